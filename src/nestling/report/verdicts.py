"""What the numbers do and do not show, in sentences that follow from them alone."""

from __future__ import annotations

from collections.abc import Iterator

from nestling.outer.stats import Estimate
from nestling.report.run_data import RunData

__all__ = ["limits", "state_line", "verdicts"]


def state_line(data: RunData) -> str:
    """How far the run came."""
    done, planned = len(data.steps), data.info.planned_steps
    steps = f"{done} of {planned} outer steps" if planned is not None else f"{done} outer steps"
    if not data.steps and not data.episodes:
        running = data.running_episodes
        return f"This run has not finished an episode yet ({running} running): there is nothing to show."
    if data.is_finished:
        return f"Finished: {steps}."
    if data.is_finished is None:
        return (
            f"{steps} recorded; the plan is not recorded, so whether it is finished is not known."
        )
    waiting = f"{data.running_episodes} episodes were running" if data.running_episodes else ""
    waiting = f"; {waiting} when this was written" if waiting else ""
    return f"Unfinished: {steps} done{waiting}. The numbers below are those so far."


def verdicts(data: RunData) -> list[str]:
    """Comparisons one would make by eye, made by their intervals."""
    return [*_training(data), *_held_out(data)]


def limits(data: RunData) -> list[str]:
    """What this run cannot tell."""
    lines = [
        "One run is one training seed. The intervals cover the choice of tasks and the sampling of "
        "episodes; how much another training seed would differ takes further runs.",
        "The no-op line is what an agent earns that submits a valid job at its first attempt on the "
        "best untrained base and changes nothing. Under the seed rule that is "
        f"{data.weights.validation:g} + {data.weights.quality * data.weights.post_share:g} × "
        f"best_pre + {data.weights.speed:g}. Reward below or at this line does not show that the "
        "agent can train anything; uplift does, because a no-op has uplift 0.",
        "The best window is the highest of several noisy means and flatters; the final window and "
        "the held-out difference do not.",
        "Uplift, post and best_pre are means over jobs that were scored. When fewer jobs die, this "
        "set changes, so read them beside validity and job success.",
    ]
    gain = data.headline.held_out_gain
    if gain is not None and gain.lo is not None and gain.hi is not None:
        lines.append(
            f"With {gain.n} held-out pairs the interval of the gain is {gain.hi - gain.lo:.3f} wide; "
            f"true gains much smaller than {(gain.hi - gain.lo) / 2:.3f} would go unseen."
        )
    elif data.steps:
        lines.append(
            "No held-out gain was measured, so nothing is known beyond the trained families."
        )
    return lines


def _training(data: RunData) -> Iterator[str]:
    head = data.headline
    final, untrained, no_op = head.final, head.untrained, head.no_op
    if final is not None and untrained is not None:
        yield (
            f"Training episodes: final {_shown(final)} against untrained {_shown(untrained)}; "
            f"{_apart(final, untrained)}."
        )
    if head.measured_gain is not None and head.measured is not None:
        yield (
            f"Measured on the training families, step {head.measured_step}: {_shown(head.measured)}, "
            f"minus untrained {_gain(head.measured_gain)}."
        )
        final = head.measured
    if final is not None and no_op is not None:
        if final.lo is None or final.hi is None:
            where = "cannot be told from one group"
        elif final.lo > no_op:
            where = "lies above it"
        elif final.hi < no_op:
            where = "lies below it"
        else:
            where = "covers it"
        yield (
            f"No-op line {no_op:.3f} ({head.no_op_source}): the interval of the final reward {where}."
        )


def _held_out(data: RunData) -> Iterator[str]:
    head = data.headline
    gain = head.held_out_gain
    if gain is None:
        if data.sweeps:
            yield "Held-out families: no trained checkpoint was measured against the untrained agent yet."
        return
    names = ", ".join(head.held_out_families)
    yield f"Held out ({names}), step {head.held_out_step} minus untrained: {_gain(gain)}."


def _gain(gain: Estimate) -> str:
    if gain.lo is None or gain.hi is None:
        shows = "no interval"
    elif gain.lo <= 0 <= gain.hi:
        shows = "the interval covers 0"
    else:
        shows = f"the interval is {'above' if gain.lo > 0 else 'below'} 0"
    p = "" if gain.p_value is None else f", p = {gain.p_value:.3g}"
    return f"{gain.mean:+.3f}{_interval(gain)} over {gain.n} pairs{p}; {shows}"


def _apart(first: Estimate, second: Estimate) -> str:
    if first.lo is None or first.hi is None or second.lo is None or second.hi is None:
        return "too few groups for intervals"
    if first.lo > second.hi:
        return "the 95 % intervals do not overlap and the final one is higher"
    if first.hi < second.lo:
        return "the 95 % intervals do not overlap and the final one is lower"
    return "the 95 % intervals overlap"


def _shown(one: Estimate) -> str:
    return f"{one.mean:.3f}{_interval(one)} (n = {one.n})"


def _interval(one: Estimate) -> str:
    return "" if one.lo is None or one.hi is None else f" [{one.lo:.3f}, {one.hi:.3f}]"
