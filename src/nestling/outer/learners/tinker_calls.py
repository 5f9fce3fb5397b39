"""One call to a service under our own time limit, with a heartbeat in the log while it waits.

Each call has a daemon thread of its own: the SDK blocks where it likes, and a call that never comes
back must neither stop the event loop nor keep the process from ending.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future
from typing import TypeVar

from nestling.core.clock import Clock
from nestling.outer.learners.tinker_faults import PauseWatch, TinkerFaultError, fault_of
from nestling.outer.learners.tinker_service import Pending

__all__ = ["Caller"]

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Caller:
    """Makes calls; safe to use many times at once."""

    def __init__(
        self,
        watch: PauseWatch,
        clock: Clock,
        *,
        heartbeat_s: float,
        secrets: tuple[str, ...] = (),
    ) -> None:
        self._watch = watch
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._secrets = secrets

    async def call(self, what: str, timeout_s: float, pending: Pending[T]) -> T:
        """The result of `pending`; `what` names it for people.

        Raises:
            TinkerFaultError: the service failed, refused, or took longer than `timeout_s`; a pause
                that the SDK told of meanwhile is named as the reason.
        """
        box: Future[T] = Future()

        def work() -> None:
            if not box.set_running_or_notify_cancel():
                return
            try:
                box.set_result(pending.result(timeout_s))
            except BaseException as error:  # noqa: BLE001 (handed to whoever waits)
                box.set_exception(error)

        threading.Thread(target=work, name=f"tinker-{what}", daemon=True).start()
        waiting = asyncio.wrap_future(box)
        started = self._clock.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                while not waiting.done():
                    await asyncio.wait({waiting}, timeout=self._heartbeat_s)
                    if not waiting.done():
                        self._beat(what, self._clock.monotonic() - started)
                return waiting.result()
        except TimeoutError as error:
            raise self._late(what, timeout_s, error) from error
        except Exception as error:
            raise fault_of(what, error, self._secrets) from error
        finally:
            if not waiting.done():
                waiting.cancel()
                pending.cancel()

    def _beat(self, what: str, waited_s: float) -> None:
        pause = self._watch.current()
        if pause is None:
            logger.info("tinker: %s has been waiting for %.0f s", what, waited_s)
        else:
            logger.warning(
                "tinker: %s has been waiting for %.0f s; paused (%s): %s",
                what,
                waited_s,
                pause.kind,
                pause.detail,
            )

    def _late(self, what: str, timeout_s: float, error: TimeoutError) -> TinkerFaultError:
        pause = self._watch.current()
        if pause is not None:
            wrong = f"{what} was paused for longer than {timeout_s:g} s: {pause.detail}"
            return TinkerFaultError(pause.kind, wrong)
        detail = str(error)
        wrong = f"{what} took longer than {timeout_s:g} s" + (f" ({detail})" if detail else "")
        return TinkerFaultError("timeout", wrong)
