"""Sampling sessions for agents whose turns arrive at different times.

Every session owns a slot with its cache; tokens fed to it wait until the next `sample`, which brings the
chosen slots up to date and decodes one turn of each together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from nestling.core.errors import ConfigError
from nestling.engine.decoder import row_uniforms, sample_tokens
from nestling.engine.model import KVCache, Model, decode, extend
from nestling.engine.params import Params

__all__ = ["SamplingParams", "Turn", "TurnSampler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample and when to stop."""

    temperature: float = 1.0
    """0 takes the likeliest token."""
    max_turn_tokens: int = 256
    max_total_tokens: int = 1024
    """Prompt, sampled and forced tokens together."""
    max_turns: int = 16

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise ConfigError(f"temperature={self.temperature}; expected 0 to 100")
        for name in ("max_turn_tokens", "max_total_tokens", "max_turns"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; expected at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One sampled turn."""

    ids: list[int]
    """The end token included unless truncated."""
    logprobs: list[float]
    text: str
    """Without the end token."""
    truncated: bool
    """The turn hit `max_turn_tokens`, `max_total_tokens` or the slot's length."""


@dataclass(slots=True)
class _Session:
    ids: list[int]
    cached: int
    """Tokens of `ids` that the cache holds."""
    uniforms: npt.NDArray[np.float32]


class TurnSampler:
    """`slots` sessions of at most `max_len` tokens each, on one model (J = 1).

    The model's weights are read at every `sample`. After they changed, call `refresh`: the caches of open
    sessions hold keys and values of the old weights and are then computed again.
    """

    def __init__(self, model: Model, slots: int, max_len: int) -> None:
        if model.num_jobs != 1:
            raise ConfigError(f"a turn sampler serves one job; this model holds {model.num_jobs}")
        self._model = model
        self._max_len = max_len
        dtype = model.params().embed.dtype
        self._cache = KVCache(model.config, slots, max_len, device=model.device, dtype=dtype)
        self._sessions: dict[int, _Session] = {}
        self._free = list(range(slots - 1, -1, -1))

    def open(self, prompt_ids: Sequence[int], seed: int) -> int:
        """A slot for a new session; ConfigError when all are taken or the prompt does not fit."""
        if not self._free:
            raise ConfigError(f"all {len(self._sessions)} slots are taken; close one first")
        self._check_fits(0, prompt_ids)
        if not prompt_ids:
            raise ConfigError("the prompt is empty; expected at least one token")
        slot = self._free.pop()
        uniforms = row_uniforms(seed, self._max_len + 1)
        self._sessions[slot] = _Session(ids=list(prompt_ids), cached=0, uniforms=uniforms)
        return slot

    def feed(self, slot: int, ids: Sequence[int]) -> None:
        """Append given tokens (a tool result) to a session."""
        session = self._session(slot)
        self._check_fits(len(session.ids), ids)
        session.ids.extend(ids)

    def remaining(self, slot: int) -> int:
        """Tokens that still fit into the slot."""
        return self._max_len - len(self._session(slot).ids)

    def close(self, slot: int) -> list[int]:
        """Free a slot; returns the session's tokens."""
        session = self._session(slot)
        del self._sessions[slot]
        self._free.append(slot)
        return session.ids

    def refresh(self) -> None:
        """Forget cached keys and values, after the weights changed."""
        for session in self._sessions.values():
            session.cached = 0

    @torch.no_grad()
    def sample(self, slots: Sequence[int], params: SamplingParams) -> list[Turn]:
        """One turn for each slot, decoded together; the sampled tokens join the sessions."""
        if len(set(slots)) != len(slots):
            raise ConfigError("a slot is listed twice; expected each at most once")
        sessions = [self._session(slot) for slot in slots]
        if not sessions:
            return []
        weights = self._model.params()
        self._catch_up(weights, slots, sessions)
        limit = min(params.max_total_tokens, self._max_len)
        starts = [len(session.ids) for session in sessions]
        logps: list[list[float]] = [[] for _ in sessions]
        live = [i for i, start in enumerate(starts) if start < limit]
        while live:
            tokens, values = self._step(weights, slots, sessions, live, params.temperature)
            for i, token, value in zip(list(live), tokens, values, strict=True):
                session = sessions[i]
                session.cached = len(session.ids)
                session.ids.append(token)
                logps[i].append(value)
                count = len(session.ids) - starts[i]
                if (
                    token == self._model.tokenizer.turn_end_id
                    or count >= params.max_turn_tokens
                    or len(session.ids) >= limit
                ):
                    live.remove(i)
        return [
            self._turn(session.ids[start:], logp)
            for session, start, logp in zip(sessions, starts, logps, strict=True)
        ]

    def _session(self, slot: int) -> _Session:
        if slot not in self._sessions:
            raise ConfigError(f"slot {slot} is not open; open slots: {sorted(self._sessions)}")
        return self._sessions[slot]

    def _check_fits(self, used: int, ids: Sequence[int]) -> None:
        if used + len(ids) > self._max_len:
            raise ConfigError(
                f"{used} + {len(ids)} tokens do not fit a slot of {self._max_len}; "
                "end the session or give slots more length"
            )

    def _turn(self, ids: list[int], logp: list[float]) -> Turn:
        tokenizer = self._model.tokenizer
        ended = bool(ids) and ids[-1] == tokenizer.turn_end_id
        text = tokenizer.decode(ids[:-1] if ended else ids)
        return Turn(ids=ids, logprobs=logp, text=text, truncated=not ended)

    def _catch_up(
        self, weights: Params, slots: Sequence[int], sessions: Sequence[_Session]
    ) -> None:
        """Cache everything but each session's last token."""
        behind = [i for i, one in enumerate(sessions) if len(one.ids) - 1 > one.cached]
        # Rows are padded to the longest of a chunk, and the padding has to fit behind a row's own tokens.
        behind.sort(key=lambda i: len(sessions[i].ids) - sessions[i].cached)
        while behind:
            chunk = [behind.pop()]
            length = len(sessions[chunk[0]].ids) - 1 - sessions[chunk[0]].cached
            while (
                behind and len(chunk) < 64 and sessions[behind[-1]].cached + length <= self._max_len
            ):
                chunk.append(behind.pop())
            ids = np.zeros((1, len(chunk), length), np.int64)
            for b, i in enumerate(chunk):
                fresh = sessions[i].ids[sessions[i].cached : -1]
                ids[0, b, : len(fresh)] = fresh
            device = self._model.device
            extend(
                weights,
                self._model.config,
                torch.from_numpy(ids).to(device),
                torch.tensor([[sessions[i].cached for i in chunk]], device=device),
                self._cache,
                torch.tensor([slots[i] for i in chunk], device=device),
            )
            for i in chunk:
                sessions[i].cached = len(sessions[i].ids) - 1

    def _step(
        self,
        weights: Params,
        slots: Sequence[int],
        sessions: Sequence[_Session],
        live: list[int],
        temperature: float,
    ) -> tuple[list[int], list[float]]:
        device = self._model.device
        token = torch.tensor([[sessions[i].ids[-1] for i in live]], device=device)
        place = [len(sessions[i].ids) - 1 for i in live]
        position = torch.tensor([place], device=device)
        rows = torch.tensor([slots[i] for i in live], device=device)
        scores = decode(
            weights, self._model.config, token, position, self._cache, max(place) + 1, rows=rows
        )
        uniforms = [float(sessions[i].uniforms[at + 1]) for i, at in zip(live, place, strict=True)]
        drawn, logp = sample_tokens(
            scores[0],
            torch.full((len(live), 1), temperature, device=device),
            torch.tensor(uniforms, device=device),
            any_greedy=temperature == 0,
        )
        return drawn.tolist(), logp.tolist()
