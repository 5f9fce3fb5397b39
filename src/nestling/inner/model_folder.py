"""The identity of a base model's folder, without reading it as a model."""

from __future__ import annotations

import hashlib
from pathlib import Path

from nestling.core.errors import ModelError

__all__ = ["folder_digest"]


def folder_digest(folder: Path) -> str:
    """SHA-256 over names and contents of the plain files of a model folder.

    Raises:
        ModelError: when there is no such folder.
    """
    if not folder.is_dir():
        raise ModelError(f"no model folder {folder}; expected a folder with model.safetensors")
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
            digest.update(path.name.encode() + b"\x00" + content)
    return digest.hexdigest()
