"""A model small enough to learn in seconds, and jobs simple enough to be learned by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nestling.core.clock import Clock
from nestling.engine.checkpoint import Model, save_model
from nestling.engine.config import ModelConfig
from nestling.engine.weights import Weights
from nestling.families.splits import EvalSecret
from nestling.families.vocabulary import tokenizer
from nestling.inner.baselines import Baselines
from nestling.inner.run import InnerContext
from nestling.inner.scorers.embedded import EmbeddedScorer
from nestling.inner.trainer import TrainLimits
from nestling.inner.trainers.embedded import EmbeddedTrainer
from nestling.jobs.bundle import Bundle
from nestling.jobs.env_zygote import Zygote
from nestling.jobs.jail import Jail, JailLimits

FAMILY = "calc_chain"
N = 12

INIT = """\
from environment.taskset import Taskset

__all__ = ["Taskset"]
"""

TASKSET = """\
import verifiers.v1 as vf


class Task(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def pays(self, trace):
        {reward}


class Taskset(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for n in range(64):
            yield Task(vf.TaskData(prompt={prompt}, name=str(n)), self.config.task)
"""

SHORT = "return 1.0 - min(len(trace.last_reply), 120) / 120"
"""A short reply pays: something even a random model can learn."""
SAME = "return 0.5"


def job(
    reward: str = SHORT, *, base: str = "micro", prompt: str = "str(n)", **prime_rl: object
) -> Bundle:
    """A job whose rubric is one line of Python."""
    settings = {"lr": 3e-3, "max_steps": 4, "batch_size": 32, "group_size": 8, "max_tokens": 16}
    table = "\n".join(
        f"{key} = {value!r}".replace("'", '"').replace("True", "true")
        for key, value in (settings | prime_rl).items()
    )
    return Bundle.from_files(
        {
            "job.toml": f'base_model = "{base}"\n[prime_rl]\n{table}\n'.encode(),
            "environment/__init__.py": INIT.encode(),
            "environment/taskset.py": TASKSET.format(reward=reward, prompt=prompt).encode(),
        }
    )


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two untrained models of different size."""
    root = tmp_path_factory.mktemp("bases")
    for name, width in (("nano", 16), ("micro", 32)):
        words = tokenizer()
        config = ModelConfig(
            vocab_size=words.vocab_size,
            hidden_size=width,
            intermediate_size=2 * width,
            num_layers=1,
            num_heads=2,
            num_kv_heads=2,
            head_dim=width // 2,
        )
        weights = Weights.init(config, 1, torch.Generator().manual_seed(width))
        # So that the few small steps of a test move the logits.
        weights.views()["final_norm"].fill_(8.0)
        save_model(root / name, Model(config=config, weights=weights, tokenizer=words))
    return {name: root / name for name in ("nano", "micro")}


@pytest.fixture(scope="session")
def secret_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "eval.key"
    EvalSecret.load_or_create(path)
    return path


@pytest.fixture(scope="session")
def scorer(bases: dict[str, Path], secret_path: Path) -> Iterator[EmbeddedScorer]:
    """One warm scorer process for all tests that do not harm it."""
    scorer = EmbeddedScorer(secret_path=secret_path, bases=bases)
    scorer.start()
    yield scorer
    scorer.close()


@pytest.fixture(scope="session")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture
def make_context(
    jail: Jail,
    zygote: Zygote,
    scorer: EmbeddedScorer,
    bases: dict[str, Path],
    state: Path,
    tmp_path: Path,
) -> Callable[..., InnerContext]:
    """A context over the shared scorer; keyword arguments replace its parts."""

    def make(
        *,
        wall_s: float = 60.0,
        call_s: float = 30.0,
        clock: Clock | None = None,
        **changes: object,
    ) -> InnerContext:
        limits = JailLimits(call_s=call_s)
        parts = {
            "trainer": EmbeddedTrainer(jail=jail, starter=zygote, env_limits=limits, clock=clock),
            "scorer": scorer,
            "baselines": Baselines(scorer, bases, folder=state),
            "bases": bases,
            "work_folder": tmp_path / "work",
            "n": N,
            "limits": TrainLimits(wall_s=wall_s),
            "usd_per_hour": 0.36,
        }
        return InnerContext(**(parts | changes))

    return make
