"""Play items with the families' pure functions: the hidden eval without its environment.

Used to build base models, where starting verifiers would only cost time. Axes: J job (model).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from nestling.core.seeds import derive_seed, stream
from nestling.engine.chat import FinalAnswer, MalformedCall, parse_turn, tool_result_ids
from nestling.engine.model import Model
from nestling.engine.sampler import SamplingParams, TurnEnd, play_stacked
from nestling.engine.tokenizer import Tokenizer
from nestling.families.demonstrations import item_prompt_ids
from nestling.families.family import Family, Item
from nestling.families.registry import get

__all__ = ["EVAL_SAMPLING", "EVAL_SAMPLING_OPEN", "eval_sampling", "play_items", "scores"]

EVAL_SAMPLING: Final = SamplingParams(
    temperature=1.0, max_turn_tokens=96, max_total_tokens=512, max_turns=12
)
"""The settings of the hidden eval, for the shipped vocabulary."""

EVAL_SAMPLING_OPEN: Final = SamplingParams(
    temperature=1.0, max_turn_tokens=96, max_total_tokens=1536, max_turns=12
)
"""The same for vocabularies of the hub, which need more tokens for the same turns."""


def eval_sampling(tokenizer: Tokenizer) -> SamplingParams:
    """The settings of the hidden eval for models with this vocabulary."""
    return EVAL_SAMPLING if tokenizer.is_closed else EVAL_SAMPLING_OPEN


def scores(
    model: Model,
    families: Sequence[str],
    n: int,
    seed: int,
    *,
    temperature: float = 1.0,
    max_rows: int | None = None,
) -> list[dict[str, float]]:
    """Share of right answers per job and family, over `n` fresh items each.

    All jobs get the same items and the same random numbers.
    """
    items = [
        (family, family.sample(rng, *family.eval_range))
        for name in families
        for family, rng in [(get(name), stream(seed, name))]
        for _ in range(n)
    ]
    correct_J = play_items(model, items, seed, temperature=temperature, max_rows=max_rows)
    return [
        {name: sum(correct[i * n : (i + 1) * n]) / n for i, name in enumerate(families)}
        for correct in correct_J
    ]


def play_items(
    model: Model,
    items: Sequence[tuple[Family, Item]],
    seed: int,
    *,
    temperature: float = 1.0,
    max_rows: int | None = None,
) -> list[list[bool]]:
    """For each job, which items its model answers exactly right."""
    num_jobs = model.num_jobs
    prompts = [item_prompt_ids(model.tokenizer, item) for _, item in items]
    seeds = [derive_seed(seed, "row", index) for index in range(len(items))]
    params = SamplingParams(
        temperature=temperature,
        max_turn_tokens=EVAL_SAMPLING.max_turn_tokens,
        max_total_tokens=EVAL_SAMPLING.max_total_tokens,
        max_turns=EVAL_SAMPLING.max_turns,
    )
    game = _Game(model, items)
    play_stacked(
        model,
        [prompts] * num_jobs,
        [seeds] * num_jobs,
        [params] * num_jobs,
        game.respond,
        max_rows=max_rows,
    )
    return game.correct_J


class _Game:
    """Tool state of every row of every job, and who was right."""

    def __init__(self, model: Model, items: Sequence[tuple[Family, Item]]) -> None:
        self._tokenizer = model.tokenizer
        self._items = items
        self._states: dict[tuple[int, int], dict[str, Any]] = {}
        self.correct_J = [[False] * len(items) for _ in range(model.num_jobs)]

    def respond(self, turns: list[TurnEnd]) -> list[list[int] | None]:
        """Tool results as ids; None where the row is over."""
        return [self._answer(turn) for turn in turns]

    def _answer(self, turn: TurnEnd) -> list[int] | None:
        family, item = self._items[turn.row]
        if turn.truncated:
            return None
        parsed = parse_turn(turn.text)
        if isinstance(parsed, FinalAnswer):
            self.correct_J[turn.job][turn.row] = family.grade(item, parsed.text) == 1.0
            return None
        if isinstance(parsed, MalformedCall):
            return tool_result_ids(self._tokenizer, f"error: {parsed.reason}")
        key = (turn.job, turn.row)
        if key not in self._states:
            self._states[key] = family.start(item)
        result = family.call(item, self._states[key], parsed.name, parsed.arguments)
        return tool_result_ids(self._tokenizer, result)
