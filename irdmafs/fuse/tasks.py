"""Tasks of a session that are started by code that cannot wait."""

import math
from collections.abc import Awaitable, Callable
from typing import Any

import trio

_Step = tuple[Callable[..., Awaitable[None]], tuple[Any, ...]]


class Tasks:
    """Runs the functions given to start_soon(), from run() until stop(), which cancels the rest."""

    def __init__(self) -> None:
        self.ended = False
        self._to_run: trio.MemorySendChannel[_Step]
        self._to_run, self._steps = trio.open_memory_channel[_Step](math.inf)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            async for step, args in self._steps:
                nursery.start_soon(step, *args)

    def start_soon(self, step: Callable[..., Awaitable[None]], *args: Any) -> bool:
        """Run this in a task. Return False, and do nothing, after stop()."""
        if self.ended:
            return False
        self._to_run.send_nowait((step, args))
        return True

    def stop(self) -> None:
        self.ended = True
        self._to_run.close()

    def close(self) -> None:
        self.stop()
        self._steps.close()
