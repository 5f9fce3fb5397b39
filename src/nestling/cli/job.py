"""`nestling job`: check, run, show or render one training job."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nestling.cli.options import (
    Commands,
    family_of,
    json_option,
    print_json,
    print_table,
    recipe,
    room_options,
    say,
)
from nestling.core.errors import ConfigError, JobRejectedError

if TYPE_CHECKING:
    from nestling.config import RunConfig
    from nestling.jobs.bundle import Bundle
    from nestling.jobs.manifest import JobManifest
    from nestling.jobs.outcome import Outcome, StepRecord
    from nestling.jobs.probe_report import ProbeReport

__all__ = ["command"]

_folder = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
_family = click.option(
    "--family", help="What the job teaches; the folder's name unless given.", metavar="NAME"
)


@click.group("job", cls=Commands)
def command() -> None:
    """Check, run, show or render one training job.

    DIR holds job.toml and environment/, such as examples/ledger.
    """


@command.command("check")
@_folder
@_family
@room_options
@json_option
def check(
    folder: Path,
    family: str | None,
    settings: tuple[str, ...],
    unsafe_no_jail: bool,
    as_json: bool,
) -> int:
    """Check a job without training it; every problem comes with its fix.

    Exit code 0: it may be trained; 1: it may not.
    """
    name = _family_of(folder, family)
    config = recipe(settings, unsafe_no_jail=unsafe_no_jail)
    report = _check(folder, name, config)
    _print_report(report)
    if as_json:
        print_json(_report_json(report))
    return 0 if report.ok else 1


@command.command("run")
@_folder
@_family
@click.option("--eval-items", type=click.IntRange(8, 10_000), help="Hidden items per score.")
@click.option("--seed", type=click.IntRange(0), help="Root of the training seeds.")
@click.option(
    "--keep-model",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep the trained model below this folder.",
)
@room_options
@json_option
def run(
    folder: Path,
    family: str | None,
    eval_items: int | None,
    seed: int | None,
    keep_model: Path | None,
    settings: tuple[str, ...],
    unsafe_no_jail: bool,
    as_json: bool,
) -> int:
    """Check a job, train it, and score the model on hidden items before and after."""
    name = _family_of(folder, family)
    changes = [*settings]
    if eval_items is not None:
        changes.append(f"inner.eval_items={eval_items}")
    if seed is not None:
        changes.append(f"inner.seed={seed}")
    if keep_model is not None:
        changes.append("inner.keep_models=true")
    config = recipe(changes, unsafe_no_jail=unsafe_no_jail)
    try:
        done = _run(folder, name, config, keep_model)
    except KeyboardInterrupt:
        say("interrupted; nothing was kept, run the job again")
        return 130
    if isinstance(done, tuple):
        report, bundle = done
        _print_report(report)
        if as_json:
            print_json(_rejected_json(report, name, bundle))
        return 1
    _print_outcome(done, keep_model)
    if as_json:
        print_json(_outcome_json(done))
    return 0 if done.status == "succeeded" else 1


@command.command("show")
@_folder
@json_option
def show(folder: Path, as_json: bool) -> int:
    """Show a job's files and settings, defaults included; runs nothing."""
    bundle = _freeze(folder)
    manifest = _manifest(bundle)
    values = manifest.prime_rl.model_dump()
    own = manifest.explicit_keys
    click.echo(f"job         {bundle.job_hash}")
    click.echo(f"base_model  {manifest.base_model}")
    click.echo(f"rollouts    {values['max_steps'] * values['batch_size']}")
    for key, value in (manifest.sft.model_dump() if manifest.sft else {}).items():
        click.echo(f"sft.{key}  {value!r}")
    for key, value in manifest.env.items():
        click.echo(f"env.{key}  {value!r}")
    click.echo("")
    rows = [(key, _toml(value), "set" if key in own else "") for key, value in values.items()]
    print_table(("[prime_rl]", "value", "by the job"), rows)
    click.echo("")
    sizes = [(path, str(len(data))) for path, data in bundle.files.items()]
    print_table(("file", "bytes"), sizes)
    if as_json:
        print_json(
            {
                "job_hash": bundle.job_hash,
                "base_model": manifest.base_model,
                "prime_rl": values,
                "explicit_keys": sorted(own),
                "env": dict(manifest.env),
                "sft": manifest.sft.model_dump() if manifest.sft else None,
                "files": {path: len(data) for path, data in bundle.files.items()},
            }
        )
    return 0


@command.command("render")
@_folder
@click.option(
    "--trainer", type=click.Choice(["prime_rl"]), required=True, help="For which program."
)
@click.option(
    "--base-model", required=True, metavar="NAME", help="Catalog name or a name of a model hub."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    required=True,
    help="File to write; - for standard output.",
)
@click.option("--package", default="environment", help="Import name of the job's package.")
@click.option("--train-gpus", type=click.IntRange(1), default=1, show_default=True,
              help="GPUs that train.")  # fmt: skip
@click.option("--infer-gpus", type=click.IntRange(1), default=1, show_default=True,
              help="GPUs that sample.")  # fmt: skip
def render(
    folder: Path,
    trainer: str,  # noqa: ARG001 (the one choice)
    base_model: str,
    out: Path,
    package: str,
    train_gpus: int,
    infer_gpus: int,
) -> int:
    """Write the rl.toml with which prime-rl trains this job."""
    from nestling.core.rundir import write_atomic
    from nestling.jobs.rl_toml import RlRun, render_rl_toml

    bundle = _freeze(folder)
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", folder.resolve().name).strip("._-")[:40] or "job"
    text = render_rl_toml(
        _manifest(bundle),
        base_model,
        RlRun(
            name=f"{plain}-{bundle.job_hash[:12]}",
            package=package,
            num_train_gpus=train_gpus,
            num_infer_gpus=infer_gpus,
        ),
    )
    if str(out) == "-":
        click.echo(text, nl=False)
    else:
        write_atomic(out, text.encode())
        say(f"wrote {out}")
    return 0


def _check(folder: Path, family: str, config: RunConfig) -> ProbeReport:
    from nestling.bench.room import room_here
    from nestling.jobs.probe_report import ProbeReport

    try:
        bundle = _freeze(folder)
    except JobRejectedError as error:
        return ProbeReport(ok=False, problems=tuple(error.problems))
    with room_here(config) as room:
        return room.check(bundle, family)


def _run(
    folder: Path, family: str, config: RunConfig, keep_model: Path | None
) -> Outcome | tuple[ProbeReport, Bundle | None]:
    """The outcome, or why the job may not be trained."""
    from nestling.bench.room import room_here
    from nestling.jobs.probe_report import ProbeReport

    try:
        bundle = _freeze(folder)
    except JobRejectedError as error:
        return ProbeReport(ok=False, problems=tuple(error.problems)), None
    say(f"checking {folder} for {family}")
    with room_here(config, keep_model) as room:
        report = room.check(bundle, family)
        if not report.ok:
            return report, bundle
        steps = bundle.manifest(room.context.bounds).prime_rl.max_steps
        expected = f", about {report.predicted.cpu_s:.0f} CPU s" if report.predicted else ""
        say(f"accepted in {report.seconds:.1f} s; training {steps} steps{expected}")
        return room.run(bundle, family, lambda step: _say_step(step, steps))


def _freeze(folder: Path) -> Bundle:
    """Raises `ConfigError` for what is no job folder, `JobRejectedError` for a broken job."""
    from nestling.jobs.bundle import freeze

    _require_job_folder(folder)
    return freeze(folder)


def _require_job_folder(folder: Path) -> None:
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise ConfigError(
            f"{folder} {what}; expected a job folder with job.toml and environment/, "
            f"such as examples/ledger; check the path"
        )
    if not (folder / "job.toml").exists() and not (folder / "environment").exists():
        raise ConfigError(
            f"{folder} is not a job folder: it has neither job.toml nor environment/; "
            f"copy one of examples/ and change it"
        )


def _manifest(bundle: Bundle) -> JobManifest:
    """By the bounds of small models, else of open or large ones; errors are those of the small ones."""
    from nestling.jobs.bounds import LARGE, OPEN

    try:
        return bundle.manifest()
    except JobRejectedError:
        for bounds in (OPEN, LARGE):
            with contextlib.suppress(JobRejectedError):
                return bundle.manifest(bounds)
        raise


def _family_of(folder: Path, given: str | None) -> str:
    """The family that was named, or the one that the folder is named after."""
    from nestling.families.registry import names

    _require_job_folder(folder)
    if given is not None:
        return family_of(given)
    name = folder.resolve().name
    for family in names():
        if name == family or re.match(rf"{family}[-_.]", name):
            return family
    raise ConfigError(
        f"nothing says what {folder} teaches: its name is not a family; expected one of "
        f"{', '.join(names())}; add --family NAME"
    )


def _say_step(step: StepRecord, steps: int) -> None:
    loss = "constant groups, no update" if step.loss is None else f"loss {step.loss:+.4f}"
    say(
        f"step {step.step + 1}/{steps}  reward {step.reward_mean:.3f}  {loss}  "
        f"groups {step.trained_groups}  lr {step.learning_rate:.2g}  {step.cpu_s:.1f} CPU s"
    )


def _print_report(report: ProbeReport) -> None:
    for stage in report.stages:
        say(f"{stage.name}: {stage.seconds:.2f} s")
    for problem in report.problems:
        click.echo(problem.line())
    if report.ok and report.predicted is not None:
        cost = report.predicted
        click.echo(f"accepted; predicted {cost.cpu_s:.1f} CPU s, {cost.usd:.4f} USD")
    elif report.ok:
        click.echo("accepted")


def _print_outcome(outcome: Outcome, keep_model: Path | None) -> None:
    click.echo(f"{outcome.family} on {outcome.base_model}: {outcome.status}")
    if outcome.status != "succeeded":
        click.echo(f"{outcome.reason}: {outcome.detail}")
    if outcome.warm_up is not None:
        warm = outcome.warm_up
        click.echo(
            f"warm-up     loss {warm.first_loss:.3f} to {warm.last_loss:.3f} in {warm.steps} steps "
            f"on {warm.examples} worked examples, {warm.cpu_s:.1f} CPU s"
        )
    if outcome.pre is not None:
        click.echo(f"untrained   {outcome.pre:.3f} (best base {outcome.best_pre:.3f})")
    if outcome.post is not None and outcome.uplift is not None and outcome.uplift_ci is not None:
        lo, hi = outcome.uplift_ci
        click.echo(f"trained     {outcome.post:.3f}")
        click.echo(
            f"uplift      {outcome.uplift:+.3f} (95 % {lo:+.3f} to {hi:+.3f}, n={outcome.n})"
        )
    click.echo(
        f"cost        {outcome.cpu_s:.1f} CPU s, {outcome.wall_s:.1f} s, {outcome.usd:.5f} USD, "
        f"{outcome.train_steps} steps"
    )
    click.echo(f"job         {outcome.job_hash}")
    if keep_model is not None and outcome.model_ref is not None:
        click.echo(f"model       {keep_model / outcome.model_ref}")


def _report_json(report: ProbeReport) -> dict[str, Any]:
    return {
        "ok": report.ok,
        "attempts_left": None,  # a person may check as often as they like
        "messages": _messages(report),
        "predicted": report.predicted.model_dump() if report.predicted else None,
        "seconds": report.seconds,
    }


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    return outcome.model_dump(mode="json", exclude={"steps"})


def _rejected_json(report: ProbeReport, family: str, bundle: Bundle | None) -> dict[str, Any]:
    """The same fields as of an outcome, for a job that was never trained."""
    from nestling.jobs.outcome import Outcome

    first = report.problems[0]
    outcome = Outcome(
        job_hash=bundle.job_hash if bundle else "",
        family=family,
        base_model=_base_model(bundle),
        status="failed",
        reason=first.code,
        detail=first.line(),
    )
    return {**_outcome_json(outcome), "status": "rejected", "messages": _messages(report)}


def _base_model(bundle: Bundle | None) -> str:
    try:
        return _manifest(bundle).base_model if bundle else ""
    except JobRejectedError:
        return ""


def _messages(report: ProbeReport) -> list[Mapping[str, str]]:
    return [
        {
            "stage": one.stage,
            "code": one.code,
            "wrong": one.wrong,
            "expected": one.expected,
            "fix": one.fix,
        }
        for one in report.problems
    ]


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
