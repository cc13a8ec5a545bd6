"""The table of requests: each kind that the kernel can send, its operation, and its answer."""

import errno
import os
import select
from collections.abc import Callable, Coroutine, Sequence
from struct import Struct
from typing import Any, Final, NamedTuple

from ..backend.clock import now_ns
from ..backend.namespace import acl, fail
from ..coherence.nodes import Handle
from ..posix.calls import Attributes, OpenInfo
from ..posix.locks import Lock
from ..posix.operations import Operations
from ..posix.own_xattrs import PREFIX as OWN_XATTRS
from ..posix.privileges import CAPABILITY
from . import wire
from .backings import Backings
from .bodies import SetattrFields, creator
from .connection import Connection
from .deferred import Deferred
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
from .wire import BODY, Malformed, Opcode, Request, Valid

__all__ = ["ANSWERED", "Requests", "Row"]

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

# Requests that only the kernel handles, or sends only to servers that offer them: answered ENOSYS.
_NOT_SERVED: Final = frozenset(
    {
        *(Opcode.INIT, Opcode.ACCESS, Opcode.BMAP, Opcode.NOTIFY_REPLY),
        *(Opcode.SETUPMAPPING, Opcode.REMOVEMAPPING, Opcode.IOCTL),
    }
)


class Answered:
    """The result of a request that gets no answer, or has got one already."""


ANSWERED: Final = Answered()
# A coroutine is run to its result.
Result = Any
CarryOut = Callable[[Request], Result]


class Row(NamedTuple):
    """How one kind of request, of at least `size` bytes, is answered: `carry_out` gives a result, `pack`
    packs it. Without `pack` the result is the payload."""

    size: int
    carry_out: CarryOut
    pack: Callable[[Any], bytes] | None


class Requests:
    """The table of all kinds of requests (`rows`), which are read from the connection's buffer.

    `interrupt` is given the number of a request whose caller got a signal.
    """

    def __init__(
        self,
        connection: Connection,
        operations: Operations,
        backings: Backings,
        notices: Notices,
        deferred: Deferred,
        interrupt: Callable[[int], None],
    ) -> None:
        self._connection = connection
        self._buffer = connection.buffer
        self._view = memoryview(connection.buffer)
        self._operations = operations
        self._find = operations.find
        self._locked = operations.kernel_locks.hold
        self._attributes = operations.attributes
        self._backings = backings
        self._notices = notices
        self._deferred = deferred
        self._interrupt_waiting = interrupt
        self.rows = self._table(operations)

    def _table(self, ops: Operations) -> dict[int, Row]:
        named, changing = self._named, self._changing
        at_handle, row = self._at_handle, self._row
        rows = {
            # Names
            Opcode.LOOKUP: row(None, self._lookup, pack_found),
            Opcode.FORGET: row(wire.FORGET_IN, self._forget),
            Opcode.BATCH_FORGET: row(wire.BATCH_FORGET_IN, self._batch_forget),
            Opcode.MKNOD: row(wire.MKNOD_IN, changing(self._mknod), pack_entry),
            Opcode.MKDIR: row(wire.MKDIR_IN, changing(self._mkdir), pack_entry),
            Opcode.SYMLINK: row(None, changing(self._symlink), pack_entry),
            Opcode.LINK: row(wire.LINK_IN, changing(self._link), pack_entry),
            Opcode.UNLINK: row(None, changing(named(ops.unlink))),
            Opcode.RMDIR: row(None, changing(named(ops.rmdir))),
            Opcode.RENAME: row(wire.RENAME_IN, self._rename),
            Opcode.RENAME2: row(wire.RENAME2_IN, self._rename2),
            Opcode.READLINK: row(None, lambda asked: ops.readlink(asked.nodeid, asked)),
            # Attributes
            Opcode.GETATTR: row(None, self._getattr, pack_attributes),
            Opcode.SETATTR: row(wire.SETATTR_IN, self._setattr, pack_attributes),
            Opcode.STATX: row(None, self._statx),
            Opcode.STATFS: row(None, lambda asked: ops.statfs(asked, asked.nodeid), pack_statfs),
            Opcode.SETXATTR: row(wire.SETXATTR_IN, self._setxattr),
            Opcode.GETXATTR: row(wire.GETXATTR_IN, self._getxattr),
            Opcode.LISTXATTR: row(wire.GETXATTR_IN, self._listxattr),
            Opcode.REMOVEXATTR: row(None, named(ops.removexattr)),
            # Files
            Opcode.OPEN: row(wire.OPEN_IN, self._open, self._pack_open),
            Opcode.CREATE: row(wire.CREATE_IN, changing(self._create), self._pack_created),
            Opcode.TMPFILE: row(wire.CREATE_IN, self._tmpfile, self._pack_created),
            Opcode.READ: at_handle(wire.READ_IN, ops.read),
            Opcode.WRITE: row(wire.WRITE_IN, self._write, pack_written),
            Opcode.FLUSH: row(wire.FLUSH_IN, self._flush),
            Opcode.RELEASE: row(wire.RELEASE_IN, self._release),
            Opcode.FSYNC: at_handle(wire.FSYNC_IN, self._fsync(ops.fsync)),
            Opcode.FALLOCATE: at_handle(wire.FALLOCATE_IN, self._fallocate),
            Opcode.LSEEK: at_handle(wire.LSEEK_IN, ops.lseek, wire.LSEEK_OUT.pack),
            Opcode.COPY_FILE_RANGE: at_handle(
                wire.COPY_FILE_RANGE_IN, ops.copy_file_range, pack_written
            ),
            Opcode.POLL: row(wire.POLL_IN, self._poll),
            # Directories
            Opcode.OPENDIR: row(wire.OPEN_IN, self._opendir, self._pack_opendir),
            Opcode.READDIR: at_handle(wire.READ_IN, self._readdir),
            Opcode.READDIRPLUS: at_handle(wire.READ_IN, self._readdirplus),
            Opcode.RELEASEDIR: at_handle(wire.RELEASE_IN, lambda fh, *_: ops.releasedir(fh)),
            Opcode.FSYNCDIR: at_handle(wire.FSYNC_IN, self._fsync(ops.fsyncdir)),
            Opcode.SYNCFS: row(None, lambda asked: ops.fsyncdir(0, False)),
            # Locks and signals
            Opcode.GETLK: row(wire.LOCK_IN, self._getlk, pack_lock),
            Opcode.SETLK: row(wire.LOCK_IN, self._setlk),
            Opcode.SETLKW: row(wire.LOCK_IN, self._setlk),
            Opcode.INTERRUPT: row(wire.INTERRUPT_IN, self._interrupt),
            Opcode.DESTROY: row(None, lambda asked: None),
        }
        missing = set(Opcode) - _NOT_SERVED - rows.keys()
        if missing:
            raise NotImplementedError(f"requests that nothing answers: {missing}")
        # Lookups by int are twice as fast as by members of an enumeration.
        return {int(opcode): found for opcode, found in rows.items()}

    # -- rows ------------------------------------------------------------------------------------

    @staticmethod
    def _row(
        layout: Struct | None, carry_out: CarryOut, pack: Callable[[Any], bytes] | None = None
    ) -> Row:
        """Return the row of a request whose body begins with `layout`."""
        return Row(BODY + (layout.size if layout is not None else 0), carry_out, pack)

    def _named(self, operation: Callable[[int, bytes, Request], Result]) -> CarryOut:
        """Return the operation of a request whose body is one name."""
        return lambda asked: operation(asked.nodeid, self._name(asked, BODY), asked)

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

        return self._row(layout, carry_out, pack)

    def _changing(self, carry_out: CarryOut) -> CarryOut:
        """Return the operation of a request during which the kernel has locked the directory."""
        return lambda asked: self._hold(carry_out(asked), asked.nodeid)

    async def _hold(self, carrying_out: Coroutine[Any, Any, Any], *directories: int) -> Result:
        with self._locked(*directories):
            return await carrying_out

    @staticmethod
    def _fsync(operation: Callable[[int, bool], Result]) -> Callable[..., Result]:
        return lambda fh, flags, _: operation(fh, bool(flags & 1))

    def _name(self, asked: Request, start: int) -> bytes:
        return wire.decode_name(self._buffer, start, asked.length)[0]

    def _two_names(self, asked: Request, start: int) -> tuple[bytes, bytes]:
        first, after = wire.decode_name(self._buffer, start, asked.length)
        return first, self._name(asked, after)

    # -- names -----------------------------------------------------------------------------------

    def _lookup(self, asked: Request) -> Result:
        name, _ = wire.decode_name(self._buffer, BODY, asked.length)
        found = self._find(asked.nodeid, name, asked.pid)
        return self._operations.lookup(asked.nodeid, name, asked) if found is None else found

    def _forget(self, asked: Request) -> Answered:
        (lookups,) = wire.FORGET_IN.unpack_from(self._buffer, BODY)
        self._deferred.forgotten.append((asked.nodeid, lookups))
        return ANSWERED

    def _batch_forget(self, asked: Request) -> Answered:
        count, _ = wire.BATCH_FORGET_IN.unpack_from(self._buffer, BODY)
        start = BODY + wire.BATCH_FORGET_IN.size
        stop = start + count * wire.FORGET_ONE.size
        asked.refuse_shorter(stop)
        self._deferred.forgotten += wire.FORGET_ONE.iter_unpack(self._view[start:stop])
        return ANSWERED

    def _mknod(self, asked: Request) -> Result:
        mode, rdev, umask, _ = wire.MKNOD_IN.unpack_from(self._buffer, BODY)
        name = self._name(asked, BODY + wire.MKNOD_IN.size)
        return self._operations.mknod(asked.nodeid, name, mode, rdev, creator(asked, umask))

    def _mkdir(self, asked: Request) -> Result:
        mode, umask = wire.MKDIR_IN.unpack_from(self._buffer, BODY)
        name = self._name(asked, BODY + wire.MKDIR_IN.size)
        return self._operations.mkdir(asked.nodeid, name, mode, creator(asked, umask))

    def _symlink(self, asked: Request) -> Result:
        name, target = self._two_names(asked, BODY)
        return self._operations.symlink(asked.nodeid, name, target, asked)

    def _link(self, asked: Request) -> Result:
        (old,) = wire.LINK_IN.unpack_from(self._buffer, BODY)
        name = self._name(asked, BODY + wire.LINK_IN.size)
        return self._operations.link(old, asked.nodeid, name, asked)

    def _rename(self, asked: Request) -> Result:
        (target,) = wire.RENAME_IN.unpack_from(self._buffer, BODY)
        return self._renamed(asked, target, 0, BODY + wire.RENAME_IN.size)

    def _rename2(self, asked: Request) -> Result:
        target, flags, _ = wire.RENAME2_IN.unpack_from(self._buffer, BODY)
        return self._renamed(asked, target, flags, BODY + wire.RENAME2_IN.size)

    def _renamed(self, asked: Request, target: int, flags: int, start: int) -> Result:
        old, new = self._two_names(asked, start)
        renaming = self._operations.rename(asked.nodeid, old, target, new, flags, asked)
        return self._hold(renaming, asked.nodeid, target)

    # -- attributes ------------------------------------------------------------------------------

    def _getattr(self, asked: Request) -> Attributes:
        return self._attributes(asked.nodeid)

    def _setattr(self, asked: Request) -> Result:
        (
            valid, _, fh, size, _, atime, mtime, _, atime_ns, mtime_ns, _,
            mode, _, uid, gid, _,
        ) = wire.SETATTR_IN.unpack_from(self._buffer, BODY)  # fmt: skip
        if max(atime_ns, mtime_ns) >= _NS:
            raise Malformed("a time has more nanoseconds than a second")
        wanted = Attributes()
        wanted.st_mode, wanted.st_uid, wanted.st_gid = mode, uid, gid
        if valid & Valid.SIZE:
            if size > _OFFSET_MAX:
                raise fail(errno.EFBIG)
            wanted.st_size = size
        now = now_ns() if valid & _VALID_NOW else 0
        wanted.st_atime_ns = now if valid & Valid.ATIME_NOW else atime * _NS + atime_ns
        wanted.st_mtime_ns = now if valid & Valid.MTIME_NOW else mtime * _NS + mtime_ns
        # The kernel sends a SETATTR that sets nothing before a change that has no request of its own.
        lose_set_ids = bool(valid & Valid.KILL_SUIDGID) or not valid & ~_VALID_HANDLES
        return self._operations.setattr(
            asked.nodeid, wanted, SetattrFields(valid), fh if valid & Valid.FH else None, asked,
            lose_set_ids=lose_set_ids,
        )  # fmt: skip

    def _statx(self, asked: Request) -> bytes:
        entry = self._attributes(asked.nodeid)
        return pack_statx(entry, self._operations.birth_ns(asked.nodeid))

    def _setxattr(self, asked: Request) -> Result:
        size, flags, more = wire.SETXATTR_IN.unpack_from(self._buffer, BODY)
        name, start = wire.decode_name(self._buffer, BODY + wire.SETXATTR_IN.size, asked.length)
        asked.refuse_shorter(start + size)
        value = bytes(self._view[start : start + size])
        drop_set_gid = bool(more & wire.SETXATTR_ACL_KILL_SGID)
        return self._operations.setxattr(
            asked.nodeid, name, value, asked, flags, drop_set_gid=drop_set_gid
        )

    def _getxattr(self, asked: Request) -> Result:
        room, _ = wire.GETXATTR_IN.unpack_from(self._buffer, BODY)
        name, _ = wire.decode_name(self._buffer, BODY + wire.GETXATTR_IN.size, asked.length)
        if name in _ASKED_OFTEN and not self._operations.has_xattrs(asked.nodeid):
            return self._refuse(asked, errno.ENODATA)
        if name.startswith(OWN_XATTRS):
            self._deferred.settle()  # a caller that asks what is open must not see closed files
        return self._sized(self._operations.getxattr(asked.nodeid, name, asked), room)

    async def _sized(self, asking: Coroutine[Any, Any, bytes], room: int) -> bytes:
        return sized(await asking, room)

    async def _listxattr(self, asked: Request) -> bytes:
        room, _ = wire.GETXATTR_IN.unpack_from(self._buffer, BODY)
        names = await self._operations.listxattr(asked.nodeid, asked)
        return sized(b"".join(name + b"\0" for name in names), room)

    def _refuse(self, asked: Request, code: int) -> Answered:
        """Answer with an error that is asked for often: an exception takes 2 us more."""
        self._connection.refuse(asked.unique, code)
        return ANSWERED

    # -- files -----------------------------------------------------------------------------------

    def _open(self, asked: Request) -> Result:
        flags, more = wire.OPEN_IN.unpack_from(self._buffer, BODY)
        if self._deferred.released and flags & (os.O_ACCMODE | os.O_TRUNC):
            self._deferred.settle()  # the present writers of a file decide which content the open gets
        lose_set_ids = bool(more & wire.OPEN_KILL_SUIDGID)
        return self._operations.open(asked.nodeid, flags, asked, lose_set_ids=lose_set_ids)

    def _create(self, asked: Request) -> Result:
        flags, mode, umask, _ = wire.CREATE_IN.unpack_from(self._buffer, BODY)
        name = self._name(asked, BODY + wire.CREATE_IN.size)
        return self._operations.create(asked.nodeid, name, mode, flags, creator(asked, umask))

    def _tmpfile(self, asked: Request) -> Result:
        flags, mode, umask, _ = wire.CREATE_IN.unpack_from(self._buffer, BODY)
        return self._operations.tmpfile(asked.nodeid, mode, flags, creator(asked, umask))

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
                self._backings.register(node)
            except OSError:
                self._deferred.carry_out(self._cancel(info.handle, lookups), "giving up an open")
                raise
        if info.handle.flags & os.O_ACCMODE != os.O_WRONLY:
            self._operations.atimes.opened(node.ino)
        return wire.OPEN_OUT.pack(info.handle.fh, flags | _PASSTHROUGH, node.backing_id)

    async def _cancel(self, handle: Handle, lookups: Sequence[tuple[int, int]]) -> None:
        await self._operations.cancel_open(handle)
        await self._operations.forget(lookups)

    async def _write(self, asked: Request) -> int:
        fh, offset, size, flags = wire.WRITE_IN.unpack_from(self._buffer, BODY)
        start = BODY + wire.WRITE_IN.size
        asked.refuse_shorter(start + size)
        written = await self._operations.write(fh, offset, self._view[start : start + size])
        if flags & wire.WRITE_KILL_SUIDGID and self._operations.has_set_ids(asked.nodeid):
            await self._operations.setattr(
                asked.nodeid, Attributes(), SetattrFields(0), None, asked, lose_set_ids=True
            )
        return written

    def _flush(self, asked: Request) -> Result:
        fh, _, _, owner = wire.FLUSH_IN.unpack_from(self._buffer, BODY)
        return self._operations.close(fh, asked.pid, owner)

    def _release(self, asked: Request) -> Result:
        fh, _, flags, _ = wire.RELEASE_IN.unpack_from(self._buffer, BODY)
        released = self._deferred.released
        if fh in released:
            raise fail(errno.EBADF)
        operations = self._operations
        if flags & wire.RELEASE_FLOCK_UNLOCK or operations.locking.has_locked(fh):
            return operations.release_locked(fh)
        if not operations.release_can_wait(fh):
            return operations.release(fh)
        released.append(fh)
        return None

    async def _fallocate(self, fh: int, offset: int, length: int, mode: int, _: int) -> None:
        if max(offset, length) > _OFFSET_MAX:
            raise fail(errno.EFBIG)
        await self._operations.fallocate(fh, mode, offset, length)

    def _poll(self, asked: Request) -> bytes:
        """Return the ready events. A file is always readable and writable; POLLPRI: its name has something
        newer."""
        fh, kernel_handle, flags, _ = wire.POLL_IN.unpack_from(self._buffer, BODY)
        if flags & wire.POLL_SCHEDULE_NOTIFY:
            self._operations.poll(fh, kernel_handle, asked.uid)
        events = select.POLLIN | select.POLLOUT
        if self._operations.is_outdated(fh):
            events |= select.POLLPRI
        return wire.POLL_OUT.pack(events, 0)

    # -- directories -----------------------------------------------------------------------------

    def _opendir(self, asked: Request) -> Result:
        return self._operations.opendir(asked.nodeid, asked)

    def _pack_opendir(self, fh: int) -> bytes:
        return wire.OPEN_OUT.pack(fh, _CACHE_DIR if self._operations.listings_stay else 0, 0)

    def _readdir(self, fh: int, offset: int, size: int) -> bytes:
        parts: list[bytes] = []
        for next_id, ino, name, mode in self._operations.names(fh, offset):
            record = wire.dirent(ino, next_id, name, mode)
            size -= len(record)
            if size < 0:
                break
            parts.append(record)
        return b"".join(parts)

    async def _readdirplus(self, fh: int, offset: int, size: int) -> bytes:
        listing = DirectoryReply(size)
        await self._operations.readdir(fh, offset, listing.add)
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
        return self._operations.test_lock(asked.nodeid, owner, lock)

    def _setlk(self, asked: Request) -> Result:
        fh, owner, lock, flock = self._decode_lock(asked)
        wait = asked.opcode == Opcode.SETLKW
        return self._operations.lock(fh, owner, lock, flock=flock, wait=wait)

    def _interrupt(self, asked: Request) -> Answered:
        (interrupted,) = wire.INTERRUPT_IN.unpack_from(self._buffer, BODY)
        self._interrupt_waiting(interrupted)
        return ANSWERED
