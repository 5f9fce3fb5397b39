import json
import os
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from nestling.core.errors import ModelError
from nestling.inner.lineage import check_weights, read_weights_file, tensor_specs

BASE = {
    "embed.weight": np.arange(12, dtype=np.float16).reshape(4, 3),
    "norm.weight": np.ones(3, dtype=np.float16),
}
PINNED = tensor_specs(save(BASE))


def changed(**tensors: np.ndarray) -> bytes:
    return save(BASE | {name.replace("__", "."): value for name, value in tensors.items()})


def test_untouched_and_retrained_weights_pass() -> None:
    check_weights(save(BASE), PINNED)
    check_weights(save({name: value.astype(np.float32) for name, value in BASE.items()}), PINNED)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (changed(embed__weight=np.zeros((3, 4), np.float16)), "shape"),
        (changed(norm__weight=np.array([1, np.nan, 1], np.float16)), "not finite"),
        (changed(norm__weight=np.array([1, np.inf, 1], np.float32)), "not finite"),
        (changed(norm__weight=np.ones(3, np.int32)), "header entry"),
        (changed(extra__weight=np.zeros(2, np.float16)), "'extra.weight' added"),
        (save({"norm.weight": BASE["norm.weight"]}), "'embed.weight' missing"),
        (pickle.dumps(BASE), "safetensors"),
        (b"", "safetensors"),
        (save(BASE) + b"\x00\x00", "no tensor"),
        (save(BASE)[:-2], "no tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tampered_weights_are_refused(weights: bytes, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_weights(weights, PINNED)


def test_brain_float_infinity_is_found() -> None:
    def brain_floats(*halves: int) -> bytes:
        header = json.dumps({"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
        data = b"".join(half.to_bytes(2, "little") for half in halves)
        return len(header).to_bytes(8, "little") + header + data

    one, infinity = 0x3F80, 0x7F80
    pinned = tensor_specs(brain_floats(one, one))
    check_weights(brain_floats(one, one), pinned)
    with pytest.raises(ModelError, match="not finite"):
        check_weights(brain_floats(one, infinity), pinned)


def test_overlapping_tensors_are_refused() -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"a": entry, "b": entry}).encode()
    with pytest.raises(ModelError, match="overlaps"):
        tensor_specs(len(header).to_bytes(8, "little") + header + b"\x00" * 4)


def test_links_pipes_and_oversized_files_are_refused(tmp_path) -> None:
    elsewhere = tmp_path / "secret"
    elsewhere.write_bytes(save(BASE))
    linked, piped, large = (tmp_path / name for name in ("linked", "piped", "large"))
    for folder in (linked, piped, large):
        folder.mkdir()
    (linked / "model.safetensors").symlink_to(elsewhere)
    os.mkfifo(piped / "model.safetensors")
    (large / "model.safetensors").write_bytes(b"\x00" * 1001)
    for folder, message in ((linked, "cannot be opened"), (piped, "plain file"), (large, "1001")):
        with pytest.raises(ModelError, match=message):
            read_weights_file(folder, max_bytes=1000)
    with pytest.raises(ModelError, match="cannot be opened"):
        read_weights_file(tmp_path, max_bytes=1000)


@settings(max_examples=300)
@given(st.binary(max_size=200), st.integers(0, 300), st.binary(max_size=4))
def test_damaged_bytes_are_refused_and_never_crash(junk: bytes, at: int, patch: bytes) -> None:
    good = save(BASE)
    at = min(at, len(good))
    for weights in (junk, good[:at] + patch + good[at + len(patch) :], good[:at] + patch):
        try:
            check_weights(weights, PINNED)
        except ModelError:
            continue
        assert {name: (s.shape, s.dtype) for name, s in tensor_specs(weights).items()} == {
            name: (s.shape, s.dtype) for name, s in PINNED.items()
        }


def test_a_folder_in_place_of_the_file_is_refused(tmp_path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ModelError, match="not a plain file"):
        read_weights_file(tmp_path, max_bytes=1000)


def test_a_tensor_that_is_named_twice_is_refused() -> None:
    weights = save(BASE)
    length = int.from_bytes(weights[:8], "little")
    header = weights[8 : 8 + length].rstrip()
    name, entry = next((k, v) for k, v in json.loads(header).items() if k != "__metadata__")
    header = b"{" + f"{json.dumps(name)}:{json.dumps(entry)},".encode() + header[1:]
    forged = len(header).to_bytes(8, "little") + header + weights[8 + length :]
    with pytest.raises(ModelError, match="broken header"):
        tensor_specs(forged)


def test_header_with_absurd_nesting_or_sizes_is_refused() -> None:
    for header in (
        b"[" * 100_000,
        b'{"w": {"dtype": "F32", "shape": [9e9], "data_offsets": [0, 4]}}',
    ):
        with pytest.raises(ModelError):
            tensor_specs(len(header).to_bytes(8, "little") + header + b"\x00" * 4)
