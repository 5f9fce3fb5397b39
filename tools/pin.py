"""Writes constraints.txt: exact versions and hashes of all dependencies except torch.

Needs `uv` on the PATH. Run it after a change of the dependencies in pyproject.toml: versions that
still fit stay as they are; `--upgrade` takes the newest of everything.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = """\
# Exact versions and hashes of everything but torch, for `make`: pip checks each file it takes.
# Made with:  python tools/pin.py   (torch is pinned in the Makefile, because its file depends on the machine)
"""
BUILD_AND_TORCH_NEEDS = [
    "editables",
    "filelock",
    "fsspec",
    "hatchling",
    "networkx",
    "setuptools<82",
    "sympy",
    "typing-extensions",
]


def main() -> None:
    """Resolve for every platform and write the file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    wanted = [line for line in wanted if not line.startswith("torch")] + BUILD_AND_TORCH_NEEDS
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "wanted.in", Path(folder) / "pinned.txt"
        source.write_text("\n".join(wanted) + "\n")
        pins = ROOT / "constraints.txt"
        if pins.exists() and "--upgrade" not in sys.argv[1:]:
            target.write_text(pins.read_text())
        command = ["uv", "pip", "compile", str(source), "-o", str(target), "-q", "--universal"]
        command += ["--python-version", "3.11", "--generate-hashes", "--no-header"]
        command += ["--no-annotate", "--no-emit-index-url"]
        subprocess.run(command, check=True)
        lines = [line for line in target.read_text().splitlines() if not line.startswith("#")]
        pins.write_text(HEADER + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
