"""One deadline per stage of an episode, and one way in which a stage can die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from nestling.agent.policy import ContextFullError
from nestling.core.errors import NestlingError

__all__ = ["StageFailedError", "StageName", "stage"]

StageName = Literal["policy", "runner", "workspace"]


class StageFailedError(NestlingError):
    """The machinery under an episode died or was too slow; not the agent's doing."""

    def __init__(self, name: StageName, how: Literal["failed", "timed_out"], detail: str) -> None:
        super().__init__(f"{name} {how}: {detail}")
        self.name = name
        self.how = how
        self.detail = detail


@asynccontextmanager
async def stage(name: StageName, limit_s: float) -> AsyncIterator[None]:
    """Run a block of one stage within `limit_s` seconds.

    Raises `StageFailedError` for a deadline and for the errors a dead model, worker or disk gives
    (`NestlingError`, `OSError`, `EOFError`). A full context passes through: the episode knows it.
    Cancellation and bugs pass through too.
    """
    try:
        async with asyncio.timeout(limit_s):
            yield
    except ContextFullError:
        raise
    except TimeoutError as error:
        raise StageFailedError(
            name, "timed_out", f"no answer within {limit_s:g} s; raise the limit of this stage"
        ) from error
    except (NestlingError, OSError, EOFError) as error:
        raise StageFailedError(name, "failed", f"{type(error).__name__}: {error}") from error
