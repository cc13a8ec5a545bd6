"""Run a coroutine without a task until it really has to wait.

Most requests are answered from memory and never wait, but a trio task costs more than answering them.
So the kernel session starts each request's coroutine itself. A coroutine that is about to wait calls
`await detach()` first; at that point the session moves it into a task of its own. A coroutine that waits
for others, perhaps for ever, says so: `await detach(any_signal=True)`. Under any other runner (pyfuse3, a
test) detach() does nothing.
"""

from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")

_inline = False


class Detached(Exception):
    """Raised by run(): the coroutine has to wait; go on with Rest() in a task. `any_signal`: any signal
    that the caller gets may end the wait."""

    def __init__(self, any_signal: bool = False) -> None:
        self.any_signal = any_signal


@coroutine
def detach(*, any_signal: bool = False) -> Generator[object, None, bool]:
    """Leave the synchronous caller; await this before the first await that may wait. `any_signal`: any
    signal that the caller gets may end the wait. Return whether that took time, in which others ran."""
    if not _inline:
        return False
    yield Detached(any_signal)
    return True


def run(coro: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, from synchronous code. Raises Detached when it called detach()."""
    global _inline
    outer, _inline = _inline, True  # a request may carry out others that were put off
    try:
        yielded = coro.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        _inline = outer
    if not isinstance(yielded, Detached):
        raise RuntimeError(f"{coro!r} waited without detach()")
    raise yielded


class Rest(NamedTuple, Generic[T]):
    """The rest of a detached coroutine: await it in a task, once, to run that to its end. A coroutine that
    waits already cannot be awaited itself."""

    coro: Coroutine[Any, Any, T]

    def __await__(self) -> Generator[Any, Any, T]:
        return self.coro.__await__()
