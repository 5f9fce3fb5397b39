"""Freeze a workspace into a content-addressed bundle: what was probed is what is trained.

Only `job.toml`, `environment/` and `data/` take part; whatever else lies in the workspace is left
out, so nothing placed there (a score, a verdict) can be mistaken for ours. The folder is read
through directory handles that never follow a link.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nestling.core.errors import ConfigError, JobRejectedError, Problem
from nestling.jobs.bounds import SMALL, Bounds
from nestling.jobs.manifest import JobManifest, parse_manifest

__all__ = ["HASH_FILE", "LIMITS", "Bundle", "BundleLimits", "freeze"]

HASH_FILE = ".job_hash"
"""Beside the files of a written bundle; cannot itself be part of a bundle."""

_FOLDERS = ("environment", "data")
_SUFFIXES = (".py", ".toml", ".json", ".jsonl", ".txt", ".csv", ".md")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_STARTUP_NAMES = frozenset({"sitecustomize.py", "usercustomize.py", "conftest.py"})
_MAX_DEPTH = 6
_MAX_PROBLEMS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleLimits:
    """How much a job may hold."""

    files: int = 64
    file_bytes: int = 256 * 1024
    total_bytes: int = 2 * 1024 * 1024


LIMITS = BundleLimits()


@dataclass(frozen=True, slots=True)
class Bundle:
    """The files of one job by relative path, and the hash that names them."""

    files: Mapping[str, bytes]
    job_hash: str

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], limits: BundleLimits = LIMITS) -> Bundle:
        """A bundle of files held in memory; raises `JobRejectedError` with what is wrong."""
        problems = _content_problems(files, limits)
        if problems:
            raise JobRejectedError(problems[:_MAX_PROBLEMS])
        ordered = dict(sorted(files.items()))
        return cls(ordered, _job_hash(ordered))

    def manifest(self, bounds: Bounds = SMALL) -> JobManifest:
        """The parsed `job.toml`; raises `JobRejectedError`."""
        return parse_manifest(self.files["job.toml"], bounds)

    def write(self, folder: Path) -> None:
        """Write the files and their hash below a new or empty folder."""
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; write a bundle to a new folder")
        for name, data in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        (folder / HASH_FILE).write_text(self.job_hash + "\n", encoding="ascii")

    @classmethod
    def load(cls, folder: Path, limits: BundleLimits = LIMITS) -> Bundle:
        """Read a written bundle; raises `JobRejectedError` when it changed since."""
        bundle = freeze(folder, limits)
        try:
            recorded = (folder / HASH_FILE).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            recorded = ""
        if bundle.job_hash != recorded:
            raise JobRejectedError(
                [
                    _files(
                        "hash",
                        f"the bundle's files do not match {HASH_FILE}",
                        "the files that were submitted",
                        "submit the job again",
                    )
                ]
            )
        return bundle


def freeze(folder: Path, limits: BundleLimits = LIMITS) -> Bundle:
    """Read a workspace folder into a bundle; raises `JobRejectedError` with what is wrong."""
    files: dict[str, bytes] = {}
    problems: list[Problem] = []
    try:
        root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read as a folder: {error.strerror}") from error
    try:
        for item in _read_workspace(root, limits):
            if isinstance(item, Problem):
                problems.append(item)
            else:
                files[item[0]] = item[1]
    finally:
        os.close(root)
    if problems:
        raise JobRejectedError(problems[:_MAX_PROBLEMS])
    return Bundle.from_files(files, limits)


def _read_workspace(root: int, limits: BundleLimits) -> Iterator[tuple[str, bytes] | Problem]:
    """Files and problems, in path order; stops early once a cap is passed."""
    entries = _names(root, limits.files * 4)
    count = 0
    for name in entries or ():
        if name == "job.toml":
            yield _read_file(root, name, name, limits)
        elif name in _FOLDERS:
            for item in _read_folder(root, name, name, 1, limits):
                yield item
                count += 1
                if count > limits.files:
                    return


def _read_folder(
    parent: int, name: str, path: str, depth: int, limits: BundleLimits
) -> Iterator[tuple[str, bytes] | Problem]:
    try:
        handle = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except OSError:
        yield _files("not_a_folder", f"{path} is not a folder", "a plain folder", f"remove {path}")
        return
    try:
        names = _names(handle, limits.files)
        if names is None:
            yield _too_many(limits)
            return
        for child in names:
            child_path = f"{path}/{child}"
            problem = _path_problem(child_path)
            if problem is not None:
                yield problem
            elif stat.S_ISDIR(os.stat(child, dir_fd=handle, follow_symlinks=False).st_mode):
                if depth >= _MAX_DEPTH:
                    yield _files(
                        "depth",
                        f"{_shown(child_path)} is nested too deep",
                        f"{_MAX_DEPTH} levels",
                        "use fewer folders",
                    )
                else:
                    yield from _read_folder(handle, child, child_path, depth + 1, limits)
            else:
                yield _read_file(handle, child, child_path, limits)
    finally:
        os.close(handle)


def _names(handle: int, limit: int) -> list[str] | None:
    """Sorted entries of a folder; None when there are more than `limit`."""
    names = []
    with os.scandir(handle) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) > limit:
                return None
    return sorted(names)


def _read_file(
    parent: int, name: str, path: str, limits: BundleLimits
) -> tuple[str, bytes] | Problem:
    """One regular file, unlinked elsewhere and within the size cap."""
    plain = ("plain files only", f"write {_shown(path)} again with write_file")
    try:
        # O_NONBLOCK: opening a FIFO must not wait for a writer.
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
    except OSError:
        return _files("not_plain", f"{_shown(path)} is a link or cannot be read", *plain)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            return _files("not_plain", f"{_shown(path)} is not a regular file", *plain)
        if status.st_nlink > 1:
            return _files("hard_link", f"{_shown(path)} is a hard link", *plain)
        with os.fdopen(handle, "rb", closefd=False) as file:
            return path, file.read(limits.file_bytes + 1)
    finally:
        os.close(handle)


def _content_problems(files: Mapping[str, bytes], limits: BundleLimits) -> list[Problem]:
    problems = []
    if "job.toml" not in files:
        problems.append(
            _files("missing", "job.toml is missing", "job.toml", "write job.toml with base_model")
        )
    if "environment/__init__.py" not in files:
        missing = "environment/__init__.py"
        problems.append(_files("missing", f"{missing} is missing", "a package", f"write {missing}"))
    if len(files) > limits.files:
        problems.append(_too_many(limits))
    seen: dict[str, str] = {}
    for path, data in files.items():
        problem = _path_problem(path) or _data_problem(path, data, limits)
        if problem is not None:
            problems.append(problem)
        twin = seen.setdefault(path.casefold(), path)
        if twin != path:
            problems.append(
                _files(
                    "twin",
                    f"{_shown(path)} and {_shown(twin)} differ only in case",
                    "distinct names",
                    "rename one",
                )
            )
    total = sum(len(data) for data in files.values())
    if total > limits.total_bytes:
        problems.append(
            _files(
                "total_size",
                f"the job has {total} bytes",
                f"at most {limits.total_bytes}",
                "generate rows in code instead of storing them",
            )
        )
    return problems


def _path_problem(path: str) -> Problem | None:
    if path == "job.toml":
        return None
    parts = path.split("/")
    shown = _shown(path)
    inside = parts[0] in _FOLDERS
    if not inside or not all(_PART.fullmatch(part) and ".." not in part for part in parts):
        return _files(
            "path",
            f"{shown} is not an allowed path",
            "environment/ or data/ and names of letters, digits, _ . -",
            "rename it",
        )
    if len(parts) > _MAX_DEPTH + 1:
        return _files("depth", f"{shown} is nested too deep", f"{_MAX_DEPTH} levels", "use fewer")
    if parts[-1].lower() in _STARTUP_NAMES:
        return _files(
            "startup_file", f"{shown} would run at start-up", "no such file", f"remove {shown}"
        )
    if "__pycache__" in parts:
        return _files("compiled", f"{shown} is compiled code", "sources only", "remove __pycache__")
    return None


def _data_problem(path: str, data: bytes, limits: BundleLimits) -> Problem | None:
    shown = _shown(path)
    if not path.endswith(_SUFFIXES):
        return _files("suffix", f"{shown} has no allowed ending", " ".join(_SUFFIXES), "rename it")
    if path.startswith("data/") and path.endswith(".py"):
        return _files(
            "code_in_data", f"{shown} is code in data/", "code in environment/", "move it there"
        )
    if len(data) > limits.file_bytes:
        return _files(
            "file_size",
            f"{shown} is larger than {limits.file_bytes} bytes",
            f"at most {limits.file_bytes}",
            "make it smaller",
        )
    if b"\0" in data:
        return _files("nul", f"{shown} holds a NUL byte", "text", "write it as UTF-8 text")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return _files(
            "not_utf8",
            f"{shown} is not UTF-8 at byte {error.start}",
            "UTF-8 text",
            "write the file again as plain text",
        )
    return None


def _job_hash(files: Mapping[str, bytes]) -> str:
    """SHA-256 over sorted paths and bytes, each with its length, so that no two jobs collide."""
    digest = hashlib.sha256(b"nestling-job-1\n")
    for path, data in sorted(files.items()):
        name = path.encode()
        digest.update(len(name).to_bytes(4, "big") + name + len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


def _too_many(limits: BundleLimits) -> Problem:
    return _files("too_many", "too many files", f"at most {limits.files}", "merge or remove files")


def _files(code: str, wrong: str, expected: str, fix: str) -> Problem:
    return Problem(stage="files", code=f"files.{code}", wrong=wrong, expected=expected, fix=fix)


def _shown(path: str) -> str:
    text = "".join(c if c.isascii() and c.isprintable() else "?" for c in path[-80:])
    return text if len(text) <= 40 else "..." + text[-37:]
