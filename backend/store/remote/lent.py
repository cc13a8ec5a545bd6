"""Memory that programs lend: files are read into it straight from store nodes, bypassing this host's cache.

It comes as a descriptor: of a memfd that cannot shrink, or of a dma-buf, which stands for memory of a
device. With it comes its *lifeline*, a pipe that nobody writes to: when all its other ends are closed, the
program has ended or wants its memory back. Until then the memory stays registered for RDMA, so that later
reads into it only move bytes.

The kinds of both descriptors are checked, and nobody can keep the pipe locked. The memory is only ever
mapped here, never written with write(2): a program can block writers to its memfd for ever (by a write of
its own, from a page that never comes), but not stores into a mapping.
"""

import errno
import fcntl
import os
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio
from trio.lowlevel import ParkingLot

from ...transport import Memory

# The limit; each takes two descriptors and a task.
LENT_MAX = 256
# Missing in Python's fcntl.
_F_SEAL_FUTURE_WRITE = 0x10


class Declined(OSError):
    """A file should be opened instead of being read past the cache; the text gives the reason."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.EOPNOTSUPP, why)


@dataclass(eq=False)
class Lent:
    """Lent memory; `size` is in bytes."""

    fd: int
    size: int
    memory: Memory
    users: int = 0
    ending: ParkingLot = field(default_factory=ParkingLot)


class Lender:
    """All memory that is lent to a mount. `forget` is called with a descriptor when memory is taken
    back."""

    def __init__(self, nursery: trio.Nursery, forget: Callable[[int], None]) -> None:
        self._nursery = nursery
        self._forget = forget
        self._loans: dict[tuple[int, int], Lent] = {}

    def __len__(self) -> int:
        return len(self._loans)

    @asynccontextmanager
    async def using(self, fd: int, lifeline: int) -> AsyncIterator[Lent]:
        """Use lent memory; both descriptors belong to the lender from now on. Raises OSError EINVAL for
        descriptors of other kinds, Declined if too much is lent."""
        try:
            lent = self._find(fd, lifeline)
        except BaseException:
            os.close(fd)
            os.close(lifeline)
            raise
        lent.users += 1
        try:
            yield lent
        finally:
            lent.users -= 1
            lent.ending.unpark_all()

    def _find(self, fd: int, lifeline: int) -> Lent:
        status = os.fstat(fd)
        # Checked each time: this descriptor may belong to a program that may only read another's memory.
        kind = _kind_of(fd, status)
        key = status.st_dev, status.st_ino
        lent = self._loans.get(key)
        if lent is not None:
            os.close(fd)
            os.close(lifeline)
            return lent
        if len(self._loans) >= LENT_MAX:
            raise Declined(f"{LENT_MAX} buffers are lent already")
        if not stat.S_ISFIFO(os.fstat(lifeline).st_mode):
            raise OSError(errno.EINVAL, "the lifeline is no pipe")
        lent = self._loans[key] = Lent(fd, status.st_size, kind)
        self._nursery.start_soon(self._keep, key, lent, lifeline)
        return lent

    async def _keep(self, key: tuple[int, int], lent: Lent, lifeline: int) -> None:
        try:
            await trio.lowlevel.wait_readable(lifeline)
            while lent.users:  # a new user may come before the end of the last one is known here
                await lent.ending.park()
            self._forget(lent.fd)
        finally:
            del self._loans[key]
            os.close(lent.fd)
            os.close(lifeline)


def _kind_of(fd: int, status: os.stat_result) -> Memory:
    """Return the kind of memory. Raises OSError EINVAL for a descriptor of neither kind, for a file that
    may shrink while it is read into, and for memory that is not charged to its lender yet."""
    if os.readlink(f"/proc/self/fd/{fd}").startswith("/dmabuf:"):
        return Memory.DEVICE
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK or seals & (fcntl.F_SEAL_WRITE | _F_SEAL_FUTURE_WRITE):
        raise OSError(
            errno.EINVAL, "neither a dma-buf nor a memfd that is sealed against shrinking only"
        )
    if status.st_blocks * 512 < status.st_size:
        raise OSError(errno.EINVAL, "its memory is not allocated")
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise OSError(errno.EINVAL, "it is not open for reading and writing")
    return Memory.LENT
