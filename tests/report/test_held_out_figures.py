from __future__ import annotations

from dataclasses import replace

from nestling.report.figures.held_out import gains
from nestling.report.gather import gather


def test_a_sweep_without_the_untrained_agent_has_no_gains_and_still_a_figure(run_folder) -> None:
    data = gather(run_folder)
    step, sweep = max(data.sweeps.items())
    alone = sweep.model_copy(update={"comparisons": ()})
    drawn = gains(replace(data, sweeps={step: alone}))
    assert drawn.table.rows == []
    assert "<svg" in drawn.svg
