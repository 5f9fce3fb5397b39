"""The run's memory: one SQLite file per run."""

from nestling.store.group_commit import GroupCommit
from nestling.store.run_store import RunStore

__all__ = ["GroupCommit", "RunStore"]
