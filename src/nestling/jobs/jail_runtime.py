"""The files a jailed Python needs, and no others: interpreter, libraries, our worker's few files."""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

__all__ = ["JAIL_JOB_DIR", "WORKER_FILES", "PythonRuntime", "python_runtime"]

JAIL_JOB_DIR: Final = "/job"
"""Where the job's folder is inside."""
_PACKAGE_DIR: Final = "/nestling"

WORKER_FILES: Final = (
    "core/errors.py",
    "jobs/rollout_env.py",
    "jobs/env_protocol.py",
    "jobs/verifiers_host.py",
    "jobs/env_worker.py",
    "jobs/jail_confine.py",
)
"""All of this package that exists in a jail."""

_SYSTEM_FILES: Final = (
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/alternatives",
    "/etc/localtime",
    "/usr/share/zoneinfo",
)
_SYSTEM_FOLDERS: Final = ("bin", "lib", "lib32", "lib64")
_DEVICES: Final = ("null", "zero", "full", "random", "urandom")


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonRuntime:
    """The interpreter in use, as bubblewrap options and a search path."""

    python: str
    options: tuple[str, ...]
    sys_path: tuple[str, ...]
    """Search path after the standard library."""


@cache
def python_runtime() -> PythonRuntime:
    """How to have this interpreter and its installed packages in a jail.

    Works for a virtual environment, pyenv and uv builds, and the distribution's Python. The home
    folder is not mounted, only the folders named here (their parents are empty). An installed
    `nestling` is hidden behind an empty folder.
    """
    python = Path(sys.executable).resolve()
    options: list[str] = []
    for name in _SYSTEM_FOLDERS:
        options += _system_folder(name)
    for file in _SYSTEM_FILES:
        options += ["--ro-bind-try", file, file]
    options += _readonly(python)
    stdlib = {Path(sysconfig.get_path(key)) for key in ("stdlib", "platstdlib")}
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        library_dir = Path(sys.base_prefix) / "lib"
        stdlib |= set(library_dir.glob("libpython*.so*"))
    packages = [
        Path(entry)
        for entry in sys.path
        if Path(entry).name in ("site-packages", "dist-packages") and Path(entry).is_dir()
    ]
    for path in [*sorted(stdlib), *packages]:
        options += _readonly(path)
    for folder in packages:
        if (folder / "nestling").is_dir():
            options += ["--tmpfs", str(folder / "nestling")]
            options += ["--remount-ro", str(folder / "nestling")]
    source = Path(__file__).parents[1]
    for file in WORKER_FILES:
        options += ["--ro-bind", str(source / file), f"{_PACKAGE_DIR}/nestling/{file}"]
    for device in _DEVICES:
        options += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    return PythonRuntime(
        python=str(python),
        options=(*_open_parents(options), *options),
        sys_path=(_PACKAGE_DIR, *(str(folder) for folder in packages)),
    )


def _system_folder(name: str) -> list[str]:
    """`/usr/NAME`, and `/NAME` as the link or folder it is on this system."""
    options = _readonly(Path("/usr") / name) if (Path("/usr") / name).is_dir() else []
    top = Path("/") / name
    if top.is_symlink():
        return [*options, "--symlink", str(top.readlink()), str(top)]
    return [*options, *_readonly(top)] if top.is_dir() else options


def _open_parents(options: list[str]) -> list[str]:
    """The folders above the mount points; bubblewrap alone makes them for its own user only."""
    targets = [
        Path(options[at + 2])
        for at, option in enumerate(options)
        if option in ("--ro-bind", "--ro-bind-try", "--dev-bind", "--symlink")
    ]
    parents = {parent for target in targets for parent in target.parents} - {Path("/")}
    mounted = set(targets)
    made: list[str] = []
    for folder in sorted(parents):
        if not mounted & {folder, *folder.parents}:
            made += ["--perms", "0755", "--dir", str(folder)]
    return made


def _readonly(path: Path) -> list[str]:
    return ["--ro-bind", str(path), str(path)]
