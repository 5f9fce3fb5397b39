"""prime-rl's metrics.jsonl as step records.

Trainer and orchestrator append to one file, several rows a step; a step is over when the last row of both is there.
Names are those of commit 559b447 (`trainer/rl/train.py`, `orchestrator/metrics.py`, `monitors/file.py`). Steps count
from 1 there, from 0 here. The file lies where the job's code can write too: it informs, it decides nothing.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Final

from nestling.core.clock import Clock
from nestling.inner.trainers.prime_rl_rollouts import read_rollouts
from nestling.jobs.outcome import StepRecord

__all__ = ["MetricsReader"]

_TRAINER_DONE: Final = "time/forward_backward"
_ORCHESTRATOR_DONE: Final = "progress/rollouts"
_REWARD: Final = re.compile(r"train/agg/(effective|all)/[^/]+/reward/mean")
_MAX_READ_BYTES: Final = 8 * 2**20
_MAX_LINE_BYTES: Final = 2**20


class MetricsReader:
    """Follows the file of one run as it grows."""

    def __init__(self, run: Path, max_steps: int, clock: Clock, *, num_gpus: int) -> None:
        self._num_gpus = num_gpus
        self._run = run
        self._max_steps = max_steps
        self._clock = clock
        self._offset = 0
        self._rest = b""
        self._rows: dict[int, dict[str, float]] = {}
        self._next = 1
        self._last_s = clock.monotonic()

    def read(self) -> list[StepRecord]:
        """Steps that are complete since the last call, in order; a line still being written waits."""
        for line in self._new_lines():
            self._take(line)
        found = []
        while self._next <= self._max_steps and self._is_complete(self._next):
            found.append(self._record(self._next))
            self._next += 1
        return found

    def _new_lines(self) -> list[bytes]:
        try:
            with (self._run / "metrics.jsonl").open("rb") as file:
                file.seek(self._offset)
                data = file.read(_MAX_READ_BYTES)
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest if len(self._rest) <= _MAX_LINE_BYTES else b""
        return lines

    def _take(self, line: bytes) -> None:
        """Keep the numbers of a row; anything else in the file is passed over."""
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return
        step = row.get("step") if isinstance(row, dict) else None
        if not isinstance(step, int) or not self._next <= step <= self._max_steps:
            return
        numbers = self._rows.setdefault(step, {})
        for name, value in row.items():
            if (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and math.isfinite(value)
            ):
                numbers[name] = float(value)

    def _is_complete(self, step: int) -> bool:
        return self._rows.get(step, {}).keys() >= {_TRAINER_DONE, _ORCHESTRATOR_DONE}

    def _record(self, step: int) -> StepRecord:
        numbers = self._rows.pop(step)
        rewards = sorted(  # "effective" is what was trained on, "all" what was played
            (name for name in numbers if _REWARD.fullmatch(name)),
            key=lambda name: "/all/" in name,
        )
        with_text = step in (1, self._max_steps)
        played = read_rollouts(self._run, step, with_text=with_text)
        now_s = self._clock.monotonic()
        took_s, self._last_s = now_s - self._last_s, now_s
        return StepRecord(
            step=step - 1,
            reward_mean=numbers[rewards[0]] if rewards else played.reward_mean,
            reward_std=played.reward_std,
            loss=numbers.get("loss/mean"),
            grad_norm=numbers.get("optim/grad_norm"),
            kl=numbers.get("mismatch_kl/all/mean"),
            learning_rate=numbers.get("optim/lr", 0.0),
            trained_groups=played.varied_groups,
            rollout_tokens=max(0, int(numbers.get("progress/output_tokens", 0))),
            cpu_s=took_s * self._num_gpus,
            samples=played.samples,
        )
