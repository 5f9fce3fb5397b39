"""Episodes as a list that can be filtered, sorted and paged, all by the address."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import urlencode

from nestling.report.run_data import EpisodeRow

__all__ = ["ORDERS", "PAGE_ROWS", "Asked", "Listed", "list_episodes"]

PAGE_ROWS: Final = 100

_Key = Callable[[EpisodeRow], float | str | None]

ORDERS: Final[Mapping[str, _Key]] = {
    "played": lambda _: None,
    "step": lambda one: one.step,
    "family": lambda one: one.family,
    "reward": lambda one: one.reward,
    "validation": lambda one: one.validation,
    "quality": lambda one: one.quality,
    "uplift": lambda one: one.uplift,
    "attempts": lambda one: float(one.num_attempts),
    "time": lambda one: one.seconds,
}
"""Sortable columns; `played` is the order of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What an address asks for; empty text asks for everything."""

    text: str = ""
    """Part of the id, detail, base or settings."""
    family: str = ""
    outcome: str = ""
    purpose: str = ""
    """train, or the name of a measured arm."""
    step: str = ""
    order: str = "played"
    is_falling: bool = True
    page: int = 1

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Asked:
        """From the parameters of an address; nonsense is ignored."""
        order = query.get("sort", "played")
        page = query.get("page", "1")
        return cls(
            text=query.get("q", "").strip()[:200],
            family=query.get("family", ""),
            outcome=query.get("outcome", ""),
            purpose=query.get("purpose", ""),
            step=query.get("step", ""),
            order=order if order in ORDERS else "played",
            is_falling=query.get("rising", "") != "1",
            page=int(page) if page.isdecimal() and 0 < len(page) < 8 else 1,
        )

    def address(self, **changes: object) -> str:
        """The parameters with some of them changed; back to the first page unless one is asked."""
        asked = replace(self, **{"page": 1, **changes})  # type: ignore[arg-type]
        given = {
            "q": asked.text,
            "family": asked.family,
            "outcome": asked.outcome,
            "purpose": asked.purpose,
            "step": asked.step,
            "sort": asked.order if asked.order != "played" else "",
            "rising": "" if asked.is_falling else "1",
            "page": str(asked.page) if asked.page > 1 else "",
        }
        return "?" + urlencode({name: value for name, value in given.items() if value})

    def sorted_by(self, order: str) -> str:
        """Address for a click on a column: the highest first, or turned round."""
        return self.address(
            order=order, is_falling=not self.is_falling if order == self.order else True
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One page of the episodes that fit."""

    rows: Sequence[EpisodeRow]
    num_found: int
    num_all: int
    page: int
    num_pages: int
    mean_reward: float | None
    """Of all that fit."""


def list_episodes(episodes: Sequence[EpisodeRow], asked: Asked) -> Listed:
    """Filter, sort, cut."""
    found = [one for one in episodes if _fits(one, asked)]
    if asked.order == "played":
        ordered = found[::-1] if asked.is_falling else found
    else:
        ordered = _ordered(found, ORDERS[asked.order], asked.is_falling)
    num_pages = max(1, -(-len(ordered) // PAGE_ROWS))
    page = min(asked.page, num_pages)
    rewards = [one.reward for one in found]
    return Listed(
        rows=ordered[(page - 1) * PAGE_ROWS : page * PAGE_ROWS],
        num_found=len(found),
        num_all=len(episodes),
        page=page,
        num_pages=num_pages,
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
    )


def _ordered(found: Sequence[EpisodeRow], key: _Key, is_falling: bool) -> list[EpisodeRow]:
    """Rows without a value come last either way."""
    known = [(value, one) for one in found if (value := key(one)) is not None]
    known.sort(key=lambda pair: pair[0], reverse=is_falling)
    return [one for _, one in known] + [one for one in found if key(one) is None]


def _fits(one: EpisodeRow, asked: Asked) -> bool:
    purpose = one.arm or "train"
    exact = (
        (asked.family, one.family),
        (asked.outcome, one.outcome_code),
        (asked.purpose, purpose),
        (asked.step, str(one.step)),
    )
    if any(wanted and wanted != value for wanted, value in exact):
        return False
    if not asked.text:
        return True
    words = " ".join((one.id, one.detail, one.base_model or "", one.settings or "")).lower()
    return all(word in words for word in asked.text.lower().split())
