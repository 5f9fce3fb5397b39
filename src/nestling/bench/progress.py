"""What a benchmark says while it runs."""

from __future__ import annotations

import sys

__all__ = ["tell"]


def tell(text: str) -> None:
    """One line on standard error, at once."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
