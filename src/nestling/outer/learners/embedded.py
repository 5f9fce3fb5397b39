"""Our engine as a learner, in this process.

One thread owns all tensors: sampling, training and saving are jobs on it, so that weights never change
under a reader. `publish` copies what is trained (all weights, or the adapter), and a published copy
keeps its own caches; several versions can be sampled at the same time.

On a CPU with one torch thread the same calls give the same numbers. Sampled tokens do not depend on
which requests happen to be batched; with `lockstep` neither do the last bits of log-probabilities, at
the price of decoding every turn alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from nestling.core.errors import LearnerError, NestlingError
from nestling.core.heap import trim_heap
from nestling.engine.learn import (
    AdamW,
    ImportanceSampling,
    LoraConfig,
    PolicyTrainer,
    PpoClip,
)
from nestling.engine.learn import TrainRow as EngineRow
from nestling.engine.model import Model
from nestling.engine.tokenizer import Tokenizer
from nestling.outer.config import EmbeddedConfig
from nestling.outer.learner import Handle, LossSpec, LossStats, Sampled, StepStats, TrainRow
from nestling.outer.learners import saved_state
from nestling.outer.learners.turn_batches import PublishedPolicy, TurnBatcher, TurnRequest

__all__ = ["EmbeddedLearner"]

_T = TypeVar("_T")

_KEEP_RESUMABLE = 2
"""Saved states that keep their optimiser: the committed one and the one before it."""


class EmbeddedLearner:
    """Satisfies `Learner`; use it from one event loop and `close` it at the end.

    Takes over `model` and trains it in place. `folder` holds the saved states; references are names
    below it, so the folder may move. Sessions have at most `max_total_tokens` tokens; the caches of
    one published policy take `num_sessions` times that.
    """

    def __init__(
        self,
        model: Model,
        folder: Path,
        *,
        max_total_tokens: int,
        config: EmbeddedConfig | None = None,
    ) -> None:
        if model.num_jobs != 1 or model.lora is not None:
            raise LearnerError(
                f"the embedded learner trains one plain model; got {model.num_jobs} jobs"
                f"{' with an adapter' if model.lora is not None else ''}; merge it first"
            )
        self._config = config or EmbeddedConfig()
        self._max_total_tokens = max_total_tokens
        self._model = model
        self._folder = folder
        self._initial = model.weights.clone() if self._config.lora_rank == 0 else model.weights
        self._initial_hash = model.weights.content_hash()
        self._version = 0
        self._order = 0
        self._spec = LossSpec()
        self._trainer = self._new_trainer(self._spec)
        self._has_gradient = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")
        self._batcher = TurnBatcher(
            self._thread, window_s=self._config.window_s, lockstep=self._config.lockstep
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The agent's tokenizer."""
        tokenizer: Tokenizer = self._model.tokenizer
        return tokenizer

    async def sample(
        self,
        handle: Handle,
        ids: Sequence[int],
        *,
        session: str,
        seed: int,
        max_tokens: int,
        temperature: float,
    ) -> Sampled:
        """One turn; see `Learner.sample`."""
        if not isinstance(handle, PublishedPolicy):
            raise LearnerError(f"{handle!r} was not published by this learner")
        request = TurnRequest(
            ids=tuple(ids),
            session=session,
            seed=seed,
            max_tokens=max_tokens,
            temperature=temperature,
        )
        return await self._batcher.sample(handle, request)

    async def forward_backward(self, rows: Sequence[TrainRow], loss: LossSpec) -> LossStats:
        """Add a gradient; before an update all calls must use the same `loss`."""
        return await self._call(lambda: self._forward_backward(rows, loss))

    async def optim_step(self, lr: float) -> StepStats:
        """Clip and apply the gradient."""
        return await self._call(lambda: self._optim_step(lr))

    async def publish(self) -> PublishedPolicy:
        """A copy of the weights that nothing changes any more."""
        return await self._call(lambda: self._policy(self._copy(), self._version))

    async def save(self, name: str) -> str:
        """Write the state below the learner's folder; the reference is `name`."""
        return await self._call(lambda: self._save(name))

    async def load(self, ref: str) -> None:
        """Go back to a saved state of a run that began with the same weights."""
        await self._call(lambda: self._load(ref))

    async def open_policy(self, ref: str) -> PublishedPolicy:
        """A saved state as a policy to sample, for measurements; the learner itself stays as it is."""

        def read() -> PublishedPolicy:
            version = self._checked_info(ref).version
            return self._policy(saved_state.read_model(self._folder, ref, self._model), version)

        return await self._call(read)

    def close(self) -> None:
        """Finish what runs on the thread and end it; may be called twice."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _call(self, work: Callable[[], _T]) -> _T:
        def guarded() -> _T:
            try:
                return work()
            except LearnerError:
                raise
            except (NestlingError, RuntimeError, MemoryError) as error:
                raise LearnerError(f"the engine failed: {error}") from error

        try:
            running = self._thread.submit(guarded)
        except RuntimeError as error:
            raise LearnerError(f"the learner is closed: {error}") from error
        return await asyncio.wrap_future(running)

    def _forward_backward(self, rows: Sequence[TrainRow], loss: LossSpec) -> LossStats:
        if not any(any(row.sampled) for row in rows):
            raise LearnerError(f"{len(rows)} rows without a sampled token; expected at least one")
        if loss != self._spec:
            if self._has_gradient:
                raise LearnerError("the loss changed before the pending gradient was applied")
            state = self._trainer.state_dict()
            self._trainer, self._spec = self._new_trainer(loss), loss
            self._trainer.load_state_dict(state)
        engine_rows = [
            EngineRow(
                ids=row.ids, sampled=row.sampled, logprobs=row.logprobs, advantage=row.advantage
            )
            for row in rows
        ]
        stats = self._trainer.forward_backward(engine_rows, loss.temperature)
        self._has_gradient = True
        before = _mean_logprob(rows)
        return LossStats(
            loss=stats.loss,
            num_tokens=stats.num_tokens,
            kl_sampler=None if before is None else before - stats.mean_logp,
            kl_initial=stats.reference_kl if loss.kl_coef > 0 else None,
            nll=None if before is None else -stats.mean_logp,
            clipped_share=stats.dropped_fraction,
            max_logprob_gap=stats.max_abs_logp_diff,
        )

    def _optim_step(self, lr: float) -> StepStats:
        if not self._has_gradient:
            raise LearnerError("no gradient is pending; call forward_backward first")
        self._has_gradient = False
        stats = self._trainer.optim_step(lr)
        if not stats.updated:
            raise LearnerError(
                f"the gradient has norm {stats.grad_norm}; expected a finite one from rows with an "
                f"advantage; lower the learning rate or resume from the last step"
            )
        self._version += 1
        trim_heap()
        return StepStats(version=self._version, learning_rate=lr, grad_norm=stats.grad_norm)

    def _save(self, name: str) -> str:
        state = self._trainer.state_dict()
        self._order += 1
        info = saved_state.StateInfo(
            version=self._version,
            count=state["count"],
            initial_hash=self._initial_hash,
            lora_rank=self._config.lora_rank,
            order=self._order,
        )
        saved_state.write_state(self._folder, name, model=self._model, trainer=state, info=info)
        saved_state.thin_out(self._folder, keep_resumable=_KEEP_RESUMABLE)
        return name

    def _load(self, ref: str) -> None:
        info = self._checked_info(ref)
        state = saved_state.read_trainer(self._folder, ref, self._model)
        self._trainer.load_state_dict(state)
        self._version, self._order, self._has_gradient = info.version, info.order, False

    def _checked_info(self, ref: str) -> saved_state.StateInfo:
        info = saved_state.read_info(self._folder, ref)
        if info.initial_hash != self._initial_hash:
            raise LearnerError(
                f"{self._folder / ref} began with other weights ({info.initial_hash[:12]}); "
                f"expected {self._initial_hash[:12]}; start from the same agent model"
            )
        if info.lora_rank != self._config.lora_rank:
            raise LearnerError(
                f"{self._folder / ref} has lora_rank={info.lora_rank}; "
                f"expected {self._config.lora_rank}"
            )
        return info

    def _new_trainer(self, spec: LossSpec) -> PolicyTrainer:
        config = self._config
        loss: ImportanceSampling | PpoClip = ImportanceSampling()
        if spec.kind == "ppo_clip":
            loss = PpoClip(clip_low=spec.clip, clip_high=spec.clip)
        lora = None
        if config.lora_rank:
            lora = LoraConfig(
                rank=config.lora_rank, alpha=config.lora_rank * config.lora_alpha_per_rank
            )
        return PolicyTrainer(
            self._model,
            loss,
            AdamW(
                lr=0.0,  # every step brings its own
                betas=config.betas,
                weight_decay=config.weight_decay,
                max_norm=config.max_grad_norm,
            ),
            lora=lora,
            reference=self._initial,
            kl_coef=spec.kl_coef,
            token_budget=config.token_budget,
            seed=config.seed,
        )

    def _copy(self) -> Model:
        model = self._model
        lora = model.lora
        return Model(
            config=model.config,
            weights=model.weights.clone() if lora is None else model.weights,
            tokenizer=model.tokenizer,
            lora=None if lora is None else lora.clone(),
            compute_dtype=model.compute_dtype,
        )

    def _policy(self, model: Model, version: int) -> PublishedPolicy:
        return PublishedPolicy(
            model,
            version=version,
            num_slots=self._config.num_sessions,
            max_len=self._max_total_tokens,
        )


def _mean_logprob(rows: Sequence[TrainRow]) -> float | None:
    """Mean log-probability at sampling over the tokens that carry a gradient."""
    values = [
        value
        for row in rows
        if row.advantage
        for value, is_sampled in zip(row.logprobs, row.sampled, strict=True)
        if is_sampled
    ]
    return sum(values) / len(values) if values else None
