"""The run in a dozen numbers for scripts: `summary.json`."""

from __future__ import annotations

from nestling.core.frozen import Frozen
from nestling.report.run_data import RunData

__all__ = ["Summary", "summarise_run"]


class Summary(Frozen):
    """Stable fields; None where the run cannot tell."""

    final_reward: float | None
    """Last checkpoint measured on the training families, else `window`: the mean over the last
    training steps, as many as it takes to see every training family."""
    noop_reward: float | None
    """Measured on the training families, else by the formula from best_pre."""
    best_reward: float | None
    """Best mean of any such window of training steps, or `final_reward` when that is higher."""
    untrained_reward: float | None
    """Untrained agent measured on the training families, else the mean over the training episodes
    that the untrained weights played. Measured together with `final_reward`, or neither is."""
    heldout_gain: float | None
    """Last checkpoint minus untrained agent, paired, on the held-out families."""
    heldout_p: float | None
    heldout_n: int | None
    """Pairs."""
    steps: int
    """Outer steps done."""
    jobs: int
    """Training jobs that ended, well or badly."""
    usd: float | None
    gpu_minutes: float | None
    commit: str | None


def summarise_run(data: RunData) -> Summary:
    """The numbers of the report's headline."""
    head = data.headline
    gain = head.held_out_gain
    # Both on the same footing: the sweep's tasks, or those of training.
    is_measured = head.measured is not None and head.measured_untrained is not None
    final = head.measured if is_measured else head.final
    untrained = head.measured_untrained if is_measured else head.untrained
    best = max((one.mean for one in (head.best, final) if one is not None), default=None)
    return Summary(
        final_reward=final.mean if final else None,
        noop_reward=head.no_op,
        best_reward=best,
        untrained_reward=untrained.mean if untrained else None,
        heldout_gain=gain.mean if gain else None,
        heldout_p=gain.p_value if gain else None,
        heldout_n=gain.n if gain else None,
        steps=len(data.steps),
        jobs=sum(job.state not in ("queued", "running") for job in data.jobs),
        usd=data.usd,
        gpu_minutes=data.gpu_minutes,
        commit=data.info.commit,
    )
