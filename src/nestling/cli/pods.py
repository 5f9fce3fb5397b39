"""`nestling fleet up | ls | down | simulate-runpod`: rented pods, and a rehearsal without renting."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nestling.cli.options import json_option, print_json, print_table, say, set_option
from nestling.core.errors import ConfigError

if TYPE_CHECKING:
    from nestling.config import RunConfig
    from nestling.fleet.pods.list import PodLine, PodList, Swept

__all__ = ["add_to"]

_API_URL = "https://api.runpod.io/v2"

_api_option = click.option(
    "--api-url", default=_API_URL, show_default=True, help="Another API, such as the simulator's."
)
_pool_option = click.option(
    "--pool", default="nestling", show_default=True, help="First part of the names of our pods."
)


def add_to(group: click.Group) -> None:
    """Add these commands to `nestling fleet`."""
    for command in (up, ls, down, simulate_runpod):
        group.add_command(command)


@click.command("up")
@click.argument("recipe", type=click.Path(path_type=Path, dir_okay=False))
@set_option
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Run folder.")
@click.option("--pods", "number", type=click.IntRange(1), help="How many; default: fleet.workers.")
@json_option
def up(
    recipe: Path, settings: tuple[str, ...], out: Path | None, number: int | None, as_json: bool
) -> int:
    """Rent pods for a run ahead of it and wait until their workers speak.

    They wait for `nestling run` with the same recipe and folder, and end themselves when it does not
    come within fleet.lost_controller_s.
    """
    from nestling.config import RunpodFleet, load_recipe

    config = load_recipe(recipe, settings)
    folder = out or Path("runs") / config.name
    fleet = config.fleet
    if not isinstance(fleet, RunpodFleet):
        raise ConfigError(f"{recipe} has fleet.kind = {fleet.kind}; expected runpod")
    wanted = number or fleet.workers
    if wanted > fleet.workers:
        raise ConfigError(f"--pods {wanted}; expected at most fleet.workers = {fleet.workers}")
    say(f"renting {wanted} pods, at most {fleet.max_usd_per_hour:g} USD/h together")
    usd = asyncio.run(_up(config, folder, wanted))
    say(
        f"{wanted} pods wait at {usd:.2f} USD/h; next: nestling run {recipe} --out {folder}; "
        f"they end themselves after {fleet.lost_controller_s:g} s without it"
    )
    if as_json:
        print_json({"pods": wanted, "usd_per_hour": usd, "folder": str(folder)})
    return 0


@click.command("ls")
@_pool_option
@_api_option
@json_option
def ls(pool: str, api_url: str, as_json: bool) -> int:
    """The pods of the account that are ours, and what they cost."""
    pods = asyncio.run(_ls(api_url, f"{pool}-"))
    usd = sum(pod.usd_per_hour for pod in pods)
    if as_json:
        print_json({"pods": [pod.as_json() for pod in pods], "usd_per_hour": usd})
        return 0
    print_table(
        ("pod", "id", "status", "USD/h", "up"),
        [
            (pod.name, pod.id, pod.status, f"{pod.usd_per_hour:.2f}", f"{pod.up_s:.0f} s")
            for pod in pods
        ],
    )
    say(f"{len(pods)} pods, {usd:.2f} USD/h")
    return 0


@click.command("down")
@click.option(
    "--run", "run", type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="End the pods of the run in this folder.",
)  # fmt: skip
@click.option("--all", "every", is_flag=True, help="End every pod of the pool, whoever made it.")
@click.option("--timeout-s", type=click.FloatRange(1), default=120.0, show_default=True,
              help="How long to wait for the proof.")  # fmt: skip
@_pool_option
@_api_option
@json_option
def down(
    run: Path | None, every: bool, timeout_s: float, pool: str, api_url: str, as_json: bool
) -> int:
    """End pods and prove that none is left; exits 1 when one may be."""
    if (run is None) != every:
        raise click.UsageError("Give one of --run FOLDER and --all.")
    prefix = f"{pool}-" if run is None else f"{pool}-{_run_id(run)}-"
    swept = asyncio.run(_down(api_url, prefix, timeout_s))
    if as_json:
        print_json({"ended": swept.ended, "left": swept.left})
    if swept.left:
        say(
            f"error: {len(swept.left)} pods are not proved gone: {', '.join(swept.left)}; try again, "
            "or end them in the console"
        )
        return 1
    say(f"{len(swept.ended)} pods ended; none is left in the list, nor at its own address")
    return 0


@click.command("simulate-runpod")
@click.option("--listen", default="127.0.0.1:8600", show_default=True, help="Loopback host:port.")
@click.option(
    "--faults", type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="What goes wrong, as TOML or JSON; see docs/runpod.md.",
)  # fmt: skip
@click.option(
    "--speed", type=click.FloatRange(0.1, 1000), default=1.0, show_default=True,
    help="Simulated seconds per second: boots, credit and rate limits; not the jobs.",
)  # fmt: skip
@click.option(
    "--folder", type=click.Path(path_type=Path, file_okay=False),
    help="Keep the logs of the pods there.",
)  # fmt: skip
@json_option
def simulate_runpod(
    listen: str, faults: Path | None, speed: float, folder: Path | None, as_json: bool
) -> int:
    """A Runpod account on this machine, every pod a real worker process. Ends on Ctrl-C.

    Shows what to set for a rehearsal, and at the end what it would have cost.
    """
    report = asyncio.run(_simulate(listen, faults, speed, folder))
    if as_json:
        print_json(report)
        return 0
    print_table(
        ("gpu", "pods", "hours", "USD"),
        [
            (gpu, f"{one['pods']:.0f}", f"{one['hours']:.3f}", f"{one['usd']:.4f}")
            for gpu, one in report["by_gpu"].items()
        ],
    )
    say(
        f"{report['pods_made']} pods, {report['usd']:.4f} USD, {report['pods_left']} left, "
        f"{report['requests']} requests in {report['simulated_s']:.0f} s"
    )
    return 0


async def _up(config: RunConfig, folder: Path, number: int) -> float:
    from nestling.wiring.runs import open_pods

    async with open_pods(config, folder) as provider:
        await provider.sweep()
        await provider.wait_for_pods(number)
        return provider.keeper.maker.burn_usd_per_hour()


async def _ls(api_url: str, prefix: str) -> list[PodLine]:
    account = _account(api_url)
    try:
        return await account.pods(prefix)
    finally:
        await account.close()


async def _down(api_url: str, prefix: str, timeout_s: float) -> Swept:
    account = _account(api_url)
    try:
        return await account.end_all(prefix, limit_s=timeout_s, told=say)
    finally:
        await account.close()


def _account(api_url: str) -> PodList:
    from nestling.wiring.fleets import open_pod_account

    return open_pod_account(api_url)


def _run_id(folder: Path) -> str:
    """The run's part of its pods' names; refused while a controller would rent new ones."""
    from nestling.core.rundir import RunDir
    from nestling.store.run_store import RunStore

    with RunDir(folder).lock(), RunStore.open_reader(folder / "run.db") as store:
        found = store.meta("fleet.run_id")
    if found is None:
        raise ConfigError(
            f"the run in {folder} never had pods; expected one with fleet.kind=runpod"
        )
    return found


async def _simulate(
    listen: str, faults: Path | None, speed: float, folder: Path | None
) -> dict[str, Any]:
    from nestling.fleet.runpod_simulator.script import load_script
    from nestling.fleet.runpod_simulator.server import simulated_runpod

    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, over.set)
    script = load_script(faults)
    async with simulated_runpod(script, folder=folder, listen=listen, speed=speed) as running:
        say("a simulated Runpod account; in another terminal:")
        say(f"  export RUNPOD_API_KEY={running.key}")
        say(f"  nestling run RECIPE --set fleet.api_url={running.url} \\")
        say("      --set fleet.address=https://127.0.0.1:8443 --set fleet.listen=127.0.0.1:8443")
        click.echo(json.dumps({"url": running.url, "key": running.key}))
        await over.wait()
        return running.app.report()
