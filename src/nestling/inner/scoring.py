"""Hidden items, pinned bases and the rules they are played by: what the scorer process keeps.

Importing this takes seconds (torch and verifiers); only the scorer process does.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final

from nestling.core.clock import SystemClock
from nestling.core.errors import ConfigError
from nestling.core.seeds import derive_seed
from nestling.engine.checkpoint import Model
from nestling.families import registry
from nestling.families.hidden_taskset import hidden_taskset
from nestling.families.item_play import EVAL_SAMPLING, EVAL_SAMPLING_OPEN, eval_sampling
from nestling.families.splits import HIDDEN, EvalSecret, commitment, hidden_items
from nestling.inner.guarded_env import Deadline
from nestling.inner.openai_config import OpenAiConfig
from nestling.inner.openai_serving import Serving
from nestling.inner.pinned_base import PinnedBase
from nestling.inner.score_wire import Ready, ScoreReply, ScoreRequest
from nestling.inner.stack_client import Stacks
from nestling.jobs.rollouts import EnvResponder, play_env
from nestling.jobs.verifiers_host import VerifiersHost

__all__ = ["Scoring"]

_OWN_SHARE: Final = 0.9
"""Of the time its parent waits: a process that waits for a stack gives up before it is ended, and lives on."""


class Scoring:
    """Everything that stays loaded between requests."""

    def __init__(
        self,
        secret: EvalSecret,
        bases: Mapping[str, Path],
        stacks: Sequence[str] = (),
        *,
        device: str = "cpu",
        openai: OpenAiConfig | None = None,
    ) -> None:
        """Stack processes (by their sockets) or a server sample; without either, this process does."""
        self._secret = secret
        self._stacks = Stacks(sockets=tuple(stacks)) if stacks else None
        self._serving = Serving(openai) if openai is not None else None
        self._folders = dict(bases)
        self._device = device
        self._base = functools.cache(self._load_base)

    def ready(self, wall_s: float) -> Ready:
        """What the parent may know.

        Raises:
            ConfigError: no server program.
            JobFailedError: `scorer.start_timeout`, of a stack that does not answer.
            LearnerError: a stack is away.
        """
        check = _deadline(wall_s, "scorer.start_timeout").check
        return Ready(
            fingerprint=_fingerprint(
                "" if self._stacks is None else self._stacks.fingerprint(check),
                "" if self._serving is None else self._serving.fingerprint(),
            ),
            commitments={split: commitment(self._secret, split) for split in HIDDEN},
        )

    def score(self, request: ScoreRequest) -> ScoreReply:
        """Play the items; the model may be the base itself.

        Raises:
            ModelError: the weights are not those of a trained copy of the base.
            ConfigError: unknown base or family, more items than there are, or no server program.
            JobFailedError: `scorer.*` of a server that samples, `scorer.timeout` of a stack that does not answer.
            LearnerError: a stack is away.
        """
        cpu_start_s = time.process_time()
        base = self._base(request.base)
        model = base.load_trained(Path(request.model_folder))
        correct, device_s = self._play(base, model, request)
        return ScoreReply(
            correct=correct,
            base_digest=base.digest,
            weights_hash=model.weights.content_hash(),
            delta_norm=base.delta_norm(model),
            cpu_s=time.process_time() - cpu_start_s + device_s,
        )

    def close(self) -> None:
        """End the server, if any."""
        if self._serving is not None:
            self._serving.close()

    def _load_base(self, name: str) -> PinnedBase:
        if name not in self._folders:
            raise ConfigError(f"no base model {name!r}; expected one of {sorted(self._folders)}")
        return PinnedBase(self._folders[name])

    def _play(
        self, base: PinnedBase, model: Model, request: ScoreRequest
    ) -> tuple[tuple[bool, ...], float]:
        """Which items were solved, and seconds spent in a stack or with a server."""
        family = registry.get(request.family)
        items = hidden_items(family, request.split, request.n, self._secret)
        seeds = [
            derive_seed(self._secret.key, "sampling", family.name, request.split, index)
            for index in range(request.n)
        ]
        host = VerifiersHost(hidden_taskset(family, items))
        device_s = 0.0
        try:
            if self._serving is not None:
                start_s = time.perf_counter()
                scores = self._serving.play(
                    base,
                    request.base,
                    Path(request.model_folder),
                    model,
                    host,
                    seeds,
                    eval_sampling(model.tokenizer),
                )
                rewards = [score.reward for score in scores]
                device_s = time.perf_counter() - start_s
            elif self._stacks is None:
                placed = replace(model, weights=model.weights.to(self._device))
                sampling = eval_sampling(model.tokenizer)
                played = play_env(placed, host, range(request.n), seeds, sampling)
                rewards = [one.score.reward for one in played]
            else:
                rewards, device_s = _play_stacked(self._stacks, model, request, host, seeds)
        finally:
            host.close()
        return tuple(reward == 1.0 for reward in rewards), device_s


def _play_stacked(
    stacks: Stacks, model: Model, request: ScoreRequest, host: VerifiersHost, seeds: Sequence[int]
) -> tuple[list[float], float]:
    """The same play by a stack process, which gets the weights that were checked here."""
    weights = model.weights.flat[0].numpy()
    check = _deadline(request.wall_s, "scorer.timeout").check
    with closing(stacks.join_weights(request.base, weights, check)) as job:
        responder = EnvResponder(host, model.tokenizer, range(request.n))
        rollouts = job.play(
            model.tokenizer,
            responder.prompts,
            seeds,
            eval_sampling(model.tokenizer),
            responder.respond,
        )
        return [score.reward for score in responder.score(rollouts)], job.busy_s


def _deadline(wall_s: float, reason: str) -> Deadline:
    return Deadline(SystemClock(), _OWN_SHARE * wall_s, reason)


def _fingerprint(stacks: str, server: str) -> str:
    """Settings, our own code, the libraries, the processor, and who samples: all that may change a score."""
    digest = hashlib.sha256(repr((EVAL_SAMPLING, EVAL_SAMPLING_OPEN)).encode() + stacks.encode())
    digest.update(server.encode())
    package = Path(sys.modules["nestling"].__file__ or "").parent
    for part in ("core", "engine", "families", "jobs", "inner"):
        for path in sorted((package / part).rglob("*.py")):
            digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    for library in ("torch", "numpy", "tokenizers", "verifiers"):
        digest.update(f"{library}=={importlib.metadata.version(library)}".encode())
    digest.update(f"{platform.python_version()} {platform.machine()} {_processor()}".encode())
    return digest.hexdigest()


def _processor() -> str:
    """The processor's name: another one may round, and so sample, differently."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("model name")), platform.processor())
