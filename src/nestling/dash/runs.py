"""Which runs a folder holds."""

from __future__ import annotations

from pathlib import Path

from nestling.core.errors import ConfigError

__all__ = ["find_runs", "require_runs"]

_DEPTH = 3
"""Folders below the one named that are looked into."""


def find_runs(where: Path) -> dict[str, Path]:
    """Run folders by the name they have in addresses, newest first.

    `where` is a run folder itself, or a folder with runs in it, up to three levels down.
    """
    if (where / "run.db").is_file():
        return {where.resolve().name or "run": where}
    found: list[Path] = []
    patterns = ["/".join(["*"] * depth) + "/run.db" for depth in range(1, _DEPTH + 1)]
    for pattern in patterns:
        found += [path.parent for path in where.glob(pattern)]
    found.sort(key=_changed_at, reverse=True)
    return {path.relative_to(where).as_posix().replace("/", "~"): path for path in found}


def require_runs(where: Path) -> dict[str, Path]:
    """As `find_runs`; `ConfigError` when there is none."""
    found = find_runs(where)
    if not found:
        what = "holds no run" if where.is_dir() else "is not a folder"
        raise ConfigError(
            f"{where} {what}; expected the folder of `nestling run` (it has a run.db), or a folder "
            f"of such folders; start a run, or name its folder"
        )
    return found


def _changed_at(folder: Path) -> float:
    """The write-ahead log changes first."""
    times = [
        path.stat().st_mtime for path in (folder / "run.db", folder / "run.db-wal") if path.exists()
    ]
    return max(times, default=0.0)
