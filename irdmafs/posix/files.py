"""Operations on open files: data, locks, and closing."""

import ctypes
import errno
import os
from collections.abc import Coroutine
from typing import Any, Final

import trio

from ..backend.namespace import fail
from ..backend.namespace.protection import APPEND, IMMUTABLE
from ..backend.store.api import Store
from ..coherence.cache import Cache
from ..coherence.content import Content
from ..coherence.nodes import Handle
from ..inline import detach
from .answers import Answers
from .atimes import Atimes
from .calls import OFFSET_MAX
from .locking import Locking
from .locks import Lock
from .metadata import Metadata
from .privileges import Closer, privileges_of
from .waits import Waits

_COPIED_MAX_BYTES: Final = 16 * 1024 * 1024  # in one request: others wait meanwhile
_FALLOC_FL_KEEP_SIZE: Final = 1
_FALLOC_FL_PUNCH_HOLE: Final = 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class OpenFiles:
    """Reads, writes, locks and closes by file handle. An unknown handle is a KeyError."""

    def __init__(
        self,
        store: Store,
        cache: Cache,
        answers: Answers,
        metadata: Metadata,
        locking: Locking,
        atimes: Atimes,
        waits: Waits,
    ) -> None:
        self._store = store
        self._inodes = store.namespace.inodes
        self._extents = store.extents
        self._cache = cache
        self._nodes = cache.nodes
        self._answers = answers
        self._metadata = metadata
        self._locking = locking
        self._atimes = atimes
        self._waits = waits

    def _handle(self, fh: int, *, writing: bool = False) -> Handle:
        """Return an open file. Raises KeyError if there is none, EBADF if it is not open for that."""
        handle = self._nodes.handles[fh]
        if handle.is_directory or (writing and not handle.writing):
            raise fail(errno.EBADF)
        return handle

    @staticmethod
    def _content(handle: Handle) -> Content:
        assert handle.content is not None
        return handle.content

    async def read(self, fh: int, off: int, size: int) -> bytes:
        if off > OFFSET_MAX:
            raise fail(errno.EINVAL)
        handle = self._handle(fh)
        if not handle.flags & os.O_NOATIME:
            self._atimes.read(self._inodes[handle.node.ino])
        return await self._cache.carried.read(handle, off, size)

    async def write(self, fh: int, off: int, buf: "memoryview | bytes") -> int:
        if off > OFFSET_MAX:
            raise fail(errno.EINVAL)
        handle = self._handle(fh, writing=True)
        inode = self._inodes[handle.node.ino]
        # The kernel lets programs take O_APPEND off: it does not know the append-only flag.
        if inode.flags & APPEND and off < self._answers.attributes(handle.node, inode).st_size:
            raise fail(errno.EPERM)
        return await self._cache.carried.write(handle, off, buf)

    async def flush(self, fh: int, pid: int = 0) -> None:
        handle = self._handle(fh)
        pid = pid or handle.pid
        found = self._inodes[handle.node.ino]
        if handle.writing and privileges_of(found) & ~handle.node.told:
            await self._metadata.lose_privileges(found.ino, Closer(pid))
        await self._publish(handle, pid, self._cache.publisher.flush(handle, pid))

    async def _publish(self, handle: Handle, pid: int, step: Coroutine[Any, Any, None]) -> None:
        """Run code that may publish for a process, unless the process has lost a lock."""
        if not self._locking.may_lose:
            await step
            return
        try:
            self._locking.check(pid)
        except OSError:
            if self._cache.publisher.give_up(handle):
                step.close()
                raise
        with self._locking.publishing(handle.node.ino, pid):
            await step

    async def release(self, fh: int) -> None:
        self._handle(fh)
        await self._cache.release(fh)

    def release_can_wait(self, fh: int) -> bool:
        """Return whether releasing this handle shows others nothing that its flush did not show before.

        Raises OSError EBADF for a directory's, KeyError when there is none.
        """
        return not self._handle(fh).writing

    async def fsync(self, fh: int, datasync: bool) -> None:
        handle = self._handle(fh)
        await self._publish(handle, handle.pid, self._cache.publisher.fsync(handle))

    async def fallocate(self, fh: int, mode: int, offset: int, length: int) -> None:
        handle = self._handle(fh, writing=True)
        protected = self._inodes[handle.node.ino].flags
        if protected & IMMUTABLE or (protected & APPEND and mode & ~_FALLOC_FL_KEEP_SIZE):
            raise fail(errno.EPERM)
        if offset + length > self._store.size_max:
            raise fail(errno.EFBIG)

        def change(fd: int) -> None:
            if not mode & _FALLOC_FL_PUNCH_HOLE:
                self._cache.carried.refuse_growth(handle.node.ino, fd, offset, length)
                self._cache.carried.refuse_to_reserve(fd, offset, length)
            if _libc.fallocate(fd, mode, offset, length):
                raise fail(ctypes.get_errno())

        await self._cache.carried.change(handle, change)

    async def lseek(self, fh: int, offset: int, whence: int) -> int:
        content = self._content(self._handle(fh))
        if whence not in (os.SEEK_DATA, os.SEEK_HOLE):
            raise fail(errno.EINVAL)
        if not content.extent:
            raise fail(errno.ENXIO)
        with self._extents.opened(content.extent) as fd:
            return os.lseek(fd, offset, whence)

    async def copy_file_range(
        self, fh_in: int, off_in: int, fh_out: int, off_out: int, length: int
    ) -> int:
        if max(off_in, off_out) > OFFSET_MAX:
            raise fail(errno.EOVERFLOW)
        source = self._content(self._handle(fh_in))
        target = self._handle(fh_out, writing=True)
        if self._inodes[target.node.ino].flags & (IMMUTABLE | APPEND):
            raise fail(errno.EPERM)
        length = min(length, 16 * 1024 * 1024)  # other requests wait meanwhile
        copied = 0

        def change(out: int) -> None:
            nonlocal copied
            if source.extent:
                with self._extents.opened(source.extent) as fd:
                    left = max(0, os.fstat(fd).st_size - off_in)
                    self._cache.carried.refuse_growth(
                        target.node.ino, out, off_out, min(length, left)
                    )
                    copied = os.copy_file_range(fd, out, length, off_in, off_out)

        await self._cache.carried.change(target, change)
        if copied:
            self._atimes.read(self._inodes[source.ino])
        return copied

    def is_outdated(self, fh: int) -> bool:
        """Return whether the name by which a file was opened leads elsewhere, or nowhere, now, or whether
        a version was published since; for a handle that writes: one that it does not show."""
        handle = self._handle(fh)
        content, version = self._content(handle), self._inodes[handle.node.ino].version
        if handle.writing:
            changing = content.is_changing and not content.state.ended
            newer = not changing and content.base.version != version
        else:
            newer = handle.version != version
        if newer or handle.name is None:
            return newer
        return not self._store.namespace.leads_to(*handle.name, handle.node.ino)

    def poll(self, fh: int, kernel_handle: int, uid: int) -> None:
        """Have the kernel ask once more for `is_outdated` when that may have changed. Raises OSError EAGAIN
        if this user's processes wait for too much already."""
        self._waits.poll(self._handle(fh).node, kernel_handle, uid)

    async def test_lock(self, node_id: int, owner: int, lock: Lock) -> Lock:
        """Return the lock in the way, or `lock` as F_UNLCK (fcntl F_GETLK)."""
        return await self._locking.test(self._nodes.inode_of(node_id).ino, owner, lock)

    async def lock(self, fh: int, owner: int, lock: Lock, *, flock: bool, wait: bool) -> None:
        """Take or give back a lock (fcntl F_SETLK, F_SETLKW; flock). Raises OSError EAGAIN, EDEADLK,
        ENOLCK, EIO."""
        ino = self._handle(fh).node.ino
        await self._locking.lock(fh, ino, owner, lock, flock=flock, wait=wait)

    async def close(self, fh: int, pid: int, owner: int) -> None:
        """Close a descriptor in the kernel session, which tells whose locks on the file end with it. The
        next owner of such a lock sees what was written under it, also if the process is being killed."""
        locking = self._locking
        if locking.may_lose and locking.posix.holds(self._handle(fh).node.ino, owner):
            await detach()
            with trio.CancelScope(shield=True):
                await self._close(fh, pid, owner)
        else:
            await self._close(fh, pid, owner)

    async def _close(self, fh: int, pid: int, owner: int) -> None:
        locking = self._locking
        published = False
        try:
            await self.flush(fh, pid)
            published = True
        finally:
            if locking.closes_matter:
                ino = self._handle(fh).node.ino
                await locking.closed(fh, ino, owner, pid, published=published)

    async def release_locked(self, fh: int) -> None:
        """Release a handle through which locks may have been taken."""
        async with self._locking.releasing(fh, self._handle(fh).node.ino):
            await self.release(fh)
