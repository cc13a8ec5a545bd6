"""Threads that work on data connections, and the event loop that waits for them."""

import contextvars
import errno
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import trio

from ..prompt import acquire
from .channel import TICK_S, Lost

T = TypeVar("T")


async def in_threads(
    works: Sequence[Callable[[], T]], stop: Callable[[], None], places: trio.Semaphore | None
) -> list[T]:
    """Run each work in a thread of its own, for which there are `places` (None: any number); all have ended
    when this returns or raises. Return their results in the order in which they came.

    `stop` is called, once or more, when one of them fails before others have ended, or this is cancelled,
    and must make them end soon. Raises what the first one that failed raised.
    """
    running = _Running(stop, places)
    try:
        for work in works:
            if places is not None:
                await acquire(places)
            running.start(work)
    except trio.Cancelled:
        stop()
        if running.left:
            with trio.CancelScope(shield=True):
                await running.ended()
        raise
    if running.left:
        await running.ended()
        if running.is_cancelled:
            await trio.lowlevel.checkpoint_if_cancelled()
    if running.errors:
        raise running.errors[0]
    return running.results


class _Running:
    """Works that one task has started. A task for each, as in trio.to_thread, would cost more than most."""

    def __init__(self, stop: Callable[[], None], places: trio.Semaphore | None) -> None:
        self.left = 0
        self.is_cancelled = False
        self.results: list[Any] = []
        self.errors: list[BaseException] = []
        self._stop = stop
        self._places = places
        self._token = trio.lowlevel.current_trio_token()
        self._waiting: trio.lowlevel.Task | None = None

    def start(self, work: Callable[[], Any]) -> None:
        token = self._token
        self.left += 1
        try:
            trio.lowlevel.start_thread_soon(
                partial(contextvars.copy_context().run, work),
                lambda outcome: token.run_sync_soon(self._end, outcome.unwrap),
            )
        except RuntimeError as error:
            why = str(error)

            def refuse() -> None:
                raise OSError(errno.EAGAIN, why)

            self._end(refuse)

    def ended(self) -> Awaitable[None]:
        """Return what waits until those that are left have ended. When it `is_cancelled`, they are stopped,
        and the cancellation has to be raised afterwards."""

        def abort(_: object) -> trio.lowlevel.Abort:
            self.is_cancelled = True
            self._stop()
            return trio.lowlevel.Abort.FAILED

        self._waiting = trio.lowlevel.current_task()
        return trio.lowlevel.wait_task_rescheduled(abort)

    def _end(self, result: Callable[[], Any]) -> None:
        self.left -= 1
        if self._places is not None:
            self._places.release()
        try:
            self.results.append(result())
        except BaseException as error:
            self.errors.append(error)
            if self.left:
                self._stop()
        if not self.left and self._waiting is not None:
            trio.lowlevel.reschedule(self._waiting)


class Promise:
    """Work in the event loop, for whose end threads can wait."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._ended = trio.Event()
        self._error: Exception | None = None

    async def fulfil(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work; an error is raised in the waiting threads."""
        try:
            await work()
        except Exception as error:
            self._error = error
        except BaseException:
            self._error = Lost("the node is stopping")
            raise
        finally:
            self._done.set()
            self._ended.set()

    async def ended(self) -> None:
        """Wait for the end of the work in the event loop."""
        if not self._ended.is_set():
            await self._ended.wait()

    def wait(self, limit_s: float, between: Callable[[], None]) -> None:
        """Wait in a thread for the end; `between` is called each tick. Raises Lost after `limit_s`."""
        end = time.monotonic() + limit_s
        while not self._done.wait(TICK_S):
            between()
            if time.monotonic() > end:
                raise Lost(f"the node was busy for {limit_s:g} s")
        if self._error is not None:
            raise self._error
