"""How long the probe of a template job takes with a warm worker: seconds by stage, wall and CPU.

The machine room's own probe: warm zygote, leak index in memory, no model. CPU counts this process and the jailed
worker, and is what one idle core would take; wall depends on what else the machine does.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, Final

from nestling.bench.progress import tell
from nestling.bench.record import Measured
from nestling.bench.room import room_here
from nestling.config import RunConfig
from nestling.core.errors import ConfigError
from nestling.families.registry import ALL
from nestling.inner.cpu_time import CpuMeter
from nestling.jobs.template import template_job

__all__ = ["measure"]

_COLUMNS: Final = ("family", "wall p50 s", "CPU p50 s", "slowest stages")


def measure(
    config: RunConfig | None = None, *, families: Sequence[str] = ALL, runs: int = 5
) -> Measured:
    """The template job of each family.

    Args:
        config: its leak index and jail are used; the default recipe when None.
        families: names.
        runs: counted probes of each, at least one; a first one is not counted.

    Raises:
        ConfigError: fewer than one run, or the jail is missing.
    """
    if runs < 1:
        raise ConfigError(f"runs={runs}; expected at least 1, 5 for figures to be compared")
    used = config or RunConfig()
    rows = []
    with room_here(used) as room:
        for family in families:
            tell(family)
            bundle = template_job(family)
            probes = []
            for _ in range(runs + 1):
                meter = CpuMeter()
                report = room.check(bundle, family)
                probes.append((report, meter.elapsed_s()))
                assert report.ok, report.lines()
            rows.append(_row(family, probes[1:]))
    return Measured(
        settings={
            "families": list(families),
            "runs": runs,
            "leak_items": used.inner.leak_items,
        },
        runs=tuple(rows),
        figures={
            "probe_wall_s_p50": median(s for row in rows for s in row["wall_s"]),
            "probe_cpu_s_p50": median(s for row in rows for s in row["cpu_s"]),
            "probe_cpu_s_max": max(s for row in rows for s in row["cpu_s"]),
        },
        columns=_COLUMNS,
        rows=tuple(_cells(row) for row in rows),
    )


def _row(family: str, probes: Sequence[tuple[Any, float]]) -> dict[str, Any]:
    names = [stage.name for stage in probes[0][0].stages]
    return {
        "family": family,
        "wall_s": [report.seconds for report, _ in probes],
        "cpu_s": [round(cpu_s, 3) for _, cpu_s in probes],
        "stage_s": {
            name: median(report.stages[place].seconds for report, _ in probes)
            for place, name in enumerate(names)
        },
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    slowest = sorted(row["stage_s"].items(), key=lambda pair: -pair[1])[:3]
    return (
        row["family"],
        f"{median(row['wall_s']):.2f}",
        f"{median(row['cpu_s']):.2f}",
        ", ".join(f"{name} {seconds:.2f}" for name, seconds in slowest),
    )
