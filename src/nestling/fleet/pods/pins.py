"""What exactly must be installed in a pod, found on both sides and compared: drift is refused.

A pin is the source digest of this package, the Python version, or the exact version or git revision
of an installed package. The controller's own values are the expected ones, so a job on a pod is done
by the same code as here.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata, resources
from pathlib import Path

__all__ = ["drift", "expected_pins", "found_pins"]

_SOURCE = "nestling.source"
_PYTHON = "python"


def expected_pins(packages: Mapping[str, str]) -> dict[str, str]:
    """Pins for pods of this controller: its own code and Python, and `packages` as configured."""
    return {_SOURCE: _source_digest(), _PYTHON: _python(), **packages}


def found_pins(names: Iterable[str]) -> dict[str, str]:
    """The present value of each pin on this machine; `missing` for a package that is not there."""
    return {name: _found(name) for name in names}


def drift(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """One line per pin that differs; empty when all is as expected."""
    return [
        f"{name} is {found.get(name, 'missing')}; expected {value}"
        for name, value in sorted(expected.items())
        if found.get(name, "missing") != value
    ]


def _found(name: str) -> str:
    if name == _SOURCE:
        return _source_digest()
    if name == _PYTHON:
        return _python()
    try:
        package = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return "missing"
    return _revision(package) or package.version


def _revision(package: metadata.Distribution) -> str | None:
    """The commit that pip recorded for an install from git (PEP 610); None for any other."""
    text = package.read_text("direct_url.json")
    if text is None:
        return None
    commit = json.loads(text).get("vcs_info", {}).get("commit_id")
    return str(commit) if commit else None


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])


@functools.cache
def _source_digest() -> str:
    """SHA-256 over names and contents of all modules of this package."""
    digest = hashlib.sha256()
    with resources.as_file(resources.files("nestling")) as root:
        for path in sorted(Path(root).rglob("*.py")):
            data = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(root).as_posix()} {data}\n".encode())
    return digest.hexdigest()
