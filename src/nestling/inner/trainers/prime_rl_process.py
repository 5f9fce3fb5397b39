"""How the `rl` program is started: where it is, what it sees of the environment, which GPUs it gets."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from nestling.core.errors import ConfigError
from nestling.jobs.jail import require_bubblewrap

__all__ = ["find_program", "program_environment", "veiled", "visible_gpus"]

_PASSED_ON: Final = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE",
    "XDG_CACHE_HOME", "UV_CACHE_DIR", "UV_PYTHON", "SSL_CERT_FILE", "NESTLING_WORKER",
)  # fmt: skip
"""All of the environment that prime-rl, and so the job, sees; no key can be in it."""


def find_program(program: str) -> Path:
    """The path of `rl`.

    Raises:
        ConfigError: nothing of that name can be run.
    """
    found = shutil.which(program)
    if found is None:
        raise ConfigError(
            f"inner.prime_rl.program = {program!r} cannot be run; expected prime-rl's `rl`, a name on PATH or a "
            "path; install prime-rl (docs/prime-rl.md) and set it, for example .../prime-rl/.venv/bin/rl"
        )
    return Path(found).absolute()


def visible_gpus(wanted: int, *, shared: bool, visible: str | None) -> str:
    """CUDA_VISIBLE_DEVICES for a run: the first ones of what the worker sees, one of them twice when shared.

    prime-rl counts the entries and gives the first to inference, the next to the trainer; it reads numbers only
    (`get_physical_gpu_ids`, commit 559b447).

    Raises:
        ConfigError: the worker sees fewer than `wanted`, or names that are no numbers.
    """
    ours = (
        None if visible is None else [part.strip() for part in visible.split(",") if part.strip()]
    )
    if ours is not None and not all(part.isdigit() for part in ours):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES = {visible!r}; expected numbers, all that prime-rl reads; give fleet.gpus indices"
        )
    if shared:
        return ",".join((ours or ["0"])[:1] * 2)
    if ours is None:
        ours = [str(index) for index in range(wanted)]
    if len(ours) < wanted:
        raise ConfigError(
            f"prime-rl is to use {wanted} GPUs (inner.prime_rl.train_gpus + infer_gpus), this worker sees {len(ours)}; "
            "give a worker more, or set inner.prime_rl.share_gpu = true"
        )
    return ",".join(ours[:wanted])


def program_environment(
    source: Mapping[str, str], program: Path, package: Path, *, more: Sequence[str], gpus: str
) -> dict[str, str]:
    """What the program may see: names known here and those of `more`, its own folder first on PATH."""
    kept = {name: source[name] for name in (*_PASSED_ON, *more) if name in source}
    return kept | {
        "PATH": os.pathsep.join([str(program.parent), kept.get("PATH", os.defpath)]),
        "PYTHONPATH": str(package),
        "CUDA_VISIBLE_DEVICES": gpus,
    }


def veiled(command: Sequence[str], hidden: Sequence[Path]) -> list[str]:
    """The command with `hidden` files and folders empty, and a process table of its own; all else is as it was.

    No capability is left to undo it. It is no jail: network and whatever else this user may write stay open.

    Raises:
        ConfigError: bubblewrap is not installed.
    """
    covered: list[str] = []
    for path in hidden:
        if path.is_dir():
            covered += ["--tmpfs", str(path)]
        elif path.exists():
            covered += ["--ro-bind", os.devnull, str(path)]
    veil = ["--dev-bind", "/", "/", "--proc", "/proc", "--unshare-pid", "--die-with-parent"]
    return [require_bubblewrap(), *veil, "--cap-drop", "ALL", *covered, "--", *command]
