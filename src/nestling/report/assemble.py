"""Everything a report shows, computed from what a run left behind."""

from __future__ import annotations

from nestling.agent.reward import RewardWeights
from nestling.report.bases import best_untrained, better_bases
from nestling.report.headline import headline
from nestling.report.reference_rows import reference_rows
from nestling.report.run_data import RunData
from nestling.report.run_records import RunRecords
from nestling.report.step_rows import step_rows

__all__ = ["assemble"]


def assemble(records: RunRecords) -> RunData:
    """Pure: equal records give equal data, to the last resampled interval."""
    weights = records.weights or RewardWeights()
    episodes, jobs = records.episodes, records.jobs
    training = records.training_families
    best_pre = best_untrained(records.baselines, episodes)
    better_base = better_bases(records.baselines, episodes)
    reward_kind = episodes[-1].reward_kind if episodes else "seed"
    references = reference_rows(episodes, training)
    steps = step_rows(
        records.steps,
        episodes,
        references=references,
        better_base=better_base,
        best_pre=best_pre,
        no_op=(reward_kind, weights),
    )
    usd = records.usd
    if usd is None and jobs:
        usd = sum(job.usd for job in jobs)
    return RunData(
        info=records.info,
        weights=weights,
        weights_known=records.weights is not None,
        reward_kind=reward_kind,
        training_families=training,
        better_base=better_base,
        best_pre=best_pre,
        steps=steps,
        references=references,
        sweeps=records.sweeps,
        jobs=jobs,
        episodes=episodes,
        running_episodes=records.running_episodes,
        failed_episodes=records.failed_episodes,
        costs=records.costs,
        family_costs=records.family_costs,
        usd=usd,
        usd_reserved=records.usd_reserved,
        headline=headline(
            steps,
            episodes,
            training=training,
            references=references,
            sweeps=records.sweeps,
            no_op=(reward_kind, weights, best_pre),
        ),
    )
