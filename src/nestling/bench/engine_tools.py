"""A GRPO step on a real task with tools, and its conversations for a peer to repeat.

Items of a family are played with its own tools at temperature 1, so rows have as many turns as the model needs and
end when it answers. What was played is kept: a peer that is made to say the same tokens does the same work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from nestling.core.seeds import derive_seed, stream
from nestling.engine.advantage import group_advantages
from nestling.engine.chat import ToolCall, parse_turn, tool_result_ids
from nestling.engine.checkpoint import load_model
from nestling.engine.learn import AdamW, LossStats, PolicyTrainer, PpoClip, TrainRow
from nestling.engine.sampler import Rollout, SamplingParams, TurnEnd, play
from nestling.families.demonstrations import item_prompt_ids
from nestling.families.registry import get

__all__ = ["ToolWorkload"]

_SEED = 7


class ToolWorkload:
    """One base model and `num_prompts` items of a family, each played by `group_size` rows."""

    def __init__(self, folder: Path, family: str, *, num_prompts: int, group_size: int) -> None:
        self.folder, self.family, self.group_size = folder, get(family), group_size
        self.model = load_model(folder)
        rules = import_module(f"nestling.families.public.{family}")
        self.signatures: Mapping[str, Mapping[str, type]] = rules.SIGNATURES
        rng = stream(_SEED, family)
        self.items = [self.family.sample(rng, *self.family.eval_range) for _ in range(num_prompts)]
        self.params = SamplingParams(max_turn_tokens=96, max_total_tokens=512, max_turns=12)
        self.played: list[Rollout] = []
        """Of the last step."""
        self._policy = PolicyTrainer(self.model, PpoClip(), AdamW(lr=1e-6))
        self._prompts = [item_prompt_ids(self.model.tokenizer, item) for item in self.items]
        self._steps = 0

    def grpo(self) -> LossStats:
        """Groups played, graded and learned from; every step draws other random numbers."""
        grouped = [prompt for prompt in self._prompts for _ in range(self.group_size)]
        self._steps += 1
        seeds = [derive_seed(_SEED, "row", self._steps, index) for index in range(len(grouped))]
        game = _Game(self)
        self.played = play(self.model, grouped, seeds, self.params, game.respond)
        rewards = [
            reward + _spread(one) for reward, one in zip(game.rewards, self.played, strict=True)
        ]
        advantages = group_advantages(np.array(rewards).reshape(-1, self.group_size)).reshape(-1)
        rows = [
            TrainRow(ids=one.ids, sampled=one.sampled, logprobs=one.logprobs, advantage=float(a))
            for one, a in zip(self.played, advantages, strict=True)
        ]
        stats = self._policy.forward_backward(rows)
        self._policy.optim_step()
        return stats

    def counts(self) -> dict[str, float]:
        """What the last step consisted of, per row on average."""
        rows = self.played
        return {
            "rows": len(rows),
            "prompt_tokens": _mean([one.prompt_len for one in rows]),
            "tokens": _mean([len(one.ids) for one in rows]),
            "sampled_tokens": _mean([sum(one.sampled) for one in rows]),
            "turns": _mean([one.num_turns for one in rows]),
        }


class _Game:
    """The tools' state and the reward of every row."""

    def __init__(self, workload: ToolWorkload) -> None:
        self._workload = workload
        rows = len(workload.items) * workload.group_size
        self._states: list[dict[str, Any] | None] = [None] * rows
        self.rewards = [0.0] * rows

    def respond(self, turns: list[TurnEnd]) -> list[list[int] | None]:
        """Tool results; whatever is no call ends the row."""
        return [self._answer(turn) for turn in turns]

    def _answer(self, turn: TurnEnd) -> list[int] | None:
        work = self._workload
        item = work.items[turn.row // work.group_size]
        parsed = parse_turn(turn.text)
        if turn.truncated or not isinstance(parsed, ToolCall):
            self.rewards[turn.row] = work.family.grade(item, turn.text)
            return None
        state = self._states[turn.row]
        if state is None:
            state = self._states[turn.row] = work.family.start(item)
        if parsed.name in work.signatures:
            result = work.family.call(item, state, parsed.name, parsed.arguments)
        else:
            result = str({"error": f"Tool {parsed.name} not found."})  # TRL's words
        return tool_result_ids(work.model.tokenizer, result)


def _spread(rollout: Rollout) -> float:
    """A little of the reward differs between any two rows, so that no group is without a gradient."""
    return sum(token % 2 == 0 for token in rollout.ids) / len(rollout.ids) / 100


def _mean(values: Sequence[int]) -> float:
    return round(sum(values) / len(values), 2)
