"""What a report knows of a run, as plain values: no database, no files, no drawing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from nestling.agent.reward import RewardKind, RewardWeights
from nestling.outer.stats import Estimate
from nestling.outer.step_report import StepReport
from nestling.outer.sweep_report import Sweep
from nestling.store.money import Spending

__all__ = [
    "EpisodeRow",
    "GainAccount",
    "Headline",
    "JobRow",
    "MachineCost",
    "ReferenceRow",
    "RewardParts",
    "RunData",
    "RunInfo",
    "StepRow",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The run as a whole."""

    name: str
    version: str | None
    """Of the program that wrote it."""
    commit: str | None
    machine: str | None
    config: Mapping[str, Any]
    """The resolved configuration; empty when the folder has none."""
    seeds: Mapping[str, int]
    """Every seed of the configuration, by dotted name."""
    planned_steps: int | None
    started_at: float | None
    """Seconds since the epoch, of the first recorded event."""
    last_at: float | None

    @property
    def wall_s(self) -> float | None:
        """First to last event, pauses between resumed parts included."""
        if self.started_at is None or self.last_at is None:
            return None
        return max(0.0, self.last_at - self.started_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """One finished episode without its text."""

    id: str
    group_id: str
    member: int
    purpose: Literal["train", "measure"]
    arm: str | None
    """Measured policy; None in training."""
    step: int | None
    """Step that used it, or whose policy was measured; None while no step has used it."""
    version: int | None
    """Updates in the weights that played it."""
    family: str
    outcome_code: str
    detail: str
    reward_kind: RewardKind
    reward: float
    """Under `reward_kind`, as are the three terms."""
    validation: float
    quality: float
    speed: float
    seed_reward: float
    """What either rule pays; both are always recorded."""
    paired_reward: float
    num_attempts: int
    valid_attempt: int | None
    base_model: str | None
    """Of the accepted job, and so on."""
    settings: str | None
    """All its choices as one text; equal for equal jobs as far as job.toml tells."""
    config_keys: tuple[str, ...] | None
    """Sorted names of the `[prime_rl]` keys that its job.toml sets."""
    job_hash: str | None
    pre: float | None
    best_pre: float | None
    post: float | None
    uplift: float | None
    uplift_ci: tuple[float, float] | None
    num_items: int
    """Hidden items scored."""
    train_steps: int
    job_cpu_s: float
    job_wall_s: float
    job_usd: float
    sampled_tokens: int
    seconds: float

    @property
    def is_valid(self) -> bool:
        """A submission passed the probe."""
        return self.valid_attempt is not None

    @property
    def is_job_done(self) -> bool:
        """The job trained and was scored."""
        return self.outcome_code == "job_succeeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardParts:
    """Weighted parts of a mean reward; they add up to it."""

    validation: float
    quality: float
    speed: float
    no_submission: float
    """The price of episodes without a readable submission, 0 or below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GainAccount:
    """A difference of mean rewards by where it came from; the parts add up to `total`."""

    total: Estimate
    validation: Estimate
    """Submissions that are accepted, and sooner."""
    success: Estimate
    """More jobs that end with a score, at the quality of both sides' mean."""
    quality: Estimate
    """Better trained models among the scored ones."""
    speed: Estimate
    no_submission: Estimate

    def parts(self) -> list[tuple[str, Estimate]]:
        """Names and estimates of all parts, the total last."""
        names = [field.name for field in fields(self) if field.name != "total"]
        return [(name, getattr(self, name)) for name in [*names, "total"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One committed outer step: what the run recorded, and what its episodes add to it."""

    step: int
    report: StepReport
    num_groups: int
    families: Mapping[str, int]
    """Finished episodes by family."""
    validation: Estimate | None
    """Terms and shares with intervals over groups; None without episodes."""
    quality: Estimate | None
    speed: Estimate | None
    validity: Estimate | None
    first_try: Estimate | None
    job_success: Estimate | None
    """Of accepted jobs."""
    post: Estimate | None
    """Of scored jobs, as is `best_pre`."""
    best_pre: Estimate | None
    better_base: Estimate | None
    """Share of accepted jobs on the better base, where the bases differ and it is known."""
    attempts: float | None
    """Submissions per episode."""
    episode_s: float | None
    """Wall-clock seconds per episode."""
    parts: RewardParts | None
    """Of the mean reward."""
    scored_quality: Estimate | None
    """Quality term of scored jobs alone."""
    best_of_group: Estimate | None
    """Over groups: the best reward in the group."""
    group_size: float | None
    """Finished episodes per group."""
    distinct_share: float | None
    """Distinct job settings per accepted job; 1: no two jobs alike."""
    distinct_in_group: Estimate | None
    """Over groups with two accepted jobs: distinct jobs, code included, per accepted job."""
    job_difference: Estimate | None
    """Over those groups: share of choices that differ between two of their jobs."""
    base_share_by_family: Mapping[str, Mapping[str, float]]
    """Share of each base among a family's accepted jobs."""
    num_valid: int
    no_op_formula: float | None
    """Reward of a job valid at once that changes nothing, over this step's families."""
    references: Mapping[str, float]
    """Measured reward of each reference arm over this step's families, where it has them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRow:
    """One measured policy on the training families, or on one of them."""

    arm: str
    family: str
    """`all` pools them."""
    reward: Estimate
    uplift: Estimate | None
    validity: float
    job_success: float | None
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One job as the queue, or where there was none an episode, knows it."""

    id: str
    family: str
    state: str
    """queued, running, done or failed in the queue; an outcome's status once it is over."""
    job_hash: str | None
    """Names its content; None while the queue has no outcome of it."""
    base_model: str | None
    reason: str
    pre: float | None
    best_pre: float | None
    post: float | None
    uplift: float | None
    uplift_ci: tuple[float, float] | None
    num_items: int
    train_steps: int
    cpu_s: float
    wall_s: float
    usd: float
    worker: str | None
    tries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCost:
    """Money and time of one machine type."""

    machine: str
    usd: float
    minutes: float

    @property
    def is_gpu(self) -> bool:
        """Whether the price list counts it as a GPU."""
        return not self.machine.startswith("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The numbers one looks for first; None where the run cannot tell."""

    untrained: Estimate | None
    """Training episodes that the untrained weights played."""
    final: Estimate | None
    """Episodes of the last steps, as many as it takes to see every training family."""
    best: Estimate | None
    """The best such window of the run; the maximum of noisy means, so it flatters."""
    window_steps: int
    account: GainAccount | None
    """Where `final` differs from `untrained`."""
    no_op: float | None
    no_op_source: Literal["measured", "formula"] | None
    measured_untrained: Estimate | None
    """Untrained agent on the training families, in the sweeps; and so on."""
    measured: Estimate | None
    """Last checkpoint."""
    measured_gain: Estimate | None
    """Paired difference between those two."""
    measured_step: int | None
    held_out_families: tuple[str, ...]
    held_out: Estimate | None
    """Last checkpoint of the last sweep."""
    held_out_untrained: Estimate | None
    held_out_gain: Estimate | None
    """Paired difference between those two."""
    held_out_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """Everything a report shows."""

    info: RunInfo
    weights: RewardWeights
    weights_known: bool
    """False: the run recorded none, so the defaults are shown and checked against the terms."""
    reward_kind: RewardKind
    training_families: tuple[str, ...]
    better_base: Mapping[str, str]
    """Base with the better untrained score, by family, where one is better."""
    best_pre: Mapping[str, float]
    """Best untrained score by family, on the items that pay the reward."""
    steps: tuple[StepRow, ...]
    references: tuple[ReferenceRow, ...]
    sweeps: Mapping[int, Sweep]
    """By the step they followed."""
    jobs: tuple[JobRow, ...]
    episodes: tuple[EpisodeRow, ...]
    """Finished ones, in the order they started."""
    running_episodes: int
    failed_episodes: int
    """Broken by the machinery."""
    costs: tuple[MachineCost, ...]
    family_costs: tuple[Spending, ...]
    """Money and time by family, machines and kinds of job added up."""
    usd: float | None
    usd_reserved: float
    headline: Headline

    @property
    def train_episodes(self) -> Sequence[EpisodeRow]:
        """Without measurements."""
        return [one for one in self.episodes if one.purpose == "train"]

    @property
    def is_finished(self) -> bool | None:
        """Whether all planned steps are done; None when the plan is not recorded."""
        planned = self.info.planned_steps
        return None if planned is None else len(self.steps) >= planned

    @property
    def gpu_minutes(self) -> float | None:
        """Worker minutes over the workers that share a GPU; None when no machine time was accounted."""
        if not self.costs:
            return None
        share = int(self.info.config.get("fleet", {}).get("workers_per_machine", 1))
        return sum(cost.minutes for cost in self.costs if cost.is_gpu) / share
