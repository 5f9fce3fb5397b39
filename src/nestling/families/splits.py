"""Which items belong to which set: dev is public, A, B and C are hidden behind a secret.

Every prompt belongs to exactly one set. A public hash gives one prompt in sixteen to dev; a keyed
hash (HMAC-SHA256 with the secret) shares the rest among A, B and C. Item i of a set is drawn from a
stream of its own, so the first n items are the same whatever n is, and sets cannot overlap.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from nestling.core.errors import ConfigError
from nestling.core.seeds import derive_seed
from nestling.families.family import Family, Item
from nestling.families.registry import get

__all__ = [
    "HIDDEN",
    "EvalSecret",
    "HiddenSplit",
    "Split",
    "commitment",
    "dev_items",
    "hidden_items",
]

Split = Literal["dev", "a", "b", "c"]
"""dev: shown to the agent; a: baselines it may ask for; b: pays the reward; c: sealed for reports."""
HiddenSplit = Literal["a", "b", "c"]
HIDDEN: Final[tuple[HiddenSplit, ...]] = ("a", "b", "c")

_SECRET_BYTES: Final = 32
_DEV_ONE_IN: Final = 16
_MAX_DRAWS: Final = 1000
"""Per item; a set takes about a third of all prompts, so running out means the set is exhausted."""


@dataclass(frozen=True, slots=True)
class EvalSecret:
    """32 random bytes that choose the hidden items; never printed, never given to agent code."""

    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.key) != _SECRET_BYTES:
            raise ConfigError(
                f"the eval secret has {len(self.key)} bytes; expected {_SECRET_BYTES}; "
                "restore the file or delete it to make a new one (old baselines then no longer apply)"
            )

    @classmethod
    def load_or_create(cls, path: str | Path) -> EvalSecret:
        """The secret in `path`, made with mode 0600 when there is none; safe against a racing twin.

        Raises:
            ConfigError: the file cannot be used: wrong size, not private, or not readable.
        """
        file = Path(path)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            if not file.exists():
                _create(file)
            if file.stat().st_mode & 0o077:
                raise ConfigError(
                    f"{file} can be read by others; expected mode 0600; run: chmod 600 {file}"
                )
            return cls(file.read_bytes())
        except OSError as e:
            raise ConfigError(
                f"cannot use the eval secret {file}: {e}; expected a private file; check the folder's rights"
            ) from e


def hidden_items(family: str | Family, split: Split, n: int, secret: EvalSecret) -> list[Item]:
    """The first `n` items of a hidden set; distinct, and never in another set or in dev.

    Raises:
        ConfigError: unknown family, or `split` is not a hidden one.
    """
    if split == "dev":
        raise ConfigError("dev is not a hidden set; expected a, b or c; use dev_items(family, n)")
    place = HIDDEN.index(split)
    key = secret.key
    chosen = get(family)
    family_key = _mac(key, "partition", chosen.name)

    def belongs(item: Item) -> bool:
        if _is_dev(item):
            return False
        return _mac(family_key, item.prompt)[0] % len(HIDDEN) == place

    return _draw(chosen, n, belongs, _mac(key, "items", chosen.name, split))


def dev_items(family: str | Family, n: int) -> list[Item]:
    """The first `n` public example items; the same for everyone.

    Raises:
        ConfigError: unknown family.
    """
    chosen = get(family)
    return _draw(chosen, n, _is_dev, f"nestling dev items of {chosen.name}".encode())


def commitment(secret: EvalSecret, split: Split) -> str:
    """A hash that binds a split's secret without telling it; published before the split is opened."""
    return _mac(secret.key, "commitment", split).hex()


def _create(file: Path) -> None:
    """Write a whole secret beside `file` and link it into place: readers never see half of one."""
    fresh = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(secrets.token_bytes(_SECRET_BYTES))
            handle.flush()
            os.fsync(handle.fileno())
        try:
            os.link(fresh, file)
        except FileExistsError:
            return
    finally:
        fresh.unlink(missing_ok=True)


def _draw(family: Family, n: int, belongs: Callable[[Item], bool], key: bytes) -> list[Item]:
    items: list[Item] = []
    seen: set[str] = set()
    for index in range(n):
        rng = random.Random(derive_seed(key, index))
        for _ in range(_MAX_DRAWS):
            item = family.sample(rng, *family.eval_range)
            if belongs(item) and item.identity not in seen:
                break
        else:
            raise ConfigError(
                f"{family.name} has no {n} different items for one set; only {index} were found; ask for fewer"
            )
        seen.add(item.identity)
        items.append(item)
    return items


def _is_dev(item: Item) -> bool:
    return hashlib.sha256(item.prompt.encode()).digest()[0] % _DEV_ONE_IN == 0


def _mac(key: bytes, *names: str) -> bytes:
    return hmac.new(key, "\x00".join(names).encode(), hashlib.sha256).digest()
