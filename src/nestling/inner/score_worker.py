"""The scorer process: `python -m nestling.inner.score_worker`, spoken to over its own pipes.

It holds the eval secret, the pinned bases and the libraries, stays warm between jobs, and reads
nothing of a job but one file of tensors. It ends when its input ends.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import signal
import sys
import time
from pathlib import Path
from typing import BinaryIO

from nestling.core.errors import ConfigError, ModelError
from nestling.core.seeds import derive_seed
from nestling.engine.checkpoint import Model
from nestling.engine.sampler import SamplingParams
from nestling.families import registry
from nestling.families.hidden_taskset import hidden_taskset
from nestling.families.splits import HIDDEN, EvalSecret, commitment, hidden_items
from nestling.inner.eval_settings import EVAL_SETTINGS
from nestling.inner.pinned_base import PinnedBase
from nestling.inner.score_wire import (
    MAX_LINE_BYTES,
    REQUEST,
    Ready,
    Refused,
    ScoreReply,
    ScoreRequest,
    Start,
)
from nestling.jobs.rollouts import play_env
from nestling.jobs.verifiers_host import VerifiersHost

__all__ = ["main"]


def main() -> None:
    """Answer requests from standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    requests, replies = _own_pipes()
    start = REQUEST.validate_json(requests.readline(MAX_LINE_BYTES))
    if not isinstance(start, Start):
        raise SystemExit("the first line must be a start message")
    try:
        scoring = _Scoring(start)
    except ConfigError as error:
        _send(replies, Refused(reason="scorer.config", detail=str(error)))
        return
    _send(replies, scoring.ready())
    while line := requests.readline(MAX_LINE_BYTES):
        request = REQUEST.validate_json(line)
        if not isinstance(request, ScoreRequest):
            raise SystemExit("only the first line may be a start message")
        try:
            reply: ScoreReply | Refused = scoring.score(request)
        except ModelError as error:
            reply = Refused(reason="scorer.refused", detail=str(error)[:2000])
        except ConfigError as error:
            reply = Refused(reason="scorer.config", detail=str(error)[:2000])
        _send(replies, reply)


class _Scoring:
    """Everything that stays loaded between requests."""

    def __init__(self, start: Start) -> None:
        self._secret = EvalSecret.load_or_create(Path(start.secret_path))
        self._folders = {name: Path(folder) for name, folder in start.bases.items()}
        self._base = functools.cache(self._load_base)

    def ready(self) -> Ready:
        """What the parent may know."""
        return Ready(
            fingerprint=_fingerprint(),
            commitments={split: commitment(self._secret, split) for split in HIDDEN},
            cpu_s=time.process_time(),
        )

    def score(self, request: ScoreRequest) -> ScoreReply:
        """Play the items; a model may be the base itself."""
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
            raise ModelError(f"no base model {name!r}; expected one of {sorted(self._folders)}")
        return PinnedBase(self._folders[name])

    def _play(self, model: Model, request: ScoreRequest) -> tuple[bool, ...]:
        family = registry.get(request.family)
        items = hidden_items(family, request.split, request.n, self._secret)
        seeds = [
            derive_seed(self._secret.key, "sampling", family.name, request.split, index)
            for index in range(request.n)
        ]
        params = SamplingParams(
            temperature=EVAL_SETTINGS.temperature,
            max_turn_tokens=EVAL_SETTINGS.max_turn_tokens,
            max_total_tokens=EVAL_SETTINGS.max_total_tokens,
            max_turns=EVAL_SETTINGS.max_turns,
        )
        host = VerifiersHost(hidden_taskset(family, items))
        try:
            rollouts = play_env(model, host, range(request.n), seeds, params)
        finally:
            host.close()
        return tuple(rollout.score.reward == 1.0 for rollout in rollouts)


def _own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Input and output of this protocol; whatever a library prints goes to standard error."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, replies


def _send(replies: BinaryIO, message: Ready | ScoreReply | Refused) -> None:
    replies.write(message.model_dump_json().encode() + b"\n")
    replies.flush()


def _fingerprint() -> str:
    """Settings, our own code, the libraries and the processor: all that may change a score."""
    digest = hashlib.sha256(EVAL_SETTINGS.model_dump_json().encode())
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


if __name__ == "__main__":
    main()
