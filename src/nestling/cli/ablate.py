"""`nestling ablate`: which part of an agent's jobs earns its reward?"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from nestling.cli.bench import measured
from nestling.cli.options import json_option, print_json, room_options, say
from nestling.core.errors import ConfigError

if TYPE_CHECKING:
    from nestling.bench.ablation.measure import Result
    from nestling.bench.ablation.parts import Part
    from nestling.config import RunConfig
    from nestling.jobs.bundle import Bundle

__all__ = ["command"]


@click.command("ablate")
@click.argument("run", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--arm", metavar="NAME", help="A policy that RUN measured; default: the agent in training."
)
@click.option("--last", type=click.IntRange(1), default=5, show_default=True,
              help="Of training: jobs of the last steps.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(1, 10_000), default=8, show_default=True,
              help="Accepted jobs drawn of each family.")  # fmt: skip
@click.option("--parts", metavar="A,B,...", default="base,data,rubric,config,all", show_default=True,
              help="Parts to swap.")  # fmt: skip
@click.option("--seeds", type=click.IntRange(1, 100), default=1, show_default=True,
              help="Training seeds of every job.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True,
              help="Of the draw.")  # fmt: skip
@click.option(
    "--folder", type=click.Path(path_type=Path, file_okay=False),
    help="Keeps what was trained; the same one continues. Default: RUN/ablation.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False),
    help="File for the figures; the table goes beside it as .md. Default: ablation.json in the folder.",
)  # fmt: skip
@room_options
@json_option
def command(
    run: Path,
    arm: str | None,
    last: int,
    jobs: int,
    parts: str,
    seeds: int,
    seed: int,
    folder: Path | None,
    out: Path | None,
    settings: tuple[str, ...],
    unsafe_no_jail: bool,
    as_json: bool,
) -> int:
    """What each part of a policy's jobs earns over the family template's part.

    RUN is the folder of a run or of eval-agent. Of each job one part is replaced (base, data, rubric,
    config, and all of them), and both are trained and scored by the recipe of RUN, changed by --set,
    on this machine.
    """
    from nestling.bench.ablation.accepted import accepted_jobs
    from nestling.bench.ablation.measure import ablate
    from nestling.bench.ablation.page import page
    from nestling.core.rundir import write_atomic

    chosen = _parts(parts)
    config = _config(run, settings, unsafe_no_jail=unsafe_no_jail)
    accepted = accepted_jobs(run, arm=arm, last=last, per_family=jobs, seed=seed)
    place = folder or run / "ablation"
    say(
        f"{len(accepted.jobs)} of {accepted.num_accepted} accepted jobs of {accepted.whose}; at most "
        f"{len(accepted.jobs) * (1 + len(chosen)) * seeds} trainings, in {place}"
    )
    file = out or place / "ablation.json"
    try:
        record = measured(
            "ablation",
            lambda: asyncio.run(
                ablate(config, accepted, place, told=_say_result, parts=chosen, seeds=seeds)
            ),
            file,
        )
    except KeyboardInterrupt:
        say("interrupted; the same command continues")
        return 130
    write_atomic(file.with_suffix(".md"), page(record).encode())
    say(f"wrote {file.with_suffix('.md')}")
    if as_json:
        print_json(record.model_dump(mode="json"))
    return 0


def _parts(text: str) -> tuple[Part, ...]:
    from nestling.bench.ablation.parts import PARTS

    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if unknown := [name for name in names if name not in PARTS]:
        raise ConfigError(
            f"--parts names {unknown[0]!r}; expected some of {', '.join(PARTS)}; check the spelling"
        )
    return cast("tuple[Part, ...]", names)


def _config(run: Path, settings: tuple[str, ...], *, unsafe_no_jail: bool) -> RunConfig:
    """The recipe of the run, for this machine and without keeping models."""
    from nestling.config import LocalFleet, RunpodFleet, load_recipe

    config = load_recipe(run / "config.toml", settings)
    if isinstance(config.fleet, RunpodFleet):
        say("the run rented pods; this machine trains instead")
        config = config.model_copy(update={"fleet": LocalFleet()})
    if unsafe_no_jail or config.unsafe_no_jail:
        say("warning: no jail; the jobs' code can do whatever you can do on this machine")
        config = config.model_copy(update={"unsafe_no_jail": True})
    return config.model_copy(
        update={"inner": config.inner.model_copy(update={"keep_models": False})}
    )


def _say_result(family: str, bundle: Bundle, result: Result) -> None:
    from nestling.core.errors import Problem

    if isinstance(result, Problem):
        say(f"{family} {bundle.job_hash[:12]}: refused, {result.code}")
    elif result.post is None:
        say(f"{family} {bundle.job_hash[:12]}: {result.status}, {result.reason}")
    else:
        say(
            f"{family} {bundle.job_hash[:12]}: trained to {result.post:.3f}, {result.cpu_s:.0f} CPU s"
        )
