"""Callers that wait for a change, as long as it takes: how many may, and how that ends.

They wait for a change below a directory, in a request, or for one of a file, in poll(2). The kernel session
is told of signals that end a request (see fuse/tasks.py). pyfuse3 is not, so there each caller is looked at
from time to time, and few may wait: each takes one of the tasks that answer requests.
"""

import errno
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

import trio

from ..backend.namespace import Namespace, fail
from ..callers.processes import Processes
from ..coherence.kernel_cache import KernelCache
from ..coherence.nodes import Node
from ..inline import detach
from .calls import Caller

_OF_ONE_USER_MAX: Final = 4096
_WITHOUT_SIGNALS_MAX: Final = 48
_LOOK_AT_CALLER_S: Final = 0.5
_LOOK_AT_DESCRIPTORS_S: Final = 60.0


class Waits:
    """The waits of a mount."""

    def __init__(self, namespace: Namespace, processes: Processes, kernel: KernelCache) -> None:
        self._inodes = namespace.inodes
        self._watches = namespace.watches
        self._processes = processes
        self._kernel = kernel
        self._tells_of_signals = kernel.tells_of_signals
        self._waiting: Counter[int] = Counter()  # by user
        # The newest counter when somebody was last told one.
        self._told = 0
        # The kernel's numbers of polled descriptors, by inode.
        self._polled: dict[int, set[int]] = {}
        self._ended = False

    def end(self) -> None:
        """End all waits, soon: the mount ends. The kernel session cancels them by itself."""
        self._ended = True

    def count(self, directory: int) -> int:
        """Return the counter of a directory (see Watches), when the kernel looks names up for who is told
        it. Raises EAGAIN if too many are waited for."""
        count = self._watches.count(directory)
        if self._told != self._watches.newest:
            self._told = self._watches.newest
            self.forget_names()
        return count

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
                    if self._ended:
                        raise fail(errno.ENOTCONN)
                    pending = await self._processes.pending_signals(ctx.pid)
                    if pending.fatal or pending.handled:
                        raise fail(errno.EINTR)

    def poll(self, node: Node, kernel_handle: int, uid: int) -> None:
        """Have the kernel ask for a descriptor's events again when the names of its file, or its version,
        change. Raises OSError EAGAIN as `changed` does."""
        waiting = self._polled.get(node.ino)
        if waiting is not None:
            waiting.add(kernel_handle)
            return
        with ExitStack() as stack:
            stack.enter_context(self._one_more(uid))
            count, version = self._watches.count(node.ino), self._inodes[node.ino].version
            if self._kernel.start_soon(self._wake_polls, node, count, version, stack.pop_all()):
                self._polled[node.ino] = {kernel_handle}

    async def _wake_polls(self, node: Node, count: int, version: int, waiting: ExitStack) -> None:
        with waiting:
            while node.opens:
                with trio.move_on_after(_LOOK_AT_DESCRIPTORS_S) as look, suppress(BlockingIOError):
                    await self._watches.wait(node.ino, count)
                if not look.cancelled_caught:
                    break
            polled = self._polled.pop(node.ino)
        inode = self._inodes.get(node.ino)
        if inode is None or inode.version == version:
            self.forget_names()
        for kernel_handle in polled:
            await self._kernel.wake_poll(kernel_handle)

    def forget_names(self) -> None:
        """Have the kernel look names up before somebody is told that one leads elsewhere. It finishes a
        change of names after that was answered, and until then would open the file that had the name."""
        if self._kernel.can_forget:
            self._kernel.forget((), names=True)

    @contextmanager
    def _one_more(self, uid: int) -> Iterator[None]:
        """Count one that waits."""
        signals = self._tells_of_signals
        user, most = (uid, _OF_ONE_USER_MAX) if signals else (0, _WITHOUT_SIGNALS_MAX)
        if self._waiting[user] >= most:
            raise fail(errno.EAGAIN, "too many wait")
        self._waiting[user] += 1
        try:
            yield
        finally:
            self._waiting[user] -= 1
            if not self._waiting[user]:
                del self._waiting[user]
