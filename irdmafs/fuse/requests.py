"""The table of requests: each kind that the kernel can send, its operation, and its answer."""

import errno
import os
import select
from collections.abc import Callable, Coroutine, Sequence
from struct import Struct
from typing import Any, Final, NamedTuple

from ..backend.model.clock import now_ns
from ..backend.namespace import acl, fail
from ..coherence.kernel_locks import KernelLocks
from ..coherence.nodes import Handle
from ..inline import detach
from ..posix.calls import Attributes, OpenInfo
from ..posix.filesystem import Filesystem
from ..posix.lock_tables import Lock
from ..posix.own_xattrs import PREFIX as OWN_XATTRS
from ..posix.privileges import CAPABILITY
from . import wire
from .connection import Connection
from .deferred import Deferred
from .interrupts import WaitingRequests
from .notices import Notices
from .replies import (
    DirectoryReply,
    pack_attributes,
    pack_entry,
    pack_found,
    pack_lock,
    pack_statfs,
    pack_statx,
    pack_written,
    sized,
)
from .wire import BODY, Malformed, Opcode, Request, Valid, decode_name

__all__ = ["NO_ANSWER", "NoPayload", "Requests", "Row"]

_NS: Final = 1_000_000_000
_OFFSET_MAX: Final = 2**63 - 1
# The attributes that the kernel asks for before a file is first written, and where it checks modes.
_ASKED_OFTEN: Final = frozenset({CAPABILITY, *acl.NAMES})

# Fields of a SETATTR that say by which descriptor and for whom, not what is set.
_VALID_HANDLES: Final = int(Valid.FH | Valid.LOCKOWNER)
_VALID_NOW: Final = int(Valid.ATIME_NOW | Valid.MTIME_NOW)
_CACHE_DIR: Final = int(wire.Open.CACHE_DIR | wire.Open.KEEP_CACHE)
_KEEP_CACHE: Final = int(wire.Open.KEEP_CACHE)
_NOFLUSH: Final = int(wire.Open.NOFLUSH)
_PASSTHROUGH: Final = int(wire.Open.PASSTHROUGH)

# Requests that only the kernel handles, or sends only to servers that offer them: answered ENOSYS. The
# kernel makes ENOTTY of that for IOCTL.
_NOT_SERVED: Final = frozenset(
    {
        *(Opcode.INIT, Opcode.ACCESS, Opcode.BMAP, Opcode.NOTIFY_REPLY),
        *(Opcode.SETUPMAPPING, Opcode.REMOVEMAPPING, Opcode.IOCTL),
    }
)
# Requests during which the kernel has locked the directories that they name.
_RENAMES: Final = frozenset({Opcode.RENAME, Opcode.RENAME2})
_CHANGE_NAMES: Final = frozenset(
    {
        *(Opcode.MKNOD, Opcode.MKDIR, Opcode.SYMLINK, Opcode.LINK, Opcode.CREATE),
        *(Opcode.UNLINK, Opcode.RMDIR, *_RENAMES),
    }
)
_CHANGE_ATTRIBUTES: Final = frozenset({Opcode.SETATTR, Opcode.SETXATTR, Opcode.REMOVEXATTR})


class NoPayload:
    """The result of a request that is answered with an error (an exception takes 2 us more), or, with the
    code 0, gets no answer."""

    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        self.code = code


NO_ANSWER: Final = NoPayload(0)
_NO_DATA: Final = NoPayload(errno.ENODATA)
# A coroutine is run to its result.
Result = Any
CarryOut = Callable[[Request], Result]


class Row(NamedTuple):
    """How one kind of request, of at least `size` bytes, is answered: `carry_out` gives a result, `pack`
    packs it. Without `pack` the result is the payload."""

    size: int
    carry_out: CarryOut
    pack: Callable[[Any], bytes] | None


def _row(
    layout: Struct | None, carry_out: CarryOut, pack: Callable[[Any], bytes] | None = None
) -> Row:
    """Return the row of a request whose body begins with `layout`."""
    return Row(BODY + (layout.size if layout is not None else 0), carry_out, pack)


class Requests:
    """The table of all kinds of requests (`rows`), which are read from the connection's buffer: each
    operation decodes a body, and calls the part of the filesystem that carries the request out."""

    def __init__(
        self,
        connection: Connection,
        filesystem: Filesystem,
        notices: Notices,
        deferred: Deferred,
        waiting: WaitingRequests,
    ) -> None:
        self._buffer = connection.buffer
        self._view = memoryview(connection.buffer)
        self._lookups = filesystem.lookups
        self._nodes = filesystem.cache.nodes
        self._names = filesystem.names
        self._metadata = filesystem.metadata
        self._xattrs = filesystem.xattrs
        self._opens = filesystem.opens
        self._files = filesystem.files
        self._directories = filesystem.directories
        self._atimes = filesystem.atimes
        self._notices = notices
        self._deferred = deferred
        self._waiting = waiting
        listings_stay = filesystem.coherence.listings_stay
        self._directory_flags = _CACHE_DIR if listings_stay else 0
        self.rows = self._table()
        locks = filesystem.coherence.kernel_locks
        if locks is not None:
            for opcode in _CHANGE_NAMES | _CHANGE_ATTRIBUTES:
                row = self.rows[opcode]
                self.rows[opcode] = row._replace(carry_out=self._told_to_others(row, locks))

    def _table(self) -> dict[int, Row]:
        at_handle, files = self._at_handle, self._files
        rows = {
            # Names
            Opcode.LOOKUP: _row(None, self._lookup, pack_found),
            Opcode.FORGET: _row(wire.FORGET_IN, self._forget),
            Opcode.BATCH_FORGET: _row(wire.BATCH_FORGET_IN, self._batch_forget),
            Opcode.MKNOD: _row(wire.MKNOD_IN, self._mknod, pack_entry),
            Opcode.MKDIR: _row(wire.MKDIR_IN, self._mkdir, pack_entry),
            Opcode.SYMLINK: _row(None, self._symlink, pack_entry),
            Opcode.LINK: _row(wire.LINK_IN, self._link, pack_entry),
            Opcode.UNLINK: _row(None, self._unlink),
            Opcode.RMDIR: _row(None, self._rmdir),
            Opcode.RENAME: _row(wire.RENAME_IN, self._rename),
            Opcode.RENAME2: _row(wire.RENAME2_IN, self._rename2),
            Opcode.READLINK: _row(None, lambda asked: self._names.readlink(asked.nodeid, asked)),
            # Attributes
            Opcode.GETATTR: _row(None, self._getattr, pack_attributes),
            Opcode.SETATTR: _row(wire.SETATTR_IN, self._setattr, pack_attributes),
            Opcode.STATX: _row(None, self._statx),
            Opcode.STATFS: _row(
                None, lambda asked: self._metadata.statfs(asked.nodeid), pack_statfs
            ),
            Opcode.SETXATTR: _row(wire.SETXATTR_IN, self._setxattr),
            Opcode.GETXATTR: _row(wire.GETXATTR_IN, self._getxattr),
            Opcode.LISTXATTR: _row(wire.GETXATTR_IN, self._listxattr),
            Opcode.REMOVEXATTR: _row(None, self._removexattr),
            # Files
            Opcode.OPEN: _row(wire.OPEN_IN, self._open, self._pack_open),
            Opcode.CREATE: _row(wire.CREATE_IN, self._create, self._pack_created),
            Opcode.TMPFILE: _row(wire.CREATE_IN, self._tmpfile, self._pack_created),
            Opcode.READ: at_handle(wire.READ_IN, files.read),
            Opcode.WRITE: _row(wire.WRITE_IN, self._write, pack_written),
            Opcode.FLUSH: _row(wire.FLUSH_IN, self._flush),
            Opcode.RELEASE: _row(wire.RELEASE_IN, self._release),
            Opcode.FSYNC: at_handle(
                wire.FSYNC_IN, lambda fh, flags, _: files.fsync(fh, bool(flags & 1))
            ),
            Opcode.FALLOCATE: at_handle(wire.FALLOCATE_IN, self._fallocate),
            Opcode.LSEEK: at_handle(wire.LSEEK_IN, files.lseek, wire.LSEEK_OUT.pack),
            Opcode.COPY_FILE_RANGE: at_handle(
                wire.COPY_FILE_RANGE_IN, files.copy_file_range, pack_written
            ),
            Opcode.POLL: _row(wire.POLL_IN, self._poll),
            # Directories
            Opcode.OPENDIR: _row(wire.OPEN_IN, self._opendir, self._pack_opendir),
            Opcode.READDIR: at_handle(wire.READ_IN, self._readdir),
            Opcode.READDIRPLUS: at_handle(wire.READ_IN, self._readdirplus),
            Opcode.RELEASEDIR: at_handle(
                wire.RELEASE_IN, lambda fh, *_: self._directories.releasedir(fh)
            ),
            Opcode.FSYNCDIR: _row(wire.FSYNC_IN, lambda asked: self._directories.sync()),
            Opcode.SYNCFS: _row(None, lambda asked: self._directories.sync()),
            # Locks and signals
            Opcode.GETLK: _row(wire.LOCK_IN, self._getlk, pack_lock),
            Opcode.SETLK: _row(wire.LOCK_IN, self._setlk),
            Opcode.SETLKW: _row(wire.LOCK_IN, self._setlk),
            Opcode.INTERRUPT: _row(wire.INTERRUPT_IN, self._interrupt),
            Opcode.DESTROY: _row(None, lambda asked: None),
        }
        missing = set(Opcode) - _NOT_SERVED - rows.keys()
        if missing:
            raise NotImplementedError(f"requests that nothing answers: {missing}")
        # Lookups by int are twice as fast as by members of an enumeration.
        return {int(opcode): found for opcode, found in rows.items()}

    # -- rows ------------------------------------------------------------------------------------

    def _at_handle(
        self,
        layout: Struct,
        operation: Callable[..., Result],
        pack: Callable[[Any], bytes] | None = None,
    ) -> Row:
        """Return the row of a request whose operation takes the fields of `layout`; the first is a
        handle."""
        buffer, unpack = self._buffer, layout.unpack_from

        def carry_out(asked: Request) -> Result:
            return operation(*unpack(buffer, BODY))

        return _row(layout, carry_out, pack)

    def _told_to_others(self, row: Row, locks: KernelLocks) -> CarryOut:
        """Return the operation of a request that other hosts must know of before it is answered: it may
        wait."""

        def carry_out(asked: Request) -> Result:
            directories = [asked.nodeid] if asked.opcode in _CHANGE_NAMES else []
            if asked.opcode in _RENAMES:
                directories += wire.RENAME_IN.unpack_from(self._buffer, BODY)
            return hold(row.carry_out(asked), directories)

        async def hold(operation: Coroutine[Any, Any, Any], directories: list[int]) -> Result:
            with locks.hold(*directories):
                await detach()
                return await operation

        return carry_out

    # -- names -----------------------------------------------------------------------------------

    def _lookup(self, asked: Request) -> Result:
        name, _ = decode_name(self._buffer, BODY, asked.length)
        found = self._lookups.find(asked.nodeid, name, asked.pid)
        return self._lookups.lookup_fresh(asked.nodeid, name, asked) if found is None else found

    def _forget(self, asked: Request) -> NoPayload:
        (lookups,) = wire.FORGET_IN.unpack_from(self._buffer, BODY)
        self._deferred.forgotten.append((asked.nodeid, lookups))
        return NO_ANSWER

    def _batch_forget(self, asked: Request) -> NoPayload:
        count, _ = wire.BATCH_FORGET_IN.unpack_from(self._buffer, BODY)
        start = BODY + wire.BATCH_FORGET_IN.size
        stop = start + count * wire.FORGET_ONE.size
        asked.refuse_shorter(stop)
        self._deferred.forgotten += wire.FORGET_ONE.iter_unpack(self._view[start:stop])
        return NO_ANSWER

    def _mknod(self, asked: Request) -> Result:
        mode, rdev, umask, _ = wire.MKNOD_IN.unpack_from(self._buffer, BODY)
        name, _ = decode_name(self._buffer, BODY + wire.MKNOD_IN.size, asked.length)
        return self._names.mknod(asked.nodeid, name, mode, umask, rdev, asked)

    def _mkdir(self, asked: Request) -> Result:
        mode, umask = wire.MKDIR_IN.unpack_from(self._buffer, BODY)
        name, _ = decode_name(self._buffer, BODY + wire.MKDIR_IN.size, asked.length)
        return self._names.mkdir(asked.nodeid, name, mode, umask, asked)

    def _symlink(self, asked: Request) -> Result:
        name, target = self._two_names(asked, BODY)
        return self._names.symlink(asked.nodeid, name, target, asked)

    def _link(self, asked: Request) -> Result:
        (old,) = wire.LINK_IN.unpack_from(self._buffer, BODY)
        name, _ = decode_name(self._buffer, BODY + wire.LINK_IN.size, asked.length)
        return self._names.link(old, asked.nodeid, name, asked)

    def _unlink(self, asked: Request) -> Result:
        name, _ = decode_name(self._buffer, BODY, asked.length)
        return self._names.unlink(asked.nodeid, name, asked)

    def _rmdir(self, asked: Request) -> Result:
        name, _ = decode_name(self._buffer, BODY, asked.length)
        return self._names.rmdir(asked.nodeid, name, asked)

    def _rename(self, asked: Request) -> Result:
        (target,) = wire.RENAME_IN.unpack_from(self._buffer, BODY)
        old, new = self._two_names(asked, BODY + wire.RENAME_IN.size)
        return self._names.rename(asked.nodeid, old, target, new, 0, asked)

    def _rename2(self, asked: Request) -> Result:
        target, flags, _ = wire.RENAME2_IN.unpack_from(self._buffer, BODY)
        old, new = self._two_names(asked, BODY + wire.RENAME2_IN.size)
        return self._names.rename(asked.nodeid, old, target, new, flags, asked)

    def _two_names(self, asked: Request, start: int) -> tuple[bytes, bytes]:
        first, after = decode_name(self._buffer, start, asked.length)
        second, _ = decode_name(self._buffer, after, asked.length)
        return first, second

    # -- attributes ------------------------------------------------------------------------------

    def _getattr(self, asked: Request) -> Attributes:
        return self._metadata.attributes(asked.nodeid)

    def _setattr(self, asked: Request) -> Result:
        (
            valid, _, fh, size, _, atime, mtime, _, atime_ns, mtime_ns, _,
            mode, _, uid, gid, _,
        ) = wire.SETATTR_IN.unpack_from(self._buffer, BODY)  # fmt: skip
        if max(atime_ns, mtime_ns) >= _NS:
            raise Malformed("a time has more nanoseconds than a second")
        if valid & Valid.SIZE and size > _OFFSET_MAX:
            raise fail(errno.EFBIG)
        now = now_ns() if valid & _VALID_NOW else 0
        changes = {}
        if valid & Valid.MODE:
            changes["mode"] = mode
        if valid & Valid.UID:
            changes["uid"] = uid
        if valid & Valid.GID:
            changes["gid"] = gid
        if valid & (Valid.ATIME | Valid.ATIME_NOW):
            changes["atime_ns"] = now if valid & Valid.ATIME_NOW else atime * _NS + atime_ns
        if valid & (Valid.MTIME | Valid.MTIME_NOW):
            changes["mtime_ns"] = now if valid & Valid.MTIME_NOW else mtime * _NS + mtime_ns
        # The kernel sends a SETATTR that sets nothing before a change that has no request of its own.
        lose_set_ids = bool(valid & Valid.KILL_SUIDGID) or not valid & ~_VALID_HANDLES
        return self._metadata.change(
            asked.nodeid, changes, asked, size=size if valid & Valid.SIZE else None,
            fh=fh if valid & Valid.FH else None, lose_set_ids=lose_set_ids,
        )  # fmt: skip

    def _statx(self, asked: Request) -> bytes:
        entry = self._metadata.attributes(asked.nodeid)
        return pack_statx(entry, self._metadata.birth_ns(asked.nodeid))

    def _setxattr(self, asked: Request) -> Result:
        size, flags, more = wire.SETXATTR_IN.unpack_from(self._buffer, BODY)
        name, start = decode_name(self._buffer, BODY + wire.SETXATTR_IN.size, asked.length)
        asked.refuse_shorter(start + size)
        value = bytes(self._view[start : start + size])
        drop_set_gid = bool(more & wire.SETXATTR_ACL_KILL_SGID)
        return self._xattrs.setxattr(
            asked.nodeid, name, value, asked, flags, drop_set_gid=drop_set_gid
        )

    def _getxattr(self, asked: Request) -> Result:
        room, _ = wire.GETXATTR_IN.unpack_from(self._buffer, BODY)
        name, _ = decode_name(self._buffer, BODY + wire.GETXATTR_IN.size, asked.length)
        if name in _ASKED_OFTEN and not self._nodes.inode_of(asked.nodeid).xattrs:
            return _NO_DATA
        if name.startswith(OWN_XATTRS):
            self._deferred.settle()  # a caller that asks what is open must not see closed files
        return self._sized(self._xattrs.getxattr(asked.nodeid, name, asked), room)

    async def _sized(self, asking: Coroutine[Any, Any, bytes], room: int) -> bytes:
        return sized(await asking, room)

    async def _listxattr(self, asked: Request) -> bytes:
        room, _ = wire.GETXATTR_IN.unpack_from(self._buffer, BODY)
        names = await self._xattrs.listxattr(asked.nodeid, asked)
        return sized(b"".join(name + b"\0" for name in names), room)

    def _removexattr(self, asked: Request) -> Result:
        name, _ = decode_name(self._buffer, BODY, asked.length)
        return self._xattrs.removexattr(asked.nodeid, name, asked)

    # -- files -----------------------------------------------------------------------------------

    def _open(self, asked: Request) -> Result:
        flags, more = wire.OPEN_IN.unpack_from(self._buffer, BODY)
        if self._deferred.released and flags & (os.O_ACCMODE | os.O_TRUNC):
            self._deferred.settle()  # the present writers of a file decide which content the open gets
        lose_set_ids = bool(more & wire.OPEN_KILL_SUIDGID)
        return self._opens.open(asked.nodeid, flags, asked, lose_set_ids=lose_set_ids)

    def _create(self, asked: Request) -> Result:
        flags, mode, umask, _ = wire.CREATE_IN.unpack_from(self._buffer, BODY)
        name, _ = decode_name(self._buffer, BODY + wire.CREATE_IN.size, asked.length)
        return self._opens.create(asked.nodeid, name, mode, umask, flags, asked)

    def _tmpfile(self, asked: Request) -> Result:
        flags, mode, umask, _ = wire.CREATE_IN.unpack_from(self._buffer, BODY)
        return self._opens.tmpfile(asked.nodeid, mode, umask, flags, asked)

    def _pack_created(self, created: tuple[OpenInfo, Attributes]) -> bytes:
        info, entry = created
        return pack_entry(entry) + self._pack_open(info, (entry.st_ino, 1))

    def _pack_open(self, info: OpenInfo, *lookups: tuple[int, int]) -> bytes:
        """Answer an open, which came with `lookups` of its node."""
        flags = _NOFLUSH if info.noflush else 0
        if not info.passthrough:
            return wire.OPEN_OUT.pack(
                info.handle.fh, flags | (_KEEP_CACHE if info.keep_cache else 0), 0
            )
        node = info.handle.node
        if not node.backing_id:
            try:
                self._notices.pass_through(node)
            except OSError:
                self._deferred.carry_out(self._cancel(info.handle, lookups), "giving up an open")
                raise
        if info.handle.flags & os.O_ACCMODE != os.O_WRONLY:
            self._atimes.opened(node.ino)
        return wire.OPEN_OUT.pack(info.handle.fh, flags | _PASSTHROUGH, node.backing_id)

    async def _cancel(self, handle: Handle, lookups: Sequence[tuple[int, int]]) -> None:
        await self._opens.cancel_open(handle)
        await self._lookups.forget(lookups)

    async def _write(self, asked: Request) -> int:
        fh, offset, size, flags = wire.WRITE_IN.unpack_from(self._buffer, BODY)
        start = BODY + wire.WRITE_IN.size
        asked.refuse_shorter(start + size)
        written = await self._files.write(fh, offset, self._view[start : start + size])
        if flags & wire.WRITE_KILL_SUIDGID and self._metadata.has_set_ids(asked.nodeid):
            await detach()
            await self._metadata.change(asked.nodeid, {}, asked, lose_set_ids=True)
        return written

    def _flush(self, asked: Request) -> Result:
        fh, _, _, owner = wire.FLUSH_IN.unpack_from(self._buffer, BODY)
        return self._files.close(fh, asked.pid, owner)

    def _release(self, asked: Request) -> Result:
        fh, _, flags, _ = wire.RELEASE_IN.unpack_from(self._buffer, BODY)
        if fh in self._deferred.released:
            raise fail(errno.EBADF)
        releasing = self._files.releasing(fh, flock=bool(flags & wire.RELEASE_FLOCK_UNLOCK))
        if releasing is None:
            self._deferred.released.append(fh)
        return releasing

    async def _fallocate(self, fh: int, offset: int, length: int, mode: int, _: int) -> None:
        if max(offset, length) > _OFFSET_MAX:
            raise fail(errno.EFBIG)
        await self._files.fallocate(fh, mode, offset, length)

    def _poll(self, asked: Request) -> bytes:
        """Return the ready events. A file is always readable and writable; POLLPRI: its name has something
        newer."""
        fh, kernel_handle, flags, _ = wire.POLL_IN.unpack_from(self._buffer, BODY)
        if flags & wire.POLL_SCHEDULE_NOTIFY:
            self._files.poll(fh, kernel_handle, asked.uid)
        events = select.POLLIN | select.POLLOUT
        if self._files.is_outdated(fh):
            events |= select.POLLPRI
        return wire.POLL_OUT.pack(events, 0)

    # -- directories -----------------------------------------------------------------------------

    def _opendir(self, asked: Request) -> Result:
        return self._directories.opendir(asked.nodeid, asked)

    def _pack_opendir(self, fh: int) -> bytes:
        return wire.OPEN_OUT.pack(fh, self._directory_flags, 0)

    def _readdir(self, fh: int, offset: int, size: int) -> bytes:
        parts: list[bytes] = []
        for entry in self._directories.names(fh, offset, size // wire.DIRENT.size):
            record = wire.dirent(*entry)
            size -= len(record)
            if size < 0:
                break
            parts.append(record)
        return b"".join(parts)

    async def _readdirplus(self, fh: int, offset: int, size: int) -> bytes:
        listing = DirectoryReply(size)
        await self._directories.readdir(fh, offset, listing.add)
        return b"".join(listing.parts)

    # -- locks and signals -----------------------------------------------------------------------

    def _decode_lock(self, asked: Request) -> tuple[int, int, Lock, bool]:
        fh, owner, start, last, kind, pid, flags, _ = wire.LOCK_IN.unpack_from(self._buffer, BODY)
        if start > last or last > wire.EMPTY_LOCK_END:
            raise Malformed(f"a lock of bytes {start} to {last}")
        # The kernel does not say who unlocks.
        lock = Lock(kind, start, last, pid or asked.pid, asked.uid)
        return fh, owner, lock, bool(flags & wire.LOCK_FLOCK)

    def _getlk(self, asked: Request) -> Result:
        _, owner, lock, _ = self._decode_lock(asked)
        return self._files.test_lock(asked.nodeid, owner, lock)

    def _setlk(self, asked: Request) -> Result:
        fh, owner, lock, flock = self._decode_lock(asked)
        wait = asked.opcode == Opcode.SETLKW
        return self._files.lock(fh, owner, lock, flock=flock, wait=wait)

    def _interrupt(self, asked: Request) -> NoPayload:
        (interrupted,) = wire.INTERRUPT_IN.unpack_from(self._buffer, BODY)
        self._waiting.interrupt(interrupted)
        return NO_ANSWER
