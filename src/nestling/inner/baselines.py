"""Frozen scores of the untrained base models, item by item, computed once and kept on disk.

A baseline is a fact about (base files, family, split, n, hidden items, scoring code): all of them
are in its key, so nothing stale can be read, and no job can have its own baseline drawn again.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from nestling.core.errors import ConfigError, StoreError
from nestling.core.frozen import Frozen
from nestling.core.rundir import write_atomic
from nestling.families.splits import HiddenSplit
from nestling.inner.disk import writing
from nestling.inner.model_folder import folder_digest
from nestling.inner.scorer import Scorer

__all__ = ["Baseline", "Baselines", "state_folder"]

_log = logging.getLogger(__name__)

STATE_VARIABLE: Final = "NESTLING_STATE"


class Baseline(Frozen):
    """One untrained base on the hidden items of one family and split."""

    base: str
    base_digest: str
    family: str
    split: HiddenSplit
    n: int
    commitment: str
    fingerprint: str
    correct: tuple[bool, ...]
    """Item by item, so that uplift can be paired."""
    cpu_s: float

    @property
    def mean(self) -> float:
        """Share of correct items."""
        return sum(self.correct) / len(self.correct)


def state_folder() -> Path:
    """Where lasting state is kept: $NESTLING_STATE or ~/.local/state/nestling."""
    given = os.environ.get(STATE_VARIABLE)
    return Path(given) if given else Path.home() / ".local" / "state" / "nestling"


class Baselines:
    """Looks baselines up and has the scorer compute those that are missing."""

    def __init__(
        self, scorer: Scorer, bases: Mapping[str, Path], *, folder: Path | None = None
    ) -> None:
        if not bases:
            raise ConfigError("no base models; expected at least one name and folder")
        self._scorer = scorer
        self._bases = dict(bases)
        self._folder = (folder or state_folder()) / "baselines"
        self._loaded: dict[tuple[str, str, HiddenSplit, int], Baseline] = {}
        self._digests: dict[str, str] = {}

    def get(self, base: str, family: str, split: HiddenSplit, n: int) -> Baseline:
        """The baseline of one base.

        Raises:
            ConfigError: unknown base.
            JobFailedError: the scorer failed, see `Scorer.score`; `scorer.disk`, the folder cannot be written to.
        """
        key = (base, family, split, n)
        if key not in self._loaded:
            self._loaded[key] = self._stored_or_computed(*key)
        return self._loaded[key]

    def best_base(self, family: str, split: HiddenSplit, n: int) -> Baseline:
        """The untrained base with the highest score; the first in name order on a tie."""
        return max(
            (self.get(base, family, split, n) for base in sorted(self._bases)),
            key=lambda baseline: baseline.mean,
        )

    def table(self, families: tuple[str, ...], split: HiddenSplit, n: int) -> list[Baseline]:
        """Every base on every given family."""
        return [
            self.get(base, family, split, n) for family in families for base in sorted(self._bases)
        ]

    def _stored_or_computed(self, base: str, family: str, split: HiddenSplit, n: int) -> Baseline:
        if base not in self._bases:
            raise ConfigError(f"no base model {base!r}; expected one of {sorted(self._bases)}")
        if base not in self._digests:
            self._digests[base] = folder_digest(self._bases[base])
        digest = self._digests[base]
        identity = (digest, family, split, str(n), self._scorer.commitment(split))
        parts = "\x00".join((*identity, self._scorer.fingerprint()))
        path = self._folder / f"{hashlib.sha256(parts.encode()).hexdigest()}.json"
        if (stored := _read(path)) is not None:
            return stored
        with _only_one(path):
            return _read(path) or self._compute(path, base, digest, family, split, n)

    def _compute(
        self, path: Path, base: str, digest: str, family: str, split: HiddenSplit, n: int
    ) -> Baseline:
        score = self._scorer.score(self._bases[base], base=base, family=family, split=split, n=n)
        if score.base_digest != digest or score.delta_norm != 0.0:
            raise ConfigError(
                f"base model {base!r} in {self._bases[base]} changed while in use; start again"
            )
        baseline = Baseline(
            base=base,
            base_digest=digest,
            family=family,
            split=split,
            n=n,
            commitment=self._scorer.commitment(split),
            fingerprint=self._scorer.fingerprint(),
            correct=tuple(score.correct),
            cpu_s=score.cpu_s,
        )
        try:
            write_atomic(path, baseline.model_dump_json().encode())
        except StoreError as error:  # the score is as true as it would be from the file
            _log.warning("a baseline is not kept and will be computed again: %s", error)
        return baseline


def _read(path: Path) -> Baseline | None:
    """The stored baseline; a damaged or unreadable file counts as missing and is computed again."""
    try:
        return Baseline.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Lets one process compute a baseline while others that want the same one wait."""
    with writing("scorer.disk", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_suffix(".lock").open("w")
    with file as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by the system when this process dies
        yield
