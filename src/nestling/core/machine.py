"""What this machine and this copy of the program are, in words, for records of runs."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

__all__ = ["commit", "machine_line"]


def machine_line() -> str:
    """Processor, usable cores and memory in one line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{_processor()}, {cores} cores, {gib:.0f} GiB, Python {platform.python_version()}"


def commit() -> str | None:
    """Git commit of the checkout this module runs from, `-dirty` when changed; None elsewhere."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}-dirty" if changed else head


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(  # noqa: S603 (a fixed command)
        ["git", "-C", str(root), *words],  # noqa: S607
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # never disturb another git at work
    )
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
