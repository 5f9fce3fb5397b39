"""The lines of the comparison with the published experiment, each from the data of one arc."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from nestling.outer.stats import Estimate
from nestling.report import shown
from nestling.report.estimates import by_group, estimate
from nestling.report.headline import held_out_scope, last_checkpoint
from nestling.report.paired import by_task, paired_gain
from nestling.report.published.markdown import NOT_MEASURED, gain, mean
from nestling.report.run_data import EpisodeRow, RunData
from nestling.report.windows import window_mean

__all__ = ["QUANTITIES", "Evidence", "Quantity"]

_UNTRAINED: Final = "untrained"
_NOOP: Final = "noop"
_TEMPLATE: Final = "template"
_TRAINED: Final = "trained"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One arc, and who was measured where: in its own sweeps, else in a measurement made apart."""

    data: RunData
    training: Sequence[EpisodeRow]
    """Measured episodes on the training families, with arms by role; likewise on the others."""
    held_out: Sequence[EpisodeRow]

    @classmethod
    def of(cls, data: RunData, apart: RunData | None) -> Evidence:
        """`apart` counts for the families on which the arc measured no checkpoint itself."""
        sides = []
        for training in (True, False):
            found = [
                [
                    one
                    for one in source.episodes
                    if one.arm is not None and (one.family in data.training_families) == training
                ]
                for source in (data, *([apart] if apart else []))
            ]
            trained = (one for one in found if _arm(one, _TRAINED) is not None)
            sides.append(next(trained, found[0]))
        return cls(data=data, training=sides[0], held_out=sides[1])


@dataclass(frozen=True, slots=True)
class Quantity:
    """A line of the comparison."""

    key: str
    """Of the published figure."""
    label: str
    ours: Callable[[Evidence], str]


def _arm(episodes: Sequence[EpisodeRow], role: str) -> str | None:
    """Name of the arm that plays a role; `nestling eval-agent` adds a digest to a folder's name."""
    arms = {one.arm for one in episodes if one.arm is not None}
    if role == _TRAINED:
        steps = {int(step[1]): arm for arm in arms if (step := re.match(r"step-(\d+)", arm))}
        return steps[max(steps)] if steps else None
    return next(
        (arm for arm in sorted(arms) if re.fullmatch(rf"{role}(-[0-9a-f]{{8}})?", arm)), None
    )


def _mean_of(episodes: Sequence[EpisodeRow], role: str) -> Estimate | None:
    arm = _arm(episodes, role)
    played = [one for one in episodes if one.arm == arm and arm is not None]
    return estimate(by_group(played), lambda one: one.reward, "measured", role)


def _difference(
    episodes: Sequence[EpisodeRow],
    role: str,
    value: Callable[[EpisodeRow], float] = lambda one: one.reward,
) -> str:
    """The trained agent minus the arm of that role."""
    families = {one.family for one in episodes}
    arms = [_arm(episodes, one) for one in (_TRAINED, role)]
    if None in arms:
        return NOT_MEASURED
    trained, other = (by_task(episodes, arm or "", families) for arm in arms)
    return gain(paired_gain(trained, other, value))


def _measured(role: str) -> Callable[[Evidence], str]:
    return lambda evidence: mean(_mean_of(evidence.training, role))


def _over(role: str) -> Callable[[Evidence], str]:
    return lambda evidence: _difference(evidence.training, role)


def _held_out_over(role: str) -> Callable[[Evidence], str]:
    return lambda evidence: _difference(evidence.held_out, role)


def _first_last(
    value: Callable[[EpisodeRow], float | None], name: str
) -> Callable[[Evidence], str]:
    def ours(evidence: Evidence) -> str:
        first = window_mean(evidence.data, "untrained", value, name)
        last = window_mean(evidence.data, "final", value, name)
        return f"{mean(first)} → {mean(last)}"

    return ours


def _better_base(evidence: Evidence) -> str:
    better = evidence.data.better_base

    def value(one: EpisodeRow) -> float | None:
        if one.base_model is None or one.family not in better:
            return None
        return float(one.base_model == better[one.family])

    return _first_last(value, "better-base")(evidence)


def _size(evidence: Evidence) -> str:
    data = evidence.data
    planned, jobs = data.info.planned_steps, [row.report.episodes for row in data.steps]
    of = "" if planned in (None, len(data.steps)) else f" of {planned}"
    return f"{len(data.steps)}{of} × {max(jobs, default=0)}"


def _agent(evidence: Evidence) -> str:
    agent = evidence.data.info.config.get("agent")
    name = agent.get("model") if isinstance(agent, dict) else None
    return str(name) if name else "not recorded"


def _num_jobs(evidence: Evidence) -> int:
    return sum(one.state not in ("queued", "running") for one in evidence.data.jobs)


def _job_price(evidence: Evidence) -> str:
    usd, jobs = evidence.data.usd, _num_jobs(evidence)
    return NOT_MEASURED if usd is None or not jobs else shown.usd(usd / jobs)


def _no_op(evidence: Evidence) -> str:
    measured = _mean_of(evidence.training, _NOOP)
    if measured is not None:
        return mean(measured)
    line = evidence.data.headline.no_op
    return NOT_MEASURED if line is None else f"{shown.number(line)} (by the formula)"


def _held_out_best(evidence: Evidence) -> str:
    """The highest of the checkpoints, which flatters."""
    best: tuple[int, Estimate] | None = None
    for step, sweep in sorted(evidence.data.sweeps.items()):
        arm = last_checkpoint(sweep)
        scope = held_out_scope(sweep, evidence.data.training_families)
        if arm is None or scope is None:
            continue
        summary = sweep.result(arm, scope).summary
        if summary is not None and (best is None or summary.reward.mean > best[1].mean):
            best = (step, summary.reward)
    return NOT_MEASURED if best is None else f"{mean(best[1])} (step {best[0]})"


def _no_decline(evidence: Evidence) -> str:
    """The last checkpoint minus the highest of those before it."""
    episodes = evidence.held_out
    families = {one.family for one in episodes}
    last = _arm(episodes, _TRAINED)
    arms = {one.arm for one in episodes if one.arm and re.match(r"step-\d", one.arm)} - {last}
    means = {
        arm: sum(one.reward for one in tasks.values()) / len(tasks)
        for arm in sorted(arms)
        if (tasks := by_task(episodes, arm, families))
    }
    if last is None or not means:
        return NOT_MEASURED
    best = max(means, key=lambda arm: means[arm])
    return gain(paired_gain(by_task(episodes, last, families), by_task(episodes, best, families)))


QUANTITIES: Final = (
    Quantity("agent", "agent", _agent),
    Quantity("size", "outer steps × episodes", _size),
    Quantity("jobs", "jobs that ran", lambda evidence: str(_num_jobs(evidence))),
    Quantity("usd", "cost", lambda evidence: shown.usd(evidence.data.usd)),
    Quantity("usd_per_job", "cost per job", _job_price),
    Quantity(
        "gpu_minutes",
        "GPU minutes (accounted)",
        lambda evidence: shown.number(evidence.data.gpu_minutes, 1),
    ),
    Quantity(
        "reward_first", "reward, first", lambda evidence: mean(evidence.data.headline.untrained)
    ),
    Quantity(
        "reward_best",
        "reward, best window (flatters)",
        lambda evidence: mean(evidence.data.headline.best),
    ),
    Quantity("reward_last", "reward, last", lambda evidence: mean(evidence.data.headline.final)),
    Quantity("measured_untrained", "measured: untrained", _measured(_UNTRAINED)),
    Quantity("measured", "measured: trained", _measured(_TRAINED)),
    Quantity("no_op", "measured: no-op", _no_op),
    Quantity("random", "measured: random valid job", _measured("random")),
    Quantity("template", "measured: human template", _measured(_TEMPLATE)),
    Quantity("over_untrained", "measured: trained minus untrained", _over(_UNTRAINED)),
    Quantity("over_no_op", "measured: trained minus no-op", _over(_NOOP)),
    Quantity("over_template", "measured: trained minus template", _over(_TEMPLATE)),
    Quantity(
        "validation", "validation term, first → last", _first_last(lambda one: one.validation, "v")
    ),
    Quantity(
        "success",
        "valid jobs that end scored, first → last",
        _first_last(lambda one: float(one.is_job_done) if one.is_valid else None, "success"),
    ),
    Quantity(
        "quality",
        "quality of scored jobs, first → last",
        _first_last(lambda one: one.quality if one.is_job_done else None, "quality"),
    ),
    Quantity("post", "hidden score, first → last", _first_last(lambda one: one.post, "post")),
    Quantity(
        "uplift",
        "uplift over the best untrained base, first → last",
        _first_last(lambda one: one.uplift, "uplift"),
    ),
    Quantity("better_base", "better base chosen, first → last", _better_base),
    Quantity(
        "config_use",
        "a `[prime_rl]` key set, first → last",
        _first_last(
            lambda one: float(bool(one.config_keys)) if one.config_keys is not None else None,
            "config-use",
        ),
    ),
    Quantity(
        "held_out_untrained",
        "held out, untrained",
        lambda evidence: mean(_mean_of(evidence.held_out, _UNTRAINED)),
    ),
    Quantity("held_out_best", "held out, best checkpoint (flatters)", _held_out_best),
    Quantity(
        "held_out_last",
        "held out, last checkpoint",
        lambda evidence: mean(_mean_of(evidence.held_out, _TRAINED)),
    ),
    Quantity("held_out_gain", "held out, last minus untrained", _held_out_over(_UNTRAINED)),
    Quantity("held_out_decline", "held out, last minus best earlier checkpoint", _no_decline),
    Quantity("held_out_template", "held out, last minus template", _held_out_over(_TEMPLATE)),
    Quantity(
        "held_out_paired",
        "held out, last minus no-op, by the `paired` reward",
        lambda evidence: _difference(evidence.held_out, _NOOP, lambda one: one.paired_reward),
    ),
)
