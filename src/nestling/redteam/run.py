"""Run the cases against one room."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from nestling.core.errors import ConfigError
from nestling.redteam.case import Case, Finding
from nestling.redteam.cases import ALL
from nestling.redteam.room import opened_room

__all__ = ["run_all", "select"]


def select(only: Sequence[str] = ()) -> list[Case]:
    """Cases whose id or kind matches one of the patterns (`*` and `?` as in file names); all if none.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    if not only:
        return list(ALL)
    chosen = [case for case in ALL if any(_matches(case, pattern) for pattern in only)]
    idle = [pattern for pattern in only if not any(_matches(case, pattern) for case in ALL)]
    if idle:
        kinds = ", ".join(dict.fromkeys(case.kind for case in ALL))
        raise ConfigError(
            f"no red-team case matches {', '.join(idle)}; expected an id such as jail-read-home or "
            f"one of the kinds {kinds}; use * as a wildcard"
        )
    return chosen


def run_all(
    only: Sequence[str] = (),
    jobs: int = 1,
    *,
    on_finding: Callable[[Finding], None] | None = None,
) -> list[Finding]:
    """Findings in the order of the cases.

    Args:
        only: patterns for `select`.
        jobs: cases at a time. They share one room, so judges that measure time are kindest at 1.
        on_finding: told of each as it is known, in order.

    Raises:
        ConfigError: a pattern matches nothing, or bubblewrap is not installed.
    """
    cases = select(only)
    findings = []
    with opened_room() as room, ThreadPoolExecutor(jobs) as pool:
        for finding in pool.map(lambda case: case.run(room), cases):
            findings.append(finding)
            if on_finding is not None:
                on_finding(finding)
    return findings


def _matches(case: Case, pattern: str) -> bool:
    return fnmatch.fnmatchcase(case.id, pattern) or fnmatch.fnmatchcase(case.kind, pattern)
