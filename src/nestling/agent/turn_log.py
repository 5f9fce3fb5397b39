"""The turns of an episode: those of an earlier try are replayed, new ones are kept before they act.

An episode that was cut off is played again from its start, except that its recorded turns are taken
over instead of sampled. Tools answer again: they are deterministic, or answered from finished work.
Should one answer otherwise than it did, what was said after the old answer is forgotten and sampled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nestling.agent.policy import AgentTurn, PolicySession
from nestling.agent.stage import stage

__all__ = ["RecordedTurn", "TurnFlow", "TurnLog", "storable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """A turn of an earlier try."""

    turn: AgentTurn
    """Its text is what `storable` made of it."""
    answer: str | None = None
    """What it was answered, `storable`; None when that was not recorded any more."""


class TurnLog(Protocol):
    """Durable memory of the turns of one episode; what goes wrong in it stops the run."""

    async def recorded(self) -> Sequence[RecordedTurn]:
        """Turns of earlier tries from the first one on, without a gap and without a torn one."""
        ...

    async def record(self, number: int, turn: AgentTurn, answer_before: str | None) -> None:
        """Keep turn `number`, counted from 0, with the answer to the turn before it.

        On disk when the call returns. Recorded turns from `number` on are replaced.
        """
        ...


class TurnFlow:
    """Gives an episode its turns, recorded or new, and passes the answers on."""

    def __init__(
        self,
        session: PolicySession,
        log: TurnLog | None = None,
        recorded: Sequence[RecordedTurn] = (),
    ) -> None:
        self._session = session
        self._log = log
        self._recorded = deque(recorded)
        self._number = 0
        self._answer: str | None = None
        self._answer_then: str | None = None
        """What the turn that was replayed last had been answered."""

    async def next(self, limit_s: float) -> AgentTurn:
        """The next turn; raises like `PolicySession.act` under `stage`."""
        turn: AgentTurn | None = None
        is_new = False
        async with stage("policy", limit_s):
            if self._recorded:
                turn = await self._session.replay(self._recorded[0].turn)
            if turn is None:
                turn, is_new = await self._session.act(), True
        if is_new:
            self._recorded.clear()
            self._answer_then = None
            if self._log is not None:
                await self._log.record(self._number, turn, self._answer)
        else:
            self._answer_then = self._recorded.popleft().answer
        self._number += 1
        return turn

    async def observe(self, answer: str, limit_s: float) -> None:
        """Tell the session what the last turn was answered."""
        self._answer = storable(answer)
        if self._answer_then not in (None, self._answer):
            self._recorded.clear()
        async with stage("policy", limit_s):
            await self._session.observe(answer)


def storable(text: str) -> str:
    """The text with `?` for what UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode()
