"""Recipe of an agent's first weights: demonstrations, tokenizer, supervised training.

Two stages: `make_corpus` plays the noisy demonstrator and writes token ids, `train_agent` fits a
small decoder on them, or the adapter of an open model, and can be repeated alone. Agent tokens alone carry loss. Ids are built segment
by segment, exactly as an episode builds them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nestling.agent.agent_tokenizer import train_tokenizer
from nestling.agent.demonstrator import Demonstrator, DemoRates
from nestling.agent.episode import EpisodeTask, run_episode
from nestling.agent.episode_result import TurnRecord
from nestling.agent.paper_probe import PaperRunner
from nestling.core.errors import ConfigError
from nestling.core.seeds import derive_seed, stream
from nestling.engine.chat import Message, prompt_ids, tool_result_ids
from nestling.engine.checkpoint import load_model, save_model
from nestling.engine.config import ModelConfig
from nestling.engine.learn import AdamW, LoraConfig, SupervisedTrainer, TrainRow
from nestling.engine.lora import LoraWeights, save_adapter
from nestling.engine.model import Model
from nestling.engine.tokenizer import Tokenizer
from nestling.engine.weights import Weights, num_parameters
from nestling.families.registry import TRAINING, get

__all__ = ["OPEN_PLAN", "Corpus", "WarmStartPlan", "encode_episode", "make_corpus", "train_agent"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartPlan:
    """Everything that decides the agent's first weights."""

    episodes: int = 48_000
    families: tuple[str, ...] = TRAINING
    """Families that are demonstrated; a held-out one is met for the first time when it is measured."""
    vocab_size: int = 1_024
    hidden_size: int = 256
    num_layers: int = 6
    num_heads: int = 8
    intermediate_size: int = 704
    max_tokens: int = 1_536
    """Longer episodes are left out of the corpus."""
    train_tokens: int = 60_000_000
    batch_tokens: int = 10_000
    peak_lr: float = 1.5e-3
    warmup_steps: int = 60
    lora_rank: int = 32
    """Of the adapter, when an open model is taught."""
    seed: int = 0
    rates: DemoRates = field(default_factory=DemoRates)


OPEN_PLAN: Final = WarmStartPlan(
    episodes=3_000, train_tokens=1_500_000, peak_lr=5e-4, warmup_steps=10
)
"""For an open model: it can write already, and has only the tools and the form of a job to learn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Token ids of all episodes, one after the other."""

    ids: NDArray[np.uint32]
    sampled: NDArray[np.bool_]
    """True on tokens that the demonstrator wrote."""
    starts: NDArray[np.int64]
    """Where each episode begins, and the end of the last one."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, index: int) -> tuple[list[int], list[bool]]:
        """Ids and sampled mask of one episode."""
        part = slice(int(self.starts[index]), int(self.starts[index + 1]))
        return self.ids[part].tolist(), self.sampled[part].tolist()

    def save(self, path: Path) -> None:
        """One compressed file."""
        np.savez_compressed(path, ids=self.ids, sampled=self.sampled, starts=self.starts)

    @classmethod
    def load(cls, path: Path) -> Corpus:
        """Read what `save` wrote; raises `ConfigError` when it is not there."""
        if not path.exists():
            raise ConfigError(f"{path} is missing; expected a corpus; run the corpus stage first")
        with np.load(path, allow_pickle=False) as data:
            return cls(ids=data["ids"], sampled=data["sampled"], starts=data["starts"])


def make_corpus(
    plan: WarmStartPlan, work: Path, *, processes: int = 1, tokenizer: Tokenizer | None = None
) -> Corpus:
    """Play the demonstrations and write their ids to `work`, and the tokenizer.

    Without `tokenizer`, an open model's, one is trained on the first demonstrations.
    """
    work.mkdir(parents=True, exist_ok=True)
    chunk = 500
    spans = [
        (plan, first, min(first + chunk, plan.episodes)) for first in range(0, plan.episodes, chunk)
    ]
    if processes > 1:
        with get_context("spawn").Pool(processes) as pool:
            played = [episode for part in pool.imap(_play_span, spans) for episode in part]
    else:
        played = [episode for span in spans for episode in _play_span(span)]
    if tokenizer is None:
        texts = [_plain_text(turns) for turns in played[:3000]]
        tokenizer = train_tokenizer(texts, plan.vocab_size)
    tokenizer.save(work / "agent")
    rows = [
        row
        for turns in played
        if len((row := encode_episode(tokenizer, turns))[0]) <= plan.max_tokens
    ]
    corpus = Corpus(
        ids=np.array([token for ids, _ in rows for token in ids], np.uint32),
        sampled=np.array([flag for _, flags in rows for flag in flags], np.bool_),
        starts=np.cumsum([0, *(len(ids) for ids, _ in rows)]).astype(np.int64),
    )
    corpus.save(work / "corpus.npz")
    return corpus


def encode_episode(
    tokenizer: Tokenizer, turns: Sequence[TurnRecord]
) -> tuple[list[int], list[bool]]:
    """Ids and sampled mask of a transcript, as a token policy would have built them."""
    ids = prompt_ids(tokenizer, [Message(role=turn.role, content=turn.text) for turn in turns[:2]])
    sampled = [False] * len(ids)
    for turn in turns[2:]:
        said = [*tokenizer.encode(turn.text), tokenizer.turn_end_id]
        ids += said
        sampled += [True] * len(said)
        if turn.result is not None and turn is not turns[-1]:
            fed = tool_result_ids(tokenizer, turn.result)
            ids += fed
            sampled += [False] * len(fed)
    return ids, sampled


def train_agent(
    plan: WarmStartPlan,
    work: Path,
    out: Path,
    *,
    base: tuple[str, Path] | None = None,
    device: str = "cpu",
    deadline_s: float = 1e9,
) -> dict[str, Any]:
    """Fit the decoder on the corpus in `work` and save a model folder to `out`.

    With `base`, name and folder of an open model, an adapter of it is fitted and saved.
    Returns tokens seen, steps, seconds and the loss curve. A deadline shortens the schedule: the
    learning rate decays over what is left of the time.
    """
    corpus = Corpus.load(work / "corpus.npz")
    if base is None:
        model = _fresh_model(plan, Tokenizer.load(work / "agent"), device)
    else:
        model = _adapted_model(plan, base[1], device)
    started = time.monotonic()
    seen, steps, losses = _fit(model, corpus, plan, deadline_s)
    if base is None or model.lora is None:
        model.weights = model.weights.to("cpu")
        save_model(out, model)
    else:
        save_adapter(out, model.lora, base_model=base[0])
        model.tokenizer.save(out)
    params = num_parameters(model.config) if model.lora is None else model.lora.flat.shape[1]
    return {
        "tokens": seen,
        "steps": steps,
        "seconds": round(time.monotonic() - started, 1),
        "params": params,
        "losses": losses,
    }


def _fresh_model(plan: WarmStartPlan, tokenizer: Tokenizer, device: str) -> Model:
    config = ModelConfig(
        vocab_size=-(-tokenizer.vocab_size // 8) * 8,
        hidden_size=plan.hidden_size,
        intermediate_size=plan.intermediate_size,
        num_layers=plan.num_layers,
        num_heads=plan.num_heads,
        num_kv_heads=plan.num_heads,
        head_dim=plan.hidden_size // plan.num_heads,
        max_positions=2048,
    )
    weights = Weights.seeded(config, derive_seed(plan.seed, "agent", "weights")).to(device)
    return Model(config=config, weights=weights, tokenizer=tokenizer)


def _adapted_model(plan: WarmStartPlan, folder: Path, device: str) -> Model:
    model = load_model(folder, device)
    lora = LoraConfig(rank=plan.lora_rank, alpha=2.0 * plan.lora_rank)
    seed = derive_seed(plan.seed, "agent", "adapter")
    model.lora = LoraWeights.seeded(model.config, lora, seed, device)
    return model


def _fit(
    model: Model, corpus: Corpus, plan: WarmStartPlan, deadline_s: float
) -> tuple[int, int, list[list[float]]]:
    """Tokens seen, steps taken and the loss curve."""
    trainer = SupervisedTrainer(model, AdamW(lr=plan.peak_lr, weight_decay=0.01))
    started, seen, step = time.monotonic(), 0, 0
    losses: list[list[float]] = []
    for step, batch in enumerate(_batches(corpus, plan)):
        done = max(seen / plan.train_tokens, (time.monotonic() - started) / deadline_s)
        if done >= 1:
            break
        rows = [
            TrainRow(ids=ids, sampled=sampled, logprobs=[0.0] * len(ids), advantage=1.0)
            for ids, sampled in map(corpus.row, batch)
        ]
        loss = trainer.step(rows, lr=_learning_rate(plan, step, done))
        seen += sum(len(row.ids) for row in rows)
        if step % 50 == 0:
            losses.append([step, seen, round(loss, 4)])
            logger.info("step %d tokens %d loss %.4f", step, seen, loss)
    return seen, step, losses


def _learning_rate(plan: WarmStartPlan, step: int, done: float) -> float:
    """Linear warm-up, flat, then linear decay over the second half to 2 % of the peak."""
    decay = 1.0 if done < 0.5 else max(0.02, 2 * (1 - done))
    return plan.peak_lr * min(1.0, (step + 1) / plan.warmup_steps) * decay


def _batches(corpus: Corpus, plan: WarmStartPlan) -> Iterator[list[int]]:
    """Endless batches of episodes of similar length, about `batch_tokens` padded tokens each."""
    rng = stream(plan.seed, "agent", "batches")
    lengths = np.diff(corpus.starts)
    while True:
        order = list(range(len(corpus)))
        rng.shuffle(order)
        batches: list[list[int]] = []
        for first in range(0, len(order), 256):
            pool = sorted(order[first : first + 256], key=lambda index: int(lengths[index]))
            batch: list[int] = []
            for index in pool:
                if batch and (len(batch) + 1) * int(lengths[index]) > plan.batch_tokens:
                    batches.append(batch)
                    batch = []
                batch.append(index)
            if batch:
                batches.append(batch)
        rng.shuffle(batches)
        yield from batches


def _play_span(span: tuple[WarmStartPlan, int, int]) -> list[tuple[TurnRecord, ...]]:
    plan, first, last = span
    return asyncio.run(_play(plan, first, last))


async def _play(plan: WarmStartPlan, first: int, last: int) -> list[tuple[TurnRecord, ...]]:
    policy = Demonstrator(plan.rates)
    played = []
    for index in range(first, last):
        rng = stream(plan.seed, "agent", "episode", index)
        runner = PaperRunner(_baselines(rng))
        task = EpisodeTask(
            family=get(rng.choice(plan.families)),
            task_id=f"demo-{index}",
            task_seed=rng.getrandbits(48),
            policy_seed=rng.getrandbits(48),
        )
        result = await run_episode(task, policy, runner)
        played.append(result.turns)
    return played


def _baselines(rng: random.Random) -> dict[str, float]:
    """Plausible scores, so that no number in them can be learnt by heart."""
    better, worse = rng.uniform(0.15, 0.9), rng.uniform(0.0, 0.8)
    high, low = round(better, 2), round(better * worse, 2)
    return {"nano": low, "micro": high} if rng.random() < 0.5 else {"nano": high, "micro": low}


def _plain_text(turns: Sequence[TurnRecord]) -> str:
    parts = [turns[0].text, turns[1].text]
    for turn in turns[2:]:
        parts.append(turn.text)
        if turn.result is not None:
            parts.append(turn.result)
    return "\n".join(parts)
