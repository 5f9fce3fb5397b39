"""Worked episodes for supervised training of the tiny models: clean, or wrong at known rates.

Each is a real conversation with the family's tools, tokenized segment by segment as a rollout does
it, so that training sees exactly the ids that sampling will produce.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from nestling.engine.chat import Message, prompt_ids, render_call, tool_result_ids
from nestling.engine.tokenizer import Tokenizer
from nestling.families.family import Family, Item
from nestling.families.public.steps import BAD_CALL

__all__ = [
    "CLEAN",
    "Demonstration",
    "ErrorRates",
    "Exchange",
    "demonstrate",
    "encode",
    "item_prompt_ids",
]

_HIGHEST_RATE: Final = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRates:
    """Probabilities of each kind of error; the defaults are the mix at noise z = 1."""

    early_stop: float = 0.025
    """Per step after the first: answer with the last result instead."""
    skip: float = 0.025
    """Per step: leave the call out and go on as if it had been made."""
    wrong_argument: float = 0.045
    """Per step: make a corrupted call."""
    broken_call: float = 0.02
    """Per step: write the arguments without a call, which ends the episode."""
    guess: float = 0.05
    """Per episode: answer at once with a guess."""
    wrong_form: float = 0.07
    """Per episode: state the answer in other words than `ANSWER: `."""

    @classmethod
    def at(cls, z: float) -> ErrorRates:
        """The default mix scaled by the noise knob `z` >= 0, each rate capped at 0.9."""
        base = cls()
        return cls(**{name: min(_HIGHEST_RATE, getattr(base, name) * z) for name in cls.__slots__})


CLEAN: Final = ErrorRates.at(0.0)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One turn of the model and what the tool answered; no answer ends the episode."""

    turn: str
    result: str | None = None


@dataclass(frozen=True, slots=True)
class Demonstration:
    """An encoded episode; `sampled` marks the ids that the model has to produce."""

    ids: list[int]
    sampled: list[bool]


def demonstrate(
    family: Family, item: Item, rng: random.Random, rates: ErrorRates = CLEAN
) -> list[Exchange]:
    """One episode on `item`; without errors it ends in the right answer.

    After a refused or left-out call the demonstrator goes on with what it last knew, as a careless
    solver does.
    """
    if _hits(rng, rates.guess):
        return [_final(family.guess(item, rng), rng, rates)]
    state, exchanges, last = family.start(item), list[Exchange](), ""
    solution = family.solve(item)
    step = next(solution)
    for index in range(_MAX_STEPS):
        if index and _hits(rng, rates.early_stop):
            return [*exchanges, _final(last or family.guess(item, rng), rng, rates)]
        result: str | None = None
        if not _hits(rng, rates.skip):
            label, name, arguments = step
            if _hits(rng, rates.wrong_argument):
                name, arguments = family.corrupt(item, rng, name, arguments)
            if _hits(rng, rates.broken_call):
                return [*exchanges, Exchange(_broken(label, name, arguments))]
            result = family.call(item, state, name, arguments)
            exchanges.append(Exchange(label + render_call(name, arguments), result))
            last = result.split()[-1]
        try:
            step = solution.send(None if result == BAD_CALL else result)
        except StopIteration as end:
            return [*exchanges, _final(end.value, rng, rates)]
    raise AssertionError("a solution never ends")


def encode(tokenizer: Tokenizer, item: Item, exchanges: list[Exchange]) -> Demonstration:
    """The episode as ids, with every id of the model's own turns marked, `<|im_end|>` included."""
    ids = item_prompt_ids(tokenizer, item)
    sampled = [False] * len(ids)
    for exchange in exchanges:
        turn = tokenizer.encode(exchange.turn)
        turn.append(tokenizer.turn_end_id)
        ids += turn
        sampled += [True] * len(turn)
        if exchange.result is not None:
            forced = tool_result_ids(tokenizer, exchange.result)
            ids += forced
            sampled += [False] * len(forced)
    return Demonstration(ids, sampled)


def item_prompt_ids(tokenizer: Tokenizer, item: Item) -> list[int]:
    """The ids a rollout on `item` starts from."""
    messages = [
        Message(role="system", content=item.system_prompt),
        Message(role="user", content=item.prompt),
    ]
    return prompt_ids(tokenizer, messages)


_MAX_STEPS: Final = 64


def _hits(rng: random.Random, rate: float) -> bool:
    return rate > 0 and rng.random() < rate


def _final(answer: str, rng: random.Random, rates: ErrorRates) -> Exchange:
    wrong = _hits(rng, rates.wrong_form)
    return Exchange(f"the result is {answer}" if wrong else f"ANSWER: {answer}")


def _broken(label: str, name: str, arguments: dict[str, object]) -> str:
    """What a model says that forgot how to call: the arguments, or the tool's name."""
    return f"{label} {' '.join(map(str, arguments.values())) or name + '.'}"
