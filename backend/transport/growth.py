"""How much of an extent that is coming in is there, for those who hand it on and those who seal it."""

import trio


class Growth:
    """From the front: `done` of `length` bytes."""

    def __init__(self, length: int, done: int = 0) -> None:
        self.length = length
        self.done = done
        self._error: OSError | None = None
        self._changed = trio.Event()

    def advance(self, count: int) -> None:
        """`count` more bytes are there, or as many as were missing."""
        self.done = min(self.length, self.done + count)
        self._notify()

    def give_up(self, error: OSError) -> None:
        """No more will come. What is complete stays so."""
        if self._error is None:
            self._error = error
            self._notify()

    async def more_than(self, count: int) -> int:
        """How much is there, once it is more than this. Raises the error of `give_up`."""
        while self.done <= count:
            if self._error is not None:
                raise self._error
            await self._changed.wait()
        return self.done

    async def complete(self) -> None:
        """Until all is there. Raises the error of `give_up`."""
        if self.length:
            await self.more_than(self.length - 1)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
