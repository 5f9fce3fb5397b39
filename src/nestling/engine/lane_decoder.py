"""Decoding for many jobs at once over buffers that never move.

Axes: L lane, S row of a lane, R = L*S, W = max_len + 1. A lane holds the weights of one job and S conversations.
Tokens, lengths, limits and random numbers live on the device, and a step reads and writes only those, so that it
needs no answer from the host: it appends a token to every active row and puts a row to sleep when its turn ends.
On CUDA a step is captured once per number of lanes and attended width, and several are enqueued between two looks
at the result.

Every shape that a row's arithmetic sees depends on its own job alone when lanes are launched one by one
(`LanePlan.lanes_per_launch = 1`, the default on a CPU): then a job's numbers are the same bits whoever its
neighbours are and whenever its tools answer. Launched together, lanes share the attended width and the shapes of
prefill, and numbers agree up to rounding.
"""

from __future__ import annotations

import copy
import logging
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nestling.engine.config import ModelConfig
from nestling.engine.decoder import sample_tokens
from nestling.engine.fused_step import FusedStep, RowBuffers
from nestling.engine.model import KVCache, decode, extend
from nestling.engine.params import Params, bind
from nestling.engine.weights import num_parameters, split_views

__all__ = ["LaneDecoder", "LanePlan", "NewRow", "plan_for"]

_log = logging.getLogger(__name__)
_WIDTH_STEP = 64
_TOKENS_PER_PREFILL = 2**17
"""Of prompts that go into the cache in one launch of several lanes, padding included; a row a lane is the least."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePlan:
    """How work is cut into launches."""

    lanes_per_launch: int = 1
    """1: every shape is a function of one job. More: lanes 0 to the highest busy one go together, rounded up to
    a multiple of this number."""
    steps_per_look: int = 1
    """Tokens per row between two looks at which turns have ended; a row that ends early waits."""
    in_lockstep: bool = True
    """A lane takes no step while one of its turns waits for an answer, so that the order of a job's tool calls
    repeats. Without it rows go on, and calls come in the order of time."""
    captured: bool = False
    """Record a step as a CUDA graph and replay it."""
    fused: bool = False
    """Take the kernels of `fused_step` where they serve the layout; lanes go together then."""
    shortest_catch_up: int = 2
    """Given tokens of a row from which one wide pass is worth its launches; fewer are fed step by step."""

    @property
    def together(self) -> bool:
        """Whether lanes share launches."""
        return self.lanes_per_launch > 1


def plan_for(device: torch.device) -> LanePlan:
    """One lane a launch on a CPU; on CUDA captured launches of all busy lanes."""
    if device.type == "cuda":
        return LanePlan(
            lanes_per_launch=4,
            steps_per_look=8,
            in_lockstep=False,
            captured=True,
            fused=True,
            shortest_catch_up=16,
        )
    return LanePlan()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """What a recorded graph is good for."""

    lanes: int
    """Lanes 0 to this."""
    steps: int
    width: int = 0
    """Attended positions; the fused step needs none."""
    greedy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """A conversation about to start."""

    row: int
    """Flat row, lane * S + place."""
    prompt: Ints
    """At least one token."""
    uniforms: npt.NDArray[np.float32]
    """The random number of each position, [max_total_tokens + 1] or more."""
    limit: int
    """Tokens in all, at most max_len."""
    turn_limit: int
    temperature: float


class LaneDecoder:
    """`num_lanes` lanes of `num_rows` rows each; the arrays `length` and `active` [R] follow the device."""

    def __init__(
        self,
        config: ModelConfig,
        turn_end_id: int,
        *,
        num_lanes: int,
        num_rows: int,
        max_len: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        plan: LanePlan | None = None,
    ) -> None:
        self.config, self.turn_end_id = config, turn_end_id
        self.num_lanes, self.num_rows, self.max_len = num_lanes, num_rows, max_len
        self.device = torch.device(device)
        self.plan = plan or plan_for(self.device)
        rows, width = num_lanes * num_rows, max_len + 1
        self._flat = torch.zeros(num_lanes, num_parameters(config), device=device, dtype=dtype)
        self._cache = KVCache(config, rows + 1, max_len, device=device, dtype=dtype)
        self._scratch = rows  # a cache row that belongs to no lane; what lands there is lost
        self._ids = torch.zeros(rows, width, dtype=torch.long, device=device)
        self._sampled = torch.zeros(rows, width, dtype=torch.bool, device=device)
        self._logp = torch.zeros(rows, width, device=device)
        self._uniforms = torch.zeros(rows, width, device=device)
        self._temperature = torch.ones(rows, 1, device=device)
        # length, active, known (below it tokens are given), limit, turn start, turn limit
        self._state = torch.zeros(6, rows, dtype=torch.long, device=device)
        self.length = np.zeros(rows, np.int64)
        self.active = np.zeros(rows, bool)
        self._lane_width = [0] * num_lanes
        self._greedy = np.zeros(rows, bool)
        self._graphs: dict[_Launch, torch.cuda.CUDAGraph] = {}
        self._captured = self.plan.captured and self.device.type == "cuda"
        self._fused = self._fused_step()
        self._event: torch.cuda.Event | None = None
        if self.device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def load(self, lane: int, flat_1P: Tensor, longest: int) -> None:
        """Give a lane its weights; its rows start afresh and have at most `longest` tokens.

        The cache is cleared: a masked key has weight 0, and 0 times what a job left that had diverged is not 0.
        """
        self._flat[lane].copy_(flat_1P[0])
        rows = slice(lane * self.num_rows, (lane + 1) * self.num_rows)
        width = self._lane_width[lane] = min(_rounded(longest, _WIDTH_STEP), self.max_len)
        seen = self.max_len if self.plan.together else width  # neighbours may be longer
        for buffer in (*self._cache.keys, *self._cache.values):
            buffer[rows, :, :seen].zero_()
        self._state[:, rows] = 0
        self.length[rows], self.active[rows], self._greedy[rows] = 0, False, False

    def free(self, lane: int) -> None:
        """Put a lane's rows to sleep for good."""
        rows = slice(lane * self.num_rows, (lane + 1) * self.num_rows)
        self._state[1, rows] = 0
        self.active[rows] = False

    @torch.no_grad()
    def fill(self, new: Sequence[NewRow]) -> None:
        """Start conversations in free rows; prompts go into the cache, equal ones of a lane once."""
        if not new:
            return
        rows = np.array([one.row for one in new])
        count, width = len(new), self.max_len + 1
        ids, uniforms = np.zeros((count, width), np.int64), np.zeros((count, width), np.float32)
        state = np.zeros((6, count), np.int64)
        for i, one in enumerate(new):
            size = len(one.prompt)
            ids[i, :size] = one.prompt
            uniforms[i, : min(width, len(one.uniforms))] = one.uniforms[:width]
            state[:, i] = (size, 1, size, one.limit, size, one.turn_limit)
        index = self._moved(rows)
        self._ids[index], self._uniforms[index] = self._moved(ids), self._moved(uniforms)
        self._sampled[index], self._logp[index] = False, 0.0
        temperature = np.array([[one.temperature] for one in new], np.float32)
        self._temperature[index] = self._moved(temperature)
        self._state[:, index] = self._moved(state)
        self.length[rows], self.active[rows] = state[0], True
        self._greedy[rows] = temperature[:, 0] == 0
        self._prefill(new)

    @torch.no_grad()
    def answer(self, rows: Ints, lengths: Ints, ids: Ints) -> None:
        """Wake rows with given tokens: `ids` holds the answers one after the other."""
        starts = self.length[rows]
        owner = np.repeat(np.arange(len(rows)), lengths)
        offset = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        at = self._moved(np.stack((rows[owner], starts[owner] + offset, ids)))
        self._ids[at[0], at[1]] = at[2]
        ends = starts + lengths
        index, moved = self._moved(rows), self._moved(ends)
        self._state[2, index] = moved
        self._state[4, index] = moved
        self._state[1, index] = 1
        self.active[rows] = True
        if self.plan.together:
            self._catch_up(rows, ends)

    def launch(self, lanes: Sequence[int]) -> None:
        """Enqueue the next steps of these lanes, which have active rows; lanes launched together all go on."""
        steps = self.plan.steps_per_look
        greedy = bool((self._greedy & self.active).any())
        if not self.plan.together:
            for lane in lanes:
                for _ in range(steps):
                    self._step(lane, lane + 1, self._lane_width[lane], greedy)
            return
        count = min(_rounded(max(lanes) + 1, self.plan.lanes_per_launch), self.num_lanes)
        if self._fused is not None:  # reads each row's own length, and whether it is greedy
            self._run(_Launch(lanes=count, steps=steps))
        else:
            longest = int(self.length[self.active].max())
            width = min(_rounded(longest + steps, _WIDTH_STEP), self.max_len)
            for _ in range(steps):
                self._run(_Launch(lanes=count, steps=1, width=width, greedy=greedy))
        if self._event is not None:
            self._event.record()

    def is_done(self) -> bool:
        """Whether the launched steps are over, so that `look` does not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def look(self) -> Ints:
        """Wait for the launched steps; the rows whose turn has ended since the last look."""
        seen = self._state[:2].cpu().numpy()
        ended = np.nonzero(self.active & (seen[1] == 0))[0]
        self.length, self.active = seen[0].copy(), seen[1] != 0
        return ended

    def tokens(self, rows: Ints) -> tuple[Ints, npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
        """Ids, sampled and log-probabilities [n, T] of some rows, T the longest of them."""
        T, index = int(self.length[rows].max()), self._moved(rows)
        found = [
            source[index, :T].cpu().numpy() for source in (self._ids, self._sampled, self._logp)
        ]
        return found[0], found[1], found[2]

    # --- one step -----------------------------------------------------------------------------

    @torch.no_grad()
    def _step(self, first: int, last: int, width: int, greedy: bool) -> None:
        """Append one token to the active rows of lanes first..last-1."""
        S, lanes = self.num_rows, last - first
        rows = slice(first * S, last * S)
        length, active, known, limit, turn_start, turn_limit = self._state[:, rows]
        ids, awake = self._ids[rows], active > 0
        position = (length - 1).clamp_(min=0)
        token = ids.gather(1, position[:, None])
        scores = decode(
            self._params(first, last),
            self.config,
            token.view(lanes, S),
            position.view(lanes, S),
            self._cache_part(rows),
            width,
        )
        at = length[:, None]
        drawn, logp = sample_tokens(
            scores.reshape(lanes * S, -1),
            self._temperature[rows],
            self._uniforms[rows].gather(1, at)[:, 0],
            any_greedy=greedy,
        )
        free = awake & (length >= known)
        ids.scatter_(1, at, torch.where(free, drawn, ids.gather(1, at)[:, 0])[:, None])
        for kept, value in ((self._logp[rows], logp), (self._sampled[rows], free)):
            kept.scatter_(1, at, torch.where(free, value, kept.gather(1, at)[:, 0])[:, None])
        length += active
        ended = (
            (drawn == self.turn_end_id) | (length >= limit) | (length - turn_start >= turn_limit)
        )
        active.copy_(active * ~(free & ended))

    def _run(self, launch: _Launch) -> None:
        """The steps of a launch: recorded, or one kernel after the other."""
        graph = self._graphs.get(launch)
        if graph is None and self._captured:
            graph = self._capture(launch)
        if graph is None:
            self._enqueue(launch)
        else:
            graph.replay()

    def _enqueue(self, launch: _Launch) -> None:
        for _ in range(launch.steps):
            if self._fused is None:
                self._step(0, launch.lanes, launch.width, launch.greedy)
            else:
                self._fused.step(0, launch.lanes)

    def _capture(self, launch: _Launch) -> torch.cuda.CUDAGraph | None:
        """Record a launch; warming up must not move any row, so all sleep meanwhile."""
        awake = self._state[1].clone()
        self._state[1] = 0
        try:
            side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):  # lazy initialisation may not be captured
                self._enqueue(launch)
            torch.cuda.current_stream(self.device).wait_stream(side)
            pool = next(iter(self._graphs.values())).pool() if self._graphs else None
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._enqueue(launch)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            _log.warning("decode step could not be captured (%s); it runs uncaptured", error)
            self._captured = False
            return None
        finally:
            self._state[1] = awake
        self._graphs[launch] = graph
        return graph

    # --- given tokens -------------------------------------------------------------------------

    def _prefill(self, new: Sequence[NewRow]) -> None:
        """All prompt tokens but the last go into the cache."""
        by_prompt: dict[tuple[int, bytes], list[int]] = {}
        prompts: dict[tuple[int, bytes], Ints] = {}
        for one in new:
            if len(one.prompt) > 1:
                key = (one.row // self.num_rows, one.prompt.tobytes())
                by_prompt.setdefault(key, []).append(one.row)
                prompts[key] = one.prompt
        keys = sorted(by_prompt, key=lambda key: len(prompts[key]))
        if self.plan.together:
            queues: dict[int, list[tuple[int, bytes]]] = {}
            for key in keys:
                queues.setdefault(key[0], []).append(key)
            deepest = max(map(len, queues.values()), default=0)
            longest = max((len(prompt) for prompt in prompts.values()), default=1)
            share = max(1, _TOKENS_PER_PREFILL // (max(1, len(queues)) * longest))
            for start in range(0, deepest, share):
                chunk = [
                    (by_prompt[key][0], prompts[key][:-1])
                    for queue in queues.values()
                    for key in queue[start : start + share]
                ]
                self._extend(chunk, [0] * len(chunk))
        else:
            for key in keys:
                self._extend([(by_prompt[key][0], prompts[key][:-1])], [0])
        self._share(by_prompt, prompts)

    def _share(
        self, by_prompt: dict[tuple[int, bytes], list[int]], prompts: dict[tuple[int, bytes], Ints]
    ) -> None:
        """Copy the cache of a prompt to the other rows that begin with it."""
        source = [rows[0] for rows in by_prompt.values() for _ in rows[1:]]
        target = [row for rows in by_prompt.values() for row in rows[1:]]
        if source:
            longest = max(len(prompts[key]) - 1 for key in by_prompt)
            self._cache.move(self._moved(np.array(source)), self._moved(np.array(target)), longest)

    def _catch_up(self, rows: Ints, ends: Ints) -> None:
        """Feed given tokens in one pass, all but each row's last, where padding fits behind them."""
        starts = self.length[rows] - 1
        widest = int((ends - 1 - starts).max(initial=0))
        chosen = np.nonzero((ends - 1 - starts > 0) & (starts + widest <= self.max_len))[0]
        if widest < self.plan.shortest_catch_up or len(chosen) == 0:
            return
        taken = self._ids[self._moved(rows[chosen])].cpu().numpy()
        chunk = [
            (int(rows[i]), taken[k, starts[i] : ends[i] - 1]) for k, i in enumerate(chosen.tolist())
        ]
        self._extend(chunk, starts[chosen].tolist())
        self._state[0, self._moved(rows[chosen])] = self._moved(ends[chosen])
        self.length[rows[chosen]] = ends[chosen]

    def _extend(self, chunk: Sequence[tuple[int, Ints]], starts: Sequence[int]) -> None:
        """Append tokens to the cache of some rows, all lanes from the first to the last together."""
        lanes = [row // self.num_rows for row, _ in chunk]
        first, last = min(lanes), max(lanes) + 1
        places = [0] * (last - first)
        per_lane = max(lanes.count(lane) for lane in set(lanes))
        T = max(len(ids) for _, ids in chunk)
        shape = (last - first, per_lane)
        ids, start = np.zeros((*shape, T), np.int64), np.zeros(shape, np.int64)
        rows = np.full(shape, self._scratch, np.int64)
        for lane, (row, given), begin in zip(lanes, chunk, starts, strict=True):
            j, b = lane - first, places[lane - first]
            places[j] += 1
            ids[j, b, : len(given)] = given
            start[j, b], rows[j, b] = begin, row
        extend(
            self._params(first, last),
            self.config,
            self._moved(ids),
            self._moved(start),
            self._cache,
            self._moved(rows).reshape(-1),
        )

    def _fused_step(self) -> FusedStep | None:
        """The kernels, built; None where the general step serves, or where they cannot be built."""
        if not (self.plan.fused and FusedStep.serves(self.config, self._flat.dtype)):
            return None
        buffers = RowBuffers(
            ids=self._ids,
            sampled=self._sampled,
            logp=self._logp,
            uniforms=self._uniforms,
            temperature=self._temperature,
            state=self._state,
        )
        fused = FusedStep(
            self.config,
            self._flat,
            self._cache,
            buffers,
            num_rows=self.num_rows,
            turn_end_id=self.turn_end_id,
        )
        try:
            fused.step(0, min(self.plan.lanes_per_launch, self.num_lanes))  # all rows sleep
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:  # no C compiler, say
            _log.warning("no kernels for the decode step (%s); the general step is taken", error)
            return None
        return fused

    # --- views --------------------------------------------------------------------------------

    def _params(self, first: int, last: int) -> Params:
        return bind(self.config, split_views(self.config, self._flat[first:last]))

    def _cache_part(self, rows: slice) -> KVCache:
        part = copy.copy(self._cache)
        part.keys = [key[rows] for key in self._cache.keys]
        part.values = [value[rows] for value in self._cache.values]
        return part

    def _moved(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _rounded(value: int, step: int) -> int:
    return -(-value // step) * step
