"""The `[sft]` table: a few supervised steps on worked examples before the training itself.

Examples come from the family's public dev items, worked by its own solver, or from the job's own rows
(`jobs.worked_rows`), whose tool replies come out of its jailed environment. The model learns its own turns only; what
it reads carries no loss. The optimiser is the job's own, with the rate of `[sft]`, and keeps what it remembers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from nestling.core.errors import JobFailedError
from nestling.core.seeds import derive_seed, stream
from nestling.engine.batching import TrainRow
from nestling.engine.chat import FinalAnswer, ToolCall, parse_turn, tool_result_ids
from nestling.engine.learn import LossStats, StepStats
from nestling.engine.tokenizer import Tokenizer
from nestling.families.demonstrations import demonstrate
from nestling.families.registry import get
from nestling.families.splits import dev_items
from nestling.inner.cpu_time import CpuMeter
from nestling.inner.trainer import TrainRequest
from nestling.jobs.manifest import Sft
from nestling.jobs.opening import opening_ids
from nestling.jobs.outcome import WarmUp
from nestling.jobs.rollout_env import CallRequest, FinalRequest, RolloutEnv, RolloutStart
from nestling.jobs.token_count import TokenCount
from nestling.jobs.worked_rows import MAX_WORKED_ROWS, turns_of

__all__ = ["DEV_EXAMPLES", "Supervise", "warm_up", "worked_examples"]

DEV_EXAMPLES: Final = 64
"""Public dev items that a warm-up may use."""
_MAX_OWN_EXAMPLES: Final = 256
"""Worked rows of the job that are used."""

Supervise = Callable[[Sequence[TrainRow], float], tuple[LossStats, StepStats]]
"""One optimiser step on rows with cross-entropy weights, at a learning rate."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """What the model says, and the tool's reply; no reply ends the example."""

    text: str
    reply: str | None = None


def warm_up(
    request: TrainRequest,
    tokenizer: Tokenizer,
    env: RolloutEnv,
    supervise: Supervise,
    check: Callable[[], None],
) -> WarmUp | None:
    """Take the steps of the job's `[sft]` table; None when it has none.

    `check` is called before every step and raises when the time is over.

    Raises:
        JobFailedError: `sft.*`, there are no usable examples; `train.diverged`.
        JailError: from the environment.
    """
    table = request.manifest.sft
    if table is None:
        return None
    meter = CpuMeter()
    examples = worked_examples(request, table, tokenizer, env)
    stream(request.seed, "sft").shuffle(examples)
    losses = []
    for step in range(table.steps):
        check()
        start = step * table.rows
        batch = [examples[(start + i) % len(examples)] for i in range(table.rows)]
        loss, update = supervise(batch, table.lr * (1 - step / table.steps))
        if not (update.updated and math.isfinite(loss.ce_loss)):
            raise JobFailedError("train.diverged", "the warm-up diverged; use a lower lr in [sft]")
        losses.append(loss.ce_loss)
    return WarmUp(
        steps=table.steps,
        examples=len(examples),
        first_loss=losses[0],
        last_loss=losses[-1],
        cpu_s=meter.elapsed_s(),
    )


def worked_examples(
    request: TrainRequest, table: Sft, tokenizer: Tokenizer, env: RolloutEnv
) -> list[TrainRow]:
    """All worked examples that fit into `seq_len`, as rows to imitate.

    Raises:
        JobFailedError: `sft.no_examples`, `sft.turns`, `sft.seq_len`.
        JailError: from the environment.
    """
    schemas = None if tokenizer.is_closed else env.tool_schemas()
    if table.source == "dev":
        source = _dev_examples(request)
    else:
        source = iter(_own_examples(env, TokenCount(tokenizer, schemas or ())))
    rows = [_row(tokenizer, system, prompt, schemas, turns) for system, prompt, turns in source]
    if not rows:
        raise JobFailedError(
            "sft.no_examples",
            'no row of the data set has turns; expected some with source = "rows"; '
            'add turns to rows, or set source = "dev"',
        )
    limit = request.manifest.prime_rl.seq_len
    fitting = [row for row in rows if len(row.ids) <= limit]
    if not fitting:
        raise JobFailedError(
            "sft.seq_len",
            f"the shortest worked example has {min(len(row.ids) for row in rows)} tokens, seq_len is "
            f"{limit}; raise seq_len",
        )
    return fitting


_Example = tuple[str, str, list[_Turn]]
"""System prompt, prompt, turns."""


def _dev_examples(request: TrainRequest) -> Iterator[_Example]:
    family = get(request.family)
    for index, item in enumerate(dev_items(family, DEV_EXAMPLES)):
        rng = stream(derive_seed(0, "worked dev item", index))
        exchanges = demonstrate(family, item, rng)
        yield item.system_prompt, item.prompt, [_Turn(one.turn, one.result) for one in exchanges]


def _own_examples(env: RolloutEnv, tokens: TokenCount) -> list[_Example]:
    """The job's worked rows with the replies of its own tools, played side by side."""
    worked: dict[int, list[str]] = {}
    for row in env.rows(MAX_WORKED_ROWS):
        try:
            found = turns_of(row)
        except ValueError as error:
            raise JobFailedError("sft.turns", f"{error}; correct the turns of your rows") from error
        if found is not None and len(worked) < _MAX_OWN_EXAMPLES:
            worked[row.index] = found
    calls = [_calls(index, texts) for index, texts in worked.items()]
    playing = [
        _Playing(start, index, texts, tokens.opening(start.system_prompt, start.prompt))
        for start, (index, texts) in zip(env.reset(list(worked)), worked.items(), strict=True)
    ]
    for number in range(max(map(len, calls), default=0)):
        asking = [
            (one, one.ask(made[number], tokens))
            for one, made in zip(playing, calls, strict=True)
            if number < len(made)
        ]
        for (one, _), reply in zip(asking, env.step([call for _, call in asking]), strict=True):
            one.take(reply, tokens)
    env.score([one.final(tokens) for one in playing])  # forgotten there; rewards say nothing here
    return [(one.start.system_prompt, one.start.prompt, one.turns()) for one in playing]


def _calls(index: int, texts: Sequence[str]) -> list[ToolCall]:
    """Of a worked row: every turn but the last must be one call."""
    calls: list[ToolCall] = []
    for text in texts[:-1]:
        call = parse_turn(text)
        if not isinstance(call, ToolCall):
            raise JobFailedError(
                "sft.turns",
                f"turn {len(calls) + 1} of row {index} is no tool call; expected one call in every "
                "turn but the last; write it as <tool_call>JSON</tool_call>",
            )
        calls.append(call)
    if not isinstance(parse_turn(texts[-1]), FinalAnswer):
        raise JobFailedError(
            "sft.turns", f"the last turn of row {index} is a tool call; expected the answer"
        )
    return calls


@dataclass(slots=True)
class _Playing:
    """A worked row in the job's environment, which is told what it is told of a model's rollout."""

    start: RolloutStart
    index: int
    texts: Sequence[str]
    read: int
    """Tokens before the next turn."""
    replies: list[str] = field(default_factory=list)

    def ask(self, call: ToolCall, tokens: TokenCount) -> CallRequest:
        text = self.texts[len(self.replies)]
        return CallRequest(
            rollout_id=self.start.rollout_id,
            text=text,
            name=call.name,
            arguments=call.arguments,
            prompt_tokens=self.read,
            completion_tokens=tokens.turn(text),
        )

    def take(self, reply: str | None, tokens: TokenCount) -> None:
        if reply is None:
            number = len(self.replies) + 1
            raise JobFailedError(
                "sft.turns",
                f"row {self.index} ends at turn {number}; remove the turns after it",
            )
        self.read += tokens.turn(self.texts[len(self.replies)]) + tokens.reply(reply)
        self.replies.append(reply)

    def final(self, tokens: TokenCount) -> FinalRequest:
        return FinalRequest(
            rollout_id=self.start.rollout_id,
            text=self.texts[-1],
            stop="done",
            prompt_tokens=self.read,
            completion_tokens=tokens.turn(self.texts[-1]),
        )

    def turns(self) -> list[_Turn]:
        return [_Turn(*one) for one in zip(self.texts, [*self.replies, None], strict=True)]


def _row(
    tokenizer: Tokenizer,
    system: str,
    prompt: str,
    schemas: Sequence[dict[str, Any]] | None,
    turns: Sequence[_Turn],
) -> TrainRow:
    ids = opening_ids(tokenizer, system, prompt, schemas)
    weights = [0.0] * len(ids)
    for turn in turns:
        said = [*tokenizer.encode(turn.text), tokenizer.turn_end_id]
        read = [] if turn.reply is None else tool_result_ids(tokenizer, turn.reply)
        ids += said + read
        weights += [1.0] * len(said) + [0.0] * len(read)
    nothing = [False] * len(ids)
    return TrainRow(ids=ids, sampled=nothing, logprobs=[0.0] * len(ids), ce_weights=weights)
