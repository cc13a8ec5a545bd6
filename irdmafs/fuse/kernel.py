"""The kernel session: speaks /dev/fuse itself, for what libfuse 3.14 cannot do, passthrough above all.

One trio task reads requests and starts each one's coroutine in place (see inline.py); almost all are
answered before the next read. A request that has to wait goes on in a task of its own.

While requests keep coming, the reader looks for the next one for a moment before it goes back to
trio: a process that opens file after file is then answered without a sleep and a wake-up in between,
which on a virtual machine cost more than the whole answer.
"""

import errno
import logging
import os
import select
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

import pyfuse3
import trio

from .. import inline
from ..backend.clock import now_ns
from ..backend.namespace import acl, fail
from ..coherence.kernel_cache import KernelCache, Name
from ..coherence.nodes import Node
from ..posix import ioctls
from ..posix.calls import Attributes, OpenInfo
from ..posix.locks import Lock
from ..posix.operations import Operations
from ..posix.own_xattrs import PREFIX as OWN_XATTRS
from ..posix.privileges import CAPABILITY
from . import passthrough, wire
from .interrupts import Waiting
from .replies import (
    DirectoryReply,
    missing,
    pack_attributes,
    pack_entry,
    pack_statx,
    sized,
)
from .submounts import Submounts
from .wakeups import FastWakeups
from .wire import BODY, Init, Malformed, Opcode, Valid

log = logging.getLogger(__name__)

MAX_WRITE_BYTES = 1024 * 1024
_BUFFER_BYTES = MAX_WRITE_BYTES + 4096
# How long the reader looks for the next request before it sleeps, and how long it may keep trio's
# other tasks (signals, waiting requests) from their turn.
_SPIN_NS = 100_000
_TURN_NS = 2_000_000
# Requests that come closer to each other are one burst: wake-ups stay fast, tidying up has to wait.
_BURST_S = 0.01

# Requests that may be answered before releases and forgets that came earlier are carried out.
_GO_AHEAD = frozenset(
    {
        Opcode.LOOKUP,
        Opcode.GETATTR,
        Opcode.GETXATTR,
        Opcode.OPEN,
        Opcode.RELEASE,
        Opcode.FORGET,
        Opcode.BATCH_FORGET,
    }
)
_PUT_OFF_MAX = 1024
# Releases count among them: one that has to wait its turn would come after an open that it matters to.
_BACKGROUND_MAX = 65535

_WANTED = (
    Init.ASYNC_READ
    | Init.POSIX_LOCKS
    | Init.ATOMIC_O_TRUNC
    | Init.EXPORT_SUPPORT
    | Init.BIG_WRITES
    | Init.DONT_MASK
    | Init.FLOCK_LOCKS
    | Init.DO_READDIRPLUS
    | Init.READDIRPLUS_AUTO
    | Init.PARALLEL_DIROPS
    | Init.POSIX_ACL
    | Init.MAX_PAGES
    | Init.CACHE_SYMLINKS
    | Init.EXPLICIT_INVAL_DATA
    | Init.HANDLE_KILLPRIV_V2
    | Init.SETXATTR_EXT
    | Init.INIT_EXT
    | Init.PASSTHROUGH
)

_NS = 1_000_000_000
# The attributes that the kernel asks for before a file is first written, and where it checks modes. An
# exception takes 2 us more than an answer.
_ASKED_OFTEN = frozenset({CAPABILITY, *acl.NAMES})

# Fields of a SETATTR that say by which descriptor and for whom, not what is set.
_VALID_HANDLES = Valid.FH | Valid.LOCKOWNER
_VALID_NOW = Valid.ATIME_NOW | Valid.MTIME_NOW

Answer = Coroutine[Any, Any, bytes]


class ProtocolError(Exception):
    """The kernel's FUSE cannot do what this session needs; the text says what."""


class Caller:
    """Who made a request. `pid` is the thread's, 0 when it lies outside our pid namespace."""

    __slots__ = ("gid", "pid", "uid", "umask")

    def __init__(self, uid: int, gid: int, pid: int) -> None:
        self.uid = uid
        self.gid = gid
        self.pid = pid
        self.umask = 0


class SetattrFields:
    """Which attributes a SETATTR changes; pyfuse3's own can be made by C code only."""

    def __init__(self, valid: int) -> None:
        self.update_mode = bool(valid & Valid.MODE)
        self.update_uid = bool(valid & Valid.UID)
        self.update_gid = bool(valid & Valid.GID)
        self.update_size = bool(valid & Valid.SIZE)
        self.update_atime = bool(valid & (Valid.ATIME | Valid.ATIME_NOW))
        self.update_mtime = bool(valid & (Valid.MTIME | Valid.MTIME_NOW))
        self.update_ctime = bool(valid & Valid.CTIME)


class KernelSession(KernelCache):
    """Serves one mount from an open /dev/fuse descriptor, which it closes in the end.

    Call handshake() once the filesystem is mounted, then run().
    """

    name = "kernel"

    def __init__(self, device_fd: int, wakeups: FastWakeups | None = None) -> None:
        self._fd = device_fd
        self.wakeups = wakeups or FastWakeups()
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._nursery: trio.Nursery
        self._waiting: dict[int, Waiting] = {}
        self._pollers: dict[int, set[int]] = {}
        self._operations: Operations
        self._finished = trio.Event()
        self._has_epochs = self._can_prune = False
        self._submounts: Submounts | None = None
        self._trace = log.isEnabledFor(logging.DEBUG)
        self._requests = [0] * 64
        # Handles and (node id, lookups) of requests that are put off, see settle().
        self._released: list[int] = []
        self._forgotten: list[tuple[int, int]] = []
        self.errors: dict[str, int] = {}
        self._handlers: dict[int, Callable[[int, int, Caller, int], Answer | bytes]] = {
            opcode: getattr(self, f"_{opcode.name.lower()}")
            for opcode in Opcode
            if hasattr(self, f"_{opcode.name.lower()}")
        }

    def attach(self, operations: Operations) -> None:
        self._operations = operations

    def mounted(self, device: str) -> None:
        """Tell the session the device number ("0:37") of its mount."""
        self._submounts = Submounts(device)

    @property
    def requests(self) -> dict[str, int]:
        """Requests so far, by kind."""
        return {opcode.name: self._requests[opcode] for opcode in Opcode if self._requests[opcode]}

    # -- setting up ------------------------------------------------------------------------------

    def handshake(self, stack_depth: int = 1, *, acls: bool = True) -> None:
        """Answer the kernel's INIT. Raises ProtocolError when it lacks what we need.

        `stack_depth` is how deep this filesystem may lie in a stack of filesystems, at most 2; the
        files it passes through to lie at least one less deep. `acls`: the kernel is to check ACLs, and with
        them modes, whatever the mount options say.
        """
        received = os.readv(self._fd, [self._buffer])
        _, opcode, unique, *_ = wire.decode_header(self._buffer, received)
        if opcode != Opcode.INIT:
            raise ProtocolError(f"the kernel began with request {opcode}, not INIT")
        major, minor, readahead, flags = wire.decode(wire.INIT_IN, self._buffer, received)
        if major != wire.MAJOR or minor < wire.MIN_MINOR:
            os.write(self._fd, wire.error_reply(unique, errno.EPROTO))
            raise ProtocolError(
                f"the kernel speaks FUSE {major}.{minor}; 7.{wire.MIN_MINOR} is needed"
            )
        if flags & Init.INIT_EXT:
            (flags2,) = wire.INIT_IN_FLAGS2.unpack_from(self._buffer, BODY + wire.INIT_IN.size)
            flags |= flags2 << 32
        if not flags & Init.PASSTHROUGH:
            os.write(self._fd, wire.error_reply(unique, errno.EPROTO))
            raise ProtocolError("the kernel's FUSE has no passthrough (Linux 6.9 with "
                                "CONFIG_FUSE_PASSTHROUGH has)")  # fmt: skip
        self._has_epochs = minor >= wire.EPOCH_MINOR
        self._can_prune = minor >= wire.PRUNE_MINOR
        agreed = flags & (_WANTED if acls else _WANTED & ~Init.POSIX_ACL)
        answer = wire.INIT_OUT.pack(
            wire.MAJOR, min(minor, wire.MINOR), readahead, agreed & 0xFFFFFFFF,
            _BACKGROUND_MAX, _BACKGROUND_MAX, MAX_WRITE_BYTES, 1, MAX_WRITE_BYTES // 4096, 0,
            agreed >> 32, stack_depth, 0,
        )  # fmt: skip
        os.write(self._fd, wire.reply(unique, answer))
        os.set_blocking(self._fd, False)

    # -- the loop --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until the filesystem is unmounted or stop() is called."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._read_requests)
            await self._finished.wait()
            self.settle()
            nursery.cancel_scope.cancel()

    def stop(self) -> None:
        self._finished.set()

    def close(self) -> None:
        self.wakeups.close()
        if self._submounts is not None:
            self._submounts.close()
            self._submounts = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    async def _read_requests(self) -> None:
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        clock = time.monotonic_ns
        while True:
            with trio.move_on_after(_BURST_S) as pause:
                await trio.lowlevel.wait_readable(self._fd)
            if pause.cancelled_caught:
                self.wakeups.let_go()
                await self._tidy_up()
                await trio.lowlevel.wait_readable(self._fd)
            self.wakeups.hold()
            turn_ends = clock() + _TURN_NS
            while True:
                if self._serve_one():
                    spin_ends = clock() + _SPIN_NS
                    if spin_ends > turn_ends:
                        await trio.lowlevel.checkpoint()
                        turn_ends = clock() + _TURN_NS
                    continue
                if self._finished.is_set():
                    return
                if self._waiting:
                    break  # requests that wait in their own tasks want their turn
                while not (ready := poller.poll(0)) and clock() < spin_ends:
                    pass
                if not ready:
                    break

    async def _tidy_up(self) -> None:
        try:
            await self._operations.idle()
        except Exception:
            log.exception("tidying up failed")

    def _serve_one(self) -> bool:
        """Read and answer one request; False when there is none."""
        try:
            received = os.readv(self._fd, [self._buffer])
        except BlockingIOError:
            if self._released or self._forgotten:
                self.settle()
                return True
            return False
        except OSError as error:
            if error.errno in (errno.EINTR, errno.ENOENT):
                return True
            if error.errno != errno.ENODEV:
                log.error("reading from the kernel failed: %s", error)
            self._finished.set()
            return False
        self.dispatch(received)
        return True

    def dispatch(self, received: int) -> None:
        """Answer the request of `received` bytes that is in the buffer."""
        try:
            length, opcode, unique, nodeid, uid, gid, pid = wire.decode_header(
                self._buffer, received
            )
        except Malformed as error:
            log.error("from the kernel: %s", error)
            return
        self._requests[opcode & 63] += 1
        if self._trace:
            log.debug("%s node %d pid %d, %d bytes", _name(opcode), nodeid, pid, length)
        if (self._released or self._forgotten) and (
            opcode not in _GO_AHEAD or len(self._released) + len(self._forgotten) > _PUT_OFF_MAX
        ):
            self.settle()
        handler = self._handlers.get(opcode)
        if handler is None:
            self._send(wire.error_reply(unique, errno.ENOSYS))
            return
        try:
            answer = handler(unique, nodeid, Caller(uid, gid, pid), length)
            self._send(answer if isinstance(answer, bytes) else inline.run(answer))
        except inline.Detached:
            assert not isinstance(answer, bytes)
            waiting = Waiting(opcode, pid, trio.CancelScope(), trio.Event())
            self._waiting[unique] = waiting
            self._nursery.start_soon(self._finish, unique, waiting, answer)
        except Exception as error:
            self._fail(unique, opcode, error)

    def settle(self) -> None:
        """Carry out the releases and forgets that were put off: nobody waits for them, but somebody
        may have waited for what came after them."""
        for fh in self._released:
            self._carry_out(self._operations.release(fh), f"releasing handle {fh}")
        self._released.clear()
        if self._forgotten:
            self._carry_out(self._operations.forget(self._forgotten), "forgetting nodes")
            self._forgotten = []

    def _carry_out(self, coro: Coroutine[Any, Any, None], what: str) -> None:
        """Run what nobody waits for, in a task of its own when it has to wait."""
        try:
            inline.run(coro)
        except inline.Detached:
            self._nursery.start_soon(self._carry_out_later, coro, what)
        except Exception:
            log.exception("%s failed", what)

    async def _carry_out_later(self, coro: Coroutine[Any, Any, None], what: str) -> None:
        try:
            await inline.resume(coro)
        except Exception:
            log.exception("%s failed", what)

    async def _finish(self, unique: int, waiting: Waiting, coro: Answer) -> None:
        """Run a request that waits, in a task of its own; INTERRUPT may cancel it."""
        with waiting.scope as scope:
            try:
                self._send(await inline.resume(coro))
            except Exception as error:
                self._fail(unique, waiting.opcode, error)
            finally:
                waiting.ended.set()
                del self._waiting[unique]
        if scope.cancelled_caught:
            self._send(wire.error_reply(unique, errno.EINTR))

    def _send(self, message: bytes) -> None:
        if not message:
            return
        try:
            os.write(self._fd, message)
        except OSError as error:
            # ENOENT: the caller was killed meanwhile. ENODEV: unmounted.
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                log.error("answering the kernel failed: %s", error)

    def _fail(self, unique: int, opcode: int, error: Exception) -> None:
        if isinstance(error, Malformed):
            log.error("from the kernel: %s", error)
            code = errno.EINVAL
        elif isinstance(error, OSError) and error.errno:
            code = error.errno
            if code in (errno.EIO, errno.ENOSPC, errno.EMFILE):
                log.error("%s: %s", _name(opcode), error)
        elif isinstance(error, pyfuse3.FUSEError):
            code = error.errno
        elif isinstance(error, KeyError):
            log.error("%s: the kernel asked for what is not open", _name(opcode), exc_info=error)
            code = errno.EBADF
        elif isinstance(error, OverflowError):
            code = errno.EINVAL
        else:
            log.exception("%s failed", _name(opcode), exc_info=error)
            code = errno.EIO
        name = errno.errorcode.get(code, str(code))
        self.errors[name] = self.errors.get(name, 0) + 1
        if opcode not in (Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT):
            self._send(wire.error_reply(unique, code))

    # -- telling the kernel ----------------------------------------------------------------------

    @property
    def can_forget(self) -> bool:
        return self._has_epochs and not (self._submounts is not None and self._submounts.exist())

    def invalidate_attributes(self, node: Node) -> None:
        if node.lookups > 0:
            self._tell(wire.inval_inode(node.id, -1, 0))  # takes no lock

    async def expire_names(self, names: list[Name]) -> None:
        if self.can_forget:
            self._tell(wire.inc_epoch())
            return
        for parent, name in names:
            await self._notify(wire.inval_entry(parent, name))

    def forget(self, nodes: Iterable[int], *, names: bool) -> None:
        # Neither takes a lock: a thread that waited for one could keep a killed daemon's mount alive.
        if names:
            self._tell(wire.inc_epoch())
        for node_id in nodes:
            self._tell(wire.inval_inode(node_id, -1, 0))

    async def forget_content(self, node: Node) -> None:
        await self._notify(wire.inval_inode(node.id, 0, 0))

    def prune(self, nodes: Sequence[int]) -> None:
        if not self._can_prune:
            return
        for start in range(0, len(nodes), wire.PRUNE_MAX):
            self._tell(wire.prune(nodes[start : start + wire.PRUNE_MAX]))

    async def _notify(self, message: bytes) -> None:
        # In a thread: the kernel may wait for a lock that a caller of ours holds until we answer.
        await trio.to_thread.run_sync(self._tell, message)

    def _tell(self, message: bytes) -> None:
        try:
            os.write(self._fd, message)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV, errno.ENOTDIR):
                log.warning("notifying the kernel failed: %s", error)

    def start_soon(self, telling: Callable[..., Awaitable[None]], *args: Any) -> bool:
        if self._finished.is_set():
            return False
        self._nursery.start_soon(telling, *args)
        return True

    def backing_moved(self, node: Node) -> None:
        self._operations.atimes.moved(node.id, node.ino, node.backing_extent)

    def drop_backing(self, node: Node) -> None:
        if node.backing_id:
            self._operations.atimes.gone(node.id, node.ino)
            passthrough.unregister(self._fd, node.backing_id)
            self._operations.nodes.set_backing(node, 0, 0)

    def version_published(self, ino: int) -> None:
        for handle in self._pollers.pop(ino, ()):
            message = wire.notification(wire.Notify.POLL, wire.NOTIFY_POLL.pack(handle))
            self._nursery.start_soon(self._notify, message)

    # -- names -----------------------------------------------------------------------------------

    def _lookup(self, unique: int, nodeid: int, caller: Caller, end: int) -> Answer | bytes:
        name, _ = wire.decode_name(self._buffer, BODY, end)
        entry = self._operations.find(nodeid, name, caller.pid)
        if entry is None:
            return self._look_up(unique, nodeid, name, caller)
        return _found(unique, entry)

    async def _look_up(self, unique: int, nodeid: int, name: bytes, caller: Caller) -> bytes:
        return _found(unique, await self._operations.lookup(nodeid, name, caller))

    def _forget(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        (lookups,) = wire.decode(wire.FORGET_IN, self._buffer, end)
        self._forgotten.append((nodeid, lookups))
        return b""

    def _batch_forget(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        count, _ = wire.decode(wire.BATCH_FORGET_IN, self._buffer, end)
        start = BODY + wire.BATCH_FORGET_IN.size
        if start + count * wire.FORGET_ONE.size > end:
            raise Malformed(f"BATCH_FORGET of {count} nodes is cut short")
        stop = start + count * wire.FORGET_ONE.size
        self._forgotten += wire.FORGET_ONE.iter_unpack(self._view[start:stop])
        return b""

    async def _mknod(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        mode, rdev, caller.umask, _ = wire.decode(wire.MKNOD_IN, self._buffer, end)
        name, _ = wire.decode_name(self._buffer, BODY + wire.MKNOD_IN.size, end)
        entry = await self._operations.mknod(nodeid, name, mode, rdev, caller)
        return wire.reply(unique, pack_entry(entry, entry.st_ino))

    async def _mkdir(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        mode, caller.umask = wire.decode(wire.MKDIR_IN, self._buffer, end)
        name, _ = wire.decode_name(self._buffer, BODY + wire.MKDIR_IN.size, end)
        entry = await self._operations.mkdir(nodeid, name, mode, caller)
        return wire.reply(unique, pack_entry(entry, entry.st_ino))

    async def _symlink(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        name, after = wire.decode_name(self._buffer, BODY, end)
        target, _ = wire.decode_name(self._buffer, after, end)
        entry = await self._operations.symlink(nodeid, name, target, caller)
        return wire.reply(unique, pack_entry(entry, entry.st_ino))

    async def _link(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        (old,) = wire.decode(wire.LINK_IN, self._buffer, end)
        name, _ = wire.decode_name(self._buffer, BODY + wire.LINK_IN.size, end)
        entry = await self._operations.link(old, nodeid, name, caller)
        return wire.reply(unique, pack_entry(entry, entry.st_ino))

    async def _unlink(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        name, _ = wire.decode_name(self._buffer, BODY, end)
        await self._operations.unlink(nodeid, name, caller)
        return wire.reply(unique)

    async def _rmdir(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        name, _ = wire.decode_name(self._buffer, BODY, end)
        await self._operations.rmdir(nodeid, name, caller)
        return wire.reply(unique)

    async def _rename(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        (target,) = wire.decode(wire.RENAME_IN, self._buffer, end)
        return await self._renamed(
            unique, nodeid, target, 0, BODY + wire.RENAME_IN.size, end, caller
        )

    async def _rename2(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        target, flags, _ = wire.decode(wire.RENAME2_IN, self._buffer, end)
        start = BODY + wire.RENAME2_IN.size
        return await self._renamed(unique, nodeid, target, flags, start, end, caller)

    async def _renamed(
        self,
        unique: int,
        nodeid: int,
        target: int,
        flags: int,
        start: int,
        end: int,
        caller: Caller,
    ) -> bytes:
        old, after = wire.decode_name(self._buffer, start, end)
        new, _ = wire.decode_name(self._buffer, after, end)
        await self._operations.rename(nodeid, old, target, new, flags, caller)
        return wire.reply(unique)

    async def _readlink(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        return wire.reply(unique, await self._operations.readlink(nodeid, caller))

    # -- attributes ------------------------------------------------------------------------------

    def _getattr(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        return wire.reply(unique, pack_attributes(self._operations.attributes(nodeid)))

    async def _setattr(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        (
            valid, _, fh, size, _, atime, mtime, _, atime_ns, mtime_ns, _,
            mode, _, uid, gid, _,
        ) = wire.decode(wire.SETATTR_IN, self._buffer, end)  # fmt: skip
        if max(atime_ns, mtime_ns) >= _NS:
            raise Malformed("a time has more nanoseconds than a second")
        wanted = Attributes()
        now = now_ns()
        wanted.st_mode, wanted.st_uid, wanted.st_gid = mode, uid, gid
        if valid & Valid.SIZE:
            if size > 2**63 - 1:
                raise fail(errno.EFBIG)
            wanted.st_size = size
        wanted.st_atime_ns = now if valid & Valid.ATIME_NOW else atime * _NS + atime_ns
        wanted.st_mtime_ns = now if valid & Valid.MTIME_NOW else mtime * _NS + mtime_ns
        # Before a change that is not a request of its own kind, the kernel sets nothing.
        lose_set_ids = bool(valid & Valid.KILL_SUIDGID) or not valid & ~_VALID_HANDLES
        handle = fh if valid & Valid.FH else None
        fields = SetattrFields(valid)
        entry = await self._operations.setattr(
            nodeid, wanted, fields, handle, caller, lose_set_ids=lose_set_ids,
            touch=not _VALID_NOW & ~valid,
        )  # fmt: skip
        return wire.reply(unique, pack_attributes(entry))

    async def _setxattr(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        size, flags, more = wire.decode(wire.SETXATTR_IN, self._buffer, end)
        name, after = wire.decode_name(self._buffer, BODY + wire.SETXATTR_IN.size, end)
        if after + size > end:
            raise Malformed("the value of an xattr is cut short")
        value = bytes(self._view[after : after + size])
        drop_set_gid = bool(more & wire.SETXATTR_ACL_KILL_SGID)
        await self._operations.setxattr(
            nodeid, name, value, caller, flags, drop_set_gid=drop_set_gid
        )
        return wire.reply(unique)

    def _getxattr(self, unique: int, nodeid: int, caller: Caller, end: int) -> Answer | bytes:
        size, _ = wire.decode(wire.GETXATTR_IN, self._buffer, end)
        name, _ = wire.decode_name(self._buffer, BODY + wire.GETXATTR_IN.size, end)
        if name in _ASKED_OFTEN and not self._operations.has_xattrs(nodeid):
            return wire.error_reply(unique, errno.ENODATA)
        if name.startswith(OWN_XATTRS):
            self.settle()  # who asks what is open is not to see what is closed
        return self._get_xattr(unique, nodeid, name, size, caller)

    async def _get_xattr(
        self, unique: int, nodeid: int, name: bytes, size: int, caller: Caller
    ) -> bytes:
        return sized(unique, await self._operations.getxattr(nodeid, name, caller), size)

    async def _listxattr(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        size, _ = wire.decode(wire.GETXATTR_IN, self._buffer, end)
        names = await self._operations.listxattr(nodeid, caller)
        return sized(unique, b"".join(name + b"\0" for name in names), size)

    async def _removexattr(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        name, _ = wire.decode_name(self._buffer, BODY, end)
        await self._operations.removexattr(nodeid, name, caller)
        return wire.reply(unique)

    def _statx(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        entry = self._operations.attributes(nodeid)
        birth_ns = self._operations.birth_ns(nodeid)
        return wire.reply(unique, pack_statx(entry, birth_ns))

    async def _ioctl(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        _, _, command, _, size, room = wire.decode(wire.IOCTL_IN, self._buffer, end)
        if command not in ioctls.KNOWN:
            return wire.error_reply(unique, errno.ENOTTY)
        start = BODY + wire.IOCTL_IN.size
        if start + size > end:
            raise Malformed("the data of an ioctl is cut short")
        flags = ioctls.asked_flags(command, bytes(self._view[start : start + size]))
        if flags is not None:
            await self._operations.set_flags(nodeid, flags)
        answer = ioctls.answer(command, self._operations.flags(nodeid))[:room]
        return wire.reply(unique, wire.IOCTL_OUT.pack(0, 0, 0, 0) + answer)

    async def _statfs(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        data = await self._operations.statfs(caller, nodeid)
        return wire.reply(
            unique,
            wire.STATFS_OUT.pack(
                data.f_blocks, data.f_bfree, data.f_bavail, data.f_files, data.f_ffree,
                data.f_bsize, data.f_namemax, data.f_frsize, 0,
            ),
        )  # fmt: skip

    # -- files -----------------------------------------------------------------------------------

    async def _open(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        flags, more = wire.decode(wire.OPEN_IN, self._buffer, end)
        if self._released and flags & (os.O_ACCMODE | os.O_TRUNC):
            self.settle()  # who still writes a file decides what it gets
        lose_set_ids = bool(more & wire.OPEN_KILL_SUIDGID)
        info = await self._operations.open(nodeid, flags, caller, lose_set_ids=lose_set_ids)
        try:
            return wire.reply(unique, self._pack_open(info))
        except OSError:
            await self._operations.cancel_open(info.handle)
            raise

    async def _create(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        flags, mode, caller.umask, _ = wire.decode(wire.CREATE_IN, self._buffer, end)
        name, _ = wire.decode_name(self._buffer, BODY + wire.CREATE_IN.size, end)
        info, entry = await self._operations.create(nodeid, name, mode, flags, caller)
        return wire.reply(unique, await self._pack_created(info, entry))

    async def _tmpfile(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        flags, mode, caller.umask, _ = wire.decode(wire.CREATE_IN, self._buffer, end)
        info, entry = await self._operations.tmpfile(nodeid, mode, flags, caller)
        return wire.reply(unique, await self._pack_created(info, entry))

    async def _pack_created(self, info: OpenInfo, entry: Attributes) -> bytes:
        try:
            return pack_entry(entry, entry.st_ino) + self._pack_open(info)
        except OSError:
            await self._operations.cancel_open(info.handle)
            await self._operations.forget([(entry.st_ino, 1)])
            raise

    def _pack_open(self, info: OpenInfo) -> bytes:
        flags = Open_NOFLUSH if info.noflush else 0
        if not info.passthrough:
            return wire.OPEN_OUT.pack(
                info.fh, flags | (Open_KEEP_CACHE if info.keep_cache else 0), 0
            )
        node = info.handle.node
        if not node.backing_id:
            self._register(node)
        if info.handle.flags & os.O_ACCMODE != os.O_WRONLY:
            self._operations.atimes.opened(node.ino)
        return wire.OPEN_OUT.pack(info.fh, flags | Open_PASSTHROUGH, node.backing_id)

    def _register(self, node: Node) -> None:
        content = node.content
        assert content is not None
        if content.fd >= 0:
            self._pass_through(node, content.extent, content.fd)
        else:
            with self._operations.extents.opened(content.extent) as fd:
                self._pass_through(node, content.extent, fd)

    def _pass_through(self, node: Node, extent: int, fd: int) -> None:
        atime_ns = os.fstat(fd).st_atime_ns
        backing_id = passthrough.register(self._fd, fd)
        self._operations.nodes.set_backing(node, extent, backing_id)
        self._operations.atimes.passes(node.id, node.ino, extent, atime_ns)

    async def _read(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        fh, offset, size, _, _, _, _ = wire.decode(wire.READ_IN, self._buffer, end)
        return wire.reply(unique, await self._operations.read(fh, offset, size))

    async def _write(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        fh, offset, size, flags, _, _, _ = wire.decode(wire.WRITE_IN, self._buffer, end)
        start = BODY + wire.WRITE_IN.size
        if start + size > end:
            raise Malformed("the data of a WRITE is cut short")
        written = await self._operations.write(fh, offset, self._view[start : start + size])
        if flags & wire.WRITE_KILL_SUIDGID and self._operations.has_set_ids(nodeid):
            await self._operations.setattr(
                nodeid, Attributes(), SetattrFields(0), None, caller, lose_set_ids=True
            )
        return wire.reply(unique, wire.WRITE_OUT.pack(written, 0))

    async def _flush(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        fh, _, _, owner = wire.decode(wire.FLUSH_IN, self._buffer, end)
        await self._operations.close(fh, caller.pid, owner)
        return wire.reply(unique)

    def _release(self, unique: int, nodeid: int, caller: Caller, end: int) -> Answer | bytes:
        fh, _, flags, _ = wire.decode(wire.RELEASE_IN, self._buffer, end)
        operations = self._operations
        if fh in self._released:
            raise fail(errno.EBADF)
        locked = flags & wire.RELEASE_FLOCK_UNLOCK or operations.locking.has_locked(fh)
        if not locked and operations.release_can_wait(fh):
            self._released.append(fh)
            return wire.reply(unique)
        release = operations.release_locked if locked else operations.release
        return self._release_now(unique, release(fh))

    async def _release_now(self, unique: int, release: Coroutine[Any, Any, None]) -> bytes:
        await release
        return wire.reply(unique)

    async def _fsync(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        fh, flags, _ = wire.decode(wire.FSYNC_IN, self._buffer, end)
        await self._operations.fsync(fh, bool(flags & 1))
        return wire.reply(unique)

    async def _fallocate(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        fh, offset, length, mode, _ = wire.decode(wire.FALLOCATE_IN, self._buffer, end)
        if max(offset, length) > 2**63 - 1:
            raise fail(errno.EFBIG)
        await self._operations.fallocate(fh, mode, offset, length)
        return wire.reply(unique)

    async def _lseek(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        fh, offset, whence, _ = wire.decode(wire.LSEEK_IN, self._buffer, end)
        found = await self._operations.lseek(fh, offset, whence)
        return wire.reply(unique, wire.LSEEK_OUT.pack(found))

    async def _copy_file_range(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        fh_in, off_in, _, fh_out, off_out, length, _ = wire.decode(
            wire.COPY_FILE_RANGE_IN, self._buffer, end
        )
        copied = await self._operations.copy_file_range(fh_in, off_in, fh_out, off_out, length)
        return wire.reply(unique, wire.WRITE_OUT.pack(copied, 0))

    def _poll(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        """A file is always readable and writable; POLLPRI says that a newer version was published."""
        fh, kernel_handle, flags, _ = wire.decode(wire.POLL_IN, self._buffer, end)
        ino, newer = self._operations.newer_version(fh)
        if newer:
            events = select.POLLIN | select.POLLOUT | select.POLLPRI
        else:
            events = select.POLLIN | select.POLLOUT
            if flags & wire.POLL_SCHEDULE_NOTIFY:
                self._pollers.setdefault(ino, set()).add(kernel_handle)
        return wire.reply(unique, wire.POLL_OUT.pack(events, 0))

    # -- directories -----------------------------------------------------------------------------

    async def _opendir(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        fh = await self._operations.opendir(nodeid, caller)
        flags = Open_CACHE_DIR if self._operations.listings_stay else 0
        return wire.reply(unique, wire.OPEN_OUT.pack(fh, flags, 0))

    def _readdir(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        fh, offset, size, _, _, _, _ = wire.decode(wire.READ_IN, self._buffer, end)
        parts: list[bytes] = []
        for next_id, ino, name, mode in self._operations.names(fh, offset):
            record = wire.dirent(ino, next_id, name, mode)
            size -= len(record)
            if size < 0:
                break
            parts.append(record)
        return wire.reply(unique, b"".join(parts))

    async def _readdirplus(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        fh, offset, size, _, _, _, _ = wire.decode(wire.READ_IN, self._buffer, end)
        listing = DirectoryReply(size)
        await self._operations.readdir(fh, offset, listing.add)
        return wire.reply(unique, b"".join(listing.parts))

    async def _releasedir(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        fh, _, _, _ = wire.decode(wire.RELEASE_IN, self._buffer, end)
        await self._operations.releasedir(fh)
        return wire.reply(unique)

    async def _fsyncdir(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        fh, flags, _ = wire.decode(wire.FSYNC_IN, self._buffer, end)
        await self._operations.fsyncdir(fh, bool(flags & 1))
        return wire.reply(unique)

    async def _syncfs(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        await self._operations.fsyncdir(0, False)
        return wire.reply(unique)

    # -- locks -----------------------------------------------------------------------------------

    def _decode_lock(self, caller: Caller, end: int) -> tuple[int, int, Lock, bool]:
        fh, owner, start, last, kind, pid, flags, _ = wire.decode(wire.LOCK_IN, self._buffer, end)
        if start > last or last > wire.EMPTY_LOCK_END:
            raise Malformed(f"a lock of bytes {start} to {last}")
        # The kernel does not say who unlocks.
        lock = Lock(kind, start, last, pid or caller.pid, caller.uid)
        return fh, owner, lock, bool(flags & wire.LOCK_FLOCK)

    async def _getlk(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        _, owner, lock, _ = self._decode_lock(caller, end)
        found = await self._operations.test_lock(nodeid, owner, lock)
        return wire.reply(unique, wire.LOCK_OUT.pack(found.start, found.end, found.type, found.pid))

    async def _setlk(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        fh, owner, lock, flock = self._decode_lock(caller, end)
        await self._operations.lock(fh, owner, lock, flock=flock, wait=False)
        return wire.reply(unique)

    async def _setlkw(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        fh, owner, lock, flock = self._decode_lock(caller, end)
        await self._operations.lock(fh, owner, lock, flock=flock, wait=True)
        return wire.reply(unique)

    def _interrupt(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        (interrupted,) = wire.decode(wire.INTERRUPT_IN, self._buffer, end)
        waiting = self._waiting.get(interrupted)
        if waiting is not None:
            self._nursery.start_soon(waiting.interrupted, self._operations.processes)
        return b""

    def _destroy(self, unique: int, nodeid: int, caller: Caller, end: int) -> bytes:
        return wire.reply(unique)


Open_CACHE_DIR = int(wire.Open.CACHE_DIR | wire.Open.KEEP_CACHE)
Open_KEEP_CACHE = int(wire.Open.KEEP_CACHE)
Open_NOFLUSH = int(wire.Open.NOFLUSH)
Open_PASSTHROUGH = int(wire.Open.PASSTHROUGH)


def _found(unique: int, entry: Attributes) -> bytes:
    """The answer to a lookup."""
    node_id = entry.st_ino
    packed = pack_entry(entry, node_id) if node_id else missing(entry.entry_timeout)
    return wire.reply(unique, packed)


def _name(opcode: int) -> str:
    try:
        return Opcode(opcode).name
    except ValueError:
        return f"request {opcode}"
