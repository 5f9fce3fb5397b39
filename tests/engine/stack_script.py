"""Jobs that drive a stack the way a trainer would, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from nestling.core.clock import SystemClock
from nestling.engine.decoder import row_uniforms
from nestling.engine.lane_decoder import LanePlan
from nestling.engine.sampler import SamplingParams
from nestling.engine.stack import Stack, TrainRequest
from nestling.engine.stack_events import (
    Event,
    Failed,
    Finished,
    Joined,
    Saved,
    Trained,
    TurnsEnded,
)
from nestling.engine.stack_plan import StackShape
from nestling.engine.stack_play import Play, Played
from nestling.engine.stack_train import JobSettings, TilePlan

PARAMS = SamplingParams(max_turn_tokens=9, max_total_tokens=60, max_turns=4)
PROMPTS = [[5 + i % 7, 6, 7, 8, 9, 10][: 1 + i % 6] for i in range(9)]
MIB = 2**20


def reply(ids: Sequence[int]) -> list[int] | None:
    """Depends on the turn alone; now and then the end of the row."""
    return None if sum(ids) % 5 == 0 else [3 + sum(ids) % 50] * (1 + sum(ids) % 11)


@dataclass
class Script:
    """Play and train some rounds, then save; everything that came back is kept."""

    settings: JobSettings
    folder: Path
    seed: int = 0
    rounds: int = 2
    params: SamplingParams = PARAMS
    prompts: list[list[int]] = field(default_factory=lambda: PROMPTS)
    lr: float = 3e-3
    learn_observations: bool = False
    delay: int = 0
    """Turns are answered only after this many calls of `advance`."""
    break_at: Callable[[Stack, int], None] | None = None
    """Called instead of the first answer."""
    events: list[Event] = field(default_factory=list)
    _held: list[tuple[int, TurnsEnded]] = field(default_factory=list)
    _time: int = 0

    @property
    def played(self) -> list[Played]:
        return [event.played for event in self.events if isinstance(event, Finished)]

    @property
    def trained(self) -> list[Trained]:
        return [replace(e, job=0) for e in self.events if isinstance(e, Trained)]

    @property
    def saved(self) -> Saved | None:
        found = [replace(event, job=0) for event in self.events if isinstance(event, Saved)]
        return found[0] if found else None

    @property
    def failed(self) -> Failed | None:
        return next((event for event in self.events if isinstance(event, Failed)), None)

    @property
    def is_over(self) -> bool:
        return self.saved is not None or self.failed is not None

    def begin(self, stack: Stack, number: int) -> None:
        stack.join(number, self.settings)

    def take(self, stack: Stack, number: int, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Joined):
            self._play(stack, number)
        elif isinstance(event, TurnsEnded):
            self._held.append((self._time + self.delay, event))
        elif isinstance(event, Finished):
            self._train(stack, number, event.played)
        elif isinstance(event, Trained):
            if len(self.trained) < self.rounds:
                self._play(stack, number)
            else:
                stack.save(number, self.folder)

    def tick(self, stack: Stack, number: int) -> None:
        self._time += 1
        due = [one for at, one in self._held if at <= self._time]
        self._held = [(at, one) for at, one in self._held if at > self._time]
        for event in due:
            if self.break_at is not None:
                self.break_at(stack, number)
                return
            turns, at, answers = event.turns, 0, []
            for size in turns.lengths.tolist():
                answers.append(reply(turns.ids[at : at + size].tolist()))
                at += size
            stack.answer(
                number,
                turns.rows,
                np.array([-1 if one is None else len(one) for one in answers], np.int64),
                np.array([t for one in answers if one for t in one], np.int64),
            )

    def _play(self, stack: Stack, number: int) -> None:
        first = self.seed * 1000 + 100 * len(self.played)
        length = self.params.max_total_tokens + 1
        stack.play(
            number,
            Play(
                prompts=[np.array(prompt) for prompt in self.prompts],
                uniforms=np.stack(
                    [row_uniforms(first + i, length) for i in range(len(self.prompts))]
                ),
                params=self.params,
            ),
        )

    def _train(self, stack: Stack, number: int, played: Played) -> None:
        score = (played.lengths % 5).astype(np.float32)
        advantages = score - score.mean()
        advantages[::6] = 0.0
        stack.train(
            number,
            TrainRequest(
                advantages=advantages,
                learn_observations=self.learn_observations,
                temperature=self.params.temperature,
                lr=self.lr,
            ),
        )


def new_stack(
    base: Path,
    config: object,
    *,
    lanes: int = 4,
    rows: int = 6,
    together: bool = False,
    budget: int = 64 * MIB,
) -> Stack:
    """A stack on the CPU; `together` runs it the way a GPU does, without graphs."""
    return Stack(
        base,
        StackShape(config=config, num_lanes=lanes, num_rows=rows, max_len=64, tile_tokens=2048),
        device="cpu",
        budget=budget,
        clock=SystemClock(),
        lane_plan=LanePlan(lanes_per_launch=2, steps_per_look=3, in_lockstep=False)
        if together
        else None,
        tile_plan=TilePlan(rows=4, jobs_per_launch=8, tokens_per_launch=2048) if together else None,
    )


def run(stack: Stack, scripts: Sequence[Script], late: Sequence[int] = ()) -> None:
    """Until every script is over; those named in `late` join after some time."""
    started: set[int] = set()
    for time in range(20_000):
        for number, script in enumerate(scripts):
            if number not in started and time >= (40 if number in late else 0):
                script.begin(stack, number)
                started.add(number)
        for event in stack.advance():
            scripts[event.job].take(stack, event.job, event)
        for number, script in enumerate(scripts):
            script.tick(stack, number)
            if script.is_over:
                stack.leave(number)
        if len(started) == len(scripts) and all(script.is_over for script in scripts):
            return
    raise AssertionError("the scripts do not end")
