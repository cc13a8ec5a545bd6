"""The table of requests: each kind that the kernel can send, its operation, and its answer."""

import errno
import os
import select
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from struct import Struct
from typing import Any, Final, NamedTuple

from ..backend.model.clock import now_ns
from ..backend.namespace import acl, answered, fail
from ..coherence.kernel_directories import KernelLocks
from ..coherence.nodes import Handle
from ..inline import detach
from ..posix.calls import Attributes
from ..posix.files import Opened
from ..posix.filesystem import Filesystem
from ..posix.lock_tables import Lock
from ..posix.permissions import CAPABILITY, SET_IDS
from ..posix.xattrs import PREFIX as OWN_XATTRS
from . import wire
from .connection import Connection
from .notices import Notices
from .tasks import Deferred, WaitingRequests
from .wire import BODY, Malformed, Opcode, Open, Request, Valid

_NO_FIELDS: Final = Struct("")
_NS: Final = 1_000_000_000
# The place of the flags in the fields of a lock.
_LOCK_FLAGS: Final = 4
# The attributes that the kernel asks for before a file is first written, and where it checks modes.
_ASKED_OFTEN: Final = frozenset({CAPABILITY, *acl.NAMES})

# Fields of a SETATTR that say by which descriptor and for whom, not what is set.
_VALID_HANDLES: Final = Valid.FH | Valid.LOCKOWNER
_VALID_NOW: Final = Valid.ATIME_NOW | Valid.MTIME_NOW

# Requests during which the kernel has locked the directories that they name.
_RENAMES: Final = {Opcode.RENAME, Opcode.RENAME2}
_CHANGE_NAMES: Final = {
    *(Opcode.MKNOD, Opcode.MKDIR, Opcode.SYMLINK, Opcode.LINK, Opcode.CREATE),
    *(Opcode.UNLINK, Opcode.RMDIR, *_RENAMES),
}
_CHANGE_ATTRIBUTES: Final = {Opcode.SETATTR, Opcode.SETXATTR, Opcode.REMOVEXATTR}


class NoPayload:
    """The result of a request whose answer is an error (an exception takes 2 us more); 0: no answer."""

    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        self.code = code


NO_ANSWER: Final = NoPayload(0)
_NO_DATA: Final = NoPayload(errno.ENODATA)
# A coroutine is run to its result.
Result = Any
CarryOut = Callable[..., Result]
Pack = Callable[[Any], bytes] | None


class Row(NamedTuple):
    """How one kind of request is answered. Its body begins with the fields of `layout`, which end at `size`
    bytes, and `names` names follow. `carry_out` takes the request and all of these, and gives a result;
    `pack` packs it. Without `pack` the result is the payload."""

    layout: Struct
    size: int
    names: int
    carry_out: CarryOut
    pack: Pack


def _row(layout: Struct, carry_out: CarryOut, pack: Pack = None, *, names: int = 0) -> Row:
    return Row(layout, BODY + layout.size, names, carry_out, pack)


def _at_node(operation: CarryOut) -> CarryOut:
    """Return what calls an operation with the node of a request, what is in it, and the caller."""
    return lambda asked, *fields: operation(asked.nodeid, *fields, asked)


def _as_sent(operation: CarryOut) -> CarryOut:
    """Return what calls an operation with what is in a request."""
    return lambda asked, *fields: operation(*fields)


class Requests:
    """The table of requests (`rows`), each with the part of the filesystem that carries it out. Others are
    answered ENOSYS, of which the kernel makes ENOTTY for IOCTL: only it handles them, or sends them only to
    servers that offer them. Values of any length follow the decoded fields in the connection's buffer."""

    def __init__(
        self,
        connection: Connection,
        filesystem: Filesystem,
        notices: Notices,
        deferred: Deferred,
        waiting: WaitingRequests,
    ) -> None:
        self._view = memoryview(connection.buffer)
        self._fs = filesystem
        self._nodes = filesystem.cache.nodes
        self._posix_locks = filesystem.locking.posix
        self._notices = notices
        self._deferred = deferred
        self._waiting = waiting
        # By directory: the handle that reads the listing that the kernel keeps.
        self._listers: dict[int, int] = {}
        locks = filesystem.coherence.kernel_locks
        self._keeps_listings = locks is None
        self.rows = self._table()
        if locks is not None:
            for opcode in _CHANGE_NAMES | _CHANGE_ATTRIBUTES:
                row = self.rows[opcode]
                self.rows[opcode] = row._replace(carry_out=self._told_to_others(row, locks))

    def _table(self) -> dict[int, Row]:
        names, files = self._fs.names, self._fs.files
        rows = {
            # Names
            Opcode.LOOKUP: _row(_NO_FIELDS, self._lookup, wire.pack_found, names=1),
            Opcode.FORGET: _row(wire.FORGET_IN, self._forget),
            Opcode.BATCH_FORGET: _row(wire.BATCH_FORGET_IN, self._batch_forget),
            Opcode.MKNOD: _row(wire.MKNOD_IN, _at_node(names.mknod), wire.pack_entry, names=1),
            Opcode.MKDIR: _row(wire.MKDIR_IN, _at_node(names.mkdir), wire.pack_entry, names=1),
            Opcode.SYMLINK: _row(_NO_FIELDS, _at_node(names.symlink), wire.pack_entry, names=2),
            Opcode.LINK: _row(wire.LINK_IN, _at_node(names.link), wire.pack_entry, names=1),
            Opcode.UNLINK: _row(_NO_FIELDS, _at_node(names.unlink), names=1),
            Opcode.RMDIR: _row(_NO_FIELDS, _at_node(names.rmdir), names=1),
            Opcode.RENAME: _row(wire.RENAME_IN, self._rename, names=2),
            Opcode.RENAME2: _row(wire.RENAME2_IN, _at_node(names.rename), names=2),
            Opcode.READLINK: _row(_NO_FIELDS, _at_node(names.readlink)),
            # Attributes
            Opcode.GETATTR: _row(_NO_FIELDS, self._getattr, wire.pack_attributes),
            Opcode.SETATTR: _row(wire.SETATTR_IN, self._setattr, wire.pack_attributes),
            Opcode.STATX: _row(_NO_FIELDS, self._statx),
            Opcode.STATFS: _row(
                _NO_FIELDS, lambda asked: self._fs.metadata.statfs(asked.nodeid), wire.pack_statfs
            ),
            Opcode.SETXATTR: _row(wire.SETXATTR_IN, self._setxattr, names=1),
            Opcode.GETXATTR: _row(wire.GETXATTR_IN, self._getxattr, names=1),
            Opcode.LISTXATTR: _row(wire.GETXATTR_IN, self._listxattr),
            Opcode.REMOVEXATTR: _row(_NO_FIELDS, _at_node(self._fs.xattrs.removexattr), names=1),
            # Files
            Opcode.OPEN: _row(wire.OPEN_IN, self._open, self._pack_open),
            Opcode.CREATE: _row(
                wire.CREATE_IN, _at_node(files.create), self._pack_created, names=1
            ),
            Opcode.TMPFILE: _row(wire.CREATE_IN, _at_node(files.tmpfile), self._pack_created),
            Opcode.READ: _row(wire.READ_IN, _as_sent(files.read)),
            Opcode.WRITE: _row(wire.WRITE_IN, self._write, wire.pack_written),
            Opcode.FLUSH: _row(wire.FLUSH_IN, self._flush),
            Opcode.RELEASE: _row(wire.RELEASE_IN, self._release),
            Opcode.FSYNC: _row(wire.FSYNC_IN, _as_sent(files.fsync)),
            Opcode.FALLOCATE: _row(wire.FALLOCATE_IN, _as_sent(files.fallocate)),
            Opcode.LSEEK: _row(wire.LSEEK_IN, _as_sent(files.lseek), wire.LSEEK_OUT.pack),
            Opcode.COPY_FILE_RANGE: _row(
                wire.COPY_FILE_RANGE_IN, _as_sent(files.copy_file_range), wire.pack_written
            ),
            Opcode.POLL: _row(wire.POLL_IN, self._poll),
            # Directories
            Opcode.OPENDIR: _row(wire.OPENDIR_IN, _at_node(names.opendir), self._pack_opendir),
            Opcode.READDIR: _row(wire.READ_IN, self._readdir),
            Opcode.READDIRPLUS: _row(wire.READ_IN, self._readdirplus),
            Opcode.RELEASEDIR: _row(wire.RELEASE_IN, self._releasedir),
            Opcode.FSYNCDIR: _row(wire.FSYNC_IN, lambda asked, fh: names.sync()),
            Opcode.SYNCFS: _row(_NO_FIELDS, lambda asked: names.sync()),
            # Locks and signals
            Opcode.GETLK: _row(wire.LOCK_IN, self._getlk, wire.pack_lock),
            Opcode.SETLK: _row(wire.LOCK_IN, self._setlk),
            Opcode.SETLKW: _row(wire.LOCK_IN, self._setlk),
            Opcode.INTERRUPT: _row(wire.INTERRUPT_IN, self._interrupt),
            Opcode.DESTROY: _row(_NO_FIELDS, lambda asked: None),
        }
        if not self._fs.tells_pollers:
            # io_uring would ask 255 times for each buffered write. After ENOSYS the kernel answers itself.
            del rows[Opcode.POLL]
        # Lookups by int are twice as fast as by members of an enumeration.
        return {int(opcode): found for opcode, found in rows.items()}

    def _told_to_others(self, row: Row, locks: KernelLocks) -> CarryOut:
        """Return the operation of a request that other hosts must know of before it is answered."""

        async def carry_out(asked: Request, *fields: Any) -> Result:
            directories = [asked.nodeid] if asked.opcode in _CHANGE_NAMES else []
            if asked.opcode in _RENAMES:
                directories.append(fields[0])
            with locks.hold(*directories):
                return await row.carry_out(asked, *fields)

        return carry_out

    # -- names -----------------------------------------------------------------------------------

    def _lookup(self, asked: Request, name: bytes) -> Result:
        found = self._fs.names.find(asked.nodeid, name, asked.pid)
        return self._fs.names.lookup_fresh(asked.nodeid, name, asked) if found is None else found

    def _forget(self, asked: Request, lookups: int) -> NoPayload:
        self._deferred.forgotten.append((asked.nodeid, lookups))
        return NO_ANSWER

    def _batch_forget(self, asked: Request, count: int) -> NoPayload:
        start = BODY + wire.BATCH_FORGET_IN.size
        stop = start + count * wire.FORGET_ONE.size
        asked.refuse_shorter(stop)
        self._deferred.forgotten += wire.FORGET_ONE.iter_unpack(self._view[start:stop])
        return NO_ANSWER

    def _rename(self, asked: Request, target: int, old: bytes, new: bytes) -> Result:
        return self._fs.names.rename(asked.nodeid, target, 0, old, new, asked)

    # -- attributes ------------------------------------------------------------------------------

    def _getattr(self, asked: Request) -> Attributes:
        return self._fs.metadata.attributes(asked.nodeid)

    def _setattr(self, asked: Request, *fields: int) -> Result:
        valid, fh, size, atime, mtime, atime_ns, mtime_ns, mode, uid, gid = fields
        if max(atime_ns, mtime_ns) >= _NS:
            raise Malformed("a time has more nanoseconds than a second")
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
        return self._fs.metadata.change(
            asked.nodeid, changes, asked, size=size if valid & Valid.SIZE else None,
            fh=fh if valid & Valid.FH else None, lose_set_ids=lose_set_ids,
        )  # fmt: skip

    def _statx(self, asked: Request) -> bytes:
        entry = self._fs.metadata.attributes(asked.nodeid)
        return wire.pack_statx(entry, self._nodes.inode_of(asked.nodeid).birth_ns)

    def _setxattr(self, asked: Request, size: int, flags: int, more: int, name: bytes) -> Result:
        start = BODY + wire.SETXATTR_IN.size + len(name) + 1
        asked.refuse_shorter(start + size)
        value = bytes(self._view[start : start + size])
        drop = bool(more & wire.SETXATTR_ACL_KILL_SGID)
        change = partial(
            self._fs.xattrs.setxattr, asked.nodeid, name, value, asked, flags, drop_set_gid=drop
        )
        return answered(change, self._fs.cache.host.store.learn)

    def _getxattr(self, asked: Request, room: int, name: bytes) -> Result:
        if name in _ASKED_OFTEN and not self._nodes.inode_of(asked.nodeid).xattrs:
            return _NO_DATA
        if name.startswith(OWN_XATTRS):
            self._deferred.settle()  # a caller that asks what is open must not see closed files
        return self._sized(self._fs.xattrs.getxattr(asked.nodeid, name, asked), room)

    async def _sized(self, asking: Coroutine[Any, Any, bytes], room: int) -> bytes:
        return wire.sized(await asking, room)

    async def _listxattr(self, asked: Request, room: int) -> bytes:
        names = await self._fs.xattrs.listxattr(asked.nodeid, asked)
        return wire.sized(b"".join(name + b"\0" for name in names), room)

    # -- files -----------------------------------------------------------------------------------

    def _open(self, asked: Request, flags: int, more: int) -> Result:
        if self._deferred.released and flags & (os.O_ACCMODE | os.O_TRUNC):
            self._deferred.settle()  # the present writers of a file decide which content the open gets
        lose_set_ids = bool(more & wire.OPEN_KILL_SUIDGID)
        return self._fs.files.open(asked.nodeid, flags, asked, lose_set_ids=lose_set_ids)

    def _pack_created(self, created: Opened) -> bytes:
        handle, entry = created
        return wire.pack_entry(entry) + self._pack_open(handle, (entry.st_ino, 1))

    def _pack_open(self, handle: Handle, *lookups: tuple[int, int]) -> bytes:
        """Answer an open, which came with `lookups` of its node."""
        node = handle.node
        # Closing any descriptor of a file drops its process's POSIX locks: then we must hear of it.
        flags = 0 if handle.writing or self._posix_locks.is_used(node.ino) else Open.NOFLUSH
        if node.cached:
            flags |= Open.KEEP_CACHE if handle.keeps_cache else 0
            return wire.OPEN_OUT.pack(handle.fh, flags, 0)
        if not node.backing_id:
            try:
                self._notices.pass_through(node)
            except OSError:
                self._deferred.carry_out(self._cancel(handle, lookups), "giving up an open")
                raise
        if handle.flags & os.O_ACCMODE != os.O_WRONLY:
            self._fs.atimes.opened(node)
        return wire.OPEN_OUT.pack(handle.fh, flags | Open.PASSTHROUGH, node.backing_id)

    async def _cancel(self, handle: Handle, lookups: Sequence[tuple[int, int]]) -> None:
        await self._fs.files.cancel_open(handle)
        await self._fs.names.forget(lookups)

    async def _write(self, asked: Request, fh: int, offset: int, size: int, flags: int) -> int:
        start = BODY + wire.WRITE_IN.size
        asked.refuse_shorter(start + size)
        written = await self._fs.files.write(fh, offset, self._view[start : start + size])
        if flags & wire.WRITE_KILL_SUIDGID and self._nodes.inode_of(asked.nodeid).mode & SET_IDS:
            await detach()
            await self._fs.metadata.change(asked.nodeid, {}, asked, lose_set_ids=True)
        return written

    def _flush(self, asked: Request, fh: int, owner: int) -> Result:
        handle = self._nodes.handles[fh]
        if handle.content is None:
            raise fail(errno.EBADF)  # a directory
        return self._fs.files.close(handle, asked.pid or handle.pid, owner)

    def _release(self, asked: Request, fh: int, flags: int) -> Result:
        if fh in self._deferred.released:
            raise fail(errno.EBADF)
        releasing = self._fs.files.releasing(fh, flock=bool(flags & wire.RELEASE_FLOCK_UNLOCK))
        if releasing is None:
            self._deferred.released.append(fh)
        return releasing

    def _poll(self, asked: Request, fh: int, kernel_handle: int, flags: int) -> bytes:
        """Return the ready events: POLLIN and POLLOUT always, POLLPRI if the name has something newer."""
        if flags & wire.POLL_SCHEDULE_NOTIFY:
            self._fs.files.poll(fh, kernel_handle, asked.uid)
        events = select.POLLIN | select.POLLOUT
        if self._fs.files.is_outdated(fh):
            events |= select.POLLPRI
        return wire.POLL_OUT.pack(events, 0)

    # -- directories -----------------------------------------------------------------------------

    def _pack_opendir(self, fh: int) -> bytes:
        """Answer an opendir. The kernel keeps one listing of a directory. Who is in the middle of it would
        go on in a newer one, at the same place of other names: one handle at a time reads and renews it."""
        flags = Open.KEEP_CACHE
        if (
            self._keeps_listings
            and self._listers.setdefault(self._nodes.handles[fh].node.id, fh) == fh
        ):
            flags |= Open.CACHE_DIR
        return wire.OPEN_OUT.pack(fh, flags, 0)

    def _releasedir(self, asked: Request, fh: int, flags: int) -> Result:
        if self._listers.get(asked.nodeid) == fh:
            del self._listers[asked.nodeid]
        return self._fs.names.releasedir(fh)

    def _readdir(self, asked: Request, fh: int, offset: int, size: int) -> bytes:
        parts: list[bytes] = []
        for entry in self._fs.names.listed(fh, offset):
            record = wire.dirent(*entry)
            size -= len(record)
            if size < 0:
                break
            parts.append(record)
        return b"".join(parts)

    async def _readdirplus(self, asked: Request, fh: int, offset: int, size: int) -> bytes:
        parts: list[bytes] = []

        def add(name: bytes, ino: int, mode: int, entry: Attributes | None, next_id: int) -> bool:
            nonlocal size
            record = wire.dirent(ino, next_id, name, mode)
            size -= wire.ENTRY_OUT.size + len(record)
            if size < 0:
                return False
            parts.append(wire.NO_ENTRY if entry is None else wire.pack_entry(entry))
            parts.append(record)
            return True

        await self._fs.names.readdir(fh, offset, add)
        return b"".join(parts)

    # -- locks and signals -----------------------------------------------------------------------

    def _getlk(self, asked: Request, fh: int, owner: int, *fields: int) -> Result:
        ino = self._nodes.inode_of(asked.nodeid).ino
        return self._fs.locking.test(ino, owner, _lock(asked, *fields))

    def _setlk(self, asked: Request, fh: int, owner: int, *fields: int) -> Result:
        flock = bool(fields[_LOCK_FLAGS] & wire.LOCK_FLOCK)
        wait = asked.opcode == Opcode.SETLKW
        return self._fs.files.lock(fh, owner, _lock(asked, *fields), flock=flock, wait=wait)

    def _interrupt(self, asked: Request, interrupted: int) -> NoPayload:
        self._waiting.interrupt(interrupted)
        return NO_ANSWER


def _lock(asked: Request, start: int, last: int, kind: int, pid: int, flags: int) -> Lock:
    if start > last or last > wire.EMPTY_LOCK_END:
        raise Malformed(f"a lock of bytes {start} to {last}")
    # The kernel does not say who unlocks.
    return Lock(kind, start, last, pid or asked.pid, asked.uid)
