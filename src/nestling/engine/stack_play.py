"""The host's half of rollouts in a lane: who sits in which row, what was said, and when a row ends.

Axes: N rollout of a play, S row of the lane, W = max_len + 1. The rules are those of `engine.sampler`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from nestling.core.errors import JobFailedError
from nestling.engine.lane_decoder import NewRow
from nestling.engine.turn_sampler import SamplingParams

__all__ = ["STOPS", "LanePlay", "Play", "Played", "Turns", "check_ids"]

STOPS: Final = ("done", "max_turns", "max_tokens")
"""As in `sampler.Rollout`; a code is an index."""
_DONE, _MAX_TURNS, _MAX_TOKENS = range(3)

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """Rollouts to make, one per prompt."""

    prompts: Sequence[Ints]
    uniforms: npt.NDArray[np.float32]
    """[N, max_total_tokens + 1]: `decoder.row_uniforms` of each rollout's seed."""
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Turns of one job that have ended."""

    rows: Ints
    """Rollouts, by index into the prompts."""
    lengths: Ints
    """Tokens of each turn."""
    ids: Ints
    """The turns' tokens one after the other, end tokens included."""
    truncated: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """All rollouts of a play."""

    ids: Ints
    """[N, T], as are the next two."""
    sampled: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    lengths: Ints
    """[N], as are the rest."""
    prompt_lengths: Ints
    turns: Ints
    stops: Ints
    """Indices into `STOPS`."""


class LanePlay:
    """One play in one lane."""

    def __init__(self, play: Play, *, num_rows: int, max_len: int, vocab_size: int) -> None:
        """Raises JobFailedError when something of the play does not fit the stack."""
        self._play, self._params = play, play.params
        self._vocab_size = vocab_size
        count = len(play.prompts)
        _check(play, max_len, vocab_size)
        width = max([play.params.max_total_tokens, *(len(one) for one in play.prompts)])
        self._ids = np.zeros((count, width), np.int64)
        self._sampled = np.zeros((count, width), bool)
        self._logp = np.zeros((count, width), np.float32)
        self._prompt_lengths = np.array([len(one) for one in play.prompts], np.int64)
        self._lengths = self._prompt_lengths.copy()
        self._turn_starts = self._prompt_lengths.copy()
        self._turns = np.zeros(count, np.int64)
        self._stops = np.full(count, _MAX_TOKENS, np.int64)
        self._rollout_of = np.full(num_rows, -1, np.int64)
        self._row_of = np.full(count, -1, np.int64)
        self._asked = np.zeros(count, bool)
        self._pending = deque[int]()
        self._left = 0
        for n, prompt in enumerate(play.prompts):
            self._ids[n, : len(prompt)] = prompt
            if len(prompt) < play.params.max_total_tokens:  # else there is no room for a token
                self._pending.append(n)
                self._left += 1

    @property
    def is_over(self) -> bool:
        """Whether every rollout has ended."""
        return self._left == 0

    @property
    def width(self) -> int:
        """Tokens of the longest row that may come."""
        return self._ids.shape[1]

    @property
    def num_asked(self) -> int:
        """Turns that wait for an answer."""
        return int(self._asked.sum())

    def new_rows(self, first_row: int) -> list[NewRow]:
        """Seat waiting rollouts in free rows; `first_row` is the lane's."""
        found = []
        for place in np.nonzero(self._rollout_of < 0)[0].tolist():
            if not self._pending:
                break
            n = self._pending.popleft()
            self._rollout_of[place], self._row_of[n] = n, place
            found.append(
                NewRow(
                    row=first_row + place,
                    prompt=np.asarray(self._play.prompts[n], np.int64),
                    uniforms=self._play.uniforms[n],
                    limit=self._params.max_total_tokens,
                    turn_limit=self._params.max_turn_tokens,
                    temperature=self._params.temperature,
                )
            )
        return found

    def end_turns(
        self,
        places: Ints,
        lengths: Ints,
        ids: Ints,
        sampled: npt.NDArray[np.bool_],
        logp: npt.NDArray[np.float32],
        turn_end_id: int,
    ) -> Turns:
        """Take over what rows at `places` hold now: lengths [n] and tokens [n, T]."""
        rollouts, T = self._rollout_of[places], ids.shape[1]
        span = np.arange(T) < lengths[:, None]
        self._ids[rollouts, :T] = np.where(span, ids, 0)
        self._sampled[rollouts, :T] = sampled & span
        self._logp[rollouts, :T] = np.where(span, logp, 0.0)
        self._lengths[rollouts] = lengths
        self._turns[rollouts] += 1
        self._asked[rollouts] = True
        starts = self._turn_starts[rollouts]
        turn = span & (np.arange(T) >= starts[:, None])
        return Turns(
            rows=rollouts,
            lengths=lengths - starts,
            ids=ids[turn],
            truncated=ids[np.arange(len(rollouts)), lengths - 1] != turn_end_id,
        )

    def answer(
        self, rollouts: Ints, lengths: Ints, ids: Ints, turn_end_id: int
    ) -> tuple[Ints, Ints, Ints]:
        """Answers to turns: `lengths` [n], negative to end a rollout, and their tokens one after the other.

        Returns places, lengths and tokens of the rows that go on; ended rows are free again.

        Raises:
            JobFailedError: an answer to a rollout that asks nothing, or a token that does not exist.
        """
        self._check_answers(rollouts, lengths, ids)
        params, sizes = self._params, lengths.clip(min=0)
        length = self._lengths[rollouts]
        is_none, is_full = lengths < 0, length >= params.max_total_tokens
        is_last = self._turns[rollouts] >= params.max_turns
        truncated = self._ids[rollouts, length - 1] != turn_end_id
        self._stops[rollouts[is_none & ~truncated]] = _DONE
        self._stops[rollouts[~is_none & ~is_full & is_last]] = _MAX_TURNS
        goes_on = ~is_none & ~is_full & ~is_last & (length + sizes < params.max_total_tokens)
        self._asked[rollouts] = False
        self._turn_starts[rollouts[goes_on]] = (length + sizes)[goes_on]
        places = self._row_of[rollouts]
        self._rollout_of[places[~goes_on]] = -1
        self._left -= int((~goes_on).sum())
        return places[goes_on], sizes[goes_on], ids[np.repeat(goes_on, sizes)]

    def result(self) -> Played:
        """Everything, once the play is over."""
        T = int(self._lengths.max(initial=0))
        return Played(
            ids=self._ids[:, :T],
            sampled=self._sampled[:, :T],
            logprobs=self._logp[:, :T],
            lengths=self._lengths,
            prompt_lengths=self._prompt_lengths,
            turns=self._turns,
            stops=self._stops,
        )

    def _check_answers(self, rollouts: Ints, lengths: Ints, ids: Ints) -> None:
        count = len(self._asked)
        known = (
            len(rollouts) == len(lengths) == len(set(rollouts.tolist()))
            and bool(((rollouts >= 0) & (rollouts < count)).all())
            and bool(self._asked[rollouts].all())
        )
        if not known or int(lengths.clip(min=0).sum()) != len(ids):
            raise JobFailedError(
                "stack.protocol", "answers that fit no asked turn; expected one per ended turn"
            )
        check_ids(ids, self._vocab_size)


def _check(play: Play, max_len: int, vocab_size: int) -> None:
    total = play.params.max_total_tokens
    if total > max_len:
        raise JobFailedError(
            "stack.too_long",
            f"seq_len = {total} is above inner.stack.max_len = {max_len} of this stack; "
            "lower seq_len, or raise inner.stack.max_len",
        )
    if play.uniforms.shape[0] != len(play.prompts) or play.uniforms.shape[1] < total + 1:
        raise JobFailedError(
            "stack.protocol",
            f"random numbers of shape {list(play.uniforms.shape)} for {len(play.prompts)} prompts; "
            f"expected [{len(play.prompts)}, {total + 1}]",
        )
    for prompt in play.prompts:
        if len(prompt) == 0 or len(prompt) > max_len:
            raise JobFailedError(
                "stack.too_long",
                f"a prompt has {len(prompt)} tokens; expected 1 to {max_len}, inner.stack.max_len",
            )
        check_ids(np.asarray(prompt), vocab_size)


def check_ids(ids: Ints, vocab_size: int) -> None:
    """Refuse tokens out of range: on a GPU one would end the whole process, other jobs included."""
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        raise JobFailedError(
            "stack.protocol",
            f"a token of {int(ids.min())} to {int(ids.max())}; expected 0 to {vocab_size - 1}",
        )
