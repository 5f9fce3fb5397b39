"""What a fault of the environment means to whoever wrote it."""

from __future__ import annotations

import re
from typing import Final

from nestling.core.errors import JailError, Problem

__all__ = ["fault_problem"]

_ADVICE: Final[dict[str, tuple[str, str]]] = {
    "env.import": ("a package that imports", "correct that line"),
    "env.config": ("[env] keys of your TasksetConfig", "correct [env] in job.toml"),
    "env.rows": ("load() to yield Task(row, self.config.task)", "correct load()"),
    "env.no_rows": ("load() to yield tasks", "yield rows in load()"),
    "env.tools": ("working toolsets", "return [Tools(config.tools)]"),
    "env.state": ("the same one", "class Task(vf.Task[Data, State, TaskConfig])"),
    "env.setup": ("a task that starts", "correct setup"),
    "env.hooks": ("rewards, metrics and stops on Trace", "remove it"),
    "env.stop": ("a stop that returns a bool", "correct it"),
    "env.deadline": ("quick code", "remove endless loops and waits"),
    "env.exited": ("code that does not end the process", "remove exits, use less memory"),
    "env.memory": ("less memory", "make fewer or smaller rows"),
    "env.output_flood": ("little output", "remove prints"),
    "env.protocol": ("plain values", "return text and numbers"),
    "env.crashed": ("code that runs", "correct it"),
}
_OURS: Final = ("something else than your job", "submit again")
_NOISE: Final = re.compile(r"^import environment: | \(/[^)]*\)")
"""Our own prefix, and where the jail keeps its files."""
_MAX_DETAIL: Final = 90
_MAX_WANTED: Final = 48


def fault_problem(stage: str, error: JailError) -> Problem:
    """A problem of the stage in which the environment failed; the reason becomes its code."""
    reason = error.reason if error.reason in _ADVICE else f"env.{error.reason}"
    expected, fix = _ADVICE.get(reason, _OURS)
    name = error.reason.removeprefix("env.").replace(".", "_")
    name = "failed" if name == stage else name
    detail = _NOISE.sub("", " ".join(error.detail.split()))
    detail, _, wanted = detail.partition("; expected ")
    if wanted and reason != "env.state":
        expected = wanted if len(wanted) <= _MAX_WANTED else wanted[: _MAX_WANTED - 3] + "..."
    if len(detail) > _MAX_DETAIL:
        keep = _MAX_DETAIL - 3
        detail = detail[: keep - 30] + "..." + detail[-30:]
    return Problem(
        stage=stage,
        code=f"{stage}.{name}",
        wrong=detail or error.reason,
        expected=expected,
        fix=fix,
    )
