"""GRPO steps on a device: one job beside peers, many jobs as one batch, agreement of sampler and learner, memory."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch

from nestling.bench.engine_work import Work, Workload
from nestling.bench.gpu_decode import timed
from nestling.bench.gpu_shapes import Sizes, folder_of
from nestling.bench.peers import has_transformers, has_trl, load_peer_model, sample_tokens, trl_grpo
from nestling.core.clock import SystemClock
from nestling.engine.decoder import row_uniforms
from nestling.engine.device import free_bytes, set_precision
from nestling.engine.learn import AdamW, Dppo
from nestling.engine.sampler import SamplingParams
from nestling.engine.stack import Stack, TrainRequest
from nestling.engine.stack_events import Failed, Finished, Joined, Trained, TurnsEnded
from nestling.engine.stack_plan import Precision, StackShape, shape_table
from nestling.engine.stack_play import Play
from nestling.engine.stack_train import JobSettings
from nestling.families.bases import names

__all__ = ["agreement", "grpo", "memory", "stacked"]

_TOOL_TOKEN: Final = 1


def grpo(shape: str, device: str, sizes: Sizes) -> list[dict[str, Any]]:
    """Seconds of a single-turn GRPO step: sampling included, the reward is arithmetic on token ids."""
    found = []
    with folder_of(shape) as folder:
        for precision in sizes.precisions:
            with_jobs = _Jobs(folder, device, sizes, precision, jobs=1, turns=1)
            seconds = with_jobs.steps()
            found.append(_step_row(shape, f"nestling {precision}", 1, seconds))
            del with_jobs
        if has_transformers():
            peer = _PlainStep(folder, device, sizes)
            seconds = timed(peer.step, device, sizes.peer_runs)
            found.append(_step_row(shape, "transformers", 1, seconds))
            del peer
        if has_trl() and shape in names():
            found.append(_step_row(shape, "trl", 1, _trl_seconds(folder, device, sizes)))
    return found


def stacked(shape: str, device: str, sizes: Sizes) -> list[dict[str, Any]]:
    """Seconds of a multi-turn GRPO step of several jobs at once; tools answer at once."""
    found = []
    with folder_of(shape) as folder:
        for count in sizes.stacked:
            jobs = _Jobs(folder, device, sizes, "float32", jobs=count, turns=sizes.turns)
            found.append(_step_row(shape, "nestling float32", count, jobs.steps()))
            del jobs
    return found


def agreement(shape: str, device: str, sizes: Sizes) -> list[dict[str, Any]]:
    """How far the learner's log-probabilities are from the sampler's, before an update."""
    found = []
    with folder_of(shape) as folder:
        for precision in sizes.precisions:
            jobs = _Jobs(folder, device, sizes, precision, jobs=2, turns=sizes.turns)
            jobs.steps(count=1)
            losses = [one.loss for one in jobs.trained[:2]]
            found.append(
                {
                    "shape": shape,
                    "precision": precision,
                    "tokens": sum(loss.num_tokens for loss in losses),
                    "max_abs_logp_diff": max(loss.max_abs_logp_diff for loss in losses),
                    "mean_abs_ratio_minus_1": max(loss.mean_abs_ratio_minus_1 for loss in losses),
                }
            )
            del jobs
    return found


def memory(shape: str, device: str, sizes: Sizes) -> list[dict[str, Any]]:
    """Planned bytes of a stack, and the peak that the allocator saw over two GRPO steps."""
    found = []
    with folder_of(shape) as folder:
        for count in sizes.stacked:
            if device.startswith("cuda"):
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
            jobs = _Jobs(folder, device, sizes, "float32", jobs=count, turns=sizes.turns)
            jobs.steps(count=1)
            peak = torch.cuda.max_memory_allocated(device) if device.startswith("cuda") else None
            found.append({"shape": shape, "jobs": count, **jobs.planned, "peak_bytes": peak})
            del jobs
    return found


def _trl_seconds(folder: Path, device: str, sizes: Sizes) -> list[float]:
    """Wall seconds of TRL's steps in float32, ours in turn with them."""
    work = Work(
        rows=sizes.rollouts,
        prompt_tokens=sizes.prompt_tokens,
        new_tokens=sizes.new_tokens,
        group_size=sizes.group_size,
    )
    ours = _Jobs(folder, device, sizes, "float32", jobs=1, turns=1)
    ours.join()
    theirs, _ = trl_grpo(Workload(folder, work), sizes.peer_runs, ours.step, device=device)
    return [one.wall for one in theirs]


class _Jobs:
    """Jobs of one stack that play and train in step with one another, all tools in this process."""

    def __init__(
        self,
        folder: Path,
        device: str,
        sizes: Sizes,
        precision: Precision,
        *,
        jobs: int,
        turns: int,
    ) -> None:
        set_precision(precision)
        self._sizes, self._count, self._device = sizes, jobs, device
        extra = (turns - 1) * sizes.tool_tokens
        self._params = SamplingParams(
            max_turn_tokens=max(1, sizes.new_tokens // turns),
            max_total_tokens=sizes.prompt_tokens + sizes.new_tokens + extra,
            max_turns=turns,
        )
        budget = free_bytes(device)
        shape = StackShape.for_base(
            folder,
            num_lanes=jobs,
            num_rows=sizes.rollouts,
            max_len=self._params.max_total_tokens,
            precision=precision,
            tile_tokens=0,
            budget=budget,
        )
        self.planned = shape_table(shape, budget)
        self._stack = Stack(folder, shape, device=device, budget=budget, clock=SystemClock())
        self._vocab = shape.config.vocab_size
        self.trained: list[Trained] = []
        self._steps_done = 0

    def steps(self, count: int | None = None) -> list[float]:
        """Wall seconds of each step, all jobs together; a first step is not counted."""
        self.join()
        seconds = []
        for _ in range((count or self._sizes.steps) + 1):
            if self._device.startswith("cuda"):
                torch.cuda.synchronize(self._device)
            started = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - started)
        return seconds[1:]

    def join(self) -> None:
        """Have every job take its place."""
        settings = JobSettings(loss=Dppo(), optim=AdamW(lr=1e-5))
        for job in range(self._count):
            self._stack.join(job, settings)
        joined = 0
        while joined < self._count:
            joined += sum(isinstance(event, Joined) for event in self._stack.advance())

    def step(self) -> None:
        """One GRPO step of every job."""
        wanted = len(self.trained) + self._count
        for job in range(self._count):
            self._stack.play(job, self._play(job))
        self._steps_done += 1
        while len(self.trained) < wanted:
            for event in self._stack.advance():
                if isinstance(event, TurnsEnded):
                    self._answer(event)
                elif isinstance(event, Finished):
                    self._stack.train(event.job, self._update(event))
                elif isinstance(event, Trained):
                    self.trained.append(event)
                elif isinstance(event, Failed):
                    raise RuntimeError(event.detail)  # noqa: TRY004 (our own bug)

    def _play(self, job: int) -> Play:
        sizes, rng = self._sizes, np.random.default_rng(job)
        groups = sizes.rollouts // sizes.group_size
        prompts = rng.integers(0, self._vocab, (groups, sizes.prompt_tokens))
        first = (self._steps_done * self._count + job) * sizes.rollouts
        length = self._params.max_total_tokens + 1
        return Play(
            prompts=[prompt for prompt in prompts for _ in range(sizes.group_size)],
            uniforms=np.stack([row_uniforms(first + i, length) for i in range(sizes.rollouts)]),
            params=self._params,
        )

    def _answer(self, event: TurnsEnded) -> None:
        turns, tool = event.turns, self._sizes.tool_tokens
        ends = self._params.max_turns == 1
        lengths = np.full(len(turns.rows), -1 if ends else tool)
        ids = np.full(0 if ends else tool * len(turns.rows), _TOOL_TOKEN, np.int64)
        self._stack.answer(event.job, turns.rows, lengths, ids)

    def _update(self, event: Finished) -> TrainRequest:
        played = event.played
        score = (np.where(played.sampled, played.ids, 0).sum(1) % 7).astype(np.float32)
        groups = score.reshape(-1, self._sizes.group_size)
        return TrainRequest(
            advantages=(groups - groups.mean(1, keepdims=True)).reshape(-1),
            learn_observations=False,
            temperature=1.0,
            lr=1e-5,
        )


class _PlainStep:
    """The same step by transformers: generate, log-probabilities, clipped ratio, AdamW."""

    def __init__(self, folder: Path, device: str, sizes: Sizes) -> None:
        self._model, self._sizes = load_peer_model(folder, device).train(), sizes
        self._optim = torch.optim.AdamW(
            self._model.parameters(), lr=1e-5, fused=device.startswith("cuda")
        )
        rng = np.random.default_rng(0)
        groups = sizes.rollouts // sizes.group_size
        prompts = rng.integers(0, self._model.config.vocab_size, (groups, sizes.prompt_tokens))
        self._prompts = torch.from_numpy(prompts).to(device).repeat_interleave(sizes.group_size, 0)

    def step(self) -> None:
        """One GRPO step on `rollouts` completions."""
        sizes = self._sizes
        ids = sample_tokens(self._model, self._prompts, sizes.new_tokens).clone()  # for autograd
        new = ids[:, sizes.prompt_tokens :]
        score = (new.sum(1) % 7).float().view(-1, sizes.group_size)
        advantage = (score - score.mean(1, keepdim=True)).view(-1, 1)
        scores = self._model(ids[:, :-1]).logits[:, sizes.prompt_tokens - 1 :].float()
        logp = scores.log_softmax(-1).gather(-1, new[..., None])[..., 0]
        ratio = (logp - logp.detach()).exp()
        clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        torch.autograd.backward(-clipped.mean())
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optim.step()
        self._optim.zero_grad()


def _step_row(shape: str, by: str, jobs: int, seconds: list[float]) -> dict[str, Any]:
    middle = median(seconds)
    return {
        "shape": shape,
        "by": by,
        "jobs": jobs,
        "median_s": middle,
        "per_job_s": middle / jobs,
        "seconds": seconds,
    }
