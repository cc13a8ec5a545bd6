"""Files: opened by a name that is there, by one that is created, and without one; data, locks, closing."""

import ctypes
import errno
import os
import stat
from collections.abc import Coroutine
from contextlib import nullcontext, suppress
from typing import Any, Final

import trio

from ..backend.files.extents import when_unlocked
from ..backend.namespace import Inode, fail
from ..callers.processes import process_of
from ..coherence.content import Content
from ..coherence.kernel_cache import Name
from ..coherence.nodes import Handle
from ..inline import detach
from .calls import OFFSET_MAX, Attributes, Caller, refuse_other_than_file
from .lock_tables import Lock
from .locking import Locking
from .metadata import Part, Superblock
from .permissions import SET_IDS, Closer, privileges_of
from .since import Since
from .waits import Waits

# Others may remove a name and make it again each time that it is found taken.
_CREATES_MAX: Final = 1000
# Flags of opens that change the file, or may.
_CHANGES: Final = os.O_ACCMODE | os.O_TRUNC
_COPIED_MAX_BYTES: Final = 16 * 1024 * 1024  # in one request: others wait meanwhile
_FALLOC_FL_PUNCH_HOLE: Final = 2
# An open file, and the attributes that the kernel then has of it.
Opened = tuple[Handle, Attributes]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Files(Part):
    """Opens files, each on the content that the cache decides on, and reads, writes, locks and closes them
    by file handle. An unknown handle is a KeyError."""

    def __init__(self, block: Superblock, locking: Locking, waits: Waits, since: Since) -> None:
        super().__init__(block)
        self._locking = locking
        self._waits = waits
        self._since = since
        self._trusted = self._cache.references.believed

    # -- opened ----------------------------------------------------------------------------------

    async def open(
        self, inode: int, flags: int, ctx: Caller, *, lose_set_ids: bool | None = None
    ) -> Handle:
        node, found, name = await self._coherence.settle(inode, flags, ctx.pid)
        if not stat.S_ISREG(found.mode):
            refuse_other_than_file(found)
        if flags & _CHANGES:
            self._namespace.check_writable(found.ino)
        if flags & os.O_TRUNC:
            await self._metadata.lose_privileges(found.ino, ctx, set_ids=lose_set_ids)
            found = self._inodes[found.ino]
        if self._cache.references.announced:
            self._cache.references.opens(ctx.pid, found.ino, ctx.uid)
        handle = await self._cache.open(found, node, flags, ctx.pid, name)
        handle.name, handle.trusted = name, ctx.uid in self._trusted
        return handle

    async def create(
        self, parent_inode: int, flags: int, mode: int, umask: int, name: bytes, ctx: Caller
    ) -> Opened:
        directory = self._nodes.directory(parent_inode)
        if directory.xattrs:
            self._since.refuse(directory, name)
        writing = flags & os.O_ACCMODE != os.O_RDONLY
        for _ in range(_CREATES_MAX):
            # A file nobody writes is published as it is: empty. Else the name is made durable
            # together with the first version; a crash before that leaves neither.
            try:
                inode = await self._namespace.create(
                    directory.ino, name, mode & 0o7777 | stat.S_IFREG, ctx.uid, ctx.gid,
                    version=0 if writing else 1, durable=not writing, umask=umask,
                    layout=self._store.layout(directory.ino, name),
                    seen=not (self._store.sends and self._cache.sharing.isolates_below(directory.ino)),
                )  # fmt: skip
            except FileExistsError:
                if flags & os.O_EXCL:
                    raise
            else:
                try:
                    return self._created(inode, flags, ctx, (directory.ino, name))
                except OSError:  # there is no room for its content
                    await self._take_back(inode, directory.ino, name)
                    raise
            # Another host may be making the file: two that open it share it.
            await self._namespace.show(directory.ino, name)
            found = self._namespace.lookup(directory.ino, name)
            if found is not None:
                if not (found.is_file or found.is_dir):
                    raise fail(errno.ESTALE)  # the kernel follows it, or opens it itself
                try:
                    return await self._open_found(found, flags, ctx, (directory.ino, name))
                except OSError as error:
                    if error.errno != errno.ESTALE:  # another host has removed it
                        raise
        raise fail(errno.EBUSY, "others make and remove it all the time")

    async def _take_back(self, inode: Inode, parent: int, name: bytes) -> None:
        await self._namespace.unlink_if(parent, name, lambda found: found.ino == inode.ino)

    async def _open_found(self, found: Inode, flags: int, ctx: Caller, name: Name) -> Opened:
        """Open the file that a name led to by the time that it was to be created."""
        refuse_other_than_file(self._namespace.inode(found.ino))
        if flags & _CHANGES:
            self._namespace.check_writable(found.ino)
        found = await self._coherence.bring(found, content=not flags & os.O_TRUNC, opens=True)
        handle = await self._cache.open_any(found, flags, ctx.pid)
        handle.name, handle.trusted = name, ctx.uid in self._trusted
        handle.node.lookups += 1
        answer = self._metadata.describe(handle.node, found)
        self._coherence.changed(answer, handle.node)
        return handle, answer

    async def tmpfile(self, parent: int, flags: int, mode: int, umask: int, ctx: Caller) -> Opened:
        """Open a file without a name (O_TMPFILE). linkat(2) may give it one."""
        ino = self._nodes.directory(parent).ino
        mode = mode & 0o7777 | stat.S_IFREG
        inode = await self._namespace.orphan(mode, ctx.uid, ctx.gid, directory=ino, umask=umask)
        return self._created(inode, flags, ctx)

    def _created(self, inode: Inode, flags: int, ctx: Caller, name: Name | None = None) -> Opened:
        handle = self._cache.create(inode, flags, ctx.pid)
        handle.name, handle.trusted = name, ctx.uid in self._trusted
        node = handle.node
        node.lookups += 1
        answer = self._metadata.describe(node, inode, is_new=True)
        if name is not None:
            node.be_found(name)
            self._coherence.made(answer, *name, node, inode, ctx.pid)
        else:
            self._coherence.changed(answer, node)
        return handle, answer

    async def cancel_open(self, handle: Handle) -> None:
        """Close an open file whose open cannot be answered: nobody will release it."""
        handle.aborted = True
        await self._cache.release(handle.fh)

    # -- open ------------------------------------------------------------------------------------

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
        return await self._cache.carried.write(handle, off, buf)

    def _check_locks(self, handle: Handle, pid: int) -> None:
        """Raise OSError EIO if a process that is about to publish has lost a lock."""
        try:
            self._locking.check(pid)
        except OSError:
            if self._cache.publisher.give_up(handle):
                raise

    def releasing(self, fh: int, *, flock: bool) -> Coroutine[Any, Any, None] | None:
        """Return what carries out a release in the kernel session; None if it may be put off: it shows
        others nothing that the flush did not show before. `flock`: an flock(2) lock ends with the handle.
        Raises OSError EBADF for a directory's, KeyError when there is none."""
        handle = self._nodes.handles[fh]
        if handle.is_directory:
            raise fail(errno.EBADF)
        if flock or fh in self._locking.lockers:
            return self._locking.releasing(fh, handle.node.ino, self._cache.release)
        return self._cache.release(fh) if handle.writing else None

    async def fsync(self, fh: int) -> None:
        handle = self._handle(fh)
        if self._locking.lost_by:
            self._check_locks(handle, handle.pid)
        await self._cache.publisher.fsync(handle)
        if self._store.sends:
            await detach()
            await self._namespace.flush()

    async def fallocate(self, fh: int, offset: int, length: int, mode: int) -> None:
        handle = self._handle(fh, writing=True)
        if offset + length > self._store.size_max:
            raise fail(errno.EFBIG)

        def change(fd: int) -> None:
            if not mode & _FALLOC_FL_PUNCH_HOLE:
                self._cache.carried.refuse_growth(handle.node.ino, fd, offset, length)
                self._cache.carried.refuse_to_reserve(fd, offset, length)
            if _libc.fallocate(fd, mode, offset, length):
                if (code := ctypes.get_errno()) == errno.ENOSPC:
                    self._store.extents.look_for_room(self._content(handle).extent, refused=True)
                raise fail(code)

        await self._cache.carried.change(handle, change)

    async def lseek(self, fh: int, offset: int, whence: int) -> int:
        handle = self._handle(fh)
        content = self._content(handle)
        if whence not in (os.SEEK_DATA, os.SEEK_HOLE):
            raise fail(errno.EINVAL)
        is_here = self._cache.host.table.is_here(content)
        if not content.extent or not (is_here or offset < content.base.size):
            raise fail(errno.ENXIO)
        if not is_here:  # it is too large for that, and its holes are not known
            return offset if whence == os.SEEK_DATA else content.base.size
        with self._store.extents.opened(content.extent) as fd:
            if self._cache.in_place.is_alone(content, handle.node):
                return os.lseek(fd, offset, whence)
            await detach()
            return await when_unlocked(os.lseek, fd, offset, whence)

    async def copy_file_range(
        self, fh_in: int, off_in: int, fh_out: int, off_out: int, length: int
    ) -> int:
        if max(off_in, off_out) > OFFSET_MAX:
            raise fail(errno.EOVERFLOW)
        source = self._content(self._handle(fh_in))
        target = self._handle(fh_out, writing=True)
        length = min(length, _COPIED_MAX_BYTES)
        copied = 0
        if source.extent and not self._cache.host.table.is_here(source):
            raise fail(errno.EOPNOTSUPP)  # the kernel reads and writes, then

        def change(out: int) -> None:
            nonlocal copied
            if source.extent:
                with self._store.extents.opened(source.extent) as fd:
                    there = min(length, max(0, os.fstat(fd).st_size - off_in))
                    self._cache.carried.refuse_growth(target.node.ino, out, off_out, there)
                    copied = os.copy_file_range(fd, out, length, off_in, off_out)

        await self._cache.carried.change(target, change, writes=True)
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
        leads_elsewhere = not self._namespace.leads_to(*handle.name, handle.node.ino)
        if leads_elsewhere and not handle.told:
            handle.told = True
            self._waits.forget_names()
        return leads_elsewhere

    def poll(self, fh: int, kernel_handle: int, uid: int) -> None:
        """Have the kernel ask once more for `is_outdated` when that may have changed. Raises OSError EAGAIN
        if this user's processes wait for too much already."""
        self._waits.poll(self._handle(fh).node, kernel_handle, uid)

    async def lock(self, fh: int, owner: int, lock: Lock, *, flock: bool, wait: bool) -> None:
        """Take or give back a lock (fcntl(2), flock(2)). Raises OSError EAGAIN, EDEADLK, ENOLCK, EIO."""
        ino = self._handle(fh).node.ino
        await self._locking.lock(fh, ino, owner, lock, flock=flock, wait=wait)

    async def close(self, handle: Handle, pid: int, owner: int) -> None:
        """Carry out close(2) of one descriptor. The kernel session tells who closes it, and whose locks on
        the file end. Their next owner sees what was written under them, also if the process is killed."""
        locking, node = self._locking, handle.node
        posix, ino = locking.posix, node.ino
        any_locks = posix.inodes or locking.flocks.inodes
        shielded = locking.may_end(handle.fh, ino, owner) if any_locks else False
        if shielded:
            await detach()
        published = False
        with trio.CancelScope(shield=True) if shielded else nullcontext():
            try:
                if handle.writing:
                    found = self._inodes[ino]
                    if (found.xattrs or found.mode & SET_IDS) and privileges_of(found) & ~node.told:
                        await self._metadata.lose_privileges(ino, Closer(pid))
                    if locking.lost_by:
                        self._check_locks(handle, pid)
                    await self._cache.publisher.flush(handle, pid)
                published = True
                if shielded:
                    await self._flush_all_of(pid)
            finally:
                if locking.lost_by or locking.lockers or posix.inodes:
                    await locking.closed(handle.fh, ino, owner, pid, published=published)

    async def _flush_all_of(self, pid: int) -> None:
        """Publish all that a process has written if its end closes its files, before its locks end.
        Descriptors opened by a thread that has ended are not known to be the process's."""
        if (await self._processes.of(pid)).exit_code() is None:
            return
        handles, process = self._nodes.handles, process_of(pid)
        for fh in list(handles):
            handle = handles.get(fh)
            if handle and handle.writing and process_of(handle.pid) == process:
                with suppress(OSError), self._cache.host.held(self._content(handle)):
                    await self._cache.publisher.flush(handle, pid)
