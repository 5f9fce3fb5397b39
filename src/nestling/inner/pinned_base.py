"""A base model as the scorer trusts it: loaded once, and the measure of every trained copy."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from nestling.engine.checkpoint import Model, load_model
from nestling.engine.weights import parts
from nestling.inner.disk import temporary_folder, writing
from nestling.inner.lineage import (
    WEIGHTS_FILE,
    TensorSpec,
    check_weights,
    read_weights_file,
    tensor_specs,
)
from nestling.inner.model_folder import folder_digest

__all__ = ["PinnedBase"]

_WEIGHTS: Final = re.compile(r"\.safetensors(\.index\.json)?$")
_MAX_BASE_BYTES: Final = 16 * 1024**3
_HEADER_ALLOWANCE_BYTES: Final = 1024**2


class PinnedBase:
    """Config, tokenizer and generation settings come from here, never from a trained folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.digest = folder_digest(folder)
        self.model: Model = load_model(folder)
        self._specs = _specs(folder, {part.hf_name for part in parts(self.model.config)})
        num_numbers = self.model.weights.flat.numel()
        self._max_bytes = 2 * 4 * num_numbers + _HEADER_ALLOWANCE_BYTES

    def load_trained(self, folder: Path) -> Model:
        """The weights of `folder` inside this base's config and tokenizer.

        Raises:
            ModelError: when they are not those of a trained copy of this base.
            JobFailedError: `scorer.disk`, there is no room for a copy.
        """
        with self.checked_copy(folder) as private:
            return load_model(private)

    @contextmanager
    def checked_copy(self, folder: Path) -> Iterator[Path]:
        """The same as a folder of ours: the bytes that were checked, which nobody changes any more.

        Raises:
            ModelError: when they are not those of a trained copy of this base.
            JobFailedError: `scorer.disk`, there is no room for it.
        """
        weights = read_weights_file(folder, max_bytes=self._max_bytes)
        check_weights(weights, self._specs)
        with temporary_folder("scorer.disk", "nestling-scored-") as private:
            with writing("scorer.disk", private):
                for path in self.folder.iterdir():
                    if path.is_file() and not _WEIGHTS.search(path.name):
                        shutil.copyfile(path, private / path.name)
                (private / WEIGHTS_FILE).write_bytes(weights)
            yield private

    def delta_norm(self, model: Model) -> float:
        """Euclidean norm of `model` minus this base, in float64."""
        return model.weights.distance(self.model.weights)


def _specs(folder: Path, wanted: set[str]) -> dict[str, TensorSpec]:
    """What the base's files say of each tensor; a tied output layer that is stored again is left out."""
    found: dict[str, TensorSpec] = {}
    for link in sorted(folder.glob("*.safetensors")):
        path = link.resolve()  # a hub's cache is made of links; a trained folder may hold none
        data = read_weights_file(path.parent, max_bytes=_MAX_BASE_BYTES, name=path.name)
        found |= {name: spec for name, spec in tensor_specs(data).items() if name in wanted}
    return found
