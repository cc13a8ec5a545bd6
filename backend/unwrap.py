"""Blocks that fail: the errors of a nursery's tasks, without the exception groups that trio wraps them in,
and undoing; and tasks for many things, a few at a time.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

import trio

T = TypeVar("T")


def only_error(error: BaseException) -> BaseException:
    """Return the error of a task, as it was raised; the group if several tasks failed."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def first_error(
    group: BaseExceptionGroup[BaseException], *kinds: type[BaseException]
) -> BaseException:
    """Return the first error of the tasks that is of the first kind, or else of the next one (no kinds: an
    OSError); the group itself if there is none."""
    for kind in kinds or (OSError,):
        error: BaseException | None = group.subgroup(kind)
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is not None:
            return error
    return group


@contextmanager
def first_alone(*kinds: type[BaseException]) -> Iterator[None]:
    """Raise the `first_error` of the tasks of a block alone."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise first_error(group, *kinds) from group


@asynccontextmanager
async def background() -> AsyncIterator[trio.Nursery]:
    """Yield a nursery for tasks that end with the block. The only error of the block or of a task is raised
    alone; none if it is cancelled at the same time."""
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise group.subgroup(trio.Cancelled) or only_error(group) from None


async def for_each(
    items: Collection[T], work: Callable[[T], Awaitable[object]], *, at_once: int
) -> None:
    """Do `work` for every item, for so many `at_once`; one alone needs no task. Errors of the tasks are
    raised as a group."""
    if len(items) == 1:
        await work(*items)
        return
    places = trio.Semaphore(at_once)

    async def work_on(item: T) -> None:
        try:
            await work(item)
        finally:
            places.release()

    async with trio.open_nursery() as nursery:
        for item in items:
            await places.acquire()
            nursery.start_soon(work_on, item)


@contextmanager
def if_it_fails(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if the block raises an error, or is cancelled."""
    try:
        yield
    except BaseException:
        undo()
        raise
