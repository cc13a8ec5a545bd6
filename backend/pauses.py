"""Pauses between the tries of something that fails, rests of what is better left alone for a while, and
waiting until a rate allows more, or others leave a place.

A library of retries (tenacity, stamina) wraps a function that raises; here a try ends in several ways, and
an event may end a pause early, so only the lengths are needed.
"""

import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import trio


class Pauses:
    """Pauses, each about twice as long as the one before, with random jitter."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        # The next pause is at most this long.
        self.next_s = first_s

    async def wait(self) -> None:
        """Wait for the next pause."""
        await trio.sleep(self.take_s())

    def take_s(self) -> float:
        """Return the length of the next pause, for a caller that waits by itself."""
        length_s = self.next_s * random.uniform(0.5, 1.0)
        self.next_s = min(2 * self.next_s, self._longest_s)
        return length_s

    def begin_anew(self) -> None:
        """Make the next pause the first one: a try has succeeded."""
        self.next_s = self._first_s


class _Rest(NamedTuple):
    until: float
    length_s: float


class Rests:
    """Numbers of nodes or directories that rest now: each for `first_s`, and for twice as long, up to
    `longest_s`, each time that its rest begins again soon."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._rests: dict[int, _Rest] = {}

    def begin(self, number: int) -> float:
        """Let a number rest from now on, and return for how many seconds."""
        self.tidy()
        before = self._rests.get(number)
        length_s = min(2 * before.length_s, self._longest_s) if before else self._first_s
        self._rests[number] = _Rest(time.monotonic() + length_s, length_s)
        return length_s

    def __contains__(self, number: int) -> bool:
        rest = self._rests.get(number)
        return rest is not None and time.monotonic() < rest.until

    def ends(self) -> list[float]:
        """Return when the rests end or ended (time.monotonic())."""
        return [rest.until for rest in self._rests.values()]

    def forget(self, number: int) -> None:
        """End a rest; the next one is a first one."""
        self._rests.pop(number, None)

    def tidy(self) -> None:
        """Forget rests that ended long ago."""
        now = time.monotonic()
        for number, rest in [*self._rests.items()]:
            if now > rest.until + rest.length_s:
                del self._rests[number]


class Throttle:
    """A token bucket of bytes per second (0: unlimited), which may be changed any time. After a pause,
    `burst_bytes` need not wait."""

    def __init__(self, bytes_per_s: float = 0.0, burst_bytes: int = 0) -> None:
        self.bytes_per_s = bytes_per_s
        self._burst_bytes = burst_bytes
        self._free_at = -math.inf

    async def take(self, count: int) -> None:
        """Wait until `count` bytes may be moved, after those that were taken before."""
        if count and self.bytes_per_s:
            full_at = trio.current_time() - self._burst_bytes / self.bytes_per_s
            start = max(full_at, self._free_at)
            self._free_at = start + count / self.bytes_per_s
            await trio.sleep_until(start)


class Places:
    """Places for work that may last for ever, of which `free` are free. Who has some gets another one while
    he has fewer than are free: however many take all that they may, some are left. "" gets any."""

    def __init__(self, count: int) -> None:
        self.free = count
        # How many places each has, and those who wait for one.
        self._taken = Counter[str]()
        self._waiting = dict[str, trio.lowlevel.ParkingLot]()

    @asynccontextmanager
    async def one(self, who: str) -> AsyncIterator[None]:
        """Have a place for the block. Of those who wait for one, who has the fewest places gets it."""
        while self.free <= self._taken[who]:
            await self._waiting.setdefault(who, trio.lowlevel.ParkingLot()).park()
        self.free -= 1
        self._taken[who] += bool(who)
        try:
            yield
        finally:
            self.free += 1
            self._taken[who] -= bool(who)
            self._waiting = {each: lot for each, lot in self._waiting.items() if lot}
            if self._waiting:
                self._waiting[min(self._waiting, key=self._taken.__getitem__)].unpark()
