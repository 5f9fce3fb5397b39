"""Batched multi-turn sampling: token in, token out, the cache kept across turns.

A row is one conversation. Its prompt and every tool result are fed as the ids given, never rendered again,
so what is trained on is exactly what was sampled. Random numbers depend on the row's seed and the position
alone: a row gives the same tokens whoever its neighbours are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nestling.core.errors import ConfigError
from nestling.engine.cpu_decoder import CpuDecoder
from nestling.engine.cpu_step import CpuStep
from nestling.engine.decoder import Decoder, row_uniforms
from nestling.engine.model import Model
from nestling.engine.turn_sampler import SamplingParams, Turn, TurnSampler

__all__ = [
    "Respond",
    "Rollout",
    "SamplingParams",
    "Turn",
    "TurnEnd",
    "TurnSampler",
    "play",
    "play_stacked",
]

_COMPACT_BELOW = 0.8
_CPU_SLOTS, _CUDA_SLOTS = 64, 1024
"""Rows decoded at once; on a CPU more only take more memory (200 items of the hidden eval: 1.45 s at 64, 96, 128)."""
_CATCH_UP_TOKENS = 32
"""Forced tokens waiting over all rows from which one wide pass is cheaper than feeding them step by step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """A turn that just ended."""

    row: int
    """Index into the job's prompts."""
    ids: list[int]
    """What was sampled in this turn, the end token included."""
    text: str
    """The turn's text without the end token."""
    truncated: bool
    """The turn hit `max_turn_tokens` or `max_total_tokens` before its end token."""
    job: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One finished row."""

    ids: list[int]
    """Prompt, sampled and forced tokens."""
    sampled: list[bool]
    logprobs: list[float]
    """Of the sampling distribution (temperature applied; at temperature 0: of temperature 1); 0.0 on forced
    tokens."""
    prompt_len: int
    num_turns: int
    stop: Literal["done", "max_turns", "max_tokens"]
    """`done`: `respond` ended the row. `max_turns`: it answered, but no turn was left. `max_tokens`: the last
    turn was cut, or the answer left no room for another token."""


Respond = Callable[[list[TurnEnd]], "Sequence[list[int] | None]"]


def play(
    model: Model,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    params: SamplingParams,
    respond: Respond,
    *,
    max_rows: int | None = None,
) -> list[Rollout]:
    """Play every prompt of one job to its end.

    `respond` is called once per decode step with all rows that ended a turn and returns, for each, the ids to
    feed next or None to end the row; the answer to a turn cut by `max_total_tokens` is ignored. At most
    `max_rows` rows are decoded at once, finished ones are replaced.
    """
    return play_stacked(model, [prompts], [seeds], [params], respond, max_rows=max_rows)[0]


def play_stacked(
    model: Model,
    prompts_J: Sequence[Sequence[Sequence[int]]],
    seeds_J: Sequence[Sequence[int]],
    params_J: Sequence[SamplingParams],
    respond: Respond,
    *,
    max_rows: int | None = None,
) -> list[list[Rollout]]:
    """The same for J jobs at once; `TurnEnd.job` says whose row it is. `max_rows` counts per job."""
    if not len(prompts_J) == len(seeds_J) == len(params_J) == model.num_jobs:
        raise ConfigError(
            f"{len(prompts_J)} lists of prompts, {len(seeds_J)} of seeds and {len(params_J)} sampling "
            f"settings for {model.num_jobs} jobs; expected one of each per job"
        )
    for prompts, seeds in zip(prompts_J, seeds_J, strict=True):
        if len(prompts) != len(seeds):
            raise ConfigError(f"{len(prompts)} prompts with {len(seeds)} seeds; expected one each")
        if any(len(prompt) == 0 for prompt in prompts):
            raise ConfigError("a prompt is empty; expected at least one token")
    table = _Rows(prompts_J, seeds_J, params_J, model.tokenizer.pad_id)
    limit = max_rows or (_CUDA_SLOTS if model.device.type == "cuda" else _CPU_SLOTS)
    _Player(model, table, params_J, respond, max(1, limit)).run()
    return table.rollouts()


class _Rows:
    """All rows of all jobs as arrays; a row has a flat index n."""

    def __init__(
        self,
        prompts_J: Sequence[Sequence[Sequence[int]]],
        seeds_J: Sequence[Sequence[int]],
        params_J: Sequence[SamplingParams],
        pad_id: int,
    ) -> None:
        counts = [len(prompts) for prompts in prompts_J]
        total = sum(counts)
        self.job = np.repeat(np.arange(len(counts)), counts)
        self.row = np.concatenate([np.arange(count) for count in counts] or [np.zeros(0, int)])
        self.counts = counts
        self.seed = [seed for seeds in seeds_J for seed in seeds]
        self.prompts = [tuple(prompt) for prompts in prompts_J for prompt in prompts]
        longest = max((len(prompt) for prompt in self.prompts), default=1)
        self.max_len = max([longest, *(params.max_total_tokens for params in params_J)])
        self.ids = np.full((total, self.max_len + 1), pad_id, np.int64)
        self.sampled = np.zeros((total, self.max_len + 1), bool)
        self.logp = np.zeros((total, self.max_len + 1), np.float32)
        self.known = np.array([len(prompt) for prompt in self.prompts], np.int64)
        """Tokens given so far: below it the next token is forced, from it on it is sampled."""
        self.prompt_len = self.known.copy()
        self.length = self.known.copy()
        self.turn_start = self.known.copy()
        self.turns = np.zeros(total, np.int64)
        self.limit = np.array([params_J[j].max_total_tokens for j in self.job.tolist()], np.int64)
        self.turn_limit = np.array(
            [params_J[j].max_turn_tokens for j in self.job.tolist()], np.int64
        )
        self.max_turns = np.array([params_J[j].max_turns for j in self.job.tolist()], np.int64)
        self.stop: list[Literal["done", "max_turns", "max_tokens"]] = ["max_tokens"] * total
        for n, prompt in enumerate(self.prompts):
            self.ids[n, : len(prompt)] = prompt

    def rollouts(self) -> list[list[Rollout]]:
        found: list[list[Rollout]] = [[] for _ in self.counts]
        for n in range(len(self.prompts)):
            length = int(self.length[n])
            found[int(self.job[n])].append(
                Rollout(
                    ids=self.ids[n, :length].tolist(),
                    sampled=self.sampled[n, :length].tolist(),
                    logprobs=self.logp[n, :length].tolist(),
                    prompt_len=int(self.prompt_len[n]),
                    num_turns=int(self.turns[n]),
                    stop=self.stop[n],
                )
            )
        return found


def _decoder(
    model: Model, params_J: Sequence[SamplingParams], num_slots: int, max_len: int
) -> Decoder | CpuDecoder:
    params, temperatures = model.params(), [one.temperature for one in params_J]
    if CpuStep.fits(params, model.config):
        return CpuDecoder(
            params,
            model.config,
            num_slots=num_slots,
            max_len=max_len,
            temperature=temperatures[0],
        )
    return Decoder(
        params, model.config, num_slots=num_slots, max_len=max_len, temperatures=temperatures
    )


class _Player:
    """Drives a decoder until every row has ended."""

    def __init__(
        self,
        model: Model,
        table: _Rows,
        params_J: Sequence[SamplingParams],
        respond: Respond,
        max_rows: int,
    ) -> None:
        self.model, self.table, self.respond = model, table, respond
        self.max_rows = max_rows
        self.pending = [deque[int]() for _ in params_J]
        for n in range(len(table.prompts)):
            if (
                table.prompt_len[n] < table.limit[n]
            ):  # a prompt without room for a token ends at once
                self.pending[int(table.job[n])].append(n)
        self.num_jobs = len(params_J)
        slots = max(1, min(max_rows, max(len(queue) for queue in self.pending)))
        self.slot_row = np.full((self.num_jobs, slots), -1, np.int64)
        self.on_cpu = model.device.type == "cpu"
        self.decoder = _decoder(model, params_J, slots, table.max_len)
        self.capacity = slots

    def run(self) -> None:
        self._refill()
        table = self.table
        while True:
            rows = self.slot_row.reshape(-1)
            live = np.nonzero(rows >= 0)[0]
            if len(live) == 0:
                return
            n = rows[live]
            position = np.zeros(len(rows), np.int64)
            token = np.zeros(len(rows), np.int64)
            position[live] = table.length[n] - 1
            token[live] = table.ids[n, position[live]]
            width = int(position[live].max()) + 1
            drawn, logp = self.decoder.step(token, position, width)
            if self._advance(live, n, drawn[live], logp[live]):
                self._settle(width)
            if self.on_cpu:
                self._catch_up()

    def _advance(
        self,
        live: np.ndarray[tuple[int], np.dtype[np.int64]],
        n: np.ndarray[tuple[int], np.dtype[np.int64]],
        drawn: np.ndarray[tuple[int], np.dtype[np.int64]],
        logp: np.ndarray[tuple[int], np.dtype[np.float32]],
    ) -> bool:
        """Append one token to every live row; whether some row has ended."""
        table = self.table
        at = table.length[n]
        free = at >= table.known[n]
        chosen, place = n[free], at[free]
        table.ids[chosen, place] = drawn[free]
        table.sampled[chosen, place] = True
        table.logp[chosen, place] = logp[free]
        table.length[n] = at + 1
        ended = drawn[free] == self.model.tokenizer.turn_end_id
        full = place + 1 >= table.limit[chosen]
        cut = ~ended & (full | (place + 1 - table.turn_start[chosen] >= table.turn_limit[chosen]))
        over = np.nonzero(ended | cut)[0]
        if len(over) == 0:
            return False
        finished = self._end_turns(chosen[over], cut[over], full[over])
        if not finished:
            return False
        ended_slots = live[np.isin(n, finished)]
        self.slot_row.reshape(-1)[ended_slots] = -1
        self.decoder.release(ended_slots)
        return True

    def _end_turns(
        self,
        rows: np.ndarray[tuple[int], np.dtype[np.int64]],
        cut: np.ndarray[tuple[int], np.dtype[np.bool_]],
        full: np.ndarray[tuple[int], np.dtype[np.bool_]],
    ) -> list[int]:
        """Ask for the answers; the rows that ended."""
        table, ends = self.table, []
        for n, truncated in zip(rows.tolist(), cut.tolist(), strict=True):
            ids = table.ids[n, table.turn_start[n] : table.length[n]].tolist()
            text = self.model.tokenizer.decode(ids if truncated else ids[:-1])
            table.turns[n] += 1
            ends.append(
                TurnEnd(
                    row=int(table.row[n]),
                    ids=ids,
                    text=text,
                    truncated=truncated,
                    job=int(table.job[n]),
                )
            )
        answers = self.respond(ends)
        if len(answers) != len(ends):
            raise ConfigError(f"respond gave {len(answers)} answers to {len(ends)} turns")
        finished = []
        for n, truncated, at_limit, answer in zip(
            rows.tolist(), cut.tolist(), full.tolist(), answers, strict=True
        ):
            if self._continue(n, truncated, at_limit, answer):
                continue
            finished.append(n)
        return finished

    def _continue(self, n: int, truncated: bool, at_limit: bool, answer: list[int] | None) -> bool:
        table = self.table
        if answer is None:
            table.stop[n] = "max_tokens" if truncated else "done"
            return False
        if at_limit:
            return False
        if table.turns[n] >= table.max_turns[n]:
            table.stop[n] = "max_turns"
            return False
        start = int(table.length[n])
        end = start + len(answer)
        if end >= table.limit[n]:
            return False
        table.ids[n, start:end] = answer
        table.known[n] = table.turn_start[n] = end
        return True

    def _settle(self, width: int) -> None:
        """After rows ended: take new ones, or close the gaps where a CPU would compute them."""
        live = (self.slot_row >= 0).sum(1)
        waiting = any(self.pending)
        if waiting and live.max() <= _COMPACT_BELOW * self.capacity:
            self._refill()
        elif not waiting and self.on_cpu and isinstance(self.decoder, Decoder):
            slots = int(live.max())
            if 0 < slots <= _COMPACT_BELOW * self.slot_row.shape[1]:
                self._compact(self.decoder, slots, width)

    def _compact(self, decoder: Decoder, slots: int, width: int) -> None:
        order = np.tile(np.arange(slots), (self.num_jobs, 1))
        for order_S, row_S in zip(
            order, self.slot_row, strict=True
        ):  # only rows behind the cut move
            free = np.nonzero(row_S[:slots] < 0)[0]
            moving = slots + np.nonzero(row_S[slots:] >= 0)[0]
            order_S[free[: len(moving)]] = moving
        base = np.arange(self.num_jobs)[:, None] * self.slot_row.shape[1]
        decoder.compact((order + base).reshape(-1), slots, width)
        self.slot_row = np.take_along_axis(self.slot_row, order, 1)

    def _catch_up(self) -> None:
        """Feed waiting forced tokens in one wide pass, all but each row's last; CPU only."""
        table = self.table
        flat = self.slot_row.reshape(-1)
        waiting = np.where(flat >= 0, table.known[flat] - table.length[flat], 0)
        if waiting.clip(min=0).sum() < _CATCH_UP_TOKENS:
            return
        # Padding has to fit behind a row's own tokens, so rows near the end go on step by step.
        width = int(waiting.max())
        fits = (waiting > 1) & (table.length[flat] - 1 + width <= table.max_len)
        chosen = [np.nonzero(fits_S)[0] for fits_S in fits.reshape(self.slot_row.shape)]
        count = max(len(slots) for slots in chosen)
        if count == 0:
            return
        ids = np.zeros((self.num_jobs, count, width), np.int64)
        start = np.zeros((self.num_jobs, count), np.int64)
        rows = np.full((self.num_jobs, count), self.decoder.scratch_row, np.int64)
        for j, slots in enumerate(chosen):
            for b, s in enumerate(slots.tolist()):
                n = int(self.slot_row[j, s])
                first, end = int(table.length[n]) - 1, int(table.known[n]) - 1
                ids[j, b, : end - first] = table.ids[n, first:end]
                start[j, b], rows[j, b] = first, j * self.slot_row.shape[1] + s
                table.length[n] = end + 1
        self.decoder.extend(ids, start, rows)

    def _refill(self) -> None:
        """Put waiting rows into free slots and fill the cache with their prompts."""
        table = self.table
        new: list[tuple[int, int]] = []  # flat slot, row
        slots = self.slot_row.shape[1]
        for j, queue in enumerate(self.pending):
            for s in np.nonzero(self.slot_row[j] < 0)[0].tolist():
                if not queue:
                    break
                n = queue.popleft()
                self.slot_row[j, s] = n
                new.append((j * slots + s, n))
        for flat, n in new:
            self.decoder.set_uniforms(flat, row_uniforms(table.seed[n], table.max_len + 1))
        self._prefill(new)

    def _prefill(self, new: list[tuple[int, int]]) -> None:
        """All prompt tokens but the last go into the cache, each distinct prompt of a job once."""
        table = self.table
        by_prompt: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(self.num_jobs)]
        for flat, n in new:
            if len(table.prompts[n]) > 1:
                by_prompt[int(table.job[n])].setdefault(table.prompts[n], []).append(flat)
        queues = [sorted(group.items(), key=lambda item: len(item[0])) for group in by_prompt]
        for start in range(0, max(len(queue) for queue in queues), 64):
            self._prefill_chunk([queue[start : start + 64] for queue in queues])

    def _prefill_chunk(self, queues: list[list[tuple[tuple[int, ...], list[int]]]]) -> None:
        count = max(len(queue) for queue in queues)
        length = max(len(prompt) - 1 for queue in queues for prompt, _ in queue)
        ids = np.zeros((self.num_jobs, count, length), np.int64)
        rows = np.full((self.num_jobs, count), self.decoder.scratch_row, np.int64)
        groups: list[list[int]] = []
        lengths: list[int] = []
        for j, queue in enumerate(queues):
            for b, (prompt, flats) in enumerate(queue):
                ids[j, b, : len(prompt) - 1] = prompt[:-1]
                rows[j, b] = flats[0]
                groups.append(flats)
                lengths.append(len(prompt) - 1)
        self.decoder.extend(ids, np.zeros(rows.shape, np.int64), rows)
        self.decoder.share(groups, lengths)
