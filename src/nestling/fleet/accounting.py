"""What a run's workers did and cost, added up by machine type or by family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from nestling.store.money import Spending

__all__ = ["added_up"]


def added_up(rows: Sequence[Spending], key: Literal["machine", "family"]) -> list[Spending]:
    """One row per value of the key, in its order; the other keys become `all`."""
    sums: dict[str, Spending] = {}
    for row in rows:
        name = str(getattr(row, key))
        old = sums.get(name)
        if old is None:
            sums[name] = replace(
                row,
                machine=name if key == "machine" else "all",
                family=name if key == "family" else "all",
                kind="all",
            )
            continue
        sums[name] = replace(
            old,
            tries=old.tries + row.tries,
            seconds=old.seconds + row.seconds,
            usd=old.usd + row.usd,
            predicted_s=old.predicted_s + row.predicted_s,
            predicted_took_s=old.predicted_took_s + row.predicted_took_s,
        )
    return [sums[name] for name in sorted(sums)]
