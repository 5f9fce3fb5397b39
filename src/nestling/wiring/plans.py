"""What a run may cost, before it is started."""

from __future__ import annotations

from nestling.config import LocalFleet, RunConfig
from nestling.fleet.budget import GRACE_S
from nestling.fleet.plan import PlannedWork, RunPlan
from nestling.fleet.predict import expected_job
from nestling.fleet.runner import RunnerSettings
from nestling.outer.config import TinkerConfig
from nestling.wiring.checks import check_names
from nestling.wiring.fleets import local_slots
from nestling.wiring.prices import worker_prices
from nestling.wiring.rooms import stage_seconds
from nestling.wiring.state import open_account

__all__ = [
    "plan_run",
]


def plan_run(config: RunConfig) -> RunPlan:
    """What a run of this recipe may ask of its workers, and the ceiling of its cost.

    Raises:
        ConfigError: as `check_names`.
    """
    check_names(config)
    outer, seconds = config.outer, stage_seconds(config)
    training = outer.steps * outer.groups_per_step * outer.group_size
    every = outer.held_out.every_steps
    swept: tuple[str, ...] = config.families.held_out if every else ()
    if swept and config.references.training_families:
        swept = (*config.families.training, *swept)
    checkpoints = len({*range(every, outer.steps + 1, every), outer.steps}) if every else 0
    arms = len(config.references.arms) + 1 + checkpoints
    episodes = {
        "training": training,
        "sweeps": len(set(swept)) * outer.held_out.episodes * arms,
    }
    attempts = config.reward.weights.max_attempts
    kinds = {"check": attempts, "run": 1}
    work = [
        PlannedWork(
            what=what,
            kind=kind,
            most_jobs=number * each,
            deadline_s=getattr(seconds, kind) + GRACE_S,
        )
        for what, number in episodes.items()
        for kind, each in kinds.items()
        if number
    ]
    families = {*config.families.training, *swept}
    work.append(
        PlannedWork(
            what="baselines",
            kind="baseline",
            most_jobs=len(families),
            deadline_s=seconds.baseline + GRACE_S,
        )
    )
    machine = config.fleet.machine
    with open_account() as account:
        expected = expected_job(account.history, machine, sorted(families))
    return RunPlan(
        machine=machine,
        usd_per_hour=worker_prices(config)[machine].usd_per_hour,
        num_workers=_num_workers(config),
        work=work,
        max_tries=RunnerSettings(identity={}).max_tries,
        expected=expected,
        caps_usd={name: usd for name, usd in config.budget.model_dump().items() if usd is not None},
        apart=_apart(config),
    )


def _apart(config: RunConfig) -> tuple[str, ...]:
    learner = config.learner
    if not isinstance(learner, TinkerConfig):
        return ()
    cap = (
        "without a cap; set learner.max_usd to have one"
        if learner.max_usd is None
        else f"at most {learner.max_usd:g} USD (learner.max_usd)"
    )
    return (f"the service that trains {learner.base_model}, {cap}",)


def _num_workers(config: RunConfig) -> int:
    if isinstance(config.fleet, LocalFleet):
        return len(local_slots(config.fleet))
    return config.fleet.workers
