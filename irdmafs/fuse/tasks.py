"""Tasks of a session that are started by code that cannot wait."""

from collections.abc import Awaitable, Callable
from typing import Any

import trio

_Step = tuple[Callable[..., Awaitable[None]], tuple[Any, ...]]


class Tasks:
    """Runs the functions given to start_soon(), from run() until stop(), which cancels them."""

    def __init__(self) -> None:
        self._nursery: trio.Nursery | None = None
        self._ended = trio.Event()
        # Given before run().
        self._early: list[_Step] = []

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for step, args in self._early:
                nursery.start_soon(step, *args)
            try:
                await self._ended.wait()
            finally:
                self._ended.set()
            nursery.cancel_scope.cancel()

    def start_soon(self, step: Callable[..., Awaitable[None]], *args: Any) -> bool:
        """Run this in a task. Return False, and do nothing, after stop()."""
        if self._ended.is_set():
            return False
        if self._nursery is None:
            self._early.append((step, args))
        else:
            self._nursery.start_soon(step, *args)
        return True

    def stop(self) -> None:
        self._ended.set()
