"""The package `tools` of a workspace: the part of a family that the agent may read and import."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

from nestling.families.contract import SHARED
from nestling.families.family import Family
from nestling.families.registry import get

__all__ = ["public_files", "public_modules"]

_FOLDER: Final = Path(__file__).parent / "public"
_INIT: Final = '''"""Rows, tools and answer format of {name}. Read-only: your environment imports it.

from tools import Data, State, Tools, parse_answer, sample

sample(rng, lo, hi)  one `Data` row of difficulty lo..hi; the hidden eval uses {lo}..{hi}, 1..{highest} is possible
Data                 prompt, system_prompt, answer, num_calls, world
State                what a rollout did: see {name}_tools.py and rollout.py
Tools                {signatures}
parse_answer(text)   the value of a turn that is exactly `ANSWER: <value>`, else None
"""

from .answer import parse_answer
from .{name}_tools import Data, State, Tools, sample

__all__ = ["Data", "State", "Tools", "parse_answer", "sample"]
'''


def public_modules(family: str | Family) -> dict[str, bytes]:
    """File name to content of a family's public modules; they import each other relatively.

    Raises:
        ConfigError: there is no such family.
    """
    chosen = get(family)
    shared = {f"{module}.py": (_FOLDER / f"{module}.py").read_bytes() for module in SHARED}
    own = {
        f"{module}.py": _source(f"{chosen.public_package}.{module}") for module in chosen.modules
    }
    return dict(sorted((own | shared).items()))


def public_files(family: str | Family) -> dict[str, bytes]:
    """File name to content of the package `tools` for one family.

    Raises:
        ConfigError: there is no such family.
    """
    chosen = get(family)
    lo, hi = chosen.eval_range
    init = _INIT.format(
        name=chosen.name, lo=lo, hi=hi, highest=chosen.highest, signatures=chosen.tool_signatures
    )
    return {"__init__.py": init.encode(), **public_modules(chosen)}


def _source(module: str) -> bytes:
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, module  # noqa: PT018
    return Path(spec.origin).read_bytes()
