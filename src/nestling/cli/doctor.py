"""`nestling doctor`: what is installed, what is missing, and the fix."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import click

from nestling.cli.options import json_option, print_json
from nestling.core.errors import ConfigError, JailError, NestlingError

if TYPE_CHECKING:
    from nestling.jobs.jail import Jail

__all__ = ["Check", "command"]

State = Literal["ok", "note", "problem"]

_TORCH: Final = """\
import json, torch
cuda = torch.cuda.is_available()
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
print(json.dumps({"version": torch.__version__, "threads": torch.get_num_threads(), "gpus": names}))
"""
"""Run in a process of its own: an install that is broken may end the process that imports it."""

_JAILED: Final = """\
import json
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
nets = [line.split(":")[0].strip() for line in open("/proc/self/net/dev").readlines()[2:]]
try:
    open("/job/written", "w")
    sealed = False
except OSError:
    sealed = True
print(json.dumps({"seccomp": int(status["Seccomp"]), "nets": nets, "sealed": sealed}))
"""

_MIN_FREE_GIB: Final = 0.5
_LITTLE_FREE_GIB: Final = 5.0
_MIN_MEMORY_GIB: Final = 3.0
_INSTALL: Final = "pip install --force-reinstall nestling"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the report."""

    name: str
    state: State
    """note: works, but something is slower, weaker or worth knowing."""
    found: str
    fix: str = ""


@click.command("doctor")
@click.option(
    "--learner",
    type=click.Choice(["embedded", "tinker"]),
    default="embedded",
    help="Look at what this learner needs too; for tinker: key, service, model, price.",
)
@click.option("--model", default="Qwen/Qwen3.6-35B-A3B", help="Base model at the service.")
@click.option("--base-url", default="", help="A Tinker-compatible server; default: the hosted one.")
@click.option("--price-file", default="", help="A copy of the service's price file.")
@json_option
def command(learner: str, model: str, base_url: str, price_file: str, as_json: bool) -> int:
    """Look at everything a run needs on this machine.

    Exit code 0: runs will work; 1: something needs the fix that is shown.
    """
    checks = []
    for look in (_python, _packages, _torch, _cores, _memory, _jail, _cgroup):
        checks += _shown(look)
    for look in (_state, _disk, _bases, _agent):
        checks += _shown(look)
    if learner == "tinker":
        checks += _shown(lambda: _tinker(model, base_url, price_file))
    problems = sum(check.state == "problem" for check in checks)
    click.echo("ready" if not problems else f"{problems} to fix")
    if as_json:
        print_json({"ok": not problems, "checks": [asdict(check) for check in checks]})
    return 1 if problems else 0


def _shown(look: Callable[[], Iterator[Check]]) -> list[Check]:
    """Each check is printed as it is known: some take seconds."""
    made = []
    for check in look():
        click.echo(f"{check.state:8}{check.name}: {check.found}")
        if check.fix:
            click.echo(f"        fix: {check.fix}")
        made.append(check)
    return made


def _python() -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Check(name="Python", state="ok", found=f"{version} at {sys.executable}")


def _packages() -> Iterator[Check]:
    """What the package asks for, without extras."""
    asked = [
        re.match(r"[A-Za-z0-9._-]+", line)
        for line in metadata.requires("nestling") or []
        if "extra ==" not in line
    ]
    missing = []
    for match in asked:
        if match is not None:
            try:
                metadata.version(match[0])
            except metadata.PackageNotFoundError:
                missing.append(match[0])
    if missing:
        found = f"missing: {', '.join(missing)}"
        yield Check(name="packages", state="problem", found=found, fix=_INSTALL)
    else:
        yield Check(name="packages", state="ok", found=f"all {len(asked)} are installed")


def _torch() -> Iterator[Check]:
    fix = 'pip install "torch>=2.11,<2.14"'
    try:
        done = subprocess.run(  # noqa: S603 (our interpreter, our text)
            [sys.executable, "-P", "-c", _TORCH],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        words = getattr(error, "stderr", None) or str(error)
        last = str(words).strip().splitlines()[-1][:200]
        yield Check(name="torch", state="problem", found=f"cannot be imported: {last}", fix=fix)
        return
    yield Check(name="torch", state="ok", found=f"{said['version']}, {said['threads']} threads")
    gpus = said["gpus"]
    yield Check(
        name="GPU", state="ok" if gpus else "note", found=", ".join(gpus) or "none; CPU is used"
    )


def _cores() -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0))
    given = os.environ.get("OMP_NUM_THREADS", "not set, commands use 1")
    found = f"{cores} usable; a worker takes one each; OMP_NUM_THREADS {given}"
    yield Check(name="cores", state="ok" if cores > 1 else "note", found=found)


def _memory() -> Iterator[Check]:
    import psutil

    free = psutil.virtual_memory().available / 2**30
    if free >= _MIN_MEMORY_GIB:
        yield Check(name="memory", state="ok", found=f"{free:.1f} GiB free")
    else:
        fix = "close other programs, or run with --set fleet.workers=1"
        yield Check(name="memory", state="note", found=f"{free:.1f} GiB free", fix=fix)


def _jail() -> Iterator[Check]:
    """Real namespaces around a real interpreter, with the filter that jobs get."""
    from nestling.jobs.jail import Jail, require_bubblewrap

    try:
        path = require_bubblewrap()
    except ConfigError as error:
        found, _, fix = str(error).partition("fix: ")
        yield Check(name="bubblewrap", state="problem", found=found.rstrip("; "), fix=fix)
        return
    yield Check(name="bubblewrap", state="ok", found=f"{path} makes namespaces here")
    try:
        said = _in_jail(Jail())
    except (JailError, OSError, ValueError, subprocess.TimeoutExpired) as error:
        fix = "run as another user, outside a container, or in one with CAP_SYS_ADMIN"
        yield Check(name="jail", state="problem", found=str(error)[:300], fix=fix)
        return
    if said["nets"] in ([], ["lo"]) and said["sealed"]:
        yield Check(name="jail", state="ok", found="no network, read-only files")
    else:
        fix = "use a newer kernel or bubblewrap; do not run jobs you do not trust"
        yield Check(name="jail", state="problem", found=f"leaks: {said}", fix=fix)
    if said["seccomp"] == 2:
        yield Check(name="seccomp", state="ok", found="system calls are filtered")
    else:
        fix = "use a kernel with CONFIG_SECCOMP_FILTER"
        yield Check(name="seccomp", state="problem", found="no filter inside the jail", fix=fix)


def _in_jail(jail: Jail) -> dict[str, Any]:
    """What a program sees inside; `ValueError` when it said nothing readable."""
    from nestling.jobs.jail import JailLimits
    from nestling.jobs.jail_runtime import python_runtime

    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        jailed = jail.start_command(
            [python_runtime().python, "-I", "-S", "-c", _JAILED],
            job_dir=Path(folder),
            limits=JailLimits(),
            keep_fds=(),
            log_fd=log.fileno(),
        )
        try:
            jailed.process.wait(timeout=30)
        finally:
            jailed.kill()
        log.seek(0)
        text = log.read().decode(errors="replace").strip()
    try:
        said: dict[str, Any] = json.loads(text.splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise ValueError(f"the jailed program failed: {text[-200:] or 'no output'}") from error
    return said


def _cgroup() -> Iterator[Check]:
    from nestling.jobs.jail import JailLimits
    from nestling.jobs.jail_cgroup import JailCgroup

    limits = JailLimits()
    group = JailCgroup.create(memory_bytes=limits.memory_bytes, processes=limits.processes)
    if group is not None:
        group.remove()
        yield Check(name="cgroup", state="ok", found="memory of a whole jail is capped")
        return
    yield Check(
        name="cgroup",
        state="note",
        found="no writable cgroup v2; each process of a jail is limited, not their sum",
        fix="start with: systemd-run --user --scope -p Delegate=yes nestling ...",
    )


def _state() -> Iterator[Check]:
    from nestling.inner.baselines import state_folder

    folder = state_folder()
    fix = f"chmod u+rwx {folder}, or set NESTLING_STATE to a folder you may write to"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        found = f"{folder} cannot be written: {error.strerror}"
        yield Check(name="state folder", state="problem", found=found, fix=fix)
        return
    secret = folder / "eval-secret"
    if secret.exists() and secret.stat().st_mode & 0o077:
        found = f"{secret}, which decides hidden tasks, can be read by others"
        yield Check(name="state folder", state="problem", found=found, fix=f"chmod 600 {secret}")
    else:
        yield Check(name="state folder", state="ok", found=str(folder))


def _disk() -> Iterator[Check]:
    from nestling.inner.baselines import state_folder

    for label, folder in (("state folder", state_folder()), ("this folder", Path.cwd())):
        place = next(one for one in (folder, *folder.absolute().parents) if one.exists())
        free = shutil.disk_usage(place).free / 2**30
        state: State = "ok"
        if free < _LITTLE_FREE_GIB:
            state = "problem" if free < _MIN_FREE_GIB else "note"
        fix = "" if state == "ok" else f"free some space; long runs want {_LITTLE_FREE_GIB:g} GiB"
        name = f"disk of {label}"
        yield Check(name=name, state=state, found=f"{free:.1f} GiB free", fix=fix)


def _bases() -> Iterator[Check]:
    from nestling.families import bases

    fix = "nestling models build, or reinstall the package"
    try:
        for name in bases.names():
            bases.get(name).verify()
    except (NestlingError, OSError) as error:
        yield Check(name="base models", state="problem", found=str(error), fix=fix)
    else:
        found = f"{', '.join(bases.names())}: weights match the catalog"
        yield Check(name="base models", state="ok", found=found)


def _agent() -> Iterator[Check]:
    from nestling.config import AgentConfig
    from nestling.wiring.agents import agent_folder

    name = AgentConfig().model
    try:
        folder = agent_folder(name)
    except ConfigError as error:
        yield Check(name="agent", state="problem", found=str(error), fix=_INSTALL)
        return
    needed = ("config.json", "model.safetensors", "tokenizer.json")
    missing = [one for one in needed if not (folder / one).is_file()]
    if missing:
        found = f"{folder} has no {', '.join(missing)}"
        yield Check(name="agent", state="problem", found=found, fix=_INSTALL)
    else:
        yield Check(name="agent", state="ok", found=name)


def _tinker(model: str, base_url: str, price_file: str) -> Iterator[Check]:
    """Asks the service, which costs nothing."""
    from nestling.config import RunConfig
    from nestling.outer.config import OuterConfig, TinkerConfig
    from nestling.wiring.agents import learner_findings

    settings = TinkerConfig(base_model=model, base_url=base_url, price_file=price_file)
    config = RunConfig(learner=settings, outer=OuterConfig(temperature=1.0))
    for one in asyncio.run(learner_findings(config)):
        yield Check(name=f"tinker {one.name}", state=one.state, found=one.found, fix=one.fix)
