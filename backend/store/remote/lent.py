"""Memory that programs lend: files are read into it straight from store nodes, past this host's cache.

It comes as a descriptor: of a memfd that cannot shrink, or of a dma-buf, which stands for memory of a
device. With it comes its *lifeline*, a pipe that nobody writes to: when nobody holds its other end any
more, the program has ended or wants its memory back. Until then the memory stays registered for RDMA, so
that reading into it again moves bytes and does nothing else.

Both are known to be of these kinds, and nobody can keep the pipe locked. Memory is only ever mapped here: a
program can make whoever writes to its memfd wait for ever (by a write of its own, from a page that never
comes), but nobody who stores into a mapping.
"""

import errno
import fcntl
import os
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import trio

from ...transport import Memory

__all__ = ["LENT_MAX", "Declined", "Lender", "Lent"]

# Each takes two descriptors and a task.
LENT_MAX = 256
# Not in Python's fcntl.
_F_SEAL_FUTURE_WRITE = 0x10


class Declined(OSError):
    """A file cannot be read past the cache, and had better be opened; the text says why."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.EOPNOTSUPP, why)


class Lent(NamedTuple):
    """`size` in bytes."""

    fd: int
    size: int
    memory: Memory


class _Loan:
    def __init__(self, lent: Lent, lifeline: int) -> None:
        self.lent = lent
        self.lifeline = lifeline
        self.users = 0
        self.idle = trio.Event()
        self.idle.set()

    def close(self) -> None:
        os.close(self.lent.fd)
        os.close(self.lifeline)


class Lender:
    """All memory that is lent to a mount. `forget` is called with a descriptor of what is taken back."""

    def __init__(self, nursery: trio.Nursery, forget: Callable[[int], None]) -> None:
        self._nursery = nursery
        self._forget = forget
        self._loans: dict[tuple[int, int], _Loan] = {}

    def __len__(self) -> int:
        return len(self._loans)

    @asynccontextmanager
    async def using(self, fd: int, lifeline: int) -> AsyncIterator[Lent]:
        """Both descriptors are ours from now on. Raises OSError EINVAL for what is not to be lent, Declined
        when too much is."""
        try:
            loan = self._find(fd, lifeline)
        except BaseException:
            os.close(fd)
            os.close(lifeline)
            raise
        loan.users += 1
        if loan.users == 1:
            loan.idle = trio.Event()
        try:
            yield loan.lent
        finally:
            loan.users -= 1
            if not loan.users:
                loan.idle.set()

    def _find(self, fd: int, lifeline: int) -> _Loan:
        status = os.fstat(fd)
        # Each time: this one may be of somebody who can only look at what another has lent.
        kind = _kind_of(fd, status)
        key = status.st_dev, status.st_ino
        loan = self._loans.get(key)
        if loan is not None:
            os.close(fd)
            os.close(lifeline)
            return loan
        if len(self._loans) >= LENT_MAX:
            raise Declined(f"{LENT_MAX} buffers are lent already")
        if not stat.S_ISFIFO(os.fstat(lifeline).st_mode):
            raise OSError(errno.EINVAL, "the lifeline is no pipe")
        loan = _Loan(Lent(fd, status.st_size, kind), lifeline)
        self._loans[key] = loan
        self._nursery.start_soon(self._keep, key, loan)
        return loan

    async def _keep(self, key: tuple[int, int], loan: _Loan) -> None:
        try:
            await trio.lowlevel.wait_readable(loan.lifeline)
            while loan.users:  # somebody may come before we have heard that the last one went
                await loan.idle.wait()
            self._forget(loan.lent.fd)
        finally:
            del self._loans[key]
            loan.close()


def _kind_of(fd: int, status: os.stat_result) -> Memory:
    """Raises OSError EINVAL for what is neither, for a file that may shrink while it is read into, and for
    one whose memory is not its lender's yet, who is to pay for it."""
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
