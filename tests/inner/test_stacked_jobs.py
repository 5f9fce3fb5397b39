"""Jobs whose model lives in a stack process, from workers as the fleet has them."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from nestling.core.errors import JobFailedError, LearnerError
from nestling.families.splits import EvalSecret
from nestling.inner import stack_wire as wire
from nestling.inner.baselines import Baselines
from nestling.inner.run import InnerContext, run_job
from nestling.inner.scorers.embedded import EmbeddedScorer
from nestling.inner.stack_client import StackJob, Stacks, place
from nestling.inner.stack_config import StackConfig
from nestling.inner.stack_host import StackHost
from nestling.inner.trainer import TrainLimits, TrainRequest, TrainResult
from nestling.inner.trainers.embedded import EmbeddedTrainer
from nestling.inner.trainers.stacked import StackedTrainer
from nestling.jobs.bundle import Bundle
from nestling.jobs.env_zygote import Zygote
from nestling.jobs.jail import Jail, JailLimits

from .conftest import FAMILY, job

pytestmark = pytest.mark.long

CONFIG = StackConfig(max_jobs=3, rows_per_job=12, max_len=512)


@pytest.fixture(scope="module")
def host(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackHost]:
    logs = tmp_path_factory.mktemp("logs")
    with StackHost(bases=bases, devices=("cpu",), config=CONFIG, logs=logs) as host:
        yield host


@pytest.fixture
def stacks(host: StackHost) -> Stacks:
    return Stacks(sockets=host.sockets)


@pytest.fixture
def train(
    stacks: Stacks, jail: Jail, zygote: Zygote, bases: dict[str, Path], tmp_path: Path
) -> Callable[..., TrainResult]:
    trainer = StackedTrainer(
        stacks=stacks, jail=jail, starter=zygote, env_limits=JailLimits(call_s=20.0)
    )

    def run(bundle: Bundle, name: str, *, wall_s: float = 100.0) -> TrainResult:
        manifest = bundle.manifest()
        request = TrainRequest(
            bundle=bundle,
            manifest=manifest,
            family=FAMILY,
            base_folder=bases[manifest.base_model],
            out_folder=tmp_path / name,
            seed=7,
            limits=TrainLimits(wall_s=wall_s),
        )
        return trainer.train(request, lambda step: None)

    return run


def numbers(result: TrainResult) -> tuple[object, ...]:
    """All of a result but its times and place."""
    steps = [step.model_copy(update={"cpu_s": 0.0}) for step in result.steps]
    return steps, result.base_hash, result.final_hash, result.delta_norm


def test_jobs_in_one_stack_get_what_each_gets_alone(train: Callable[..., TrainResult]) -> None:
    one = job(max_steps=3, batch_size=16)
    others = [
        job(max_steps=2, batch_size=24, lr=1e-3, temperature=0.7),
        job(max_steps=2, batch_size=16, base="nano", optimizer="muon"),
        job("import os; os._exit(3)", max_steps=1, batch_size=16),
        job(max_steps=1, batch_size=16, lora_rank=4),
    ]
    alone = train(one, "alone")
    assert alone.final_hash != alone.base_hash
    assert alone.cpu_s > 0
    with ThreadPoolExecutor(5) as pool:
        running = [pool.submit(train, bundle, str(i)) for i, bundle in enumerate(others)]
        beside = pool.submit(train, one, "beside").result()
        for i in (0, 1, 3):
            assert running[i].result().steps[0].loss is not None
        with pytest.raises(JobFailedError, match=r"env\.exited"):
            running[2].result()
    assert numbers(beside) == numbers(alone)


@pytest.mark.slow
def test_whole_job_is_trained_and_scored_in_the_stack_and_matches_the_embedded_one(
    stacks: Stacks,
    jail: Jail,
    zygote: Zygote,
    bases: dict[str, Path],
    secret_path: Path,
    scorer: EmbeddedScorer,
    make_context: Callable[..., InnerContext],
    tmp_path: Path,
) -> None:
    bundle = job(max_steps=3, batch_size=16)
    through = EmbeddedScorer(secret_path=secret_path, bases=bases, stacks=stacks.sockets)
    try:
        assert through.fingerprint() != scorer.fingerprint()  # scores of the two are kept apart
        stacked = run_job(
            bundle,
            FAMILY,
            make_context(
                trainer=StackedTrainer(stacks=stacks, jail=jail, starter=zygote),
                scorer=through,
                baselines=Baselines(through, bases, folder=tmp_path / "state"),
            ),
            lambda step: None,
        )
    finally:
        through.close()
    embedded = run_job(
        bundle,
        FAMILY,
        make_context(trainer=EmbeddedTrainer(jail=jail, starter=zygote)),
        lambda step: None,
    )
    assert (stacked.status, stacked.reason) == ("succeeded", "")
    assert (stacked.pre, stacked.best_pre) == (embedded.pre, embedded.best_pre)
    assert stacked.base_hash == embedded.base_hash
    assert stacked.steps[0].reward_mean == pytest.approx(embedded.steps[0].reward_mean)
    assert stacked.steps[0].grad_norm == pytest.approx(embedded.steps[0].grad_norm, rel=1e-3)
    assert stacked.delta_norm == pytest.approx(embedded.delta_norm, rel=0.2)


def test_job_that_fits_no_row_of_the_stack_says_what_to_change(
    train: Callable[..., TrainResult],
) -> None:
    with pytest.raises(JobFailedError, match=r"stack\.too_long.*inner\.stack\.max_len"):
        train(job(max_steps=1, batch_size=16, seq_len=1024), "long")


def test_nonsense_on_a_connection_ends_that_connection_alone(
    host: StackHost, train: Callable[..., TrainResult]
) -> None:
    for data in (b"\xff\xff\xff\x00garbage", wire.encode(wire.Save(folder="x"))):
        with socket.socket(socket.AF_UNIX) as odd:
            odd.connect(host.sockets[0])
            odd.sendall(data + b"\0" * 2**24 if data[0] == 255 else data)
            odd.settimeout(30)
            assert odd.recv(1) == b""
    assert train(job(max_steps=1, batch_size=16), "after").steps


@pytest.mark.slow
def test_stack_that_dies_is_started_again_and_its_job_may_be_tried_again(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    with StackHost(bases=bases, devices=("cpu",), config=CONFIG, logs=tmp_path) as host:
        folder = Path(host.sockets[0]).parent
        assert folder.stat().st_mode & 0o077 == 0
        job = StackJob(host.sockets[0], lambda: None)
        assert job.room("micro").num_jobs == 0
        os.kill(host.process_ids()[0], signal.SIGKILL)
        with pytest.raises(LearnerError, match="tried again"):
            job.room("micro")
        job.close()
        while (room := _room(host.sockets[0])) is None:  # until the new one serves
            os.sched_yield()
        assert room.num_jobs == 0
    assert not folder.exists()


def _room(path: str) -> wire.Room | None:
    try:
        with closing(StackJob(path, lambda: None)) as job:
            return job.room("micro")
    except LearnerError:
        return None


def test_jobs_that_start_together_are_spread_over_devices() -> None:
    def room(asker: int, jobs: int, lanes: int) -> wire.Room:
        return wire.Room(num_jobs=jobs, num_lanes=lanes, asker=asker, process_id=1, fingerprint="x")

    found = [place([room(i, 0, 40), room(7, 0, 40)]) for i in range(80)]
    assert found.count(0) == found.count(1) == 40
    assert place([room(0, 10, 40), room(0, 5, 40)]) == 1
    assert place([room(0, 10, 40), room(0, 5, 10)]) == 0  # the smaller device is the fuller one


def test_secret_never_reaches_the_stack(host: StackHost, secret_path: Path) -> None:
    secret = EvalSecret.load_or_create(secret_path)
    (pid,) = host.process_ids()
    for name in ("environ", "cmdline"):
        seen = Path(f"/proc/{pid}/{name}").read_bytes()
        assert secret.key.hex().encode() not in seen
        assert str(secret_path).encode() not in seen
