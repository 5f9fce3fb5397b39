"""Many jobs on one base model and one device: they join, play, train and leave while others go on.

Asynchronous by events: a request is queued, `advance` does what is ready, and what came of it is a list of events.
A job's fault ends that job alone. Not safe for several threads; one process owns it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nestling.core.clock import Clock
from nestling.core.errors import JobFailedError
from nestling.engine.advantage import observation_weights
from nestling.engine.checkpoint import load_model, save_model
from nestling.engine.lane_decoder import LaneDecoder, LanePlan, plan_for
from nestling.engine.model import Model
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
from nestling.engine.stack_play import Ints, LanePlay, Play, Played, check_ids
from nestling.engine.stack_train import (
    JobSettings,
    PlayedRows,
    StackedJob,
    TilePlan,
    Update,
    is_out_of_memory,
    train_jobs,
)
from nestling.engine.weights import Weights

__all__ = ["Stack", "TrainRequest"]

_log = logging.getLogger(__name__)
_TRAIN_SHARE = 0.5
"""Training together waits until this share of the jobs that train are ready, or nothing is left to decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """One update on what the job played last."""

    advantages: npt.NDArray[np.float32]
    """[N], one per rollout of the play."""
    learn_observations: bool
    """Cross-entropy on tool results (`echo`)."""
    temperature: float
    lr: float


@dataclass(slots=True, kw_only=True)
class _Job:
    number: int
    bytes: int
    trained: StackedJob | None
    weights: Weights
    """Of the decoder when nothing is trained."""
    played: Played | None = None
    wanted: Update | None = None
    busy_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Waiting:
    number: int
    settings: JobSettings | None
    weights: npt.NDArray[np.float32] | None
    bytes: int


@dataclass(slots=True, kw_only=True)
class _Seated:
    job: _Job
    play: LanePlay
    lane: int = -1
    answers: list[tuple[Ints, Ints, Ints]] = field(default_factory=list)


class Stack:
    """The jobs of one base model on one device."""

    def __init__(
        self,
        base_folder: Path,
        shape: StackShape,
        *,
        device: str,
        budget: int,
        clock: Clock,
        lane_plan: LanePlan | None = None,
        tile_plan: TilePlan | None = None,
    ) -> None:
        """`shape.num_lanes` is what is wished for; lanes that do not fit into `budget` bytes are left out.

        Raises:
            ConfigError: not one lane fits.
        """
        self.device = torch.device(device)
        self._model = load_model(base_folder, self.device)
        self._base_hash = self._model.weights.content_hash()
        self._shape = shape
        # On a CPU other programs' time is not a job's.
        self._now_s = time.process_time if self.device.type == "cpu" else clock.monotonic
        lanes = shape.fitting(budget)
        plan = lane_plan or plan_for(self.device)
        together = self.device.type == "cuda"
        self._tiles = tile_plan or TilePlan(
            rows=shape.tile_rows,
            jobs_per_launch=shape.launch_jobs(budget) if together else 1,
            tokens_per_launch=shape.tile_tokens,
        )
        fixed = shape.fixed_bytes(lanes, budget)
        self._room = min(budget - fixed, 2 * lanes * shape.job_bytes("adamw"))
        self.reserved = fixed + self._room
        """Bytes of the device that no other stack may take."""
        self._decoder = LaneDecoder(
            self._model.config,
            self._model.tokenizer.turn_end_id,
            num_lanes=lanes,
            num_rows=shape.num_rows,
            max_len=shape.max_len,
            device=self.device,
            dtype=shape.dtype,
            plan=plan,
        )
        self.num_lanes, self._together = lanes, plan.together
        self._in_lockstep = plan.in_lockstep
        self._jobs: dict[int, _Job] = {}
        self._waiting: deque[_Waiting] = deque()
        self._seats: dict[int, _Seated] = {}  # by lane
        self._queue: deque[_Seated] = deque()
        self._events: list[Event] = []

    # --- requests -----------------------------------------------------------------------------

    def join(self, job: int, settings: JobSettings) -> None:
        """A job that trains; `Joined` when there is room for it."""
        size = self._shape.job_bytes(settings.optim.kind, settings.lora)
        self._wait(_Waiting(number=job, settings=settings, weights=None, bytes=size))

    def join_weights(self, job: int, flat: npt.NDArray[np.float32]) -> None:
        """A job that only plays, with float32 weights [P] of its own."""
        expected = self._model.weights.flat.shape[1]
        if flat.shape != (expected,):
            self._fail(job, "stack.protocol", f"{flat.shape} numbers; expected {expected} weights")
            return
        self._wait(_Waiting(number=job, settings=None, weights=flat, bytes=flat.nbytes))

    def leave(self, job: int) -> None:
        """Forget a job, whatever it is doing; fine when it is gone already."""
        self._waiting = deque(one for one in self._waiting if one.number != job)
        self._queue = deque(one for one in self._queue if one.job.number != job)
        for lane, seat in list(self._seats.items()):
            if seat.job.number == job:
                self._decoder.free(lane)
                del self._seats[lane]
        if self._jobs.pop(job, None) is not None:
            self._admit()

    def play(self, job: int, play: Play) -> None:
        """Make rollouts: `TurnsEnded` until all have ended, then `Finished`."""
        self._guarded(job, lambda owner: self._begin(owner, play))

    def answer(self, job: int, rollouts: Ints, lengths: Ints, ids: Ints) -> None:
        """Answers to ended turns; see `LanePlay.answer`."""
        self._guarded(job, lambda _: self._take_answers(job, rollouts, lengths, ids))

    def train(self, job: int, request: TrainRequest) -> None:
        """One step on the last play: `Trained`."""
        self._guarded(job, lambda owner: _want(owner, _on_last_play(owner, request)))

    def supervise(
        self, job: int, rows: PlayedRows, ce_weights: npt.NDArray[np.float32], lr: float
    ) -> None:
        """One step on given rows, by cross-entropy with weights [N, T]: `Trained`."""
        self._guarded(job, lambda owner: _want(owner, self._worked(rows, ce_weights, lr)))

    def save(self, job: int, folder: Path) -> None:
        """Write the job's model: `Saved`."""
        self._guarded(job, lambda owner: self._save(owner, folder))

    def busy_s(self, job: int) -> float:
        """Seconds of the device (on a CPU: of the processor) that the job has used: its share of its launches."""
        owner = self._jobs.get(job)
        return 0.0 if owner is None else owner.busy_s

    @property
    def free(self) -> int:
        """Bytes for further jobs."""
        return self._room - sum(job.bytes for job in self._jobs.values())

    @property
    def num_jobs(self) -> int:
        """Jobs that joined or wait to."""
        return len(self._jobs) + len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether `advance` has nothing to do before another request."""
        return not (
            self._events
            or self._queue_ready()
            or any(seat.answers or seat.play.is_over for seat in self._seats.values())
            or any(job.wanted for job in self._jobs.values())
            or self._lanes_to_step()
        )

    # --- progress -----------------------------------------------------------------------------

    def advance(self, meanwhile: Callable[[], None] | None = None) -> list[Event]:
        """Do what is ready: seats, answers, some tokens for every row, training.

        `meanwhile` is called again and again while the device works.
        """
        self._seat()
        self._apply_answers()
        self._decode(meanwhile)
        self._train()
        events, self._events = self._events, []
        return events

    def _seat(self) -> None:
        """Give waiting plays a lane."""
        started = []
        while self._queue_ready():
            seat = self._queue.popleft()
            seat.lane = next(i for i in range(self.num_lanes) if i not in self._seats)
            self._seats[seat.lane] = seat
            started.append(seat)
        for seat in started:
            self._on_device(partial(self._load, seat))
        self._fill([seat for seat in started if self._seats.get(seat.lane) is seat])

    def _load(self, seat: _Seated) -> None:
        """Put the job's weights into its lane, unless it had to go meanwhile."""
        if self._seats.get(seat.lane) is seat:
            weights = seat.job.weights if seat.job.trained is None else seat.job.trained.merged()
            self._decoder.load(seat.lane, weights.flat, seat.play.width)

    def _apply_answers(self) -> None:
        """Wake answered rows, fill freed ones, end plays that are over."""
        first, given = self._shape.num_rows, []
        answered = [seat for seat in self._seats.values() if seat.answers]
        for seat in answered:
            given += [
                (places + seat.lane * first, sizes, ids) for places, sizes, ids in seat.answers
            ]
            seat.answers = []
        if given:
            rows, sizes, ids = (np.concatenate(parts) for parts in zip(*given, strict=True))
            if len(rows):
                self._on_device(lambda: self._decoder.answer(rows, sizes, ids))
        self._fill(answered)
        for seat in [seat for seat in self._seats.values() if seat.play.is_over]:
            self._decoder.free(seat.lane)
            del self._seats[seat.lane]
            seat.job.played = seat.play.result()
            self._events.append(Finished(job=seat.job.number, played=seat.job.played))

    def _fill(self, seats: Sequence[_Seated]) -> None:
        """Put waiting rollouts into free rows."""
        if self._together:
            new = [
                row
                for seat in seats
                for row in seat.play.new_rows(seat.lane * self._shape.num_rows)
            ]
            self._on_device(lambda: self._decoder.fill(new))
            return
        for seat in seats:
            rows = seat.play.new_rows(seat.lane * self._shape.num_rows)
            self._on_device(partial(self._decoder.fill, rows))

    def _decode(self, meanwhile: Callable[[], None] | None) -> None:
        lanes = self._lanes_to_step()
        if not lanes:
            return
        started_s = self._now_s()
        self._on_device(lambda: self._decoder.launch(lanes))
        while meanwhile is not None and not self._decoder.is_done():
            meanwhile()
        ended = self._decoder.look()
        self._charge([self._seats[i].job for i in lanes if i in self._seats], started_s)
        if len(ended) == 0:
            return
        ids, sampled, logp = self._decoder.tokens(ended)
        owners = ended // self._shape.num_rows
        for lane in np.unique(owners).tolist():
            seat, at = self._seats.get(lane), np.nonzero(owners == lane)[0]
            if seat is None:  # its job failed while memory was being found
                self._decoder.free(lane)
                continue
            turns = seat.play.end_turns(
                ended[at] - lane * self._shape.num_rows,
                self._decoder.length[ended[at]],
                ids[at],
                sampled[at],
                logp[at],
                self._model.tokenizer.turn_end_id,
            )
            self._events.append(TurnsEnded(job=seat.job.number, turns=turns))

    def _train(self) -> None:
        ready = [job for job in self._jobs.values() if job.wanted is not None]
        if not ready:
            return
        if self._together:
            learners = sum(job.trained is not None for job in self._jobs.values())
            if self._lanes_to_step() and len(ready) < _TRAIN_SHARE * learners:
                return
        else:
            ready = ready[:1]  # others may decode in between
        self._train_some(ready)

    def _train_some(self, jobs: Sequence[_Job]) -> None:
        """One step of each; when memory runs out, of half of them at a time."""
        started_s = self._now_s()
        try:
            results = train_jobs(
                [job.trained for job in jobs if job.trained is not None],
                [job.wanted for job in jobs if job.wanted is not None],
                self._tiles,
                self._shape.dtype if self._shape.precision == "bfloat16" else None,
            )
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._empty_cache()
            if len(jobs) == 1:
                self._fail(jobs[0].number, "stack.out_of_memory", self._memory_hint())
                return
            half = len(jobs) // 2
            _log.warning("out of memory with %d jobs in one step; %d at a time", len(jobs), half)
            self._train_some(jobs[:half])
            self._train_some(jobs[half:])
            return
        self._charge(jobs, started_s)
        for job, result in zip(jobs, results, strict=True):
            job.wanted = None
            if result is None:
                self._fail(job.number, "stack.out_of_memory", self._memory_hint())
            else:
                self._events.append(Trained(job=job.number, loss=result[0], step=result[1]))

    # --- jobs ---------------------------------------------------------------------------------

    def _wait(self, one: _Waiting) -> None:
        if one.bytes > self._room:
            detail = (
                f"the job needs {one.bytes / 2**20:.0f} MiB, the stack has {self._room / 2**20:.0f}"
            )
            self._fail(one.number, "stack.out_of_memory", f"{detail}; {self._memory_hint()}")
            return
        self._waiting.append(one)
        self._admit()

    def _admit(self) -> None:
        """Let jobs in, in their order, as long as they fit."""
        while self._waiting and self._waiting[0].bytes <= self.free:
            one = self._waiting.popleft()
            try:
                self._jobs[one.number] = self._new_job(one)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self._empty_cache()
                self._fail(one.number, "stack.out_of_memory", self._memory_hint())
                continue
            self._events.append(Joined(job=one.number))

    def _new_job(self, one: _Waiting) -> _Job:
        base = self._model.weights
        if one.settings is not None:
            trained = StackedJob(base, self._model.tokenizer, one.settings, self.device)
            return _Job(number=one.number, bytes=one.bytes, trained=trained, weights=base)
        assert one.weights is not None
        flat = torch.from_numpy(one.weights.copy())[None].to(self.device)
        weights = Weights(self._model.config, flat)
        return _Job(number=one.number, bytes=one.bytes, trained=None, weights=weights)

    def _begin(self, job: _Job, play: Play) -> None:
        if self._seat_of(job.number) is not None:
            raise JobFailedError("stack.protocol", "a play is going on; expected one at a time")
        made = LanePlay(
            play,
            num_rows=self._shape.num_rows,
            max_len=self._shape.max_len,
            vocab_size=self._model.config.vocab_size,
        )
        job.played = None
        self._queue.append(_Seated(job=job, play=made))

    def _take_answers(self, job: int, rollouts: Ints, lengths: Ints, ids: Ints) -> None:
        seat = self._seat_of(job)
        if seat is None or seat.lane < 0:
            raise JobFailedError("stack.protocol", "an answer, but nothing is played")
        end = self._model.tokenizer.turn_end_id
        seat.answers.append(seat.play.answer(rollouts, lengths, ids, end))

    def _worked(self, rows: PlayedRows, ce_weights: npt.NDArray[np.float32], lr: float) -> Update:
        longest = int(rows.lengths.max(initial=0))
        check_ids(rows.ids, self._model.config.vocab_size)
        if longest > self._shape.max_len or bool((ce_weights[:, :1] > 0).any()):
            raise JobFailedError(
                "stack.too_long",
                f"a row of {longest} tokens, or one whose first token is to be learned; expected at "
                f"most {self._shape.max_len}, inner.stack.max_len",
            )
        nothing = np.zeros(len(rows.lengths), np.float32)
        return Update(rows=rows, advantages=nothing, ce_weights=ce_weights, temperature=1.0, lr=lr)

    def _save(self, job: _Job, folder: Path) -> None:
        if job.trained is None:
            raise JobFailedError("stack.protocol", "this job trains nothing")
        weights, base = job.trained.merged(), self._model.weights
        is_finite = bool(weights.flat.isfinite().all())
        if is_finite:
            try:
                save_model(folder, Model(weights.config, weights, self._model.tokenizer))
            except OSError as error:
                raise JobFailedError("stack.disk", str(error)) from error
        difference: Tensor = weights.flat.double() - base.flat.double()
        self._events.append(
            Saved(
                job=job.number,
                base_hash=self._base_hash,
                final_hash=weights.content_hash(),
                delta_norm=float(difference.norm()),
                is_finite=is_finite,
            )
        )

    def _fail(self, job: int, reason: str, detail: str) -> None:
        self.leave(job)
        self._events.append(Failed(job=job, reason=reason, detail=detail))

    def _guarded(self, job: int, work: Callable[[_Job], None]) -> None:
        """A fault of one job's request is the end of that job; one that has ended already asks nothing."""
        owner = self._jobs.get(job)
        if owner is None:
            return
        try:
            work(owner)
        except JobFailedError as error:
            self._fail(job, error.reason, error.detail)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._empty_cache()
            self._fail(job, "stack.out_of_memory", self._memory_hint())

    def _on_device(self, work: Callable[[], None]) -> None:
        """Run a part of decoding; when memory runs out, the newest of its jobs has to go."""
        while True:
            try:
                work()
            except RuntimeError as error:
                if not is_out_of_memory(error) or not self._seats:
                    raise
                self._empty_cache()
                newest = max(seat.job.number for seat in self._seats.values())
                self._fail(newest, "stack.out_of_memory", self._memory_hint())
                if not self._seats:
                    return
            else:
                return

    def _seat_of(self, job: int) -> _Seated | None:
        every = [*self._seats.values(), *self._queue]
        return next((seat for seat in every if seat.job.number == job), None)

    def _lanes_to_step(self) -> list[int]:
        """Lanes with rows that can go on."""
        busy = np.nonzero(self._decoder.active.reshape(self.num_lanes, -1).any(1))[0].tolist()
        if not self._in_lockstep:
            return [int(lane) for lane in busy]
        return [i for i in busy if i not in self._seats or not self._seats[i].play.num_asked]

    def _queue_ready(self) -> bool:
        return bool(self._queue) and len(self._seats) < self.num_lanes

    def _charge(self, jobs: Sequence[_Job], started_s: float) -> None:
        share_s = (self._now_s() - started_s) / max(len(jobs), 1)
        for job in jobs:
            job.busy_s += share_s

    def _empty_cache(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _memory_hint(self) -> str:
        return (
            f"{self.device} ran out of memory; lower seq_len, batch_size or lora_rank in the job, or "
            "inner.stack.max_jobs, inner.stack.rows_per_job or inner.stack.tile_tokens in the recipe"
        )


def _want(job: _Job, update: Update) -> None:
    if job.trained is None or job.wanted is not None:
        raise JobFailedError("stack.protocol", "this job trains nothing, or trains already")
    job.wanted = update


def _on_last_play(job: _Job, request: TrainRequest) -> Update:
    played = job.played
    if played is None:
        raise JobFailedError("stack.protocol", "nothing was played to train on")
    if request.advantages.shape != played.lengths.shape or request.temperature <= 0:
        raise JobFailedError(
            "stack.protocol",
            f"{len(request.advantages)} advantages at temperature {request.temperature}; "
            f"expected {len(played.lengths)} and a temperature above 0",
        )
    weights = None
    if request.learn_observations:
        every = [observation_weights(row) for row in played.sampled.tolist()]
        weights = np.array(every, np.float32).reshape(played.sampled.shape)
    rows = PlayedRows(
        ids=played.ids,
        sampled=played.sampled,
        logprobs=played.logprobs,
        lengths=played.lengths,
    )
    return Update(
        rows=rows,
        advantages=request.advantages,
        ce_weights=weights,
        temperature=request.temperature,
        lr=request.lr,
    )
