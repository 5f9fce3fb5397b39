"""An environment of its own for a peer that cannot share ours; used by the checks beside this file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
TORCH = "torch==2.13.0"


def make_env(
    folder: Path, packages: Sequence[str], *, ours: bool, pinned: Sequence[str] = ()
) -> Path:
    """A virtual environment with these packages; its python. Kept when it is complete already.

    `ours` adds this project with its pinned dependencies, as far as the packages allow. `pinned` are
    installed last, without what they ask for. torch comes by pip alone, so that pip's own settings
    decide which build of it is taken.
    """
    python = folder / "bin" / "python"
    wanted = "\n".join([TORCH, *packages, *pinned, str(ours)])
    stamp = folder / ".complete"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    run([sys.executable, "-m", "venv", "--clear", str(folder)])
    run([str(python), "-m", "pip", "install", "-q", "uv"])
    run([str(python), "-m", "pip", "install", "-q", "--no-deps", TORCH])
    uv = [str(folder / "bin" / "uv"), "pip", "install", "-q", "--python", str(python)]
    if ours:
        plain = folder / "constraints.txt"
        plain.write_text(_without_hashes((ROOT / "constraints.txt").read_text()))
        run([*uv, "--no-deps", "-r", str(plain)])
    run([*uv, TORCH, *packages])
    if pinned:
        run([*uv, "--no-deps", *pinned])
    if ours:
        run([*uv, "--no-deps", "--no-build-isolation", "-e", str(ROOT)])
    stamp.write_text(wanted)
    return python


def run(command: Sequence[str]) -> None:
    """Show and run; ends the script when it fails."""
    print("+", *command, flush=True)
    subprocess.run(command, check=True)


def _without_hashes(text: str) -> str:
    kept = [line for line in text.splitlines() if not line.lstrip().startswith("--hash")]
    return "\n".join(line.rstrip("\\ ") for line in kept) + "\n"
