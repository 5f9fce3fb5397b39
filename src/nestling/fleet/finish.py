"""Run a release to its end although the caller is being cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["finish"]

T = TypeVar("T")


async def finish(release: Coroutine[Any, Any, T], *, limit_s: float = 30.0) -> T:
    """The release's value; a cancellation waits for it (at most `limit_s`) and then goes on.

    Raises `TimeoutError` when the release itself takes longer than `limit_s`.
    """

    async def limited() -> T:
        async with asyncio.timeout(limit_s):
            return await release

    task = asyncio.ensure_future(limited())
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                continue
            except Exception:  # noqa: BLE001 (the cancellation is what the caller must see)
                break
        raise
