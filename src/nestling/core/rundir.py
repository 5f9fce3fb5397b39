"""Where a run keeps its files, and artifacts named by what is in them.

<run>/run.db        the run store (source of truth)
<run>/artifacts/    blobs by SHA-256: bundles, checkpoints, transcripts
<run>/config.toml   the resolved configuration
<run>/logs/         one file per worker, for people
<run>/run.lock      held by the one controller of the run
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nestling.core.errors import StoreError

__all__ = ["ArtifactStore", "RunDir", "write_atomic"]


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file by new content; after a crash it holds the old or the new bytes, never a mix.

    The bytes and the folder entry are on disk on return. Raises `StoreError` when they are not.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror or error}; expected a writable folder with free "
            f"space; free space or fix its permissions, then resume the run"
        ) from error


class ArtifactStore:
    """Blobs that are named by their SHA-256, so that writing twice is harmless."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, data: bytes) -> str:
        """Keep a blob durably; returns its SHA-256 in hex. May be repeated."""
        digest = hashlib.sha256(data).hexdigest()
        path = self.path(digest)
        if not path.exists():
            write_atomic(path, data)
        return digest

    def get(self, digest: str) -> bytes:
        """The blob, checked against its name; `StoreError` when it is missing or damaged."""
        path = self.path(digest)
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise StoreError(
                f"artifact {digest} is missing from {self.folder}; expected the file {path}; "
                f"restore it from a copy of the run folder"
            ) from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise StoreError(
                f"artifact {path} is damaged: its content does not match its name; restore it from "
                f"a copy of the run folder, or delete it to have it made again"
            )
        return data

    def has(self, digest: str) -> bool:
        """Whether the blob is there."""
        return self.path(digest).exists()

    def path(self, digest: str) -> Path:
        """Where the blob is or would be; `ValueError` when `digest` is not 64 hex digits."""
        if len(digest) != 64 or not all(char in "0123456789abcdef" for char in digest):
            raise ValueError(f"artifact name {digest!r} is not a SHA-256 in lower-case hex")
        return self.folder / digest[:2] / digest


class RunDir:
    """The folder of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.database = root / "run.db"
        self.config = root / "config.toml"
        self.logs = root / "logs"
        self.artifacts = ArtifactStore(root / "artifacts")

    @classmethod
    def create(cls, root: Path) -> RunDir:
        """The folder, made when it is not there yet."""
        try:
            for folder in (root, root / "artifacts", root / "logs"):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"cannot create the run folder {root}: {error.strerror or error}; "
                f"choose a folder that you may write to"
            ) from error
        return cls(root)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the one controller of this run; `StoreError` when another process is.

        The lock belongs to the process and goes with it, so a killed controller leaves none behind.
        """
        descriptor = os.open(self.root / "run.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StoreError(
                    f"the run {self.root} is in use by another process; expected one controller "
                    f"per run; stop the other one or choose another run folder"
                ) from error
            yield
        finally:
            os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
