"""What lies in the workspace when an episode starts, and which dev items its prompt shows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from nestling.agent.prompt import PromptRules, document_files
from nestling.core.seeds import stream
from nestling.families.family import Family, Item
from nestling.families.splits import dev_items
from nestling.jobs.template import RANGE_GAP, REWARDS_GAP, TASKSET_PATH, starting_files

__all__ = ["episode_examples", "template_gaps", "workspace_files"]

_NUM_DEV_ITEMS = 64
"""Pool from which an episode's examples are drawn; also the most a prompt can show."""


def workspace_files(family: Family, examples: Sequence[Item], rules: PromptRules) -> dict[str, str]:
    """Path to text: the documents, the family's public tools, and the template with its gaps."""
    return {**starting_files(family.name), **document_files(family, examples, rules)}


def episode_examples(family: Family, task_seed: int, num_examples: int) -> list[Item]:
    """Dev items of one task; the same for all episodes of a group."""
    return stream(task_seed, "examples").sample(_dev_pool(family.name), num_examples)


def template_gaps() -> str:
    """What the template leaves open, in one line."""
    return f"files: {TASKSET_PATH} (template: fill {RANGE_GAP}, {REWARDS_GAP.strip()}); write job.toml."


@lru_cache(maxsize=32)
def _dev_pool(family: str) -> tuple[Item, ...]:
    return tuple(dev_items(family, _NUM_DEV_ITEMS))
