"""A tiny real learner and a tiny real game, so that the loop is tested without an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from nestling.agent.episode_result import EpisodeResult
from nestling.agent.policy import Trajectory
from nestling.agent.reward import Terms
from nestling.core.errors import LearnerError
from nestling.core.seeds import derive_seed
from nestling.engine.config import ModelConfig
from nestling.engine.model import Model
from nestling.engine.tokenizer import Tokenizer
from nestling.engine.weights import Weights
from nestling.outer.config import EmbeddedConfig, TinkerConfig
from nestling.outer.learner import LossSpec, LossStats, Sampled, StepStats, TrainRow
from nestling.outer.learners.embedded import EmbeddedLearner
from nestling.outer.learners.tinker import TinkerLearner
from nestling.outer.plan import EpisodePlan
from nestling.store.group_commit import GroupCommit
from nestling.store.run_store import RunStore

from .engine_service import EngineService

VOCAB = 6
END = 0


@dataclass(frozen=True)
class TableHandle:
    table: np.ndarray
    version: int


def log_softmax(rows):
    shifted = rows - rows.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


class TableLearner:
    """Next-token logits are a table over the last token; plain gradient ascent."""

    def __init__(self, folder: Path, lr_scale: float = 30_000.0) -> None:
        self.folder = folder
        self.lr_scale = lr_scale
        self.table = np.zeros((VOCAB, VOCAB))
        self.grad: np.ndarray | None = None
        self.version = 0
        self.updates: list[list[TrainRow]] = []
        self.specs: list[LossSpec] = []

    async def sample(self, handle, ids, *, session, seed, max_tokens, temperature):
        rng = np.random.default_rng(seed)
        out, logprobs, last = [], [], ids[-1]
        while len(out) < max_tokens:
            logp = log_softmax(handle.table[last] / temperature)
            last = int(min(np.searchsorted(np.cumsum(np.exp(logp)), rng.random()), VOCAB - 1))
            out.append(last)
            logprobs.append(float(np.float32(logp[last])))
            if last == END:
                break
        await asyncio.sleep(0)
        return Sampled(ids=out, logprobs=logprobs, stopped=out[-1] == END)

    async def forward_backward(self, rows: Sequence[TrainRow], loss: LossSpec) -> LossStats:
        tokens = sum(sum(row.sampled) for row in rows)
        if not tokens:
            raise LearnerError("no sampled token to learn from")
        grad = np.zeros_like(self.table)
        shift = 0.0
        for row in rows:
            for place, is_sampled in enumerate(row.sampled):
                if not is_sampled:
                    continue
                last, token = row.ids[place - 1], row.ids[place]
                logp = log_softmax(self.table[last] / loss.temperature)
                ratio = np.exp(logp[token] - row.logprobs[place])
                shift += row.logprobs[place] - logp[token]
                weight = row.advantage * ratio / loss.temperature / tokens
                grad[last] -= weight * np.exp(logp)
                grad[last, token] += weight
        self.grad = grad if self.grad is None else self.grad + grad
        self.updates.append(list(rows))
        self.specs.append(loss)
        return LossStats(loss=0.0, num_tokens=tokens, kl_sampler=shift / tokens)

    async def optim_step(self, lr: float) -> StepStats:
        if self.grad is None:
            raise LearnerError("no gradient is pending")
        self.table = self.table + self.lr_scale * lr * self.grad
        norm = float(np.linalg.norm(self.grad))
        self.grad = None
        self.version += 1
        return StepStats(version=self.version, learning_rate=lr, grad_norm=norm)

    async def publish(self) -> TableHandle:
        return TableHandle(self.table.copy(), self.version)

    async def save(self, name: str) -> str:
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps([self.version, self.table.tolist()]))
        return str(path)

    async def load(self, ref: str) -> None:
        try:
            version, table = json.loads(Path(ref).read_text())  # noqa: ASYNC240
        except (OSError, ValueError) as error:
            raise LearnerError(f"{ref} is not a saved state") from error
        self.version, self.table, self.grad = version, np.array(table), None


def result_of(
    plan: EpisodePlan, reward: float, trajectory: Trajectory | None = None, **fields
) -> EpisodeResult:
    return EpisodeResult(
        family=plan.family,
        task_id=plan.episode_id,
        task_seed=plan.task_seed,
        policy_seed=plan.policy_seed,
        reward_kind="seed",
        reward=reward,
        terms={
            "seed": Terms(kind="seed", total=reward),
            "paired": Terms(kind="paired", total=reward),
        },
        outcome_code=fields.pop("outcome_code", "no_call"),
        trajectory=trajectory,
        sampled_tokens=sum(trajectory.sampled) if trajectory else 0,
        **fields,
    )


@dataclass
class GamePlayer:
    """Two turns of at most three tokens; pays the share of sampled tokens that are 3."""

    learner: TableLearner
    before: Callable[[EpisodePlan], Awaitable[None]] | None = None
    reward: Callable[[EpisodePlan, float], float] = lambda plan, share: share
    played: list[str] = field(default_factory=list)

    async def play(self, plan: EpisodePlan, handle: TableHandle) -> EpisodeResult:
        if self.before is not None:
            await self.before(plan)
        ids, sampled, logprobs = [1, 2], [False, False], [0.0, 0.0]
        for turn in range(2):
            answer = await self.learner.sample(
                handle,
                ids,
                session=plan.episode_id,
                seed=derive_seed(plan.policy_seed, turn),
                max_tokens=3,
                temperature=0.7,
            )
            ids += [*answer.ids, 4]
            sampled += [True] * len(answer.ids) + [False]
            logprobs += [*answer.logprobs, 0.0]
        chosen = [token for token, is_sampled in zip(ids, sampled, strict=True) if is_sampled]
        trajectory = Trajectory(
            ids=tuple(ids),
            sampled=tuple(sampled),
            logprobs=tuple(logprobs),
            prompt_len=2,
            temperature=0.7,
        )
        self.played.append(plan.episode_id)
        return result_of(plan, self.reward(plan, chosen.count(3) / len(chosen)), trajectory)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    with RunStore(tmp_path / "run.db") as opened:
        yield opened


@pytest.fixture
def writer(store: RunStore) -> Iterator[GroupCommit]:
    with GroupCommit(store) as opened:
        yield opened


@pytest.fixture
def table_learner(tmp_path: Path) -> Callable[[], TableLearner]:
    return lambda: TableLearner(tmp_path)


@pytest.fixture
def game_player() -> type[GamePlayer]:
    return GamePlayer


@pytest.fixture
def make_result() -> Callable[..., EpisodeResult]:
    return result_of


TOKENIZER = Tokenizer.closed(["ann", "bob", "cat", *"0123456789"])


def tiny_model(seed: int = 0) -> Model:
    config = ModelConfig(
        vocab_size=TOKENIZER.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_positions=256,
    )
    weights = Weights.init(config, 1, torch.Generator().manual_seed(seed))
    return Model(config=config, weights=weights, tokenizer=TOKENIZER)


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[Callable[..., EmbeddedLearner]]:
    """Makes embedded learners over one folder; all are closed at the end."""
    made: list[EmbeddedLearner] = []

    def make(model_seed: int = 0, folder: str = "states", **changes) -> EmbeddedLearner:
        learner = EmbeddedLearner(
            tiny_model(model_seed),
            tmp_path / folder,
            max_total_tokens=96,
            config=EmbeddedConfig(**{"num_sessions": 8, "window_s": 0.002, **changes}),
        )
        made.append(learner)
        return learner

    yield make
    for learner in made:
        learner.close()


class TinkerLearners:
    """Makes Tinker learners of one service; calling it again is a new process of the same run."""

    def __init__(self, root: Path) -> None:
        self.service = EngineService(tiny_model())
        self.made: list[TinkerLearner] = []
        self._root = root

    def __call__(self, folder: str = "tinker", prices=None, **changes) -> TinkerLearner:
        learner = TinkerLearner(
            self.service,
            self._root / folder,
            config=TinkerConfig(base_model="tiny", **changes),
            stop_ids=[TOKENIZER.turn_end_id],
            prices=prices,
        )
        self.made.append(learner)
        return learner


@pytest.fixture
def tinker(tmp_path: Path) -> Iterator[TinkerLearners]:
    learners = TinkerLearners(tmp_path)
    yield learners
    for learner in learners.made:
        learner.close()


@pytest.fixture(params=["table", "embedded", "embedded-lora", "tinker"])
def new_learner(request, tmp_path, embedded, tinker) -> Callable[[], object]:
    """Every learner that runs without an account; calling it again gives a fresh one."""
    if request.param == "table":
        return lambda: TableLearner(tmp_path, lr_scale=100.0)
    if request.param == "tinker":
        return tinker
    return lambda: embedded(lora_rank=4 if request.param == "embedded-lora" else 0)


@pytest.fixture
def tokenizer() -> Tokenizer:
    return TOKENIZER
