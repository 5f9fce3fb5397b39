"""What a worker does with a job of each kind, given the services of its machine room."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from nestling.core.errors import JobFailedError, StoreError
from nestling.core.rundir import ArtifactStore
from nestling.fleet.worker import HandlerContext, Handlers
from nestling.jobs.bundle import Bundle
from nestling.jobs.outcome import Outcome, StepRecord
from nestling.jobs.probe_report import ProbeReport

__all__ = ["JobServices", "StageSeconds", "job_handlers", "pack_bundle", "unpack_bundle"]

T = TypeVar("T")

_UNEXPLAINED = re.compile(r"[a-z_]+\.exited")
"""Reasons of outcomes and codes of probe problems: the environment ended without a word."""
_BROKEN_WORKER = re.compile(r"jail\.zygote|scorer\.died|[a-z_]+\.jail_zygote")
_TRIES = 3


class JobServices(Protocol):
    """The machine room of one worker, made once and kept warm."""

    def check(self, bundle: Bundle, family: str) -> ProbeReport:
        """Run the probe."""
        ...

    def run(self, bundle: Bundle, family: str, log: Callable[[StepRecord], None]) -> Outcome:
        """Train and score."""
        ...

    def baselines(self, family: str) -> dict[str, float]:
        """Untrained score of every base on hidden set A."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Longest time of one whole job of each kind; the parts have their own limits inside."""

    check: float = 300.0
    run: float = 1200.0
    baseline: float = 1200.0


def job_handlers(
    services: JobServices, artifacts: ArtifactStore, limits: StageSeconds | None = None
) -> Handlers:
    """Handlers for the kinds check, run and baseline."""
    seconds = limits or StageSeconds()

    def check(payload: dict[str, Any], context: HandlerContext) -> object:
        context.stage("check", seconds.check)
        bundle = unpack_bundle(artifacts, payload["bundle"])
        report = _repeated(
            lambda: services.check(bundle, payload["family"]),
            lambda report: [problem.code for problem in report.problems],
        )
        return report.model_dump(mode="json")

    def run(payload: dict[str, Any], context: HandlerContext) -> object:
        context.stage("run", seconds.run)
        bundle = unpack_bundle(artifacts, payload["bundle"])

        def log(step: StepRecord) -> None:
            context.progress({"step": step.step, "reward_mean": step.reward_mean})

        outcome = _repeated(
            lambda: services.run(bundle, payload["family"], log), lambda outcome: [outcome.reason]
        )
        return outcome.model_dump(mode="json")

    def baseline(payload: dict[str, Any], context: HandlerContext) -> object:
        context.stage("baseline", seconds.baseline)
        return services.baselines(payload["family"])

    return {"check": check, "run": run, "baseline": baseline}


def _repeated(do: Callable[[], T], reasons: Callable[[T], Sequence[str]]) -> T:
    """Do it again when its environment ended without a word; jobs are repeatable.

    From outside, an environment that ends itself looks like one that the machine ended (an operator,
    the kernel short of memory). Only the first does so every time, and then that is its outcome.
    Parts of the worker that are broken for good end the worker: the pool starts another.
    """
    for _ in range(_TRIES - 1):
        result = do()
        found = reasons(result)
        if any(_BROKEN_WORKER.fullmatch(reason) for reason in found):
            raise SystemExit(f"this worker is broken: {', '.join(found)}")
        if not any(_UNEXPLAINED.fullmatch(reason) for reason in found):
            return result
    return do()


class _Packed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    job_hash: str
    files: dict[str, bytes]


def pack_bundle(artifacts: ArtifactStore, bundle: Bundle) -> str:
    """Keep a bundle as one artifact; returns its name. The same bundle always has the same."""
    files = dict(sorted(bundle.files.items()))
    return artifacts.put(msgspec.json.encode(_Packed(bundle.job_hash, files)))


def unpack_bundle(artifacts: ArtifactStore, name: str) -> Bundle:
    """A kept bundle; `JobFailedError` when it is missing or not what its job hash says."""
    try:
        packed = msgspec.json.decode(artifacts.get(name), type=_Packed)
    except (StoreError, msgspec.MsgspecError) as error:
        raise JobFailedError("bundle.unreadable", str(error)) from error
    bundle = Bundle.from_files(packed.files)
    if bundle.job_hash != packed.job_hash:
        raise JobFailedError("bundle.hash", f"artifact {name} does not hold job {packed.job_hash}")
    return bundle
