"""The work that the engine and its peers do in `engine`: same weights, same tokens, same number of steps.

Every function here is one measurement of ours; `peers` holds the others'. Turns never end early, so that
token counts are equal: the model is given a tokenizer whose end token is never drawn.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nestling.engine.advantage import group_advantages
from nestling.engine.checkpoint import load_model
from nestling.engine.learn import (
    AdamW,
    LossStats,
    PolicyTrainer,
    PpoClip,
    SupervisedTrainer,
    TrainRow,
)
from nestling.engine.model import Model
from nestling.engine.sampler import Rollout, SamplingParams, TurnEnd, play
from nestling.engine.weights import num_parameters

__all__ = ["Work", "Workload", "decode_bound"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Sizes; all rows are equally long."""

    rows: int = 64
    prompt_tokens: int = 64
    new_tokens: int = 64
    turns: int = 4
    """Of the multi-turn rollout, `new_tokens / turns` tokens each."""
    tool_tokens: int = 12
    """Fed between two turns."""
    group_size: int = 8
    """Completions of one prompt in a GRPO step."""

    @property
    def turn_tokens(self) -> int:
        """Sampled in one turn of the multi-turn rollout."""
        return self.new_tokens // self.turns

    @property
    def total_tokens(self) -> int:
        """Of a single-turn row."""
        return self.prompt_tokens + self.new_tokens


class Workload:
    """One model and its prompts."""

    def __init__(self, folder: Path, work: Work) -> None:
        self.folder, self.work = folder, work
        self.model = load_model(folder)
        self.end_id = self.model.tokenizer.turn_end_id
        endless = copy.copy(self.model.tokenizer)
        endless.turn_end_id = -1
        self.model.tokenizer = endless
        rng = np.random.default_rng(0)
        free = [i for i in range(self.model.config.vocab_size) if i != self.end_id]
        self.prompts = _prompts(self.model, work, free, rng)
        self.tool: list[int] = rng.choice(free, work.tool_tokens).tolist()
        rows = rng.choice(free, (work.rows, work.total_tokens)).tolist()
        given = [False] + [True] * (work.total_tokens - 1)
        self.train_rows = [TrainRow(ids=ids, sampled=given) for ids in rows]
        self._supervised = SupervisedTrainer(self._copy(), AdamW(lr=1e-5))
        self._learning = self._copy()
        self._policy = PolicyTrainer(self._learning, PpoClip(), AdamW(lr=1e-5))

    def decode(self) -> list[Rollout]:
        """Different prompts, one turn."""
        return play(self.model, self.prompts, range(self.work.rows), self._params(1), _end)

    def multi_turn(self) -> list[Rollout]:
        """Turns with a tool result between them."""
        work = self.work

        def respond(turns: list[TurnEnd]) -> list[list[int] | None]:
            return [self.tool for _ in turns]

        extra = (work.turns - 1) * work.tool_tokens
        params = SamplingParams(
            max_turn_tokens=work.turn_tokens,
            max_total_tokens=work.total_tokens + extra,
            max_turns=work.turns,
        )
        return play(self.model, self.prompts, range(work.rows), params, respond)

    def train(self) -> float:
        """One AdamW step on every token but the first; the loss before it."""
        return self._supervised.step(self.train_rows)

    def grpo(self) -> LossStats:
        """Groups sampled, advantages, one gradient step; the reward is the share of even ids."""
        work = self.work
        prompts = self.prompts[: work.rows // work.group_size]
        grouped = [prompt for prompt in prompts for _ in range(work.group_size)]
        found = play(self._learning, grouped, range(work.rows), self._params(1), _end)
        rewards = np.array([_even_share(one.ids[one.prompt_len :]) for one in found])
        advantages = group_advantages(rewards.reshape(-1, work.group_size)).reshape(-1)
        rows = [
            TrainRow(ids=one.ids, sampled=one.sampled, logprobs=one.logprobs, advantage=float(a))
            for one, a in zip(found, advantages, strict=True)
        ]
        stats = self._policy.forward_backward(rows)
        self._policy.optim_step()
        return stats

    def _params(self, turns: int) -> SamplingParams:
        total = self.work.total_tokens
        return SamplingParams(max_turn_tokens=total, max_total_tokens=total, max_turns=turns)

    def _copy(self) -> Model:
        return Model(self.model.config, self.model.weights.clone(), self.model.tokenizer)


def decode_bound(workload: Workload, flops_per_s: float, bytes_per_s: float) -> dict[str, float]:
    """What `Workload.decode` must compute and move, and the seconds that takes at the given rates.

    FLOPs: two per weight and token for the prompt (all but its last token) and for every decode step, and the
    attention's two products. Bytes: float32 weights once per step, cached keys and values read once per step.
    Prompt and decode are bound one after the other, each by the slower of the two.
    """
    config, work = workload.model.config, workload.work
    head = config.vocab_size * config.hidden_size
    matrices = num_parameters(config) - head * (1 if config.tie_embeddings else 2)
    given = work.prompt_tokens - 1
    attended = given * work.new_tokens + work.new_tokens * (work.new_tokens + 1) // 2
    pair = 4 * config.q_size * config.num_layers
    prompt_flops = work.rows * (2.0 * matrices * given + pair * given * (given + 1) / 2)
    step_flops = work.rows * (2.0 * (matrices + head) * work.new_tokens + pair * attended)
    cached = 2 * 4 * config.kv_size * config.num_layers * attended * work.rows
    step_bytes = 4.0 * (matrices + head) * work.new_tokens + cached
    prompt_s = prompt_flops / flops_per_s
    step_s = max(step_flops / flops_per_s, step_bytes / bytes_per_s)
    return {
        "flops": prompt_flops + step_flops,
        "bytes": step_bytes,
        "bound_s": prompt_s + step_s,
    }


def _prompts(
    model: Model, work: Work, free: list[int], rng: np.random.Generator
) -> list[list[int]]:
    """Random prompts that a peer which takes text reads as the very same tokens."""
    tokenizer, found = model.tokenizer, list[list[int]]()
    plain = [i for i in free if not set("<>") & set(tokenizer.decode([i]))]  # no markers in texts
    while len(found) < work.rows:
        text = tokenizer.decode(rng.choice(plain, work.prompt_tokens).tolist())
        ids = tokenizer.encode(text)[: work.prompt_tokens]
        if len(ids) == work.prompt_tokens and tokenizer.encode(tokenizer.decode(ids)) == ids:
            found.append(ids)
    return found


def _end(turns: list[TurnEnd]) -> list[list[int] | None]:
    return [None for _ in turns]


def _even_share(ids: list[int]) -> float:
    return sum(token % 2 == 0 for token in ids) / len(ids)
