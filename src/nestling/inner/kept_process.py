"""A program of others that must not outlive us, with whatever it starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

__all__ = ["KeptProcess"]


class KeptProcess:
    """A running program; leaving the block, or `end`, ends it and everything below it, whatever happened."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, output: Path
    ) -> None:
        with output.open("wb") as file:
            self._keeper = subprocess.Popen(  # noqa: S603 (the program of the recipe)
                [sys.executable, "-I", "-m", "nestling.inner.keeper", *command],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=dict(environment),
                process_group=0,
            )

    def __enter__(self) -> KeptProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """Blocks until nothing is left; may be called twice."""
        assert self._keeper.stdin is not None
        with suppress(BrokenPipeError):
            self._keeper.stdin.close()
        self._keeper.wait()

    def ended(self, wait_s: float) -> int | None:
        """Exit code once all is over; None while it runs, after `wait_s` at most."""
        try:
            return self._keeper.wait(wait_s)
        except subprocess.TimeoutExpired:
            return None
