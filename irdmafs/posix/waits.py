"""Callers that wait for a change below a directory, as long as it takes: how many may, and how that ends.

The kernel session is told of their signals (see interrupts). pyfuse3 is not, so there each caller is looked
at from time to time, and few may wait: each takes one of the tasks that answer requests.
"""

import errno
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import trio

from ..backend.namespace import Namespace, fail
from ..callers.processes import Processes
from ..coherence.kernel_cache import KernelCache
from ..inline import detach
from .calls import Caller

__all__ = ["Waits"]

_OF_ONE_USER_MAX: Final = 4096
_WITHOUT_SIGNALS_MAX: Final = 48
_LOOK_AT_CALLER_S: Final = 0.5


class Waits:
    """The waits of a mount. `shared`: others change the namespace, too."""

    def __init__(
        self, namespace: Namespace, processes: Processes, kernel: KernelCache, *, shared: bool
    ) -> None:
        self._watches = namespace.watches
        self._processes = processes
        self._kernel = kernel
        self._tells_of_signals = kernel.tells_of_signals
        self._shared = shared
        self._waiting: Counter[int] = Counter()  # by user
        self._ended = False

    def end(self) -> None:
        """End all waits, soon: the mount ends. The kernel session cancels them by itself."""
        self._ended = True

    def count(self, directory: int) -> int:
        """Return the counter of a directory (see Watches). Raises OSError EAGAIN if too many are waited
        for."""
        if not self._shared and self._kernel.can_forget and not self._watches.is_watched(directory):
            # From now on the kernel does not believe that a name does not exist (Alone.missing_s).
            self._kernel.forget((), names=True)
        return self._watches.count(directory)

    async def changed(self, directory: int, count: int, seconds: float, ctx: Caller) -> None:
        """Return when the counter of a directory (see Watches) is not `count`, or the time is over. Raises
        OSError EAGAIN when this user's processes wait for too much already; EINTR, ENOTCONN."""
        if self.count(directory) != count:
            return
        await detach(any_signal=True)
        with self._one_more(ctx.uid), trio.move_on_after(seconds):
            if self._tells_of_signals:
                await self._watches.wait(directory, count)
                return
            while self._watches.count(directory) == count:
                with trio.move_on_after(_LOOK_AT_CALLER_S) as look:
                    await self._watches.wait(directory, count)
                if look.cancelled_caught:
                    await self._look_at_caller(ctx.pid)

    @contextmanager
    def _one_more(self, uid: int) -> Iterator[None]:
        """Count one that waits."""
        user, most = (
            (uid, _OF_ONE_USER_MAX) if self._tells_of_signals else (0, _WITHOUT_SIGNALS_MAX)
        )
        if self._waiting[user] >= most:
            raise fail(errno.EAGAIN, "too many wait")
        self._waiting[user] += 1
        try:
            yield
        finally:
            self._waiting[user] -= 1
            if not self._waiting[user]:
                del self._waiting[user]

    async def _look_at_caller(self, pid: int) -> None:
        """Raise OSError if a caller is not to wait on."""
        if self._ended:
            raise fail(errno.ENOTCONN)
        pending = await self._processes.pending_signals(pid)
        if pending.fatal or pending.handled:
            raise fail(errno.EINTR)
