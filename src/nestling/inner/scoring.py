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
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from nestling.core.errors import ConfigError
from nestling.core.seeds import derive_seed
from nestling.engine.checkpoint import Model
from nestling.families import registry
from nestling.families.hidden_taskset import hidden_taskset
from nestling.families.item_play import EVAL_SAMPLING, EVAL_SAMPLING_OPEN, eval_sampling
from nestling.families.splits import HIDDEN, EvalSecret, commitment, hidden_items
from nestling.inner.pinned_base import PinnedBase
from nestling.inner.score_wire import Ready, ScoreReply, ScoreRequest
from nestling.jobs.rollouts import play_env
from nestling.jobs.verifiers_host import VerifiersHost

__all__ = ["Scoring"]


class Scoring:
    """Everything that stays loaded between requests."""

    def __init__(
        self, secret: EvalSecret, bases: Mapping[str, Path], *, device: str = "cpu"
    ) -> None:
        self._secret = secret
        self._folders = dict(bases)
        self._device = device
        self._base = functools.cache(self._load_base)

    def ready(self) -> Ready:
        """What the parent may know."""
        return Ready(
            fingerprint=_fingerprint(),
            commitments={split: commitment(self._secret, split) for split in HIDDEN},
            cpu_s=time.process_time(),
        )

    def score(self, request: ScoreRequest) -> ScoreReply:
        """Play the items; the model may be the base itself.

        Raises:
            ModelError: the weights are not those of a trained copy of the base.
            ConfigError: unknown base or family, or more items than there are.
        """
        cpu_start_s = time.process_time()
        base = self._base(request.base)
        model = base.load_trained(Path(request.model_folder))
        correct = self._play(model, request)
        return ScoreReply(
            correct=correct,
            base_digest=base.digest,
            weights_hash=model.weights.content_hash(),
            delta_norm=base.delta_norm(model),
            cpu_s=time.process_time() - cpu_start_s,
        )

    def _load_base(self, name: str) -> PinnedBase:
        if name not in self._folders:
            raise ConfigError(f"no base model {name!r}; expected one of {sorted(self._folders)}")
        return PinnedBase(self._folders[name])

    def _play(self, model: Model, request: ScoreRequest) -> tuple[bool, ...]:
        family = registry.get(request.family)
        items = hidden_items(family, request.split, request.n, self._secret)
        seeds = [
            derive_seed(self._secret.key, "sampling", family.name, request.split, index)
            for index in range(request.n)
        ]
        host = VerifiersHost(hidden_taskset(family, items))
        try:
            placed = replace(model, weights=model.weights.to(self._device))
            sampling = eval_sampling(model.tokenizer)
            rollouts = play_env(placed, host, range(request.n), seeds, sampling)
        finally:
            host.close()
        return tuple(rollout.score.reward == 1.0 for rollout in rollouts)


def _fingerprint() -> str:
    """Settings, our own code, the libraries and the processor: all that may change a score."""
    digest = hashlib.sha256(repr((EVAL_SAMPLING, EVAL_SAMPLING_OPEN)).encode())
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
