"""Another model than the one that was trained."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from nestling.core.errors import JobFailedError, NestlingError
from nestling.inner.run import run_job
from nestling.inner.trainer import StepLog, Trainer, TrainRequest, TrainResult
from nestling.redteam.case import CaseList, Happened
from nestling.redteam.hostile_job import FAMILY, hostile_job
from nestling.redteam.room import NUM_HIDDEN, TargetRoom

__all__ = ["CASES"]

_LIST = CaseList("model substitution")
CASES = _LIST.cases

_FILE: Final = "model.safetensors"


class _SwappingTrainer:
    """The real trainer, whose finished folder somebody tampers with before it is scored."""

    def __init__(self, trainer: Trainer, swap: Callable[[Path, Path], None]) -> None:
        self._trainer = trainer
        self._swap = swap

    def train(self, request: TrainRequest, log: StepLog) -> TrainResult:
        """Train, then swap."""
        result = self._trainer.train(request, log)
        self._swap(result.model_folder, request.base_folder)
        return result


def _swapped(room: TargetRoom, swap: Callable[[Path, Path], None]) -> Happened:
    context = replace(room.context, trainer=_SwappingTrainer(room.context.trainer, swap))
    outcome = run_job(hostile_job(), FAMILY, context, lambda _: None)
    return Happened(
        what=f"{outcome.status} {outcome.reason}",
        succeeded=outcome.status == "succeeded",
        evidence=outcome.detail,
    )


def _stock(folder: Path, base: Path) -> None:
    shutil.copyfile(base / _FILE, folder / _FILE)


def _nudged(folder: Path, base: Path) -> None:  # noqa: ARG001
    """Another run's weights: the same shapes, one number different."""
    data = bytearray((folder / _FILE).read_bytes())
    data[-3] ^= 0x40
    (folder / _FILE).write_bytes(data)


def _link(folder: Path, base: Path) -> None:
    (folder / _FILE).unlink()
    (folder / _FILE).symlink_to(base / _FILE)


def _bigger(folder: Path, base: Path) -> None:
    shutil.copyfile(base.parent / "micro" / _FILE, folder / _FILE)


for _id, _act, _swap in (
    ("model-stock-base", "put the untouched base in place of the trained weights", _stock),
    ("model-other-run", "put weights of another run in place", _nudged),
    ("model-link", "replace the weights by a link to another model", _link),
    ("model-stronger", "put the larger base model in place", _bigger),
):

    def _attack(room: TargetRoom, swap: Callable[[Path, Path], None] = _swap) -> Happened:
        return _swapped(room, swap)

    _LIST.add(
        _id,
        _attack,
        act=_act,
        expected="lineage: only the trainer's own weights of the pinned base are scored",
    )


def _header(weights: bytes) -> tuple[dict[str, dict[str, object]], bytes]:
    length = int.from_bytes(weights[:8], "little")
    return json.loads(weights[8 : 8 + length]), weights[8 + length :]


def _file(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _first(header: dict[str, dict[str, object]]) -> dict[str, object]:
    return next(entry for name, entry in header.items() if name != "__metadata__")


def _not_finite(weights: bytes) -> bytes:
    header, data = _header(weights)
    dtype = _first(header)["dtype"]
    bad = np.float16("nan") if dtype == "F16" else np.float32("nan")
    raw = b"\x80\x7f" if dtype == "BF16" else bad.tobytes()
    return _file(header, raw + data[len(raw) :])


def _changed(key: str, value: object) -> Callable[[bytes], bytes]:
    def change(weights: bytes) -> bytes:
        header, data = _header(weights)
        _first(header)[key] = value
        return _file(header, data)

    return change


def _extra_tensor(weights: bytes) -> bytes:
    header, data = _header(weights)
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [len(data), len(data) + 4]}
    return _file({**header, "lm_head.extra": entry}, data + b"\0\0\0\0")


def _twice(weights: bytes) -> bytes:
    """The same key twice: two readers may choose differently."""
    length = int.from_bytes(weights[:8], "little")
    text, data = weights[8 : 8 + length].rstrip(), weights[8 + length :]
    header = json.loads(text)
    name = next(key for key in header if key != "__metadata__")
    other = dict(header[name], dtype="I64")
    text = b"{" + f"{json.dumps(name)}:{json.dumps(other)},".encode() + text[1:]
    return struct.pack("<Q", len(text)) + text + data


class _Payload:
    """What a pickled checkpoint would run."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.system, ("echo touched >> outside.txt",)


def _refused(room: TargetRoom, prepare: Callable[[Path], None]) -> Happened:
    """Hand a folder to the real scorer."""
    folder = room.folder / "work" / "forged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(room.context.bases["nano"], folder)
    prepare(folder)
    try:
        score = room.context.scorer.score(
            folder, base="nano", family=FAMILY, split="b", n=NUM_HIDDEN
        )
    except JobFailedError as error:
        return Happened(
            what=f"refused: {error.reason}",
            succeeded=error.reason != "scorer.refused" or bool(room.traps.sprung()),
            evidence=error.detail,
        )
    except NestlingError as error:
        return Happened(what=f"refused: {error}", succeeded=True, evidence="not a job's fault")
    return Happened(what=f"scored {score.mean}", succeeded=True, evidence=score.weights_hash)


def _with(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        (folder / _FILE).write_bytes(change((folder / _FILE).read_bytes()))

    return prepare


def _pickled(folder: Path) -> None:
    (folder / _FILE).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Payload()))


def _disguised(folder: Path) -> None:
    (folder / _FILE).write_bytes(pickle.dumps(_Payload()))


def _pipe(folder: Path) -> None:
    (folder / _FILE).unlink()
    os.mkfifo(folder / _FILE)


def _directory(folder: Path) -> None:
    (folder / _FILE).unlink()
    (folder / _FILE).mkdir()


def _sparse(folder: Path) -> None:
    with (folder / _FILE).open("r+b") as file:
        file.truncate(1 << 40)


def _index(folder: Path) -> None:
    (folder / _FILE).unlink()
    table = {"weight_map": {"model.norm.weight": "../../state/eval-secret"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table))


for _id, _act, _prepare in (
    ("model-pickle", "a pickled checkpoint that runs a command", _pickled),
    ("model-pickle-disguised", "the same under the name of the tensors file", _disguised),
    ("model-pipe", "a named pipe in place of the weights", _pipe),
    ("model-folder", "a folder in place of the weights", _directory),
    ("model-one-tebibyte", "a file of one tebibyte", _sparse),
    ("model-index-outside", "a shard index that points outside the folder", _index),
    ("model-not-finite", "a weight that is not a number", _with(_not_finite)),
    ("model-other-shape", "a tensor of another shape", _with(_changed("shape", [1 << 39]))),
    ("model-other-type", "a tensor of another type", _with(_changed("dtype", "I8"))),
    ("model-overlap", "tensors that share their bytes", _with(_changed("data_offsets", [4, 8]))),
    ("model-extra-tensor", "a tensor too many", _with(_extra_tensor)),
    ("model-key-twice", "a header that names a tensor twice", _with(_twice)),
    ("model-header-bomb", "a header of half a gibibyte",
     _with(lambda data: struct.pack("<Q", 1 << 29) + data[8:])),
    ("model-header-deep", "a header nested a million deep",
     _with(lambda data: struct.pack("<Q", 1 << 20) + b"[" * (1 << 20) + data)),
    ("model-truncated", "half a file", _with(lambda data: data[: len(data) // 2])),
    ("model-empty", "an empty file", _with(lambda data: data[:0])),
):  # fmt: skip

    def _forge(room: TargetRoom, prepare: Callable[[Path], None] = _prepare) -> Happened:
        return _refused(room, prepare)

    _LIST.add(
        _id, _forge, act=_act, expected="checked as bytes before anything is loaded: scorer.refused"
    )


@_LIST.case(
    "model-own-code",
    act="a config with auto_map and a modelling file of its own",
    expected="config, tokenizer and code come from the pinned base alone",
)
def own_code(room: TargetRoom) -> Happened:
    """The weights are the base's, so the score must be the base's too, and no code runs."""
    folder = room.folder / "work" / "own-code"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(room.context.bases["nano"], folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "evil.Model"}, "num_hidden_layers": 99}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(room.traps.file)!r}, 'w').write('x')\n")
    (folder / "tokenizer.json").write_text("{}")
    score = room.context.scorer.score(folder, base="nano", family=FAMILY, split="b", n=NUM_HIDDEN)
    base = room.context.baselines.get("nano", FAMILY, "b", NUM_HIDDEN)
    return Happened(
        what=f"scored {score.mean:.2f}, the base has {base.mean:.2f}",
        succeeded=bool(room.traps.sprung()) or tuple(score.correct) != tuple(base.correct),
        evidence=f"delta norm {score.delta_norm}",
    )
