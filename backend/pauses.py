"""Pauses between the tries of something that fails.

A library of retries (tenacity, stamina) wraps a function that raises; here a try ends in several ways, and
an event may end a pause early, so only the lengths are needed.
"""

import random

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
