"""`nestling eval-agent`: agents on the same tasks and seeds, with intervals."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nestling.cli.options import (
    AGENT_NAMES,
    families_of,
    families_option,
    json_option,
    print_json,
    print_table,
    recipe,
    room_options,
    say,
)
from nestling.core.errors import ConfigError

if TYPE_CHECKING:
    from nestling.agent.episode_result import EpisodeResult
    from nestling.bench.agents import AgentSpec
    from nestling.bench.compare import Compared
    from nestling.config import RunConfig
    from nestling.outer.plan import EpisodePlan
    from nestling.wiring.sealed import Opened

__all__ = ["command"]

_COLUMNS = (
    "agent", "family", "n", "reward", "95 % interval", "valid", "jobs ok", "uplift",
    "gain over noop", "95 % interval", "p",
)  # fmt: skip


@click.command("eval-agent")
@click.option(
    "--agents",
    required=True,
    metavar="A,B,...",
    help=AGENT_NAMES,
)
@families_option("held_out")
@click.option(
    "-n", "episodes", type=click.IntRange(1, 10_000), default=8, show_default=True,
    help="Episodes per agent and family.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True,
              help="Root of tasks and of the agent's sampling.")  # fmt: skip
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Run folder; the same one continues. Default: runs/eval-..., by the settings.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the figures to this file.",
)
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The page. Default: agents.html in the run folder.",
)
@click.option(
    "--sealed",
    is_flag=True,
    help="Hidden set C pays instead of B. It is opened once: the state folder keeps when and for what.",
)
@click.option(
    "--sealed-again",
    is_flag=True,
    help="Open set C although it was opened for another sweep; every output then says so.",
)
@room_options
@json_option
def command(
    agents: str,
    families: str,
    episodes: int,
    seed: int,
    folder: Path | None,
    out: Path | None,
    html: Path | None,
    sealed: bool,
    sealed_again: bool,
    settings: tuple[str, ...],
    unsafe_no_jail: bool,
    as_json: bool,
) -> int:
    """Compare agents: every agent meets the same tasks with the same seeds.

    `noop`, a job that trains next to nothing, is always played; gains are paired differences from
    it, with a sign-flip p-value. Finished episodes are kept, so that the same command continues.

    With --sealed the jobs of all agents are scored on hidden set C. Nothing else opens it; a second
    opening is refused, unless the very same command continues.
    """
    from nestling.bench.compare import compare_agents, default_folder
    from nestling.core.rundir import write_atomic

    if sealed_again and not sealed:
        raise ConfigError("--sealed-again without --sealed; expected both; add --sealed")
    names = families_of(families)
    config = recipe(settings, unsafe_no_jail=unsafe_no_jail)
    held_out = config.outer.held_out.model_copy(update={"episodes": episodes})
    inner = config.inner.model_copy(update={"split": "c"}) if sealed else config.inner
    config = config.model_copy(
        update={
            "name": "eval",
            "inner": inner,
            "families": config.families.model_copy(update={"held_out": names}),
            "outer": config.outer.model_copy(update={"seed": seed, "held_out": held_out}),
        }
    )
    specs = _agents(agents)
    place = folder or default_folder(config)
    say(f"{len(specs)} agents, {len(names)} families, {episodes} episodes each, in {place}")
    try:
        found = asyncio.run(compare_agents(config, specs, place, _say_episode, again=sealed_again))
    except KeyboardInterrupt:
        say("interrupted; the same command continues")
        return 130
    figures = _figures(found, specs, config, place)
    _print_figures(figures)
    if found.opened is not None:
        say(found.opened.told())
    page = _write_page(found, specs, figures, html or place / "agents.html", config)
    say(f"wrote {page}")
    if out is not None:
        write_atomic(out, (json.dumps(figures, indent=2) + "\n").encode())
        say(f"wrote {out}")
    if as_json:
        print_json(figures)
    return 0 if all(row["dead"] == 0 for row in figures["arms"].values()) else 1


def _agents(text: str) -> list[AgentSpec]:
    """The agents that were named, and noop when it was not."""
    from nestling.bench.agents import read_agent

    labels = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if "noop" not in labels:
        labels.insert(0, "noop")
    specs = [read_agent(label) for label in labels]
    for spec in specs:
        twins = [one.label for one in specs if one.arm == spec.arm]
        if len(twins) > 1:
            raise ConfigError(
                f"{' and '.join(twins)} are the same weights; expected different agents; "
                f"leave one out"
            )
    return specs


def _say_episode(agent: AgentSpec, plan: EpisodePlan, result: EpisodeResult) -> None:
    say(
        f"{agent.label} {plan.family} {plan.member + 1}: {result.outcome_code}, "
        f"reward {result.reward:.3f}, {result.seconds:.0f} s"
    )


def _figures(
    found: Compared, specs: list[AgentSpec], config: RunConfig, folder: Path
) -> dict[str, Any]:
    from nestling.bench.compare import arm_figures
    from nestling.core.machine import commit

    sweep, families = found.sweep, config.families.held_out
    return {
        "arms": {spec.label: {"arm": spec.arm, **arm_figures(sweep, spec.arm)} for spec in specs},
        "by_family": {
            family: {spec.label: arm_figures(sweep, spec.arm, family) for spec in specs}
            for family in families
        },
        "families": list(families),
        "seed": config.outer.seed,
        "eval_items": config.inner.eval_items,
        "split": config.inner.split,
        **(_opened_figures(found.opened, folder) if found.opened else {}),
        "folder": str(folder),
        "commit": commit(),
    }


def _opened_figures(opened: Opened, folder: Path) -> dict[str, Any]:
    """How the sealed set was opened, and the untrained bases on it and on what agents ask for."""
    from nestling.report.gather import read_records

    records = read_records(folder)
    return {
        "commitment": opened.opening.commitment,
        "opened_at": opened.opening.at,
        "opened_before": opened.before,
        "opened": opened.total,
        "baselines_a": records.baselines,
        "best_pre": {
            one.family: one.best_pre for one in records.episodes if one.best_pre is not None
        },
    }


def _write_page(
    found: Compared, specs: list[AgentSpec], figures: dict[str, Any], out: Path, config: RunConfig
) -> Path:
    from nestling.bench.compare import EFFECT, NOOP
    from nestling.core.machine import machine_line
    from nestling.report.agents_page import ComparedAgent, write_agents_page

    facts = {
        "Families": ", ".join(figures["families"]),
        "Episodes": f"{config.outer.held_out.episodes} per agent and family, seed {config.outer.seed}",
        "Jobs": f"{config.inner.eval_items} hidden items per score",
        "Hidden set": found.opened.told() if found.opened else "B",
        "Machine": machine_line(),
        "Commit": figures["commit"] or "not recorded",
        "Episodes kept in": figures["folder"],
    }
    agents = [ComparedAgent(label=spec.label, arm=spec.arm) for spec in specs]
    return write_agents_page(found.sweep, agents, out, against=NOOP, effect=EFFECT, facts=facts)


def _print_figures(figures: dict[str, Any]) -> None:
    scopes = [("all", figures["arms"])]
    if len(figures["families"]) > 1:
        scopes += list(figures["by_family"].items())
    else:
        scopes = [(figures["families"][0], figures["arms"])]
    rows = [_cells(label, family, row) for family, arms in scopes for label, row in arms.items()]
    print_table(_COLUMNS, rows)
    for label, row in scopes[0][1].items():
        if row["power"] is not None:
            say(_power_line(label, row["power"]))


def _power_line(label: str, power: dict[str, Any]) -> str:
    return (
        f"{label}: {power['pairs']} pairs find a true gain of {power['detectable']:.3f} four times "
        f"out of five; a gain of {power['effect']:g} needs {power['pairs_needed']} pairs"
    )


def _cells(label: str, family: str, row: dict[str, Any]) -> tuple[str, ...]:
    return (
        label,
        family,
        f"{row['n']}" + (f" ({row['dead']} dead)" if row["dead"] else ""),
        _number(row["reward_mean"]),
        _interval(row["reward_ci"]),
        _share(row["validity"]),
        _share(row["job_success"]),
        _number(row["uplift_mean"], "+"),
        _number(row["gain_over_noop"], "+"),
        _interval(row["gain_ci"], "+"),
        "-" if row["p_value"] is None else f"{row['p_value']:.4f}",
    )


def _number(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.3f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _interval(value: list[float] | None, sign: str = "") -> str:
    return "-" if value is None else f"{value[0]:{sign}.3f} to {value[1]:{sign}.3f}"
