"""What a running nested loop shows in a terminal, or as plain lines when there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from nestling.outer.batch import DeadEpisode, PlayedEpisode
from nestling.outer.step_report import StepReport
from nestling.outer.sweep_report import ALL_FAMILIES, Sweep

__all__ = ["RunProgress"]

_KEPT_STEPS = 14


class RunProgress:
    """Collects what a run tells and draws it; hand its three methods to the run."""

    def __init__(self, console: Console, *, steps: int, title: str) -> None:
        self._console = console
        self._steps = steps
        self._title = title
        self._reports: list[StepReport] = []
        self._episodes = 0
        self._last = "starting workers"
        self._sweep: Text | None = None
        self._live: Live | None = None

    @contextmanager
    def shown(self) -> Iterator[RunProgress]:
        """Draw until the block ends; a plain line per step when the output is no terminal."""
        if not self._console.is_terminal:
            yield self
            return
        with Live(self._draw(), console=self._console, refresh_per_second=4) as live:
            self._live = live
            yield self
            live.update(self._draw())
        self._live = None

    def on_episode(self, episode: PlayedEpisode | DeadEpisode) -> None:
        """One training episode ended."""
        self._episodes += 1
        if isinstance(episode, DeadEpisode):
            self._last = f"{episode.plan.episode_id} died: {episode.reason[:80]}"
        else:
            result = episode.result
            self._last = (
                f"{episode.plan.episode_id} {result.family}: {result.outcome_code},"
                f" reward {result.reward:.3f}"
            )
        self._refresh()

    def on_step(self, report: StepReport) -> None:
        """One outer step is committed."""
        self._reports.append(report)
        if self._live is None:
            self._console.print(_line(report, self._steps), highlight=False)
        self._refresh()

    def on_sweep(self, step: int, sweep: Sweep) -> None:
        """A sweep with its reference arms is done."""
        parts = []
        for result in sweep.results:
            if result.family == ALL_FAMILIES and result.summary is not None:
                reward = result.summary.reward
                parts.append(f"{result.arm} {reward.mean:.3f} (n={reward.n})")
        self._sweep = Text(f"sweep after step {step}: " + ", ".join(parts), style="dim")
        if self._live is None:
            self._console.print(self._sweep, highlight=False)
        self._refresh()

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._draw())

    def _draw(self) -> RenderableType:
        table = Table(title=self._title, title_justify="left", expand=False)
        for name in ("step", "reward", "valid", "first try", "job ok", "uplift", "s", "left"):
            table.add_column(name, justify="right", no_wrap=True)
        for report in self._reports[-_KEPT_STEPS:]:
            table.add_row(*_cells(report, self._steps))
        status = Text(f"{self._episodes} episodes; {self._last}", style="dim", overflow="ellipsis")
        return Group(table, *([self._sweep] if self._sweep else []), status)


def _cells(report: StepReport, steps: int) -> tuple[str, ...]:
    found = report.summary
    if found is None:
        return (f"{report.step}/{steps}", "-", "-", "-", "-", "-", f"{report.step_s:.0f}", "")
    reward = found.reward
    half = f" ±{(reward.hi - reward.lo) / 2:.2f}" if reward.lo is not None and reward.hi else ""
    return (
        f"{report.step}/{steps}",
        f"{reward.mean:.3f}{half}",
        f"{found.validity:.0%}",
        f"{found.first_try_validity:.0%}",
        "-" if found.job_success is None else f"{found.job_success:.0%}",
        "-" if found.uplift is None else f"{found.uplift.mean:+.3f}",
        f"{report.step_s:.0f}",
        _duration(report.eta_s),
    )


def _line(report: StepReport, steps: int) -> str:
    names = ("step", "reward", "valid", "first try", "jobs ok", "uplift", "seconds", "left")
    return "  ".join(
        f"{name} {cell}" for name, cell in zip(names, _cells(report, steps), strict=True) if cell
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
