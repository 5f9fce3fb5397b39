"""The table of an ablation as Markdown."""

from __future__ import annotations

from nestling.bench.ablation.swaps import COLUMNS, rows_of
from nestling.bench.markdown import circumstances, table_text
from nestling.bench.record import BenchRecord

__all__ = ["page"]


def page(record: BenchRecord) -> str:
    """What each part earned, with what the figures rest on."""
    asked = record.settings
    lost = f" The files of {asked['not_kept']} more were not kept." if asked["not_kept"] else ""
    return (
        f"# What each part of the jobs earns: {asked['whose']}\n\n"
        f"{asked['jobs']} of {asked['accepted']} accepted jobs in {asked['episodes']} episodes.{lost} One part at a time is "
        f"replaced by the family template's; both jobs are trained and scored with the same seeds ({len(asked['seeds'])} of "
        f"training, {asked['items']} hidden items). `earned`: paired difference in `{asked['reward']}` reward, own minus "
        "swapped, with a 95 % cluster bootstrap interval; `by quality` and `by speed` add up to it. Alike: the job has the "
        "template's part already and counts as 0. Not runnable: by the code of why (`own.`: the job as it is), left out of n. Died: swapped jobs that "
        f"died in training, paid as such. {circumstances(record)}\n"
        f"{table_text(COLUMNS, rows_of(record.figures))}"
    )
