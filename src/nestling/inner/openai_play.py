"""Rollouts whose turns a server samples, under the rules of `jobs.rollouts` and `engine.sampler`.

All rollouts go on together: every live one asks for a turn, then all calls are answered at once. A turn that was
answered is never asked for again, so a server may die between or within rounds and nothing is played twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nestling.core.seeds import derive_seed
from nestling.engine.chat import FinalAnswer, ToolCall, tool_result_ids
from nestling.engine.sampler import SamplingParams
from nestling.engine.tokenizer import Tokenizer
from nestling.inner.openai_request import AskedTurn, SampledTurn, answer_messages
from nestling.jobs.opening import OPEN_RULES, opening_ids
from nestling.jobs.rollout_env import (
    CallRequest,
    FinalRequest,
    RolloutEnv,
    RolloutStart,
    ScoreRecord,
    StopReason,
)

__all__ = ["Ask", "play_served"]

Ask = Callable[[Sequence[AskedTurn]], list[SampledTurn]]
"""One sampled turn per asked one, in order; blocks."""


def play_served(
    ask: Ask,
    env: RolloutEnv,
    tokenizer: Tokenizer,
    row_indices: Sequence[int],
    seeds: Sequence[int],
    params: SamplingParams,
) -> list[ScoreRecord]:
    """One rollout per entry of `row_indices`; the grader's verdicts, in order.

    `tokenizer` is the pinned base's: it counts what counts against the limits, and tells whether tools are shown.

    Raises:
        JailError: the environment failed as a whole.
        JobFailedError: as `ask`.
    """
    tools = [] if tokenizer.is_closed else env.tool_schemas()
    rows = [
        _Row.opened(start, seed, tokenizer, tools)
        for start, seed in zip(env.reset(row_indices), seeds, strict=True)
    ]
    while live := [row for row in rows if row.goes_on(params)]:
        asked = [
            AskedTurn(
                messages=row.messages, tools=tools, max_tokens=row.room(params), seed=row.turn_seed
            )
            for row in live
        ]
        callers: list[tuple[_Row, SampledTurn]] = []
        calls: list[CallRequest] = []
        for row, turn in zip(live, ask(asked), strict=True):
            call = row.take(turn, tokenizer)
            if call is not None:
                callers.append((row, turn))
                calls.append(call)
        if calls:
            for (row, turn), answer in zip(callers, env.step(calls), strict=True):
                row.answer(turn, answer, tokenizer, params)
    return env.score([row.final for row in rows])


@dataclass(slots=True, kw_only=True)
class _Row:
    """One rollout as a list of messages."""

    rollout_id: int
    seed: int
    messages: list[dict[str, Any]]
    read: int
    """Tokens before the next turn."""
    turns: int = 0
    stop: StopReason | None = None
    text: str = ""
    """Its last turn; empty when that was a call."""
    last_tokens: int = 0
    has_spoken: bool = False
    """Its last turn was no call."""

    @classmethod
    def opened(
        cls, start: RolloutStart, seed: int, tokenizer: Tokenizer, tools: Sequence[dict[str, Any]]
    ) -> _Row:
        parts = [start.system_prompt, OPEN_RULES if tools else ""]
        system = "\n\n".join(part for part in parts if part)
        messages = [{"role": "system", "content": system}] if system else []
        return cls(
            rollout_id=start.rollout_id,
            seed=seed,
            messages=[*messages, {"role": "user", "content": start.prompt}],
            read=len(opening_ids(tokenizer, start.system_prompt, start.prompt, tools or None)),
        )

    def room(self, params: SamplingParams) -> int:
        """Tokens that the next turn may have."""
        return min(params.max_turn_tokens, params.max_total_tokens - self.read)

    def goes_on(self, params: SamplingParams) -> bool:
        """Whether another turn is to be sampled; there must be room for it."""
        if self.stop is None and self.room(params) < 1:
            self.stop = "max_tokens"
        return self.stop is None

    @property
    def turn_seed(self) -> int:
        """Of the next turn; the same for every model."""
        return derive_seed(self.seed, "turn", self.turns)

    def take(self, turn: SampledTurn, tokenizer: Tokenizer) -> CallRequest | None:
        """Count the turn; its call, when the rollout goes on with one."""
        self.turns += 1
        counted = turn.completion_tokens
        self.last_tokens = len(tokenizer.encode(turn.text)) + 1 if counted is None else counted
        call = turn.parsed
        if turn.truncated or isinstance(call, FinalAnswer):
            self.has_spoken, self.text = True, turn.text
            self.stop = "max_tokens" if turn.truncated else "done"
            return None
        return CallRequest(
            rollout_id=self.rollout_id,
            text=turn.text,
            name=call.name if isinstance(call, ToolCall) else "",
            arguments=call.arguments if isinstance(call, ToolCall) else {},
            malformed=None if isinstance(call, ToolCall) else call.reason,
            prompt_tokens=self.read,
            completion_tokens=self.last_tokens,
        )

    def answer(
        self, turn: SampledTurn, answer: str | None, tokenizer: Tokenizer, params: SamplingParams
    ) -> None:
        """The environment's reply; the same ends as in `engine.sampler`."""
        if answer is None:
            self.stop = "done"
            return
        if self.turns >= params.max_turns:
            self.stop = "max_turns"
            return
        self.read += self.last_tokens + len(tool_result_ids(tokenizer, answer))
        self.messages += [turn.message, *answer_messages(turn, answer)]

    @property
    def final(self) -> FinalRequest:
        return FinalRequest(
            rollout_id=self.rollout_id,
            text=self.text,
            stop=self.stop or "max_tokens",
            prompt_tokens=self.read if self.has_spoken else 0,
            completion_tokens=self.last_tokens if self.has_spoken else 0,
        )
