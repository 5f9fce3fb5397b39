"""Training under spot checks: an honest job trains to the same bits, a changed one ends with its reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nestling.core.errors import JobFailedError
from nestling.inner.trainer import TrainRequest, TrainResult
from nestling.inner.trainers.embedded import EmbeddedTrainer
from nestling.jobs.bundle import Bundle
from nestling.jobs.env_zygote import Zygote
from nestling.jobs.jail import Jail

from .conftest import FAMILY, SHORT, job

CHANGED = "return 1.0 if '900' in open('/proc/self/limits').read() else len(trace.last_reply) / 99"
Train = Callable[..., TrainResult]


@pytest.fixture
def train(jail: Jail, zygote: Zygote, bases: dict[str, Path], tmp_path: Path) -> Train:
    """Trains a job, compared with the probe's behaviour or not."""

    def training(bundle: Bundle, *, spot_seed: int | None) -> TrainResult:
        request = TrainRequest(
            bundle=bundle,
            manifest=bundle.manifest(),
            family=FAMILY,
            base_folder=bases["nano"],
            out_folder=tmp_path / str(spot_seed),
            seed=3,
        )
        trainer = EmbeddedTrainer(jail=jail, starter=zygote, spot_seed=spot_seed)
        return trainer.train(request, lambda _: None)

    return training


def test_an_honest_job_trains_to_the_same_bits(train: Train) -> None:
    honest = job(SHORT, base="nano", max_steps=2, batch_size=16)
    plain, held = train(honest, spot_seed=None), train(honest, spot_seed=8)
    assert held.final_hash == plain.final_hash != plain.base_hash
    assert [s.reward_mean for s in held.steps] == [s.reward_mean for s in plain.steps]


def test_a_job_that_changes_in_training_ends_with_its_reason(train: Train) -> None:
    changed = job(CHANGED, base="nano", max_steps=2, batch_size=16)
    train(changed, spot_seed=None)
    with pytest.raises(JobFailedError) as caught:
        train(changed, spot_seed=8)
    assert caught.value.reason == "env.changed_rubric"
    assert "; expected the same reward; fix: " in caught.value.detail
