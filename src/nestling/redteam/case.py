"""An attack, and what came of it.

A case really does what it describes to the real parts, and says afterwards what happened. It
succeeds when the attack pays or escapes; a trusted process that crashes counts as a success too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from nestling.core.clock import Clock, SystemClock
from nestling.core.frozen import Frozen

if TYPE_CHECKING:
    from nestling.redteam.room import TargetRoom

__all__ = ["Attack", "Case", "CaseList", "Finding", "Happened"]

_MAX_TEXT: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """What an attack did, as its judge saw it from outside."""

    what: str
    """One line."""
    succeeded: bool
    evidence: str = ""
    """What the verdict rests on: a reason code, scores, a file, what a process said."""


Attack = Callable[["TargetRoom"], Happened]


class Finding(Frozen):
    """One case after it was run."""

    id: str
    kind: str
    act: str
    expected: str
    happened: str
    succeeded: bool
    evidence: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One attack."""

    id: str
    """Stable, for example `jail-read-home`."""
    kind: str
    act: str
    """What the attacker does."""
    expected: str
    """The defence that should stop it."""
    attack: Attack

    def run(self, room: TargetRoom, clock: Clock | None = None) -> Finding:
        """Attack the room; never raises for what the attack provokes in it."""
        watch = clock or SystemClock()
        began_s = watch.monotonic()
        try:
            seen = self.attack(room)
        except Exception as error:  # noqa: BLE001 (a crash of trusted code is the finding)
            seen = Happened(
                what=f"trusted code crashed: {type(error).__name__}",
                succeeded=True,
                evidence=str(error),
            )
        return Finding(
            id=self.id,
            kind=self.kind,
            act=self.act,
            expected=self.expected,
            happened=_one_line(seen.what),
            succeeded=seen.succeeded,
            evidence=_one_line(seen.evidence),
            seconds=round(watch.monotonic() - began_s, 2),
        )


class CaseList:
    """The cases of one kind, filled by a decorator in the order of the source."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.cases: list[Case] = []

    def case(self, case_id: str, *, act: str, expected: str) -> Callable[[Attack], Attack]:
        """Add the decorated attack."""

        def add(attack: Attack) -> Attack:
            self.add(case_id, attack, act=act, expected=expected)
            return attack

        return add

    def add(self, case_id: str, attack: Attack, *, act: str, expected: str) -> None:
        """Add an attack that comes from a table."""
        self.cases.append(
            Case(id=case_id, kind=self.kind, act=act, expected=expected, attack=attack)
        )


def _one_line(text: str) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 3] + "..."
