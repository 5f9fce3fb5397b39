"""Find and kill parts of a running controller, and look at what is left in its store."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from nestling.engine.checkpoint import Model, save_model
from nestling.engine.config import ModelConfig
from nestling.engine.weights import Weights
from nestling.families.splits import EvalSecret
from nestling.families.vocabulary import tokenizer
from nestling.fleet.process_tree import MARKER
from nestling.store import RunStore

HERE = Path(__file__).parent
ROLES = ("controller", "worker", "scorer", "env_worker")


def make_room(folder: Path) -> dict[str, object]:
    """Two tiny bases and a secret; the settings of `real_room`."""
    folder.mkdir(parents=True, exist_ok=True)
    bases = {"nano": folder / "nano", "micro": folder / "micro"}
    words = tokenizer()
    for width, base in zip((16, 32), bases.values(), strict=True):
        config = ModelConfig(
            vocab_size=words.vocab_size,
            hidden_size=width,
            intermediate_size=2 * width,
            num_layers=1,
            num_heads=2,
            num_kv_heads=2,
            head_dim=width // 2,
        )
        weights = Weights.init(config, 1, torch.Generator().manual_seed(width))
        save_model(base, Model(config=config, weights=weights, tokenizer=words))
    EvalSecret.load_or_create(folder / "eval.key")
    return {
        "bases": {name: str(base) for name, base in bases.items()},
        "secret": str(folder / "eval.key"),
        "state": str(folder / "state"),
    }


class Run:
    """One run folder and its present controller."""

    def __init__(self, folder: Path, room: dict[str, object], *, episodes: int, workers: int):
        self.folder = folder
        self.num_episodes = episodes
        self.num_workers = workers
        self.seen: set[tuple[int, float]] = set()
        """Every process of the run that was ever looked at: number and start time."""
        self.kills: Counter[str] = Counter()
        folder.mkdir(parents=True)
        settings = {**room, "work": str(folder / "work"), "artifacts": str(folder / "artifacts")}
        (folder / "settings.json").write_text(json.dumps(settings))
        self.controller = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        arguments = [str(self.folder), str(self.num_episodes), str(self.num_workers)]
        with (self.folder / "controller.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, str(HERE / "nested_run.py"), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def is_over(self) -> bool:
        """Whether the controller has ended by itself with every episode paid."""
        code = self.controller.poll()
        if code is None:
            return False
        assert code == 0, (self.folder / "controller.log").read_text()[-3000:]
        return True

    def processes(self) -> dict[str, list[psutil.Process]]:
        """What runs now, by role."""
        found: dict[str, list[psutil.Process]] = {role: [] for role in ROLES}
        try:
            root = psutil.Process(self.controller.pid)
            children = root.children(recursive=True)
        except psutil.Error:
            return found
        found["controller"].append(root)
        for process in children:
            with suppress(psutil.Error):
                self.seen.add((process.pid, process.create_time()))
                found[_role(process.cmdline())].append(process)
        return found

    def kill_one(self, role: str) -> bool:
        """Kill a process of a role, if there is one; a killed controller is started again."""
        candidates = self.processes()[role]
        if not candidates:
            return False
        victim = candidates[self.kills.total() % len(candidates)]
        with suppress(psutil.Error):
            victim.send_signal(signal.SIGKILL)
            self.kills[role] += 1
            if role == "controller":
                self.controller.wait()
                self.controller = self._start()
            return True
        return False

    def end(self) -> None:
        """End the controller, whatever it does."""
        self.controller.kill()
        self.controller.wait()

    def orphans(self, wait_s: float = 10.0) -> list[str]:
        """Processes of the run that still live although it is over."""
        end_s = time.monotonic() + wait_s
        while left := self._left():
            if time.monotonic() > end_s:
                return left
            time.sleep(0.1)
        return []

    def _left(self) -> list[str]:
        left = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                seen = (process.pid, process.create_time()) in self.seen
                named = str(self.folder) in process.environ().get(MARKER, "")
                inside = str(self.folder) in " ".join(process.cmdline())
                if (seen or named or inside) and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
        return left

    def rewards(self) -> dict[str, tuple[float, dict[str, object]]]:
        """Reward and summary of every episode; checks that each is counted once."""
        with RunStore.open_reader(self.folder / "run.db") as store:
            store.check()
            events = Counter(
                (event.kind, event.subject)
                for event in store.events.since(0, limit=1_000_000)
                if event.kind in ("job.done", "job.failed", "episode.finished")
            )
            assert set(events.values()) == {1}, "counted twice"
            counts = store.jobs.counts()
            assert counts["queued"] == counts["running"] == 0, "lost"
            assert store.jobs.leases() == []
            assert store.processes.all() == []
            assert not [record for record in store.money.all() if record.state == "reserved"]
            paid = {}
            for number in range(self.num_episodes):
                name = f"e{number}"
                reward = store.episodes.reward(name)
                assert reward is not None, f"{name} was never paid"
                paid[name] = (reward.reward, store.episodes.get(name).summary)
            return paid


def _role(command: list[str]) -> str:
    line = " ".join(command)
    if "nestling.fleet.worker" in line:
        return "worker"
    if "nestling.inner.score_worker" in line:
        return "scorer"
    return "env_worker"


def kill_at_random(
    run: Run, rng: random.Random, roles: list[str], *, longest_pause_s: float, limit_s: float
) -> list[str]:
    """Kill these roles in this order at random moments until the run is over; what is left."""
    end_s = time.monotonic() + limit_s
    left = list(roles)
    while not run.is_over():
        assert time.monotonic() < end_s, f"not over after {limit_s:g} s; kills so far {run.kills}"
        time.sleep(rng.uniform(0.02, longest_pause_s))
        if left and run.kill_one(left[0]):
            left.pop(0)
    return left
