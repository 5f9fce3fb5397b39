"""A write that fails ends the job in the system's own words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from nestling.core.errors import JobFailedError

__all__ = ["temporary_folder", "unwritable", "writing"]


@contextmanager
def writing(reason: str, place: Path) -> Iterator[None]:
    """Writes below `place`.

    Raises:
        JobFailedError: `reason`, when the system refuses one, for example on a full disk.
    """
    try:
        yield
    except OSError as error:
        raise JobFailedError(reason, unwritable(place, error)) from error


@contextmanager
def temporary_folder(reason: str, prefix: str, place: Path | None = None) -> Iterator[Path]:
    """A folder of our own below `place` (None: where the system keeps such), gone afterwards.

    Raises:
        JobFailedError: `reason`, it cannot be made.
    """
    with writing(reason, place or Path(gettempdir())):
        made = TemporaryDirectory(prefix=prefix, dir=place)
    with made as name:
        yield Path(name)


def unwritable(place: Path, error: OSError) -> str:
    """What could not be written, why, and what to do about it."""
    if error.strerror is None:  # of our own making: it says all of this
        return str(error)
    return (
        f"{error.filename or place} cannot be written: {error.strerror}; expected a disk with room that this user may "
        "write to; free some room and run the job again"
    )
