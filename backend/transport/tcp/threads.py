"""Threads that work on data connections, and the event loop that waits for them."""

import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import trio

from .channel import TICK_S, Lost

T = TypeVar("T")


async def in_threads(
    works: Sequence[Callable[[], T]], stop: Callable[[], None], limiter: trio.CapacityLimiter
) -> list[T]:
    """Run each work in a thread of its own; all have ended when this returns or raises.

    `stop` is called, once or more, when one of them fails or this is cancelled, and must make the
    others end soon. Raises what the first one that failed raised.
    """
    results: dict[int, T] = {}
    errors: list[Exception] = []
    running = True

    async def run(number: int) -> None:
        try:
            results[number] = await trio.to_thread.run_sync(works[number], limiter=limiter)
        except Exception as error:
            errors.append(error)
            stop()

    async def stop_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            if running:
                stop()

    async with trio.open_nursery() as watching:
        watching.start_soon(stop_when_cancelled)
        async with trio.open_nursery() as nursery:
            for number in range(len(works)):
                nursery.start_soon(run, number)
        running = False
        watching.cancel_scope.cancel()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(works))]


class Promise(Generic[T]):
    """A result of work in the event loop, for which threads can wait."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._ended = trio.Event()
        self._result: T | None = None
        self._error: Exception | None = None

    async def fulfil(self, work: Callable[[], Awaitable[T]]) -> None:
        """Do the work; an error is raised in the waiting threads."""
        try:
            self._result = await work()
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
        await self._ended.wait()

    @property
    def value(self) -> T | None:
        """Return the result, None while there is none."""
        return self._result

    def wait(self, limit_s: float, between: Callable[[], None]) -> T:
        """Return the result; `between` is called in every tick and may raise. Raises Lost after
        `limit_s`."""
        end = time.monotonic() + limit_s
        while not self._done.wait(TICK_S):
            between()
            if time.monotonic() > end:
                raise Lost(f"the node was busy for {limit_s:g} s")
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]
