# mypy: disable-error-code="misc,untyped-decorator"
"""The hidden eval as a verifiers v1 taskset: the family's own tools, a strict grader, our items.

Imports verifiers, which takes seconds; only the scorer process does that.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import verifiers.v1 as vf

from nestling.families.family import Family, Item
from nestling.families.registry import get

__all__ = ["hidden_taskset"]


class _TaskConfig(vf.TaskConfig):
    """Tools of one hidden task."""

    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class _TasksetConfig(vf.TasksetConfig):
    """Settings of the hidden taskset; there are none to choose."""

    task: _TaskConfig = _TaskConfig()


def hidden_taskset(family: str | Family, items: Sequence[Item]) -> vf.Taskset[Any, Any]:
    """A taskset over `items` in their order; its only reward, `correct`, equals `Family.grade`.

    Raises:
        ConfigError: there is no such family.
    """
    chosen = get(family)
    tools = importlib.import_module(f"{chosen.public_package}.{chosen.name}_tools")
    by_index = list(items)

    class HiddenTask(vf.Task[tools.Data, tools.State, _TaskConfig]):  # type: ignore[name-defined]
        """One hidden item with its family's tools."""

        @classmethod
        def toolsets(cls, config: _TaskConfig) -> list[vf.Toolset[Any, Any]]:
            return [tools.Tools(config.tools)]

        @vf.reward(weight=1.0)
        async def correct(self, trace: vf.Trace) -> float:
            """1.0 when the last turn is exactly the right answer."""
            return chosen.grade(by_index[self.data.idx], trace.last_reply)

    class HiddenTaskset(vf.Taskset[HiddenTask, _TasksetConfig]):
        """All hidden items."""

        def load(self) -> Iterator[HiddenTask]:
            for index, item in enumerate(by_index):
                data = tools.Data(id=f"{chosen.name}-{index}", **item.to_dict())
                yield HiddenTask(data, self.config.task)

    return HiddenTaskset(_TasksetConfig(id=f"hidden_{chosen.name}"))
