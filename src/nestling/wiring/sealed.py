"""Hidden set C is opened once: every opening is kept in the state folder, with what it was for."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from nestling.core.errors import ConfigError
from nestling.core.frozen import Frozen
from nestling.core.rundir import write_atomic

__all__ = ["Opened", "Opening", "SealedSet"]

_FILE: Final = "sealed-openings.json"


class Opening(Frozen):
    """One sweep that set C was opened for."""

    at: str
    """When, in UTC."""
    commitment: str
    """Of set C; another secret has another set C, which is opened on its own."""
    agents: tuple[str, ...]
    """As they were named."""
    arms: tuple[str, ...]
    """The same sorted, by their weights."""
    families: tuple[str, ...]
    episodes: int
    """Of each agent and family."""
    seed: int
    settings: str
    """Digest of every setting that may change a result."""
    folder: str
    """Of the run, as it was named."""
    commit: str | None

    def is_same_sweep(self, other: Opening) -> bool:
        """Whether `other` continues this one, whenever it starts."""
        varies = {"at", "agents", "commit"}
        return self.model_dump(exclude=varies) == other.model_dump(exclude=varies)

    def told(self) -> str:
        """When and for what, for people."""
        return (
            f"{self.at} for {', '.join(self.agents)} on {', '.join(self.families)}, {self.episodes} "
            f"episodes each, seed {self.seed}, settings {self.settings[:8]}, in {self.folder}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An opening among all of them."""

    opening: Opening
    before: int
    """Openings that came before it."""
    total: int

    def told(self) -> str:
        """One line that every output carries."""
        times = (
            "once" if self.total == 1 else f"{self.total} times; this is opening {self.before + 1}"
        )
        return f"hidden set C, sealed until {self.opening.at}, opened {times}"


_OPENINGS: Final = TypeAdapter(tuple[Opening, ...])


class SealedSet:
    """The record of one state folder."""

    def __init__(self, state: Path) -> None:
        self._path = state / _FILE

    def check(self, wanted: Opening, *, again: bool = False) -> None:
        """Nothing, when the set may be opened for this sweep.

        Raises:
            ConfigError: it was opened for another one and `again` is not given, or the record is damaged.
        """
        earlier = self._of(wanted)
        if again or not earlier or any(one.is_same_sweep(wanted) for one in earlier):
            return
        raise ConfigError(
            f"sealed set C was opened {earlier[-1].told()}; expected that sweep again, to continue it, "
            "as another look at C makes it a second set B; "
            "--sealed-again opens it all the same, and every output then says so"
        )

    def open(self, wanted: Opening, *, again: bool = False) -> Opened:
        """Record the opening before anything is scored; a sweep that continues is not a second one.

        Raises:
            ConfigError: see `check`.
            StoreError: the record cannot be written.
        """
        with self._alone():
            self.check(wanted, again=again)
            if not any(one.is_same_sweep(wanted) for one in self._of(wanted)):
                content = _OPENINGS.dump_json((*self._read(), wanted), indent=2)
                write_atomic(self._path, content + b"\n")
            return self.opened(wanted)

    def opened(self, wanted: Opening) -> Opened:
        """The recorded opening of this sweep; `KeyError` when there is none."""
        all_of_them = self._of(wanted)
        for before, one in enumerate(all_of_them):
            if one.is_same_sweep(wanted):
                return Opened(opening=one, before=before, total=len(all_of_them))
        raise KeyError(wanted.told())

    def _of(self, wanted: Opening) -> list[Opening]:
        """Openings of the same set, the oldest first."""
        return [one for one in self._read() if one.commitment == wanted.commitment]

    def _read(self) -> tuple[Opening, ...]:
        try:
            return _OPENINGS.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return ()
        except (OSError, ValidationError) as error:
            raise ConfigError(
                f"{self._path} cannot be read; expected the record of who opened set C; "
                "restore it from a copy of the state folder"
            ) from error

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
