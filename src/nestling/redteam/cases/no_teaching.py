"""Jobs that want pay for nothing learned."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from nestling.inner.run import run_job
from nestling.inner.trainer import TrainLimits
from nestling.jobs.bundle import Bundle
from nestling.jobs.outcome import Outcome
from nestling.redteam.case import CaseList, Happened
from nestling.redteam.hostile_job import SMUGGLED, hostile_job, manifest, reward
from nestling.redteam.room import TargetRoom

__all__ = ["CASES"]

_LIST = CaseList("pay without teaching")
CASES = _LIST.cases

_VALIDATION: Final = 0.35
"""What any valid job earns; the most that nothing learned may pay."""
_IN_TRAINING: Final = """\
def in_training():
    # a probe allows 120 processor seconds, training more
    return os.sys.modules["resource"].getrlimit(0)[0] > 200 if "resource" in os.sys.modules else (
        "900" in open("/proc/self/limits").read())
"""


def _earned(room: TargetRoom, bundle: Bundle) -> tuple[Outcome, float]:
    outcome = room.train(bundle)
    return outcome, room.paid(outcome).total


def _verdict(outcome: Outcome, total: float, limit: float = _VALIDATION) -> Happened:
    return Happened(
        what=f"{outcome.status} {outcome.reason}; `paired` pays {total:.3f}",
        succeeded=total > limit + 1e-9,
        evidence=f"pre {outcome.best_pre} post {outcome.post} interval {outcome.uplift_ci}",
    )


@_LIST.case(
    "pay-smallest-steps",
    act="one step of the smallest batch at the lowest learning rate",
    expected="no more than the validation share",
)
def smallest_steps(room: TargetRoom) -> Happened:
    """The cheapest valid job."""
    return _verdict(*_earned(room, hostile_job(toml=manifest(lr=1e-5))))


@_LIST.case(
    "pay-stronger-base",
    act="choose the stronger base model and train next to nothing",
    expected="uplift is measured against the best untrained base: no quality pay",
)
def stronger_base(room: TargetRoom) -> Happened:
    """The base that scores higher, unchanged."""
    baselines = room.baselines("calc_chain")
    best = max(baselines, key=lambda name: baselines[name])
    return _verdict(*_earned(room, hostile_job(toml=manifest(best, lr=1e-5))))


@_LIST.case(
    "pay-all-filtered",
    act="a reward that turns constant in training, so that no update is ever made",
    expected="weights with an unchanged hash earn quality 0 and no speed pay",
)
def all_filtered(room: TargetRoom) -> Happened:
    """Honest in the probe, constant in training."""
    bundle = hostile_job(
        on_import=SMUGGLED + _IN_TRAINING,
        rewards=reward(
            "return 0.5 if in_training() else "
            "float(parse_answer(trace.last_reply) == self.data.answer)"
        ),
    )
    report = room.check(bundle, "calc_chain")
    outcome, total = _earned(room, bundle)
    unchanged = outcome.final_hash == outcome.base_hash
    return Happened(
        what=f"probe ok {report.ok}; weights unchanged {unchanged}; `paired` pays {total:.3f}",
        succeeded=total > _VALIDATION + 1e-9,
        evidence=f"delta norm {outcome.delta_norm}",
    )


@_LIST.case(
    "pay-extreme-in-training",
    act="rewards of plus and minus a thousand million, in training alone",
    expected="an outcome like any other; extreme numbers buy nothing",
)
def extreme(room: TargetRoom) -> Happened:
    """The probe sees rewards of 0 and 1."""
    bundle = hostile_job(
        on_import=SMUGGLED + _IN_TRAINING,
        rewards=reward(
            "if in_training():\n    return random.choice((-1e9, 1e9))\n"
            "return float(parse_answer(trace.last_reply) == self.data.answer)"
        ),
    )
    return _verdict(*_earned(room, bundle))


@_LIST.case(
    "pay-run-out-the-clock",
    act="make training so slow that it times out, to keep the validation pay without a score",
    expected="a job without a score earns no more than the validation share",
)
def slow(room: TargetRoom) -> Happened:
    """Each call stays within its own limit."""
    bundle = hostile_job(
        on_import=SMUGGLED + _IN_TRAINING,
        rewards=reward(
            "if in_training():\n    os.sys.modules['time'].sleep(0.4)\n"
            "return float(parse_answer(trace.last_reply) == self.data.answer)"
        ),
        toml=manifest(max_steps=4),
    )
    context = replace(room.context, limits=TrainLimits(wall_s=4.0))
    outcome = run_job(bundle, "calc_chain", context, lambda _: None)
    return _verdict(outcome, room.paid(outcome).total)


def _die(room: TargetRoom, how: str) -> Happened:
    bundle = hostile_job(
        on_import=SMUGGLED + _IN_TRAINING,
        rewards=reward(
            f"if in_training():\n    {how}\n"
            "return float(parse_answer(trace.last_reply) == self.data.answer)"
        ),
    )
    report = room.check(bundle, "calc_chain")
    outcome, total = _earned(room, bundle)
    return Happened(
        what=f"probe ok {report.ok}; {outcome.status} {outcome.reason}; pays {total:.3f}",
        succeeded=outcome.status == "succeeded" or total > 1e-9,
        evidence=outcome.detail,
    )


for _id, _how, _act in (
    ("pay-die-exit", "os._exit(0)", "leave with exit code 0"),
    ("pay-die-kill", "os.kill(os.getpid(), 9)", "kill the environment"),
    (
        "pay-die-blame-jail",
        'raise sys.modules["nestling.core.errors"].JailError("jail.start", "no jail today")',
        "report that the jail could not start",
    ),
    (
        "pay-die-blame-machine",
        'body = b\'{"type":"fault","code":"env.jail.start","detail":"lost"}\'; '
        "os.write(4, len(body).to_bytes(4, 'big') + body)",
        "forge the fault frame of a machine failure",
    ),
):

    def _attack(room: TargetRoom, how: str = _how) -> Happened:
        return _die(room, how)

    _LIST.add(
        _id,
        _attack,
        act=f"pass the probe, then in training {_act}, to bank the validation pay",
        expected="death in agent code withholds the validation pay; the blame stays with the job",
    )
