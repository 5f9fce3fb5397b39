"""A secret that is planted around the controller and must never leave a jail."""

from __future__ import annotations

import base64
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = ["Canary"]

_VARIABLES: Final = ("NESTLING_REDTEAM_KEY", "OPENAI_API_KEY", "HF_TOKEN")
"""Set only where the variable is not in use."""


class Canary:
    """A random word, in whichever encoding it turns up."""

    def __init__(self) -> None:
        self.word = "canary" + secrets.token_hex(12)
        plain = self.word.encode()
        self._marks = {
            self.word,
            self.word[::-1],
            plain.hex(),
            *(base64.b64encode(b"\0" * shift + plain).decode()[4:-4] for shift in range(3)),
        }

    def is_in(self, text: str) -> bool:
        """Whether the word left, as it is or encoded."""
        return any(mark in text for mark in self._marks)

    @contextmanager
    def planted(self, folder: Path) -> Iterator[list[Path]]:
        """In the environment of this process, a home folder, and files that anybody may read.

        World-readable on purpose: what keeps a jail from them is that they are not there.
        """
        home = folder / "home"
        files = [home / ".ssh" / "id_ed25519", home / ".netrc", folder / "run" / "key.txt"]
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self.word + "\n")
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        added = [name for name in _VARIABLES if name not in os.environ]
        os.environ.update(dict.fromkeys(added, self.word))
        try:
            yield files
        finally:
            for name in added:
                del os.environ[name]
