"""Fetching: real wheels in a folder, real pip, a real GGUF file inside."""

import hashlib
import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("gguf")

from nestling.core.clock import SystemClock
from nestling.core.errors import ConfigError, ModelError
from nestling.engine.checkpoint import load_model
from nestling.engine.config import ModelConfig
from nestling.engine.weights import Weights
from nestling.families.fetch_open import fetch, pip_download
from nestling.families.open_models import (
    OpenModel,
    Wheel,
    base_of_folder,
    fetched_folder,
    open_model,
    open_models,
    read_record,
)

from ..engine.gguf_files import write_llama

CONFIG = ModelConfig(
    vocab_size=300, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2,
    num_kv_heads=1, head_dim=16,
)  # fmt: skip


def make_wheel(folder: Path, package: str, data: bytes) -> Wheel:
    """A wheel of one file; nothing in it can be imported."""
    module = package.replace("-", "_")
    path = folder / f"{module}-1.0-py3-none-any.whl"
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{module}/part", data)
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nRequires-Dist: not-there\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return Wheel(
        package=package, version="1.0", sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        size=path.stat().st_size, member=f"{module}/part",
    )  # fmt: skip


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, OpenModel]:
    """A model in two packages, as large ones come."""
    folder = tmp_path_factory.mktemp("wheels")
    weights = Weights.init(CONFIG, 1, torch.Generator().manual_seed(0))
    write_llama(folder / "tiny.gguf", weights)
    data = (folder / "tiny.gguf").read_bytes()
    half = len(data) // 2
    parts = [("tiny-model-part1", data[:half]), ("tiny-model-part2", data[half:])]
    model = OpenModel(
        title="Tiny", params=weights.flat.numel(), licence="Tiny Terms", licence_url="https://x.org",
        must_accept=True, wheels=tuple(make_wheel(folder, name, part) for name, part in parts),
        gguf_sha256=hashlib.sha256(data).hexdigest(),
    )  # fmt: skip
    return folder, model


def copied(wheel: Wheel, into: Path, wheels_from: Path | None) -> None:
    """As pip would, without its start-up time."""
    name = f"{wheel.package.replace('-', '_')}-1.0-py3-none-any.whl"
    shutil.copy(wheels_from / name, into)


def bring(state: Path, made: tuple[Path, OpenModel], **changes: object):
    folder, model = made
    chosen = model.model_copy(
        update={k: v for k, v in changes.items() if k in OpenModel.model_fields}
    )
    rest = {k: v for k, v in changes.items() if k not in OpenModel.model_fields}
    options = {"accepted": True, "wheels_from": folder, "catalogue": {"tiny": chosen}}
    options |= {"download": copied} | rest
    return fetch("tiny", state, SystemClock(), **options)


@pytest.mark.long
def test_a_model_is_brought_once_and_loads(tmp_path: Path, wheels: tuple[Path, OpenModel]) -> None:
    stages: list[str] = []
    record = bring(tmp_path, wheels, told=stages.append, download=None)  # None: pip
    assert [line.split()[0] for line in stages] == ["downloading", "downloading", "converting"]
    folder = fetched_folder(tmp_path, "tiny")
    assert load_model(folder).config == CONFIG
    assert record.accepted_at is not None
    assert read_record(folder) == record

    def never(*_: object) -> None:
        raise AssertionError("fetched twice")

    assert bring(tmp_path, wheels, download=never) == record
    base = base_of_folder("tiny", folder)
    assert (base.params, base.sha256) == (record.params, record.sha256)
    assert sorted(path.name for path in folder.parent.iterdir()) == [".tiny.lock", "tiny"]


def test_what_a_killed_fetch_left_is_removed(
    tmp_path: Path, wheels: tuple[Path, OpenModel]
) -> None:
    def killed(wheel: Wheel, into: Path, wheels_from: Path | None) -> None:
        into.parent.rename(into.parent.with_name(into.parent.name + "x"))  # nobody tidies this up
        raise OSError("killed")

    with pytest.raises(OSError, match="killed"):
        bring(tmp_path, wheels, download=killed)
    folder = fetched_folder(tmp_path, "tiny").parent
    other = folder / ".tiny-2.making-1"  # of another model that is being fetched
    other.mkdir()
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 2
    bring(tmp_path, wheels)
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"tiny", other.name}


def test_changed_weights_are_noticed(tmp_path: Path, wheels: tuple[Path, OpenModel]) -> None:
    bring(tmp_path, wheels)
    folder = fetched_folder(tmp_path, "tiny")
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match="fetch it again"):
        base_of_folder("tiny", folder)


def test_terms_must_be_accepted_first(tmp_path: Path, wheels: tuple[Path, OpenModel]) -> None:
    with pytest.raises(ConfigError, match=r"Tiny Terms.*https://x\.org.*--accept-licence"):
        bring(tmp_path, wheels, accepted=False)
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_that_was_replaced_is_refused(
    tmp_path: Path, wheels: tuple[Path, OpenModel]
) -> None:
    first, second = wheels[1].wheels
    other = first.model_copy(update={"sha256": "0" * 64})
    with pytest.raises(ModelError, match=r"tiny_model_part1.*expected 000000000000"):
        bring(tmp_path, wheels, wheels=(other, second))
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".tiny.lock"]


def test_a_file_that_was_replaced_inside_is_refused(
    tmp_path: Path, wheels: tuple[Path, OpenModel]
) -> None:
    with pytest.raises(ModelError, match=r"model\.gguf has SHA-256"):
        bring(tmp_path, wheels, gguf_sha256="1" * 64)


@pytest.mark.long
def test_without_the_packages_the_way_out_is_named(
    tmp_path: Path, wheels: tuple[Path, OpenModel]
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"tiny-model-part1 1\.0.*--wheels FOLDER"):
        bring(tmp_path, wheels, wheels_from=tmp_path / "empty", download=None)


def test_a_disk_that_is_too_small_is_told_before_anything_is_downloaded(
    tmp_path: Path, wheels: tuple[Path, OpenModel]
) -> None:
    with pytest.raises(ModelError, match=r"GB are free.*NESTLING_STATE"):
        bring(tmp_path, wheels, params=10**15)


def test_a_disk_that_fills_up_is_told(tmp_path: Path, wheels: tuple[Path, OpenModel]) -> None:
    def fill(wheel: Wheel, into: Path, wheels_from: Path | None) -> None:
        with Path("/dev/full").open("wb") as full:
            full.write(b"x")

    with pytest.raises(ModelError, match="no space is left"):
        bring(tmp_path, wheels, download=fill)


def test_the_catalogue_pins_what_it_names() -> None:
    assert set(open_models()) == {"smollm2-135m", "gemma3-270m"}
    assert open_models()["gemma3-270m"].must_accept
    for model in open_models().values():
        assert model.params * 4 < model.needed_bytes
    with pytest.raises(ModelError, match="expected one of gemma3-270m, smollm2-135m"):
        open_model("gpt")


@pytest.mark.live
@pytest.mark.slow
def test_smollm2_is_on_the_index_and_speaks(tmp_path: Path) -> None:
    from nestling.engine.model import forward, logits

    fetch("smollm2-135m", tmp_path, SystemClock(), download=pip_download)
    model = load_model(fetched_folder(tmp_path, "smollm2-135m"))
    config = json.loads((fetched_folder(tmp_path, "smollm2-135m") / "config.json").read_text())
    assert config["model_type"] == "llama"
    params = model.params()
    ids = model.tokenizer.encode("The capital of France is")
    hidden = forward(params, model.config, torch.tensor([[ids]]))
    best = int(logits(params, hidden[:, :, -1])[0, 0].argmax())
    assert model.tokenizer.decode([best]) == " Paris"
