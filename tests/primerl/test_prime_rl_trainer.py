"""The trainer's contract, against a program that writes what prime-rl writes."""

from __future__ import annotations

import itertools
import math
import os
import shutil
from ast import literal_eval
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from nestling.core.clock import SystemClock
from nestling.core.errors import ConfigError, JobFailedError
from nestling.engine.checkpoint import load_model
from nestling.inner.pinned_base import PinnedBase
from nestling.inner.trainer import TrainRequest
from nestling.inner.trainers.prime_rl import PrimeRlTrainer
from nestling.inner.trainers.prime_rl_process import program_environment, visible_gpus
from nestling.jobs.outcome import StepRecord

from .standin_rl import SLEEPER

pytestmark = pytest.mark.long

Trainers = Callable[..., PrimeRlTrainer]
Requests = Callable[..., TrainRequest]


@pytest.mark.parametrize("rank", [4, 0], ids=["lora", "full"])
def test_trained_model_is_whole_and_a_copy_of_its_base(
    make_trainer: Trainers, make_request: Requests, base: Path, rank: int
) -> None:
    request = make_request(lora_rank=rank)
    logged: list[StepRecord] = []
    result = make_trainer().train(request, logged.append)
    assert [step.step for step in logged] == [0, 1]
    assert result.steps == logged
    trained = load_model(result.model_folder)
    pinned = PinnedBase(base)
    assert trained.weights.content_hash() == result.final_hash
    assert pinned.load_trained(result.model_folder).weights.content_hash() == result.final_hash
    assert pinned.model.weights.content_hash() == result.base_hash
    assert math.isclose(pinned.delta_norm(trained), result.delta_norm, rel_tol=1e-6)
    assert result.delta_norm > 0
    assert result.cpu_s > 0
    assert (result.model_folder / "adapter").is_dir() == (rank > 0)
    assert [path.name for path in request.out_folder.parent.iterdir()] == ["out"]


def test_steps_say_what_prime_rl_measured(make_trainer: Trainers, make_request: Requests) -> None:
    logged: list[StepRecord] = []
    make_trainer().train(make_request(max_steps=3), logged.append)
    first, middle, last = logged
    assert (first.reward_mean, first.loss, first.grad_norm, first.kl) == (0.5, -0.25, 0.5, 0.001)
    assert first.reward_std == pytest.approx(0.125**0.5)
    assert (first.trained_groups, first.rollout_tokens) == (1, 320)
    assert first.samples[0].text == "<user> 2 + 2?\n<assistant> 4"
    assert len(first.samples) == len(last.samples) == 2
    assert middle.samples == ()
    assert last.learning_rate == pytest.approx(3e-4)


FAULTS = {
    "oom": ("train.out_of_memory", "9.25 GiB"),
    "starved": ("train.no_signal", "RuntimeError: 8 consecutive empty train batches"),
    "env_import": ("env.import", "No module named 'pandas'"),
    "env_crash": ("env.crashed", "exit code -11"),
    "inference": ("train.inference_died", "exit code -9"),
    "install": ("train.install", "libcudart"),
    "crash": ("train.crashed", "NCCL communicator"),
    "config": ("train.config", "RLConfig"),
    "unstable": ("train.no_weights", "newest finished weights are step 1"),
    "rank": ("train.weights", "rank and alpha"),
}


@pytest.mark.parametrize(("fault", "reason", "detail"), [(k, *v) for k, v in FAULTS.items()])
def test_failure_has_its_reason_and_the_line_that_says_it(
    make_trainer: Trainers, make_request: Requests, fault: str, reason: str, detail: str
) -> None:
    with pytest.raises(JobFailedError) as caught:
        make_trainer(fault).train(make_request(), lambda step: None)
    assert caught.value.reason == reason
    assert detail in caught.value.detail
    assert "\x1b" not in caught.value.detail


def test_diverged_weights_are_told(make_trainer: Trainers, make_request: Requests) -> None:
    with pytest.raises(JobFailedError) as caught:
        make_trainer("nan").train(make_request(lora_rank=0), lambda step: None)
    assert caught.value.reason == "train.diverged"


def test_package_that_does_not_import_is_the_jobs_fault(
    make_trainer: Trainers, make_request: Requests
) -> None:
    request = make_request(package="from environment.missing import Taskset\n")
    with pytest.raises(JobFailedError) as caught:
        make_trainer().train(request, lambda step: None)
    assert caught.value.reason == "env.import"
    assert "environment.missing" in caught.value.detail


class JumpingClock(SystemClock):
    """Once something has happened, a long time is over."""

    def __init__(self, happened: Callable[[], bool]) -> None:
        self._happened = happened

    def monotonic(self) -> float:
        return super().monotonic() + (1e5 if self._happened() else 0.0)


def test_run_without_further_steps_hangs(make_trainer: Trainers, make_request: Requests) -> None:
    seen: list[StepRecord] = []
    looks = itertools.count()
    # The first look at the clock after a step begins its limit; from the second on the time is over.
    clock = JumpingClock(lambda: bool(seen) and next(looks) > 0)
    with pytest.raises(JobFailedError) as caught:
        make_trainer("hang_later", clock=clock).train(make_request(wall_s=1e9), seen.append)
    assert caught.value.reason == "train.hung"
    assert "Waiting for inference" in caught.value.detail
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("fault", "reason"), [("stubborn", "train.timeout"), ("oom_hang", "train.out_of_memory")]
)
def test_late_run_leaves_no_process_and_tells_what_it_waited_for(
    make_trainer: Trainers, make_request: Requests, fault: str, reason: str
) -> None:
    request = make_request(wall_s=1e4)
    said = request.out_folder.with_name("out.prime-rl") / "rl.log"
    clock = JumpingClock(lambda: said.is_file() and b"Waiting" in said.read_bytes())
    before = {one.pid for one in psutil.Process().children(recursive=True)}
    with pytest.raises(JobFailedError) as caught:
        make_trainer(fault, clock=clock).train(request, lambda step: None)
    assert caught.value.reason == reason
    assert {one.pid for one in psutil.Process().children(recursive=True)} <= before
    running = [str(one.info["cmdline"]) for one in psutil.process_iter(["cmdline"])]
    assert not [line for line in running if SLEEPER in line]


SPY = """\
import os
from pathlib import Path

__all__ = ["Taskset"]
try:
    seen = [Path({secret!r}).read_bytes()]
except OSError:
    seen = [b""]
seen.append(os.listdir({folder!r}))
Path("spied").write_text(repr((seen, sorted(one for one in os.listdir("/proc") if one.isdigit()))))


class Taskset: ...
"""


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_job_sees_neither_secrets_nor_other_processes(
    make_trainer: Trainers, make_request: Requests, tmp_path: Path
) -> None:
    secret, folder = tmp_path / "eval-secret", tmp_path / "leaks"
    secret.write_bytes(b"canary")
    folder.mkdir()
    (folder / "index.json").write_text("canary")
    package = SPY.format(secret=str(secret), folder=str(folder))
    trainer = make_trainer(veil=True, hidden=(secret, folder, tmp_path / "missing"), keep_runs=True)
    request = make_request(package=package, max_steps=1)
    trainer.train(request, lambda step: None)
    seen, processes = literal_eval(
        (request.out_folder.with_name("out.prime-rl") / "spied").read_text()
    )
    assert seen == [b"", []]
    assert len(processes) < 10
    assert str(os.getpid()) not in processes
    assert secret.read_bytes() == b"canary"


def test_error_of_the_step_log_ends_the_run(make_trainer: Trainers, make_request: Requests) -> None:
    def refuse(step: StepRecord) -> None:
        raise OSError("disk full")

    before = {one.pid for one in psutil.Process().children(recursive=True)}
    with pytest.raises(OSError, match="disk full"):
        make_trainer("hang_later").train(make_request(), refuse)
    assert {one.pid for one in psutil.Process().children(recursive=True)} <= before


def test_what_an_earlier_run_left_is_no_hindrance(
    make_trainer: Trainers, make_request: Requests
) -> None:
    request = make_request(max_steps=1)
    trainer = make_trainer(keep_runs=True)
    first = trainer.train(request, lambda step: None)
    kept = request.out_folder.with_name("out.prime-rl")
    assert (kept / "run" / "metrics.jsonl").is_file()
    again = trainer.train(request, lambda step: None)
    assert again.final_hash == first.final_hash


def test_missing_program_is_a_config_error(make_trainer: Trainers, make_request: Requests) -> None:
    with pytest.raises(ConfigError, match=r"prime-rl\.md"):
        make_trainer(program="no-such-rl").train(make_request(), lambda step: None)


def test_no_variable_reaches_the_job_unless_it_is_known() -> None:
    source = {
        "PATH": "/bin",
        "RUNPOD_API_KEY": "k",
        "HF_TOKEN": "t",
        "NESTLING_STATE": "/s",
        "HOME": "/h",
    }
    seen = program_environment(
        source, Path("/opt/rl"), Path("/job"), more=("HF_TOKEN",), gpus="0,1"
    )
    assert seen == {
        "PATH": "/opt:/bin",
        "HOME": "/h",
        "HF_TOKEN": "t",
        "PYTHONPATH": "/job",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }


@pytest.mark.parametrize(
    ("wanted", "shared", "visible", "expected"),
    [
        (2, False, None, "0,1"),
        (2, False, "4,5,6", "4,5"),
        (2, True, "3,4", "3,3"),
        (2, True, None, "0,0"),
    ],
)
def test_gpus_are_the_workers_own(
    wanted: int, shared: bool, visible: str | None, expected: str
) -> None:
    assert visible_gpus(wanted, shared=shared, visible=visible) == expected


@pytest.mark.parametrize("visible", ["0", "", "GPU-1a,GPU-2b"])
def test_too_few_or_unnumbered_gpus_are_refused(visible: str) -> None:
    with pytest.raises(ConfigError):
        visible_gpus(2, shared=False, visible=visible)
