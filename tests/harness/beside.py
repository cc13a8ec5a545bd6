"""Work that goes on in a thread while a test does something else."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def beside(work: Callable[[], T]) -> Iterator[Future[T]]:
    """Do work in a thread, and wait for it at the end. Raises what it raised."""
    with ThreadPoolExecutor(1) as thread:
        working = thread.submit(work)
        yield working
    working.result()


@contextmanager
def repeating(act: Callable[[], object], pause_s: float = 0.0) -> Iterator[None]:
    """Do something in a thread, again and again with pauses. Raises what that raised, at the end."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(pause_s):
            act()

    with beside(repeat):
        try:
            yield
        finally:
            ended.set()
