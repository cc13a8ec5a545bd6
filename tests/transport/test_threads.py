"""Works in threads: whoever waits for them goes on when all have ended, however they end."""

import threading
from collections.abc import Callable

import pytest
import trio
import trio.testing

from irdmafs.backend.transport.tcp.threads import in_threads


def until(stopped: threading.Event, ended: list[str], name: str) -> Callable[[], str]:
    """Return a work that ends when it is stopped."""

    def work() -> str:
        stopped.wait()
        ended.append(name)
        return name

    return work


def test_the_first_error_is_raised_when_all_were_stopped() -> None:
    stopped, ended = threading.Event(), list[str]()

    def fail() -> str:
        raise OSError("the first one")

    works = [until(stopped, ended, "one"), fail, until(stopped, ended, "other")]
    with pytest.raises(OSError, match="the first one"):
        trio.run(in_threads, works, stopped.set, None)
    assert sorted(ended) == ["one", "other"]


@pytest.mark.parametrize("places", [None, 1])
async def test_who_is_cancelled_stops_the_works_and_waits_for_them(places: int | None) -> None:
    stopped, ended = threading.Event(), list[str]()

    limit = trio.Semaphore(places) if places is not None else None
    works = [until(stopped, ended, name) for name in ("one", "other")]
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_threads, works, stopped.set, limit)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
    assert scope.cancelled_caught
    # The second one has no place before the first one has ended.
    assert sorted(ended) == ["one", "other"][: places or 2]
    assert limit is None or limit.value == places
