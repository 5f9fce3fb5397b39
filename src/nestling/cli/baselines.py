"""`nestling baselines`: hidden scores of the untrained base models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import click

from nestling.cli.options import (
    families_of,
    families_option,
    json_option,
    print_json,
    print_table,
    recipe,
    say,
    set_option,
)

if TYPE_CHECKING:
    from nestling.inner.baselines import Baseline

__all__ = ["command"]


@click.command("baselines")
@families_option("all")
@click.option(
    "--items", type=click.IntRange(8, 10_000), default=200, show_default=True,
    help="Hidden items per family.",
)  # fmt: skip
@click.option(
    "--split", type=click.Choice(["a", "b"]), default="a", show_default=True,
    help="a is what agents are told, b is what pays them.",
)  # fmt: skip
@set_option
@json_option
def command(
    families: str,
    items: int,
    split: Literal["a", "b"],
    settings: tuple[str, ...],
    as_json: bool,
) -> int:
    """Score the untrained base models; what was computed before is read from the state folder."""
    from nestling.bench.room import room_here
    from nestling.families.base_card import wilson

    names = families_of(families)
    # No job runs here, so no jail is needed: our own tools and graders score our own models.
    config = recipe(settings).model_copy(update={"unsafe_no_jail": True})
    found: list[Baseline] = []
    with room_here(config) as room:
        for family in names:
            found += room.baselines_table.table((family,), split, items)
            say(f"{family}: done")
    best = {
        family: max((one for one in found if one.family == family), key=lambda one: one.mean).base
        for family in names
    }
    rows = []
    for one in found:
        lo, hi = wilson(one.mean, one.n)
        share = f"{lo:.3f} to {hi:.3f}"
        mark = "best" if best[one.family] == one.base else ""
        rows.append((one.family, one.base, f"{one.mean:.3f}", share, mark))
    print_table(("family", "base model", "score", "95 % interval", ""), rows)
    if as_json:
        print_json(
            {
                "split": split,
                "items": items,
                "best": best,
                "baselines": [_entry(one) for one in found],
            }
        )
    return 0


def _entry(baseline: Baseline) -> dict[str, object]:
    from nestling.families.base_card import wilson

    return {
        "family": baseline.family,
        "base_model": baseline.base,
        "score": baseline.mean,
        "score_ci": list(wilson(baseline.mean, baseline.n)),
        "n": baseline.n,
    }
