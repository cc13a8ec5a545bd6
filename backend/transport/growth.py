"""The progress of an extent that is being received, for tasks that send it on or seal it."""

from collections.abc import Callable

import trio


class Growth:
    """The first `done` of `length` bytes have been received. `lend` is called before anything may keep a
    reference to the file's pages (service.Held.lend)."""

    def __init__(self, length: int, done: int = 0, lend: Callable[[], None] = lambda: None) -> None:
        self.length = length
        self.done = done
        self.lend = lend
        self._error: OSError | None = None
        self._changed = trio.Event()

    def advance(self, count: int) -> None:
        """Count `count` more bytes, at most as many as were missing."""
        self.done = min(self.length, self.done + count)
        self._notify()

    def give_up(self, error: OSError) -> None:
        """Note that no more bytes will be received. A complete extent stays complete."""
        if self._error is None:
            self._error = error
            self._notify()

    async def more_than(self, count: int) -> int:
        """Wait for more bytes than these, and return how many there are. Raises the error of `give_up`."""
        while self.done <= count:
            if self._error is not None:
                raise self._error
            await self._changed.wait()
        return self.done

    async def complete(self) -> None:
        """Wait until all bytes are there. Raises the error of `give_up`."""
        if self.length:
            await self.more_than(self.length - 1)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
