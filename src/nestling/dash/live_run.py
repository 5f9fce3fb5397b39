"""One run as the dashboard knows it: read again only where the event log says that it changed."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from nestling.core.clock import Clock
from nestling.core.rundir import RunDir
from nestling.dash.alerts import Alert, find_alerts
from nestling.dash.fleet_facts import FleetFacts, fleet_facts
from nestling.report.gather import RowMemory, gather
from nestling.report.run_data import RunData
from nestling.store import RunStore
from nestling.store.episodes import EpisodeRecord
from nestling.store.events import Event
from nestling.store.progress import GroupRecord

__all__ = ["LiveRun", "RunView"]

_NUM_RECENT = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """Everything that the pages of a run are made of, as of one event."""

    key: str
    """Its name in addresses."""
    seq: int
    at: float
    """When it was read."""
    data: RunData
    groups: tuple[GroupRecord, ...]
    running: tuple[EpisodeRecord, ...]
    fleet: FleetFacts
    alerts: tuple[Alert, ...]
    recent: tuple[Event, ...]
    """Newest last."""


class LiveRun:
    """A run folder that may still be written; may be asked from several threads."""

    def __init__(self, key: str, folder: Path, clock: Clock) -> None:
        self.key = key
        self.folder = RunDir(folder)
        self._clock = clock
        self._memory = RowMemory()
        self._view: RunView | None = None
        self._lock = threading.Lock()
        """Protects the memory and the view: one reading at a time."""

    def seq(self) -> int:
        """Position of the newest event; cheap. Raises `StoreError` when the run is gone."""
        with RunStore.open_reader(self.folder.database) as store:
            return store.events.last_seq()

    def view(self) -> RunView:
        """As of now; raises `StoreError` when the run cannot be read."""
        with self._lock:
            # The rows of leases change without an event, so a busy fleet is looked at each time.
            seq = self.seq()
            known = self._view
            if known is None or known.seq != seq or known.fleet.num_busy:
                known = self._view = self._read(seq, known)
            return known

    def _read(self, seq: int, known: RunView | None) -> RunView:
        is_fresh = known is None or known.seq != seq
        data = gather(self.folder.root, self._memory) if is_fresh or not known else known.data
        now = self._clock.now()
        with RunStore.open_reader(self.folder.database) as store:
            fleet, jail = fleet_facts(store, now), store.meta("run.jail")
            return RunView(
                key=self.key,
                seq=seq,
                at=now,
                data=data,
                groups=tuple(store.progress.groups()),
                running=tuple(store.episodes.all(state="running")),
                fleet=fleet,
                alerts=tuple(find_alerts(data, fleet, now=now, jail=jail)),
                recent=tuple(store.events.since(max(0, seq - _NUM_RECENT), _NUM_RECENT)),
            )
