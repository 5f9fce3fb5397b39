"""Why a prime-rl run failed: a reason code and the log lines that say it.

Texts are those of prime-rl at commit 559b447 and of the libraries below it. Where several fit, the cause comes before
its consequences: an environment that cannot be imported also ends the orchestrator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nestling.core.errors import JobFailedError

__all__ = ["failure", "known_cause", "last_words"]

_TAIL_BYTES: Final = 256 * 1024
_MAX_LINE_CHARS: Final = 300
_MAX_DETAIL_CHARS: Final = 1500
_ANSI: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_ERROR_LINE: Final = re.compile(r"error|exception|traceback|failed|fatal|killed", re.IGNORECASE)
_OWN: Final = "rl.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cause:
    reason: str
    logs: tuple[str, ...]
    """Names of log files without folder; `envs` stands for all of environment servers."""
    pattern: re.Pattern[str]
    advice: str


_IMPORT: Final = r"ModuleNotFoundError|ImportError|cannot import name|has no attribute '__all__'"

_CAUSES: Final = (
    _Cause(
        reason="train.disk",
        logs=("trainer.log", "inference.log", "orchestrator.log", _OWN),
        pattern=re.compile(
            r"\[Errno \d+\] (?:No space left on device|Disk quota exceeded)|StorageFull"
        ),
        advice="a disk that prime-rl writes to is full: free some room and run the job again",
    ),
    _Cause(
        reason="train.out_of_memory",
        logs=("trainer.log", "inference.log"),
        pattern=re.compile(
            r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|No available memory for the cache"
            r"|Free memory on device .* is less than desired"
        ),
        advice="the GPU's memory is too small: lower seq_len or batch_size, use LoRA, or choose the smaller base model",
    ),
    _Cause(
        reason="env.import",
        logs=("envs",),
        pattern=re.compile(_IMPORT + "|SyntaxError|NameError"),
        advice="the job's package does not import in prime-rl's environment",
    ),
    _Cause(
        reason="env.import",
        logs=(_OWN,),
        pattern=re.compile(rf"(?:{_IMPORT}).*(?:environment|tools|job_[0-9a-f]+)"),
        advice="the job's package does not import in prime-rl's environment",
    ),
    _Cause(
        reason="train.no_signal",
        logs=("orchestrator.log",),
        pattern=re.compile(
            r"consecutive empty train batches|consecutive zero-output batch equivalents"
        ),
        advice="every group had equal rewards, so nothing could be learned: change difficulty or rubric",
    ),
    _Cause(
        reason="train.install",
        logs=("trainer.log", "inference.log", "orchestrator.log", _OWN),
        pattern=re.compile(_IMPORT + r"|No such file or directory: '(?:inference|torchrun)'"),
        advice="prime-rl's own installation is broken on this machine",
    ),
    _Cause(
        reason="train.inference_died",
        logs=(_OWN,),
        pattern=re.compile(r"Inference failed with exit code -?\d+"),
        advice="the inference server ended while the run needed it",
    ),
    _Cause(
        reason="env.crashed",
        logs=(_OWN,),
        pattern=re.compile(r"env server .* failed with exit code -?\d+"),
        advice="the process of the job's environment ended",
    ),
)


def known_cause(run: Path, output: Path) -> JobFailedError | None:
    """What the logs of a run name as its cause, if anything known."""
    logs = list(_logs(run, output))
    for cause in _CAUSES:
        for name, lines in logs:
            if not _is_of(name, cause.logs):
                continue
            found = [line for line in lines if cause.pattern.search(line)]
            if found:
                return _failed(cause.reason, f"{cause.advice}; {name}: {found[-1]}", logs)
    return None


def failure(run: Path, output: Path, code: int) -> JobFailedError:
    """The error of a run that ended with `code`, not 0."""
    cause = known_cause(run, output)
    if cause is not None:
        return cause
    logs = list(_logs(run, output))
    if not any((run / "logs").glob("attempt_*")):
        return _failed("train.config", f"prime-rl refused to start, exit code {code}", logs)
    return _failed("train.crashed", f"prime-rl ended with exit code {code}", logs)


def last_words(run: Path, output: Path) -> str:
    """The last line of every log, for a run that had to be ended."""
    return "; ".join(f"{name}: {lines[-1]}" for name, lines in _logs(run, output) if lines)


def _failed(reason: str, what: str, logs: list[tuple[str, list[str]]]) -> JobFailedError:
    """With the last lines that tell of an error, the launcher's own last."""
    told = [
        f"{name}: {line}"
        for name, lines in logs
        for line in [line for line in lines if _ERROR_LINE.search(line)][-2:]
        if line not in what
    ]
    return JobFailedError(reason, "\n".join([what, *told])[:_MAX_DETAIL_CHARS])


def _is_of(name: str, wanted: tuple[str, ...]) -> bool:
    return name in wanted or ("envs" in wanted and name.startswith("envs/"))


def _logs(run: Path, output: Path) -> Iterator[tuple[str, list[str]]]:
    """Name and last lines of every log of the newest attempt."""
    newest = run / "logs" / "latest"
    for name in ("trainer.log", "inference.log", "orchestrator.log"):
        yield name, _lines(newest / name)
    for path in sorted(newest.glob("envs/*/*.log"))[:16]:
        yield path.relative_to(newest).as_posix(), _lines(path)
    yield _OWN, _lines(output)


def _lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return []
    lines = (_ANSI.sub("", line).strip() for line in text.splitlines())
    return [line[:_MAX_LINE_CHARS] for line in lines if line]
