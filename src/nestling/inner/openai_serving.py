"""Hidden items played by a served model: which weights are served, and a server that may die on the way."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

import httpx

from nestling.core.clock import Clock, SystemClock
from nestling.core.errors import JobFailedError, ModelError
from nestling.engine.checkpoint import Model
from nestling.engine.lora import LoraWeights, load_adapter, save_adapter
from nestling.engine.sampler import SamplingParams
from nestling.inner.disk import temporary_folder, writing
from nestling.inner.openai_client import ask_all
from nestling.inner.openai_config import OpenAiConfig
from nestling.inner.openai_play import play_served
from nestling.inner.openai_request import AskedTurn, SampledTurn, read_turn, turn_body
from nestling.inner.openai_server import MAX_LORA_RANK, OwnServer, version_of
from nestling.inner.pinned_base import PinnedBase
from nestling.jobs.rollout_env import RolloutEnv, ScoreRecord

__all__ = ["Serving"]

_ADAPTER: Final = "adapter"
"""In a trained model's folder: the adapter that was merged into it."""
_TRAINED: Final = "trained"
"""What trained weights are called at the server."""
_SAME_NORM: Final = 1e-3
"""An adapter is that of the whole model when merging it gives weights this close, relative to what training moved."""
_SPARE_TOKENS: Final = 64
"""Templates of the hub may put a few more tokens around a turn than ours."""


class Serving:
    """A server for one model after the other; used from one thread."""

    def __init__(self, config: OpenAiConfig, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock or SystemClock()
        self._rng = random.Random(0)
        self._own: OwnServer | None = None
        self.restarts = 0
        """Of servers that died, so far."""

    def fingerprint(self) -> str:
        """Settings and versions that may change a score; what another party serves at a URL cannot be known."""
        settings = self._config.model_dump_json(
            exclude={"keep", "start_s", "restarts", "retries", "request_s"}
        )
        return f"{settings} {version_of(self._config)}"

    def play(
        self,
        base: PinnedBase,
        base_name: str,
        model_folder: Path,
        model: Model,
        env: RolloutEnv,
        seeds: Sequence[int],
        params: SamplingParams,
    ) -> list[ScoreRecord]:
        """Verdicts on one rollout per seed with `model`, the checked weights of `model_folder`.

        Raises:
            ConfigError: the server's program does not exist.
            ModelError: the folder changed while it was looked at.
            JobFailedError: `scorer.server`, `scorer.request`, `scorer.protocol`, `scorer.disk`, or `scorer.refused` for whole
                weights that a server of others cannot be given.
        """
        sampling = SamplingParams(
            temperature=self._config.temperature,
            max_turn_tokens=params.max_turn_tokens,
            max_total_tokens=params.max_total_tokens,
            max_turns=params.max_turns,
        )
        with self._served(base, base_name, model_folder, model, params) as served:
            return play_served(
                served.ask, env, base.model.tokenizer, range(len(seeds)), seeds, sampling
            )

    def close(self) -> None:
        """End the server; may be called twice."""
        if self._own is not None:
            self._own.close()
            self._own = None

    @contextmanager
    def _served(
        self, base: PinnedBase, base_name: str, folder: Path, model: Model, params: SamplingParams
    ) -> Iterator[_Served]:
        max_len = params.max_total_tokens + _SPARE_TOKENS
        moved = base.delta_norm(model)
        adapter = None if moved == 0.0 else self._adapter(base, folder, model, moved)
        try:
            if moved == 0.0 or adapter is not None:
                self._use(base.folder, base_name, max_len)
                if adapter is None:
                    yield _Served(self, base_name)
                    return
                name = f"{_TRAINED}-{model.weights.content_hash()[:16]}"
                with temporary_folder("scorer.disk", "nestling-adapter-") as private:
                    with writing("scorer.disk", private):
                        save_adapter(private, adapter, base_model=base_name)
                    with closing(_Served(self, name, private)) as served:
                        yield served
                return
            if self._config.kind == "url":
                raise JobFailedError(
                    "scorer.refused",
                    "all weights were trained, and a server at a URL can be given adapters only; train with lora_rank, or "
                    "set inner.openai.kind to vllm",
                )
            with base.checked_copy(folder) as private:
                self._use(private, _TRAINED, max_len)
                try:
                    yield _Served(self, _TRAINED)
                finally:
                    self.close()
        finally:
            if not self._config.keep:
                self.close()

    def _adapter(
        self, base: PinnedBase, folder: Path, model: Model, moved: float
    ) -> LoraWeights | None:
        """The folder's adapter, when it is the whole of what was trained and the server takes adapters."""
        if self._config.kind == "nestling" or not (folder / _ADAPTER).is_dir():
            return None
        try:
            adapter = load_adapter(folder / _ADAPTER, base.model.config)
        except ModelError:
            return None
        apart = adapter.merged(base.model.weights).distance(model.weights)
        fits = adapter.lora.rank <= MAX_LORA_RANK and apart <= _SAME_NORM * moved
        return adapter if fits else None

    def _use(self, folder: Path, name: str, max_len: int) -> None:
        """Have the right model ready to be served; another one is ended first."""
        if self._config.kind == "url":
            return
        if self._own is not None and (self._own.model, self._own.name) != (folder, name):
            self.close()
        if self._own is None:
            self._own = OwnServer(self._config, folder, name, max_len, self._clock)

    def url(self) -> str:
        """Of a server that answers; starts it when it does not run."""
        if self._own is None:
            return self._config.url
        self._own.start()
        return self._own.url

    def is_alive(self) -> bool:
        """False once our own server has died; of others nothing is known."""
        return self._own is None or self._own.is_alive()

    def words(self) -> str:
        """What our own server said last."""
        return "" if self._own is None else self._own.last_words()

    @property
    def config(self) -> OpenAiConfig:
        return self._config

    @property
    def rng(self) -> random.Random:
        return self._rng

    @property
    def key(self) -> str:
        """Of a server of others; ours listens on loopback only."""
        return os.environ.get(self._config.key_env, "") if self._config.kind == "url" else ""


class _Served:
    """One set of weights under one name, of which a server that has the base may have to be told."""

    def __init__(self, serving: Serving, name: str, adapter: Path | None = None) -> None:
        self._serving = serving
        self._name = name
        self._adapter = adapter
        self._given_to = ""

    def ask(self, turns: Sequence[AskedTurn]) -> list[SampledTurn]:
        """Every turn exactly once, over as many servers as it takes."""
        serving = self._serving
        config = serving.config
        bodies = [
            turn_body(
                turn,
                model=self._name,
                temperature=config.temperature,
                extensions=config.extensions,
            )
            for turn in turns
        ]
        replies: list[dict[str, object] | None] = [None] * len(bodies)
        for attempt in range(config.restarts + 1):
            if attempt:
                serving.restarts += 1
            url = serving.url()
            self._give_adapter(url)
            ask_all(
                url,
                bodies,
                replies,
                config=config,
                key=serving.key,
                is_alive=serving.is_alive,
                rng=serving.rng,
            )
            answered = [reply for reply in replies if reply is not None]
            if len(answered) == len(bodies):
                return [read_turn(reply) for reply in answered]
        raise JobFailedError(
            "scorer.server",
            f"the server died {config.restarts + 1} times on one scoring: {serving.words()}"[:1500],
        )

    def close(self) -> None:
        """Take the adapter from a server that lives on."""
        if self._given_to and self._serving.is_alive():
            with suppress(httpx.TransportError):
                self._post(self._given_to, "unload_lora_adapter", {"lora_name": self._name})
        self._given_to = ""

    def _give_adapter(self, url: str) -> None:
        if self._adapter is None or self._given_to == url:
            return
        told = {"lora_name": self._name, "lora_path": str(self._adapter)}
        try:
            answer = self._post(url, "load_lora_adapter", told)
        except httpx.TransportError as error:
            raise JobFailedError(
                "scorer.server", f"the adapter cannot be given: {error}"
            ) from error
        if answer.status_code != 200:
            raise JobFailedError(
                "scorer.request",
                f"the server takes no adapter: HTTP {answer.status_code}: {answer.text[:300]}; vLLM wants "
                "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
            )
        self._given_to = url

    def _post(self, url: str, path: str, body: dict[str, str]) -> httpx.Response:
        key = self._serving.key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with httpx.Client(timeout=self._serving.config.request_s, headers=headers) as http:
            return http.post(f"{url}/{path}", json=body)
