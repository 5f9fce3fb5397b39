"""One decode step with sampling, over static buffers; `cpu_decoder` is the one for one job on a CPU.

Axes: J job, S slot of a job, R = J*S, V vocabulary. Token, position, cache, temperature and random numbers
live in fixed buffers and the step only reads and writes those, so on CUDA it is captured in a graph once per
attended width and replayed: a small model is bound by launches, not by arithmetic.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nestling.engine.config import ModelConfig
from nestling.engine.model import KVCache, decode, extend
from nestling.engine.params import Params

__all__ = ["Decoder", "row_uniforms", "sample_tokens"]

_log = logging.getLogger(__name__)
_WIDTH_STEP = 128
"""Attended widths are rounded up to this on CUDA, so that a few graphs serve every step."""


def row_uniforms(seed: int, length: int) -> npt.NDArray[np.float32]:
    """Uniform numbers in [0, 1) for positions 0..length-1 of one row.

    A counter-based stream (Philox keyed by the seed): the number at a position depends on nothing else. The
    cap keeps a float32 number times a sum near 1 below that sum.
    """
    key = np.random.Philox(key=seed % 2**64)
    drawn = np.random.Generator(key).random(length, dtype=np.float32)
    return np.minimum(drawn, np.float32(1 - 2**-22))


def sample_tokens(
    logits_RV: Tensor, temperature_R1: Tensor, uniform_R: Tensor, *, any_greedy: bool
) -> tuple[Tensor, Tensor]:
    """Token and its float32 log-probability per row, by inverting the cumulative distribution.

    Log-probabilities are those of the tempered distribution. Temperature 0 takes the likeliest token, and
    its log-probability is the one at temperature 1.
    """
    scale = torch.where(temperature_R1 > 0, temperature_R1, 1.0) if any_greedy else temperature_R1
    scores = logits_RV.float() / scale
    scores = scores - scores.amax(-1, keepdim=True)
    cumulative = scores.exp().cumsum(-1)  # over the probability of the likeliest token
    total = cumulative[:, -1:]
    token = torch.searchsorted(cumulative, uniform_R[:, None] * total, right=True)
    token.clamp_(max=scores.shape[-1] - 1)
    if any_greedy:
        token = torch.where(temperature_R1 > 0, token, scores.argmax(-1, keepdim=True))
    return token[:, 0], (scores.gather(-1, token) - total.log())[:, 0]


class Decoder:
    """The static buffers of J jobs with S slots each, and the step over them."""

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        *,
        num_slots: int,
        max_len: int,
        temperatures: Sequence[float],
    ) -> None:
        self.params, self.config, self.max_len = params, config, max_len
        self.num_jobs, self.num_slots = len(temperatures), num_slots
        device, rows = params.embed.device, len(temperatures) * num_slots
        self.device = device
        self.scratch_row = rows
        """A cache row that belongs to no slot; whatever is written there is lost."""
        self.cache = KVCache(config, rows + 1, max_len, device=device, dtype=params.embed.dtype)
        self._any_greedy = any(value == 0 for value in temperatures)
        self._job_temperature = torch.tensor(temperatures, dtype=torch.float32, device=device)
        self._inputs = torch.zeros(
            2, self.num_jobs, num_slots, dtype=torch.long, device=device
        )  # token, position
        self._uniforms = torch.zeros(rows, max_len + 1, device=device)
        self._out = torch.zeros(2, rows, device=device)  # token, log-probability
        self._graphs: dict[int, torch.cuda.CUDAGraph] | None = {} if device.type == "cuda" else None

    def set_uniforms(self, row: int, values: npt.NDArray[np.float32]) -> None:
        """Install the random numbers of the sequence that begins in flat slot `row`."""
        self._uniforms[row, : len(values)] = torch.from_numpy(values).to(self.device)

    @torch.no_grad()
    def extend(
        self,
        ids: npt.NDArray[np.int64],
        start: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64],
    ) -> None:
        """Append ids [J, b, T] at start [J, b] to cache rows [J, b]; see `model.extend`."""
        moved = [torch.from_numpy(array).to(self.device) for array in (ids, start, rows)]
        extend(self.params, self.config, moved[0], moved[1], self.cache, moved[2].reshape(-1))

    def share(self, slots: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """Copy a prompt in the first of some flat slots to the others, for each such group of slots."""
        source = [group[0] for group in slots for _ in group[1:]]
        target = [slot for group in slots for slot in group[1:]]
        if source:
            place = torch.tensor([source, target], device=self.device)
            self.cache.move(place[0], place[1], max(lengths))

    def release(self, slots: npt.NDArray[np.int64]) -> None:
        """The sequences in these flat slots have ended; they are computed along until others begin there."""

    def compact(self, source: npt.NDArray[np.int64], num_slots: int, width: int) -> None:
        """Keep the given flat slots (J * num_slots of them, in order) and shrink; CPU only."""
        target = torch.from_numpy(np.nonzero(source != np.arange(len(source)))[0])
        keep = torch.from_numpy(source)[target]
        self.cache.move(keep, target, width)
        self._uniforms[target] = self._uniforms[keep]
        self.num_slots = num_slots

    @torch.no_grad()
    def step(
        self, token: npt.NDArray[np.int64], position: npt.NDArray[np.int64], width: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Feed token [R] at position [R]; the sampled next token and log-probability [R].

        Every position must be below `width` <= max_len. The random number used is the row's at position + 1.
        """
        shape = (2, self.num_jobs, self.num_slots)
        packed = torch.from_numpy(np.stack((token, position))).view(shape)
        rows = self.num_jobs * self.num_slots
        if self._graphs is None:
            self._inputs = packed
            self._compute(width)
        else:
            self._inputs.copy_(packed)
            self._replay(min(-(-width // _WIDTH_STEP) * _WIDTH_STEP, self.max_len))
        out = self._out[:, :rows].cpu().numpy()
        return out[0].astype(np.int64), out[1].copy()

    def _compute(self, width: int) -> None:
        token, position = self._inputs[0], self._inputs[1]
        rows = self.num_jobs * self.num_slots
        logits = decode(self.params, self.config, token, position, self.cache, width)
        temperature = self._job_temperature[:, None].expand(-1, self.num_slots).reshape(rows, 1)
        index = position.reshape(rows, 1) + 1
        uniform = self._uniforms[:rows].gather(1, index)[:, 0]
        sampled, logp = sample_tokens(
            logits.reshape(rows, -1), temperature, uniform, any_greedy=self._any_greedy
        )
        self._out[0, :rows] = sampled
        self._out[1, :rows] = logp

    def _replay(self, width: int) -> None:
        assert self._graphs is not None
        graph = self._graphs.get(width) or self._capture(width)
        if graph is None:
            self._graphs = None
            self._compute(width)
        else:
            graph.replay()

    def _capture(self, width: int) -> torch.cuda.CUDAGraph | None:
        """Record the step for one width; on failure decode goes on uncaptured."""
        assert self._graphs is not None
        try:
            side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):  # warm-up: lazy initialisation may not be captured
                self._compute(width)
            torch.cuda.current_stream(self.device).wait_stream(side)
            pool = next(iter(self._graphs.values())).pool() if self._graphs else None
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._compute(width)
        except RuntimeError as error:
            _log.warning("decode step could not be captured (%s); it runs uncaptured", error)
            return None
        self._graphs[width] = graph
        return graph
