"""A completion queue, and the completion channel by which the kernel reports new completions.

An event on the channel costs a few system calls and a pass of the event loop. So the queue is polled first,
and armed only if the awaited completion is not there yet.
"""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import trio

from ...unwrap import if_it_fails
from .library import Library

_POLL = 32
_LOOKS = 4


class Completions:
    """A queue of at most `entries`; `take` is called for each completion, in the event loop. `is_awaited`
    tells whether anybody waits for one. Raises OSError."""

    def __init__(
        self,
        library: Library,
        context: Any,
        entries: int,
        take: Callable[[Any], None],
        is_awaited: Callable[[], bool],
    ) -> None:
        self._library = library
        self._take = take
        self._is_awaited = is_awaited
        self._is_armed = False
        self._is_closed = False
        self._channel, self._fd = library.completion_channel(context)
        with if_it_fails(self._channel.close), library.errors:
            self.queue = library.CQ(context, entries, channel=self._channel)

    def look(self, is_over: Callable[[], bool]) -> None:
        """Poll a few times: hardware that needs only microseconds is not worth a wait."""
        for _ in range(_LOOKS):
            # Soft-RoCE works in kernel threads: let them run.
            os.sched_yield()
            self._poll()
            if is_over() or self._is_closed:
                return

    def arm(self) -> None:
        """Arm the queue: the next completion wakes `run`. Those that are there are taken now."""
        if self._is_armed or self._is_closed:
            return
        self._is_armed = True
        try:
            with self._library.errors:
                self.queue.req_notify()
        except OSError as error:
            # The device is gone. Its adapter learns of that and fails the queue pair.
            if error.errno != errno.EIO:
                raise
        self._poll()

    async def run(self) -> None:
        """Handle completions until the queue is closed."""
        with suppress(trio.ClosedResourceError):
            while not self._is_closed:
                await trio.lowlevel.wait_readable(self._fd)
                # It may be closed since the wakeup, and pyverbs does not check for a closed queue.
                if not self._is_closed:
                    self._be_told()

    def _be_told(self) -> None:
        try:
            with self._library.errors:
                self._channel.get_cq_event(self.queue)
                self.queue.ack_events(1)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EIO):
                raise
        self._is_armed = False
        if self._is_awaited():
            self.arm()
        else:
            self._poll()

    def _poll(self) -> None:
        while not self._is_closed:
            count, found = self.queue.poll(_POLL)
            for completion in found:
                self._take(completion)
            if count < _POLL:
                return

    def close(self) -> None:
        """Close the queue and its channel. The queue pair must be closed before."""
        if not self._is_closed:
            self._is_closed = True
            trio.lowlevel.notify_closing(self._fd)
            self._library.close(self.queue)
            self._library.close(self._channel)
