"""Decoding on a device: tokens per second beside transformers, and the share of the memory's rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from nestling.bench.gpu_shapes import Sizes, folder_of
from nestling.bench.peers import has_transformers, load_peer_model, sample_tokens, sample_turns
from nestling.engine.checkpoint import load_model
from nestling.engine.device import set_precision
from nestling.engine.lane_decoder import LaneDecoder, NewRow, plan_for
from nestling.engine.model import Model
from nestling.engine.stack_plan import Precision
from nestling.engine.weights import num_parameters

__all__ = ["decode", "lanes", "rates", "timed"]


def decode(shape: str, device: str, sizes: Sizes) -> list[dict[str, Any]]:
    """One job, `sizes.rows` rows: single-turn and multi-turn, each precision, and the peer's generate.

    The bound is what a step must move: weights once, cached keys and values of every row once, over the rate of
    a plain copy on this device.
    """
    bytes_per_s = rates(device)["bytes_per_s"]
    found = []
    with folder_of(shape) as folder:
        model = load_model(folder, device)
        for precision in sizes.precisions:
            set_precision(precision)
            work = _Decoding(model, device, sizes, precision, lanes=1)
            for name, run in (("decode", work.single), ("multi_turn", work.multi)):
                seconds = timed(run, device, sizes.runs)
                row = _row(shape, name, precision, seconds, sizes.rows * sizes.new_tokens)
                if name == "decode":
                    bound_s = work.step_bytes() * sizes.new_tokens / bytes_per_s
                    row["bytes_per_step"] = work.step_bytes()
                    row["roofline_share"] = round(bound_s / row["median_s"], 4)
                found.append(row)
            del work
        set_precision("float32")
        del model
        if has_transformers():
            peer = _Generate(folder, device, sizes)
            for name, run in (("decode", peer.single), ("multi_turn", peer.multi)):
                seconds = timed(run, device, sizes.peer_runs)
                tokens = sizes.rows * sizes.new_tokens
                found.append(_row(shape, name, "transformers", seconds, tokens))
    return found


def lanes(shape: str, device: str, sizes: Sizes) -> list[dict[str, Any]]:
    """Several jobs at once, each with weights of its own and `sizes.rollouts` rows."""
    found = []
    with folder_of(shape) as folder:
        model = load_model(folder, device)
        for count in sizes.stacked:
            work = _Decoding(model, device, sizes, "float32", lanes=count, rows=sizes.rollouts)
            seconds = timed(work.single, device, max(1, sizes.runs // 2))
            tokens = count * sizes.rollouts * sizes.new_tokens
            found.append(_row(shape, f"{count} jobs", "float32", seconds, tokens))
    return found


def rates(device: str) -> dict[str, float]:
    """Bytes per second that a copy reads and writes, and float operations per second of a large product."""
    on_gpu = device.startswith("cuda")
    many = torch.ones(2**28 if on_gpu else 2**22, device=device)
    other = torch.empty_like(many)
    side = 8192 if on_gpu else 256
    kind = torch.bfloat16 if on_gpu else torch.float32
    a = torch.randn(side, side, device=device, dtype=kind)
    copy_s = min(timed(lambda: other.copy_(many), device, 5))
    product_s = min(timed(lambda: torch.mm(a, a), device, 5))
    return {
        "bytes_per_s": 2 * many.numel() * many.element_size() / copy_s,
        "flops_per_s": 2 * side**3 / product_s,
    }


def timed(work: Callable[[], object], device: str, runs: int) -> list[float]:
    """Wall seconds of each run, the device idle before and after; a first run is not counted."""
    seconds = []
    for _ in range(runs + 1):
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


class _Decoding:
    """Rows of one lane or more that never end a turn early."""

    def __init__(
        self,
        model: Model,
        device: str,
        sizes: Sizes,
        precision: Precision,
        *,
        lanes: int,
        rows: int | None = None,
    ) -> None:
        self._model, self._sizes, self._lanes = model, sizes, lanes
        self._rows = rows or sizes.rows
        self._dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        self._decoder = LaneDecoder(
            model.config,
            -1,
            num_lanes=lanes,
            num_rows=self._rows,
            max_len=sizes.max_len,
            device=device,
            dtype=self._dtype,
            plan=plan_for(torch.device(device)),
        )
        rng = np.random.default_rng(0)
        shape = (lanes * self._rows, sizes.prompt_tokens)
        self._prompts = rng.integers(0, model.config.vocab_size, shape)
        self._uniforms = rng.random((shape[0], sizes.max_len + 1), dtype=np.float32) * 0.999
        self._tool = rng.integers(0, model.config.vocab_size, sizes.tool_tokens)

    def single(self) -> None:
        """A prompt and its new tokens."""
        sizes = self._sizes
        self._fill(sizes.prompt_tokens + sizes.new_tokens, sizes.new_tokens)
        while self._decoder.active.any():
            self._advance()

    def multi(self) -> None:
        """The same number of new tokens in turns, a tool's answer between them."""
        sizes, done = self._sizes, 0
        self._fill(sizes.max_len, sizes.turn_tokens)
        while self._decoder.active.any():
            ended = self._advance()
            done += len(ended)
            going = ended[self._decoder.length[ended] < sizes.max_len]
            if len(going):
                self._decoder.tokens(going)  # a host reads the turn, as it would to answer it
                lengths = np.full(len(going), sizes.tool_tokens)
                self._decoder.answer(going, lengths, np.tile(self._tool, len(going)))

    def step_bytes(self) -> float:
        """That a step must move on average: weights, and the cached keys and values of every row."""
        sizes, config = self._sizes, self._model.config
        length = sizes.prompt_tokens + (sizes.new_tokens + 1) / 2
        cached = 2 * config.num_layers * config.kv_size * length * self._rows
        return float(self._dtype.itemsize * self._lanes * (num_parameters(config) + cached))

    def _fill(self, limit: int, turn_limit: int) -> None:
        for lane in range(self._lanes):
            self._decoder.load(lane, self._model.weights.flat, self._sizes.max_len)
        self._decoder.fill(
            [
                NewRow(
                    row=row,
                    prompt=prompt,
                    uniforms=uniforms,
                    limit=limit,
                    turn_limit=turn_limit,
                    temperature=1.0,
                )
                for row, (prompt, uniforms) in enumerate(
                    zip(self._prompts, self._uniforms, strict=True)
                )
            ]
        )

    def _advance(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        busy = np.nonzero(self._decoder.active.reshape(self._lanes, -1).any(1))[0]
        self._decoder.launch(busy.tolist())
        return self._decoder.look()


class _Generate:
    """`generate` of transformers, in bfloat16 on a GPU."""

    def __init__(self, folder: Path, device: str, sizes: Sizes) -> None:
        self._model, self._sizes = load_peer_model(folder, device).eval(), sizes
        rng = np.random.default_rng(0)
        vocab = self._model.config.vocab_size
        shape = (sizes.rows, sizes.prompt_tokens)
        self._prompts = torch.from_numpy(rng.integers(0, vocab, shape)).to(device)
        tool = torch.from_numpy(rng.integers(0, vocab, sizes.tool_tokens)).to(device)
        self._tool = tool.expand(sizes.rows, -1)

    def single(self) -> None:
        """A prompt and its new tokens."""
        sample_tokens(self._model, self._prompts, self._sizes.new_tokens)

    def multi(self) -> None:
        """The same number of new tokens in turns, a tool's answer between them."""
        sizes = self._sizes
        sample_turns(
            self._model,
            self._prompts,
            self._tool,
            turns=sizes.turns,
            turn_tokens=sizes.turn_tokens,
        )


def _row(shape: str, work: str, by: str, seconds: list[float], tokens: int) -> dict[str, Any]:
    middle = median(seconds)
    return {
        "shape": shape,
        "work": work,
        "by": by,
        "median_s": middle,
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_s": round(tokens / middle),
    }
