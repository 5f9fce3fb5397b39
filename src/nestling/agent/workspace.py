"""The agent's folder: one resolver for every tool, nothing outside, nothing but plain text files.

A path from the agent is a list of plain ASCII names. It is walked one directory descriptor at a time and
no link is ever followed, so the answer does not depend on what else happens to the folder meanwhile.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pydantic import Field

from nestling.core.errors import NestlingError
from nestling.core.frozen import Frozen

__all__ = ["READ_ONLY_HINT", "WRITABLE_HINT", "Workspace", "WorkspaceError", "WorkspaceLimits"]

WRITABLE_HINT = "job.toml, environment/... or data/..."
READ_ONLY_HINT = "INSTRUCTIONS.md, TASK.md and tools/..."

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_WRITABLE_FILES = frozenset({"job.toml"})
_WRITABLE_FOLDERS = frozenset({"environment", "data"})
_MAX_COUNTED = 50
_SCRATCH_NAME = ".nestling-write"
"""Cannot be named by an agent: names never start with a dot."""


class WorkspaceError(NestlingError):
    """A file request was refused; the message tells the agent what to do instead."""


class WorkspaceLimits(Frozen):
    """How much an episode may keep in its folder."""

    max_files: int = Field(64, ge=1, le=10_000)
    """Files of all kinds, the read-only ones included."""
    max_file_bytes: int = Field(131_072, ge=1)
    max_manifest_bytes: int = Field(4096, ge=1)
    """Of job.toml, which this process parses: TOML takes time quadratic in the length of a key."""
    max_total_bytes: int = Field(1_048_576, ge=1)
    max_path_chars: int = Field(120, ge=8, le=1024)
    max_depth: int = Field(6, ge=1, le=32)


class Workspace:
    """Read, write, edit and name the text files of one episode.

    Every method raises `WorkspaceError` for anything the agent got wrong, for files that are not plain
    files of ours (links, pipes, devices), and for a full disk. A refused request changes nothing.
    """

    def __init__(self, root: Path, limits: WorkspaceLimits | None = None) -> None:
        self.root = root
        self.limits = limits or WorkspaceLimits()

    @classmethod
    def create(
        cls, root: Path, files: Mapping[str, str], limits: WorkspaceLimits | None = None
    ) -> Workspace:
        """A new folder (mode 0700) holding `files`; read-only paths are allowed here alone."""
        root.mkdir(mode=0o700, parents=True, exist_ok=False)
        workspace = cls(root, limits)
        for path in sorted(files):
            workspace._store(workspace._parts(path), workspace._encode(path, files[path]))
        return workspace

    def read(self, path: str) -> str:
        """The text of one file."""
        parts = self._parts(path)
        with self._folder(parts[:-1], path) as folder:
            return self._decode(path, self._load(folder, parts[-1], path))

    def write(self, path: str, content: str) -> int:
        """Create or replace one file; bytes written."""
        parts = self._writable(path)
        payload = self._encode(path, content)
        self._store(parts, payload)
        return len(payload)

    def edit(self, path: str, old: str, new: str) -> None:
        """Replace `old`, which must occur exactly once, by `new`."""
        parts = self._writable(path)
        if not old:
            raise WorkspaceError(
                "old is empty; give the exact text to replace, copied from the file"
            )
        if old == new:
            raise WorkspaceError("old and new are the same text; change new")
        text = self.read(path)
        found = _occurrences(text, old)
        if found == 0:
            raise WorkspaceError(
                f"old text not found in {path}; read_file shows it, copy the text exactly"
            )
        if found > 1:
            raise WorkspaceError(
                f"old text occurs {found} times{' or more' if found == _MAX_COUNTED else ''} in {path};"
                " add lines around it so that it occurs once"
            )
        self._store(parts, self._encode(path, text.replace(old, new, 1)))

    def paths(self) -> list[str]:
        """Paths of all plain files, sorted; at most `max_files` of them."""
        return sorted(path for path, _ in self._walk())[: self.limits.max_files]

    def _parts(self, path: str) -> tuple[str, ...]:
        """The names of a path, or an error; purely textual."""
        limits = self.limits
        if not isinstance(path, str) or not path:
            raise WorkspaceError("path is empty; give a relative path such as job.toml")
        if len(path) > limits.max_path_chars:
            raise WorkspaceError(
                f"path has {len(path)} characters; the limit is {limits.max_path_chars}"
            )
        if path.startswith(("/", "\\", "~")):
            raise WorkspaceError(
                f"path {_show(path)} is absolute; give a relative path such as job.toml"
            )
        parts = tuple(part for part in path.split("/") if part != ".")
        if ".." in parts:
            raise WorkspaceError(f"path {_show(path)} leaves the workspace; do not use ..")
        if not parts or not all(_NAME.fullmatch(part) for part in parts):
            raise WorkspaceError(
                f"path {_show(path)} is not allowed; use letters, digits, _ - . and / between names"
            )
        if len(parts) > limits.max_depth:
            raise WorkspaceError(f"path has {len(parts)} levels; the limit is {limits.max_depth}")
        return parts

    def _writable(self, path: str) -> tuple[str, ...]:
        parts = self._parts(path)
        inside = len(parts) > 1 and parts[0] in _WRITABLE_FOLDERS
        if not inside and "/".join(parts) not in _WRITABLE_FILES:
            raise WorkspaceError(f"{_show(path)} is read-only; write {WRITABLE_HINT}")
        return parts

    def _encode(self, path: str, content: str) -> bytes:
        limit = self.limits.max_file_bytes
        if "/".join(self._parts(path)) in _WRITABLE_FILES:
            limit = min(limit, self.limits.max_manifest_bytes)
        if len(content) > limit:
            raise WorkspaceError(f"{path} would have over {limit} bytes; make it shorter")
        if "\x00" in content:
            raise WorkspaceError(f"{path} would hold a NUL character; write plain text")
        try:
            payload = content.encode()
        except UnicodeEncodeError as error:
            raise WorkspaceError(
                f"{path} would hold an unpaired surrogate at character {error.start}; write plain text"
            ) from error
        if len(payload) > limit:
            raise WorkspaceError(
                f"{path} would have {len(payload)} bytes; the limit is {limit}; make it shorter"
            )
        return payload

    @staticmethod
    def _decode(path: str, payload: bytes) -> str:
        try:
            return payload.decode()
        except UnicodeDecodeError as error:
            raise WorkspaceError(
                f"{path} is not UTF-8 text (byte {error.start}); write_file replaces it"
            ) from error

    @contextmanager
    def _folder(self, parts: tuple[str, ...], path: str, *, make: bool = False) -> Iterator[int]:
        """A descriptor of the folder that holds `path`; no link is followed on the way."""
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for part in parts:
                fd = self._enter(fd, part, path, make=make)
            yield fd
        finally:
            os.close(fd)

    def _enter(self, parent: int, name: str, path: str, *, make: bool) -> int:
        """Descriptor of one sub-folder; `parent` is closed once it was entered."""
        if make:
            _refuse_twin(parent, name, path)
            try:
                os.mkdir(name, mode=0o700, dir_fd=parent)
            except FileExistsError:
                pass
            except OSError as error:
                raise _cannot_write(path, error) from error
        try:
            child = os.open(
                name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent
            )
        except FileNotFoundError as error:
            raise WorkspaceError(f"no such file {path}; list_files shows all files") from error
        except OSError as error:
            raise WorkspaceError(f"{path} is not possible: {name} is not a folder") from error
        os.close(parent)
        return child

    def _load(self, folder: int, name: str, path: str) -> bytes:
        info = _plain_file(folder, name, path)
        if info is None:
            raise WorkspaceError(f"no such file {path}; list_files shows all files")
        if info.st_size > self.limits.max_file_bytes:
            raise WorkspaceError(
                f"{path} has {info.st_size} bytes, over the limit {self.limits.max_file_bytes}"
            )
        try:
            fd = os.open(
                name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder
            )
        except OSError as error:
            raise WorkspaceError(f"{path} cannot be read: {error.strerror}") from error
        with os.fdopen(fd, "rb") as file:
            opened = os.fstat(fd)
            if (opened.st_dev, opened.st_ino) != (info.st_dev, info.st_ino):
                raise WorkspaceError(f"{path} changed while it was opened; try again")
            return file.read(self.limits.max_file_bytes)

    def _store(self, parts: tuple[str, ...], payload: bytes) -> None:
        """Write beside the old file, then swap: a failed write leaves the old text."""
        path = "/".join(parts)
        self._refuse_overflow(path, len(payload))
        with self._folder(parts[:-1], path, make=True) as folder:
            _refuse_twin(folder, parts[-1], path)
            _plain_file(folder, parts[-1], path)
            try:
                _replace(folder, parts[-1], payload)
            except OSError as error:
                raise _cannot_write(path, error) from error

    def _refuse_overflow(self, path: str, num_bytes: int) -> None:
        limits = self.limits
        files = dict(self._walk())
        files.pop(path, None)
        if len(files) + 1 > limits.max_files:
            raise WorkspaceError(
                f"too many files: the limit is {limits.max_files}; replace one that exists"
            )
        total = sum(files.values()) + num_bytes
        if total > limits.max_total_bytes:
            raise WorkspaceError(
                f"all files together would have {total} bytes; the limit is {limits.max_total_bytes}"
            )

    def _walk(self) -> Iterator[tuple[str, int]]:
        """Path and size of plain files, without entering links; stops soon after the file limit."""
        seen = 0
        pending: list[tuple[str, str]] = [("", str(self.root))]
        while pending:
            prefix, folder = pending.pop()
            with os.scandir(folder) as entries:
                for entry in entries:
                    seen += 1
                    if seen > 2 * self.limits.max_files + 64:
                        return
                    if entry.is_dir(follow_symlinks=False):
                        if prefix.count("/") < self.limits.max_depth:
                            pending.append((f"{prefix}{entry.name}/", entry.path))
                    elif entry.is_file(follow_symlinks=False) and _NAME.fullmatch(entry.name):
                        yield prefix + entry.name, entry.stat(follow_symlinks=False).st_size


def _show(path: str) -> str:
    """A path of unknown content as printable text."""
    return ascii(path if len(path) <= 60 else path[:57] + "...")


def _occurrences(text: str, part: str) -> int:
    """How often `part` occurs, overlaps counted: "aa" is twice in "aaa"; stops at `_MAX_COUNTED`."""
    count, at = 0, text.find(part)
    while at >= 0 and count < _MAX_COUNTED:
        count, at = count + 1, text.find(part, at + 1)
    return count


def _refuse_twin(folder: int, name: str, path: str) -> None:
    """Refuse a name that differs from a neighbour in case only: some file systems fold case."""
    folded = name.casefold()
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name != name and entry.name.casefold() == folded:
                raise WorkspaceError(
                    f"{path} differs from {entry.name} in upper and lower case only; use {entry.name}"
                )


def _plain_file(folder: int, name: str, path: str) -> os.stat_result | None:
    """The entry when it is an ordinary file with one name, None when absent, else an error."""
    try:
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WorkspaceError(f"{path} cannot be used: {error.strerror}") from error
    if stat.S_ISDIR(info.st_mode):
        raise WorkspaceError(f"{path} is a folder; give a file inside it")
    if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
        raise WorkspaceError(f"{path} is a link or a special file; only plain files are allowed")
    return info


def _replace(folder: int, name: str, payload: bytes) -> None:
    fd = os.open(
        _SCRATCH_NAME,
        os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC,
        mode=0o600,
        dir_fd=folder,
    )
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(payload)
        os.replace(_SCRATCH_NAME, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        os.unlink(_SCRATCH_NAME, dir_fd=folder)
        raise


def _cannot_write(path: str, error: OSError) -> WorkspaceError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return WorkspaceError(f"{path} was not written: the disk is full; the old text is kept")
    return WorkspaceError(f"{path} was not written: {error.strerror}; the old text is kept")
