"""Run a coroutine without a task until it really has to wait.

Most requests are answered from memory and never wait, but a trio task costs more than answering them.
So the kernel session starts each request's coroutine itself. A coroutine that is about to wait calls
`await detach()` first; at that point the session moves it into a task of its own. Under any other
runner (pyfuse3, a test) detach() does nothing.
"""

from collections.abc import Callable, Coroutine, Generator
from functools import partial
from types import coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")

_DETACH: Final = object()
_inline = False


class Detached(Exception):
    """Raised by run(): the coroutine has to wait; go on with resume() in a task."""


@coroutine
def detach() -> Generator[object, None, None]:
    """Leave the synchronous caller; await this before the first await that may wait."""
    if _inline:
        yield _DETACH


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
    if yielded is not _DETACH:
        raise RuntimeError(f"{coro!r} waited without detach()")
    raise Detached


@coroutine
def resume(coro: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """Await this in a task to run a detached coroutine to its end."""
    step: Callable[[], Any] = partial(coro.send, None)
    while True:
        try:
            yielded = step()
        except StopIteration as stop:
            result: T = stop.value
            return result
        try:
            sent = yield yielded
        except BaseException as error:  # cancellation, too, belongs to the coroutine
            step = partial(coro.throw, error)
        else:
            step = partial(coro.send, sent)
