"""The Tinker SDK as blocking calls; the only module that imports it.

Only names that SDK 0.24.1 and 0.38 share are used: plain methods and `.result()`, never the `_async`
twins. What creates a client gives the client itself in the old SDK and a future of it in the new one.
Sums over tokens are the service's convention for losses (its documentation; SkyRL 0.3.0 agrees).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np

from nestling.core.errors import ConfigError

__all__ = [
    "KEY_VARIABLE",
    "AdamSettings",
    "Answer",
    "Datum",
    "Model",
    "Pending",
    "Service",
    "TinkerService",
    "read_key",
]

KEY_VARIABLE: Final = "TINKER_API_KEY"
_TESTED: Final = ((0, 24), (0, 38))
"""Lowest and highest minor version the calls below were tried with."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Client = Any
"""An SDK client; opaque outside this module."""


class Pending(Protocol[T_co]):
    """A call that is made, in the thread that asks, when its result is asked for."""

    def result(self, timeout_s: float) -> T_co:
        """Make the call and wait for it; raises whatever the SDK raises."""
        ...

    def cancel(self) -> None:
        """Give up waiting, from another thread; does nothing when that is not possible."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One sampled sequence."""

    ids: list[int]
    logprobs: list[float]
    """At temperature 1, whatever was asked for."""
    stopped: bool
    cached_tokens: int = 0
    """Tokens of the prompt that were not billed in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One sequence with what the loss needs at each predicted token; T = len(ids) - 1."""

    ids: list[int]
    logprobs: np.ndarray
    """[T] at sampling; 0 where nothing was sampled."""
    advantages: np.ndarray
    """[T]; 0 where nothing was sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """One optimiser step; no clipping, as in the cookbook."""

    lr: float
    beta1: float
    beta2: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model the service offers; None: it does not say."""

    name: str
    max_context: int | None = None
    trainable: bool | None = None


class Service(Protocol):
    """What the learner needs of a training service; every call may be made from any thread."""

    def models(self) -> Pending[list[Model]]:
        """What may be trained and sampled."""
        ...

    def create(self, base_model: str, *, rank: int, seed: int) -> Pending[Client]:
        """A fresh adapter to train; it does nothing yet."""
        ...

    def resume(self, path: str) -> Pending[Client]:
        """An adapter to train with the optimiser of a saved state."""
        ...

    def sampler(self, *, base_model: str | None = None, path: str | None = None) -> Pending[Client]:
        """An immutable policy: a base model, or saved sampler weights."""
        ...

    def sample(
        self,
        client: Client,
        ids: Sequence[int],
        *,
        seed: int,
        max_tokens: int,
        stop_ids: Sequence[int],
    ) -> Pending[Answer]:
        """One sequence at temperature 1."""
        ...

    def logprobs(self, client: Client, ids: Sequence[int]) -> Pending[np.ndarray]:
        """Log-probability of each token but the first, [len(ids) - 1]."""
        ...

    def forward_backward(
        self, client: Client, data: Sequence[Datum], loss: str, config: dict[str, float]
    ) -> Pending[list[np.ndarray]]:
        """Add the gradient of the summed loss; the log-probabilities now, one array per datum."""
        ...

    def optim_step(self, client: Client, adam: AdamSettings) -> Pending[dict[str, float]]:
        """Apply the gradient; what the service tells of it."""
        ...

    def save_state(self, client: Client, name: str, ttl_s: int) -> Pending[str]:
        """Weights and optimiser, as a path for `resume`."""
        ...

    def save_sampler(self, client: Client, name: str, ttl_s: int) -> Pending[str]:
        """Weights, as a path for `sampler`."""
        ...

    def delete(self, path: str) -> Pending[None]:
        """Forget a saved state."""
        ...


def read_key(environment: dict[str, str] | None = None) -> str:
    """The key from the environment, its only home; raises `ConfigError`."""
    key = (os.environ if environment is None else environment).get(KEY_VARIABLE, "").strip()
    if not key:
        raise ConfigError(
            f"{KEY_VARIABLE} is not set; expected the key of a Tinker account; export it in the shell "
            "that starts the run, and keep it out of files"
        )
    return key


class _Call(Generic[T]):
    """A `Pending` over an SDK call that gives its value or a future of it."""

    def __init__(self, start: Callable[[], Any], read: Callable[[Any], T]) -> None:
        self._start = start
        self._read = read
        self._future: Any = None

    def result(self, timeout_s: float) -> T:
        self._future = self._start()
        if hasattr(self._future, "result"):
            return self._read(self._future.result(timeout=timeout_s))
        return self._read(self._future)

    def cancel(self) -> None:
        cancel = getattr(self._future, "cancel", None)
        if cancel is not None:
            cancel()


class TinkerService:
    """`Service` over the SDK; the connection is opened by the first call."""

    def __init__(self, key: str, base_url: str = "") -> None:
        self._sdk = _import_sdk()
        options = {"base_url": base_url} if base_url else {}
        self._client = self._sdk.ServiceClient(api_key=key, **options)

    def models(self) -> Pending[list[Model]]:
        """See `Service`; a new SDK asks on its REST client."""

        def ask() -> Any:  # noqa: ANN401 (an SDK future or value)
            rest = self._client.create_rest_client()
            owner = rest if hasattr(rest, "get_server_capabilities") else self._client
            return owner.get_server_capabilities()

        def read(found: Any) -> list[Model]:  # noqa: ANN401
            return [
                Model(
                    name=one.model_name or "",
                    max_context=one.max_context_length,
                    trainable=getattr(one, "trainable", None),
                )
                for one in found.supported_models
            ]

        return _Call(ask, read)

    def create(self, base_model: str, *, rank: int, seed: int) -> Pending[Client]:
        """See `Service`."""
        return _Call(
            lambda: self._client.create_lora_training_client(
                base_model=base_model, rank=rank, seed=seed
            ),
            _same,
        )

    def resume(self, path: str) -> Pending[Client]:
        """See `Service`."""
        return _Call(
            lambda: self._client.create_training_client_from_state_with_optimizer(path), _same
        )

    def sampler(self, *, base_model: str | None = None, path: str | None = None) -> Pending[Client]:
        """See `Service`."""
        return _Call(
            lambda: self._client.create_sampling_client(model_path=path, base_model=base_model),
            _same,
        )

    def sample(
        self,
        client: Client,
        ids: Sequence[int],
        *,
        seed: int,
        max_tokens: int,
        stop_ids: Sequence[int],
    ) -> Pending[Answer]:
        """See `Service`."""
        types = self._sdk.types
        params = types.SamplingParams(
            max_tokens=max_tokens, seed=seed, stop=list(stop_ids), temperature=1.0
        )

        def read(found: Any) -> Answer:  # noqa: ANN401
            first = found.sequences[0]
            if first.logprobs is None:
                raise ValueError("the service gave no log-probabilities")
            return Answer(
                ids=[int(token) for token in first.tokens],
                logprobs=[float(value) for value in first.logprobs],
                stopped=str(first.stop_reason) == "stop",
                cached_tokens=int(getattr(found, "prompt_cache_hit_tokens", 0) or 0),
            )

        return _Call(
            lambda: client.sample(
                prompt=types.ModelInput.from_ints(list(ids)), num_samples=1, sampling_params=params
            ),
            read,
        )

    def logprobs(self, client: Client, ids: Sequence[int]) -> Pending[np.ndarray]:
        """See `Service`; hosted, the list begins with None for the first token, on SkyRL it does not."""

        def read(found: Any) -> np.ndarray:  # noqa: ANN401
            values = list(found)[-(len(ids) - 1) :] if len(ids) > 1 else []
            return np.asarray(values, dtype=np.float32)

        prompt = self._sdk.types.ModelInput.from_ints(list(ids))
        return _Call(lambda: client.compute_logprobs(prompt), read)

    def forward_backward(
        self, client: Client, data: Sequence[Datum], loss: str, config: dict[str, float]
    ) -> Pending[list[np.ndarray]]:
        """See `Service`."""
        sent = [self.datum(one) for one in data]

        def read(found: Any) -> list[np.ndarray]:  # noqa: ANN401
            return [
                np.asarray(one["logprobs"].data, dtype=np.float32).reshape(-1)
                for one in found.loss_fn_outputs
            ]

        return _Call(
            lambda: client.forward_backward(sent, loss_fn=loss, loss_fn_config=config or None), read
        )

    def optim_step(self, client: Client, adam: AdamSettings) -> Pending[dict[str, float]]:
        """See `Service`."""
        params = self._sdk.types.AdamParams(
            learning_rate=adam.lr, beta1=adam.beta1, beta2=adam.beta2
        )
        return _Call(lambda: client.optim_step(params), lambda found: dict(found.metrics or {}))

    def save_state(self, client: Client, name: str, ttl_s: int) -> Pending[str]:
        """See `Service`."""
        return _Call(
            lambda: client.save_state(name, ttl_seconds=ttl_s), lambda found: str(found.path)
        )

    def save_sampler(self, client: Client, name: str, ttl_s: int) -> Pending[str]:
        """See `Service`."""
        return _Call(
            lambda: client.save_weights_for_sampler(name, ttl_seconds=ttl_s),
            lambda found: str(found.path),
        )

    def delete(self, path: str) -> Pending[None]:
        """See `Service`."""
        return _Call(
            lambda: self._client.create_rest_client().delete_checkpoint_from_tinker_path(path),
            lambda _: None,
        )

    def datum(self, one: Datum) -> Any:  # noqa: ANN401 (tinker.Datum)
        """A datum as the SDK sends it: inputs without the last token, targets without the first."""
        types = self._sdk.types
        return types.Datum(
            model_input=types.ModelInput.from_ints(one.ids[:-1]),
            loss_fn_inputs={
                "target_tokens": np.asarray(one.ids[1:], dtype=np.int64),
                "logprobs": np.asarray(one.logprobs, dtype=np.float32),
                "advantages": np.asarray(one.advantages, dtype=np.float32),
            },
        )


def _same(found: Any) -> Any:  # noqa: ANN401 (an SDK client)
    return found


def _import_sdk() -> Any:  # noqa: ANN401 (the module)
    try:
        import tinker
    except ImportError as error:
        raise ConfigError(
            f"the Tinker SDK cannot be imported ({error}); expected the extra `tinker`; install it "
            'with: pip install "nestling[tinker]"'
        ) from error
    version = metadata.version("tinker")
    minor = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not _TESTED[0] <= minor <= _TESTED[1]:
        raise ConfigError(
            f"the Tinker SDK {version} was not tried; expected 0.24 to 0.38; install it with: "
            'pip install "nestling[tinker]"'
        )
    return tinker
