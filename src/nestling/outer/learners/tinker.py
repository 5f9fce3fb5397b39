"""A LoRA adapter at a Tinker service as a learner.

Differences from the embedded learner, each because of the service:
- Log-probabilities come at temperature 1, in sampling as in the loss, so that is the only temperature.
- The loss is sent as a sum over tokens, as the cookbook does; Adam does not care, and what is reported
  is the mean. There is no clipping of the gradient.
- `kl_coef` becomes part of the advantages: 1 - exp(reference - logp) per token, with logp at sampling.
  Right after sampling that is exactly the gradient of the embedded learner's term. It costs one pass of
  the base model over every row.
- States are kept by the service and expire; the run folder keeps their names.

A published policy is saved weights, or the base model before the first update.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from nestling.core.clock import Clock, SystemClock
from nestling.core.errors import LearnerError
from nestling.outer.config import TinkerConfig
from nestling.outer.learner import Handle, LossSpec, LossStats, Sampled, StepStats, TrainRow
from nestling.outer.learners import tinker_loss
from nestling.outer.learners.tinker_calls import Caller
from nestling.outer.learners.tinker_faults import Pause, PauseWatch, TinkerFaultError
from nestling.outer.learners.tinker_prices import Prices, Usage
from nestling.outer.learners.tinker_service import AdamSettings, Pending, Service
from nestling.outer.learners.tinker_spending import Spending
from nestling.outer.learners.tinker_states import SavedState, StateFolder
from nestling.outer.service_loss import service_loss

__all__ = ["TEMPERATURE", "TinkerHandle", "TinkerLearner"]

TEMPERATURE: Final = 1.0
"""The only temperature: the service's losses know no other."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TinkerHandle:
    """One published policy."""

    version: int
    path: str | None
    """Sampler weights on the service; None: the base model."""
    client: Any


class TinkerLearner:
    """Satisfies `Learner`; use it from one event loop and `close` it at the end.

    `folder` keeps the names of saved states; `stop_ids` end a turn. `prices` are for estimates and for
    `config.max_usd`. `on_pause` is called in any thread and must be quick.
    """

    temperature = TEMPERATURE

    def __init__(
        self,
        service: Service,
        folder: Path,
        *,
        config: TinkerConfig,
        stop_ids: Sequence[int],
        prices: Prices | None = None,
        on_pause: Callable[[Pause], None] | None = None,
        clock: Clock | None = None,
        hidden: tuple[str, ...] = (),
    ) -> None:
        self._service = service
        self._states = StateFolder(folder)
        self._config = config
        self._stop_ids = tuple(stop_ids)
        self._spending = Spending(self._states, prices, config.max_usd, config.base_model)
        used = clock or SystemClock()
        self._watch = PauseWatch(used, on_pause, secrets=hidden)
        self._caller = Caller(self._watch, used, heartbeat_s=config.heartbeat_s, secrets=hidden)
        self._training: Any = None
        self._state_path: str | None = None
        self._base: Any = None
        self._version = 0
        self._order = 0
        self._sampler_path: str | None = None
        """Saved sampler weights of the current version."""
        self._pending_tokens = 0

    @property
    def usage(self) -> Usage:
        """Tokens spent by the run so far."""
        return self._spending.used

    def costs(self) -> dict[str, float]:
        """What was spent since the last call, by metric name; USD only where prices are known."""
        return self._spending.costs()

    async def sample(
        self,
        handle: Handle,
        ids: Sequence[int],
        *,
        session: str,  # noqa: ARG002 (the service keeps its own cache)
        seed: int,
        max_tokens: int,
        temperature: float,
    ) -> Sampled:
        """One turn; a try that took too long is made again."""
        if not isinstance(handle, TinkerHandle):
            raise LearnerError(f"{handle!r} was not published by this learner")
        _check_temperature(temperature)
        most = Usage(prefill=len(ids), sample=max_tokens)
        for attempt in range(1, self._config.sample_attempts + 1):
            pending = self._service.sample(
                handle.client,
                ids,
                seed=seed % 2**31,
                max_tokens=max_tokens,
                stop_ids=self._stop_ids,
            )
            try:
                with self._spending.reserve(most) as bill:
                    timeout_s = self._config.sample_timeout_s
                    answer = await self._caller.call("sample", timeout_s, pending)
                    cached = min(answer.cached_tokens, len(ids))
                    bill.used = Usage(
                        prefill=len(ids) - cached, cached_prefill=cached, sample=len(answer.ids)
                    )
                break
            except TinkerFaultError as error:
                if error.kind != "timeout" or attempt == self._config.sample_attempts:
                    raise
                logger.warning("tinker: turn of %d tokens asked for again: %s", len(ids), error)
        if not answer.ids or len(answer.ids) != len(answer.logprobs):
            raise TinkerFaultError(
                "failed",
                f"sample gave {len(answer.ids)} tokens and {len(answer.logprobs)} log-probabilities",
            )
        return Sampled(ids=answer.ids, logprobs=answer.logprobs, stopped=answer.stopped)

    async def forward_backward(self, rows: Sequence[TrainRow], loss: LossSpec) -> LossStats:
        """Add a gradient; rows without an advantage carry none and are not sent."""
        if not any(any(row.sampled) for row in rows):
            raise LearnerError(f"{len(rows)} rows without a sampled token; expected at least one")
        _check_temperature(loss.temperature)
        kept = [row for row in rows if row.advantage and any(row.sampled)]
        if not kept:
            raise LearnerError(
                "no row has an advantage; expected rewards that differ within a group"
            )
        references = await self._reference_logprobs(kept) if loss.kl_coef else None
        data = [
            tinker_loss.datum(
                row,
                kl_coef=loss.kl_coef,
                reference_T=None if references is None else references[index],
            )
            for index, row in enumerate(kept)
        ]
        kind, config = service_loss(loss.kind, loss.clip)
        client = await self._training_client()
        pending = self._service.forward_backward(client, data, kind, config)
        with self._spending.reserve(Usage(train=sum(len(one.ids) - 1 for one in data))):
            logprobs = await self._train_call("forward_backward", pending)
        stats = tinker_loss.stats(kept, logprobs, loss, references)
        self._pending_tokens += stats.num_tokens
        return stats

    async def optim_step(self, lr: float) -> StepStats:
        """Apply the gradient."""
        if not self._pending_tokens:
            raise LearnerError("no gradient is pending; call forward_backward first")
        tokens, self._pending_tokens = self._pending_tokens, 0
        beta1, beta2 = self._config.betas
        adam = AdamSettings(lr=lr, beta1=beta1, beta2=beta2)
        client = await self._training_client()
        told = await self._train_call("optim_step", self._service.optim_step(client, adam))
        norm = next((value for name, value in told.items() if name.endswith("grad_norm")), None)
        if norm is not None and not np.isfinite(norm):
            raise TinkerFaultError("failed", f"optim_step met a gradient of norm {norm}")
        self._version += 1
        self._sampler_path = None
        return StepStats(
            version=self._version,
            learning_rate=lr,
            # Of the sum over tokens; the mean's is that many times smaller.
            grad_norm=None if norm is None else float(norm) / tokens,
        )

    async def publish(self) -> TinkerHandle:
        """Saved sampler weights; before the first update the base model."""
        return await self._handle(self._version, await self._current_sampler())

    async def save(self, name: str) -> str:
        """Save state and sampler weights on the service; the reference is `name`."""
        state_path = None
        if self._version:
            client = await self._training_client()
            pending = self._service.save_state(
                client, _fresh_name(name), self._config.checkpoint_ttl_s
            )
            state_path = await self._train_call("save_state", pending)
        self._order += 1
        state = SavedState(
            version=self._version,
            base_model=self._config.base_model,
            lora_rank=self._config.lora_rank,
            seed=self._config.seed,
            state_path=state_path,
            sampler_path=await self._current_sampler(),
            order=self._order,
        )
        self._states.write(name, state)
        await self._thin_out()
        return name

    async def load(self, ref: str) -> None:
        """Go back to a saved state; the service makes a new training run from it."""
        state = self._checked(ref)
        if state.deleted:
            raise LearnerError(
                f"the optimiser of {ref!r} was deleted, the newest {self._config.keep_states} are "
                "kept; resume from a newer one, or raise learner.keep_states before the run"
            )
        self._training, self._state_path = None, state.state_path
        self._version, self._order = state.version, max(self._order, state.order)
        self._sampler_path, self._pending_tokens = state.sampler_path, 0
        if state.state_path is not None:
            await self._training_client()

    async def open_policy(self, ref: str) -> TinkerHandle:
        """A saved state as a policy to sample; the learner itself stays as it is."""
        state = self._checked(ref)
        return await self._handle(state.version, state.sampler_path)

    def close(self) -> None:
        """Stop listening to the SDK; may be called twice."""
        self._watch.close()

    async def _handle(self, version: int, path: str | None) -> TinkerHandle:
        client = await (self._base_sampler() if path is None else self._sampler(path))
        return TinkerHandle(version=version, path=path, client=client)

    async def _sampler(self, path: str) -> Any:  # noqa: ANN401 (an SDK client)
        return await self._train_call("create_sampling_client", self._service.sampler(path=path))

    async def _base_sampler(self) -> Any:  # noqa: ANN401 (an SDK client)
        if self._base is None:
            pending = self._service.sampler(base_model=self._config.base_model)
            self._base = await self._train_call("create_sampling_client", pending)
        return self._base

    async def _current_sampler(self) -> str | None:
        if self._version and self._sampler_path is None:
            client = await self._training_client()
            pending = self._service.save_sampler(
                client, _fresh_name(f"v{self._version:06d}"), self._config.checkpoint_ttl_s
            )
            self._sampler_path = await self._train_call("save_weights_for_sampler", pending)
        return self._sampler_path

    async def _training_client(self) -> Any:  # noqa: ANN401 (an SDK client)
        """The adapter that is trained; made or resumed when it is first needed."""
        if self._training is None:
            config = self._config
            if self._state_path is None:
                pending = self._service.create(
                    config.base_model, rank=config.lora_rank, seed=config.seed
                )
                self._training = await self._train_call("create_lora_training_client", pending)
            else:
                pending = self._service.resume(self._state_path)
                self._training = await self._train_call("resume from a saved state", pending)
        return self._training

    async def _reference_logprobs(self, rows: Sequence[TrainRow]) -> list[np.ndarray]:
        """Of the base model, [len(ids) - 1] for each row."""
        base = await self._base_sampler()
        try:
            with self._spending.reserve(Usage(prefill=sum(len(row.ids) for row in rows))):
                async with asyncio.TaskGroup() as tasks:
                    asked = [
                        tasks.create_task(
                            self._train_call(
                                "compute_logprobs", self._service.logprobs(base, row.ids)
                            )
                        )
                        for row in rows
                    ]
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group
        return [task.result() for task in asked]

    async def _train_call(self, what: str, pending: Pending[T]) -> T:
        return await self._caller.call(what, self._config.train_timeout_s, pending)

    async def _thin_out(self) -> None:
        """Delete old optimisers on the service; a server that cannot delete keeps them until they expire."""
        old = [
            (name, state)
            for name, state in self._states.all()
            if state.state_path is not None and not state.deleted
        ]
        for name, state in old[: -self._config.keep_states]:
            assert state.state_path is not None
            self._states.write(name, state.model_copy(update={"deleted": True}))
            try:
                await self._train_call("delete", self._service.delete(state.state_path))
            except TinkerFaultError as error:
                logger.info("tinker: %s stays until it expires: %s", state.state_path, error)

    def _checked(self, ref: str) -> SavedState:
        state, config = self._states.read(ref), self._config
        found = (state.base_model, state.lora_rank, state.seed)
        expected = (config.base_model, config.lora_rank, config.seed)
        if found != expected:
            raise LearnerError(
                f"{ref!r} was saved with base_model, lora_rank, seed = {found}; expected {expected}; "
                "resume with the settings the run began with"
            )
        return state


def _check_temperature(temperature: float) -> None:
    if temperature != TEMPERATURE:
        raise LearnerError(
            f"temperature={temperature:g} with a Tinker service, whose losses are those of temperature "
            "1; expected 1; set outer.temperature = 1.0"
        )


def _fresh_name(name: str) -> str:
    """A name no other checkpoint has: services refuse to write one again."""
    return f"{name.replace('.', '-')}-{secrets.token_hex(4)}"
