"""The /dev/fuse messages, and the kernel session fed with ones that no kernel would send."""

import errno
import fcntl
import gc
import logging
import os
import resource
import stat
import struct
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import trio
import trio.testing
from harness.models.invariants import check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from irdmafs.backend.files import extents
from irdmafs.backend.model.clock import now_ns
from irdmafs.backend.model.records import NO_CONTENT
from irdmafs.backend.namespace import NewVersion
from irdmafs.backend.pauses import Places
from irdmafs.backend.store import embedded as store_node
from irdmafs.backend.store.embedded import EmbeddedStore, embedded_store
from irdmafs.callers.processes import Processes
from irdmafs.coherence.beliefs import Beliefs
from irdmafs.coherence.cache import Cache
from irdmafs.coherence.content import Content
from irdmafs.coherence.protocol import Coherence
from irdmafs.coherence.shared import Shared
from irdmafs.fuse import wire
from irdmafs.fuse.connection import Connection, ProtocolError
from irdmafs.fuse.counts import Counts
from irdmafs.fuse.kernel import KernelSession
from irdmafs.fuse.notices import Notices, Submounts
from irdmafs.fuse.tasks import Tasks
from irdmafs.fuse.wakeups import FastWakeups
from irdmafs.fuse.wire import Malformed, Opcode, Request
from irdmafs.mount_options import MountOptions
from irdmafs.posix.atimes import Atimes
from irdmafs.posix.filesystem import Filesystem
from irdmafs.posix.locking import Locking
from irdmafs.posix.metadata import Superblock

ROOT = 1
NO_REPLY = (Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT)
U32, U64 = 2**32 - 1, 2**64 - 1
EMPTYING = os.O_WRONLY | os.O_TRUNC
O_LARGEFILE = 0o100000  # of every open by a name

DIRENT = struct.Struct("<QQII")
LSEEK_IN = struct.Struct("<QQI4x")  # the offset is signed to us; here it is to take any bits


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_open() -> None:
    """Files that earlier tests left to the garbage collector would be closed while others are counted."""
    gc.collect()


# -- the formats -------------------------------------------------------------------------------------


@given(
    parts=st.lists(st.binary(max_size=9), max_size=4),
    start=st.integers(0, 9),
    cut=st.integers(0, 9),
)
@pytest.mark.parametrize("count", [1, 2])
def test_names_end_within_the_message_or_are_refused(
    count: int, parts: list[bytes], start: int, cut: int
) -> None:
    data = b"\0".join(parts)
    end = max(0, len(data) - cut)
    *names, _ = data[start:end].split(b"\0")
    for buffer in (data, bytearray(data)):
        if len(names) >= count and all(names[:count]):
            assert wire.decode_names(buffer, start, end, count) == tuple(names[:count])
        else:
            with pytest.raises(Malformed):
                wire.decode_names(buffer, start, end, count)


@given(
    name=st.binary(min_size=1, max_size=255), ino=st.integers(0, U64), offset=st.integers(0, U64)
)
def test_a_directory_entry_is_padded_to_eight_bytes(name: bytes, ino: int, offset: int) -> None:
    record = wire.dirent(ino, offset, name, 0o100644)
    assert len(record) % 8 == 0
    assert DIRENT.unpack_from(record) == (ino, offset, len(name), 8)
    assert record[24:].rstrip(b"\0") == name.rstrip(b"\0")


# -- a session without a kernel ----------------------------------------------------------------------

# The size of each answer's payload, where it is always the same.
_ENTRY, _OPEN, _ATTR = 128, 16, 104
_PAYLOAD = {
    Opcode.LOOKUP: _ENTRY, Opcode.MKNOD: _ENTRY, Opcode.MKDIR: _ENTRY, Opcode.SYMLINK: _ENTRY,
    Opcode.LINK: _ENTRY, Opcode.CREATE: _ENTRY + _OPEN, Opcode.TMPFILE: _ENTRY + _OPEN,
    Opcode.OPEN: _OPEN, Opcode.OPENDIR: _OPEN, Opcode.GETATTR: _ATTR, Opcode.SETATTR: _ATTR,
    Opcode.UNLINK: 0, Opcode.RMDIR: 0, Opcode.RENAME: 0, Opcode.RENAME2: 0, Opcode.WRITE: 8,
    Opcode.COPY_FILE_RANGE: 8, Opcode.STATFS: 80, Opcode.RELEASE: 0, Opcode.RELEASEDIR: 0,
    Opcode.FSYNC: 0, Opcode.FSYNCDIR: 0, Opcode.SYNCFS: 0, Opcode.SETXATTR: 0,
    Opcode.REMOVEXATTR: 0, Opcode.FLUSH: 0, Opcode.ACCESS: 0, Opcode.FALLOCATE: 0,
    Opcode.LSEEK: 8, Opcode.POLL: 8, Opcode.GETLK: 24, Opcode.SETLK: 0, Opcode.SETLKW: 0,
    Opcode.DESTROY: 0, Opcode.STATX: 288,
}  # fmt: skip


class Listener(Notices):
    """Notifications are collected: in a thread they would come at any time."""

    def __init__(
        self, connection: Connection, store: EmbeddedStore, atimes: Atimes, tasks: Tasks
    ) -> None:
        super().__init__(connection, store.extents, atimes, Submounts(""), tasks)
        self.notifications: list[bytes] = []

    async def _tell_in_thread(self, message: bytes) -> None:
        self.notifications.append(message)


class Checked(KernelSession):
    """Errors that no request should lead to are collected."""

    surprises: list[str]

    def fail(self, request: Request, error: Exception) -> None:
        expected = isinstance(error, Malformed) or (isinstance(error, OSError) and error.errno)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        no_such_handle = isinstance(error, KeyError) and (
            ".handles[" in (frame.line or "") or frame.name == "close"
        )
        if not expected and not no_such_handle:
            self.surprises.append("".join(traceback.format_exception(error)))
        super().fail(request, error)


# A mount of a cluster that hears of each change at once, and whose kernel believes nothing.
TOLD_AT_ONCE: Any = SimpleNamespace(
    exclusive=(), is_fresh=lambda inode: True, is_missing=lambda directory, name: False,
    believable_s=lambda directory, used=True: 0.0, path_valid_s=lambda directory: 0.0,
    attributes_believable_s=lambda: 0.0,
)  # fmt: skip


class Served:
    """One store served by a session whose device is a file in memory: what it writes is read there."""

    def __init__(
        self, store: EmbeddedStore, nursery: trio.Nursery, *, passthrough: bool, shared: bool
    ) -> None:
        self.connection = connected(init_message(7, 40, (1 << 64) - 1))
        atimes = Atimes(MountOptions(), store.extents)
        self.tasks = Tasks()
        self.notices = Listener(self.connection, store, atimes, self.tasks)
        self.store = store
        self.processes = Processes("/nowhere")
        self.cache = Cache(
            store, self.notices, self.processes, isolates=True, passthrough=passthrough
        )
        self.nodes = self.cache.nodes
        coherence = Coherence(store.namespace, self.cache)
        self.beliefs = Beliefs(store.namespace, self.nodes, self.notices)
        if shared:
            coherence = Shared(store, TOLD_AT_ONCE, self.cache, self.beliefs)
        locking = Locking("local", store, self.cache.publisher, self.notices)
        block = Superblock(self.cache, coherence, atimes, MountOptions())
        filesystem = Filesystem(block, locking, dict, acls=False)
        self.nursery = nursery
        tasks = Tasks()
        tasks._nursery = nursery  # it runs already, and its children tell whether any task is left
        wakeups = FastWakeups()
        wakeups.close()
        self.session = Checked(self.connection, filesystem, self.notices, tasks, Counts(), wakeups)
        self.session.surprises = []
        self.expected: Counter[int] = Counter()
        self.sent: dict[int, tuple[int, bytes]] = {}
        self.replies: dict[int, list[tuple[int, bytes]]] = {}
        self._unique = 1000

    def close(self) -> None:
        self.processes.close()
        self.notices.close()
        self.connection.close()

    def request(
        self, opcode: int, nodeid: int, body: bytes = b"", *, pid: int = 4242
    ) -> tuple[int, bytes]:
        """Send a sound request that is answered at once. Returns error (positive) and payload."""
        self._unique += 2
        unique = self._unique
        self.send(message(opcode, nodeid, body, unique=unique, pid=pid))
        self.session.deferred.settle()  # as the reader does when no other request is there
        if opcode in NO_REPLY:
            assert unique not in self.replies
            return 0, b""
        [(error, payload)] = self.replies[unique]
        return error, payload

    def send(self, data: bytes) -> None:
        """Dispatch any bytes as one message, and check what was written, if anything was."""
        self.connection.buffer[: len(data)] = data
        if len(data) >= 40 and int.from_bytes(data[:4], "little") == len(data):
            _, opcode, unique, *_ = wire.IN_HEADER.unpack_from(data)
            if opcode not in NO_REPLY:
                self.expected[unique] += 1
            self.sent[unique] = opcode, data
        self.session.answer(len(data))
        self.collect()

    async def settle(self) -> None:
        if self.nursery.child_tasks:
            await trio.testing.wait_all_tasks_blocked()
        self.collect()

    async def finish(self) -> None:
        """Wait until nothing waits any more."""
        self.session.deferred.settle()
        while self.nursery.child_tasks:
            await trio.testing.wait_all_tasks_blocked(0.001)
        self.collect()

    def collect(self) -> None:
        """Take the replies that were written since the last time."""
        fd = self.connection.fd
        written = os.pread(fd, os.fstat(fd).st_size, 0)
        os.ftruncate(fd, 0)
        os.lseek(fd, 0, os.SEEK_SET)
        while written:
            length, error, unique = wire.OUT_HEADER.unpack_from(written)
            assert 16 <= length <= len(written), f"{length} bytes are named, {len(written)} came"
            if not unique:  # what the kernel is told without having asked
                self.notices.notifications.append(written[:length])
                written = written[length:]
                continue
            assert -4095 <= error <= 0
            payload, written = written[16:length], written[length:]
            assert not (error and payload)
            self.replies.setdefault(unique, []).append((-error, payload))
            assert len(self.replies[unique]) <= self.expected[unique], "an answer too many"
            if not error:
                check_payload(*self.sent[unique], payload)
        assert not self.session.surprises, self.session.surprises[0]

    def let_go(self) -> None:
        """Do what the kernel does before it unmounts: release every handle, forget every node."""
        for fh, handle in list(self.nodes.handles.items()):
            inode = self.store.namespace.inodes.get(handle.node.ino)
            is_dir = inode is not None and inode.is_dir
            kind = Opcode.RELEASEDIR if is_dir else Opcode.RELEASE
            assert self.request(kind, handle.node.id, wire.RELEASE_IN.pack(fh, 0))[0] == 0
        for slot in list(
            self.cache.routes.promises
        ):  # opens that were led elsewhere, and never came
            self.cache.routes.withdraw(*slot)
        for node in list(self.nodes.by_id.values()):
            if node.id != ROOT:
                self.request(Opcode.FORGET, node.id, wire.FORGET_IN.pack(max(node.lookups, 0)))
        assert not self.nodes.handles
        assert list(self.nodes.by_id) == [ROOT]


def message(
    opcode: int, nodeid: int, body: bytes, *, unique: int, pid: int = 4242, uid: int = 0
) -> bytes:
    return wire.IN_HEADER.pack(40 + len(body), opcode, unique, nodeid, uid, 0, pid) + body


def init_message(major: int, minor: int, flags: int) -> bytes:
    low = flags & 0xFFFFFFFF | wire.Init.INIT_EXT
    data = wire.INIT_IN.pack(major, minor, 65536, low) + wire.INIT_IN_FLAGS2.pack(flags >> 32)
    return message(Opcode.INIT, 0, data + bytes(44), unique=1)


def device(first_message: bytes) -> int:
    """Return a file in memory that stands for /dev/fuse, with a message to read."""
    fd = os.memfd_create("device", os.MFD_CLOEXEC)
    os.write(fd, first_message)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def connected(first_message: bytes) -> Connection:
    connection = Connection(device(first_message))
    os.ftruncate(connection.fd, 0)
    os.lseek(connection.fd, 0, os.SEEK_SET)
    return connection


def check_payload(opcode: int, request: bytes, payload: bytes) -> None:
    if opcode in _PAYLOAD:
        assert len(payload) == _PAYLOAD[Opcode(opcode)], Opcode(opcode)
    elif opcode in (Opcode.READ, Opcode.READDIR, Opcode.READDIRPLUS):
        size = wire.READ_IN.unpack_from(request, 40)[2]
        assert len(payload) <= size
        step = _ENTRY if opcode == Opcode.READDIRPLUS else 0
        while opcode != Opcode.READ and payload:
            _, _, name_size, _ = DIRENT.unpack_from(payload, step)
            record = (step + DIRENT.size + name_size + 7) & ~7
            assert len(payload) >= record and b"/" not in payload[step + 24 : step + 24 + name_size]
            payload = payload[record:]
    elif opcode in (Opcode.GETXATTR, Opcode.LISTXATTR):
        size = wire.GETXATTR_IN.unpack_from(request, 40)[0]
        assert len(payload) == 8 if size == 0 else len(payload) <= size
    else:
        assert opcode == Opcode.READLINK


class Ioctls:
    """Stands in for the ioctls of passthrough, which need a real /dev/fuse."""

    def __init__(self) -> None:
        self.registered: set[int] = set()
        self._next = 1

    def register(self, backing_fd: int) -> int:
        os.fstat(backing_fd)
        self._next += 1
        self.registered.add(self._next)
        return self._next

    def unregister(self, backing_id: int) -> None:
        self.registered.remove(backing_id)


MODES = ["passthrough", "passthrough that fails", "cached"]


@contextmanager
def small_files() -> Iterator[None]:
    """No file grows beyond 8 MiB, whatever a request says."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@asynccontextmanager
async def serving(mode: str = "cached", *, shared: bool = False) -> AsyncIterator[Served]:
    """Serve a new store; afterwards it must be whole, and nothing may have been left open. `shared`: with
    the coherence of a cluster."""
    backings = Ioctls()
    now_ns()  # the clock keeps a descriptor
    before = open_files()
    with (
        tempfile.TemporaryDirectory(prefix="irdmafs-wire-") as directory,
        pytest.MonkeyPatch.context() as patch,
        small_files(),
        trio.fail_after(60),
    ):
        patch.setattr(store_node, "in_memory", lambda path: True)
        patch.setattr(logging.root, "disabled", True)
        if mode == "passthrough":
            patch.setattr(Connection, "register", backings.register)
            patch.setattr(Connection, "unregister", backings.unregister)
        async with (
            embedded_store(directory) as store,
            trio.open_nursery() as telling,
            trio.open_nursery() as nursery,
        ):
            served = Served(store, nursery, passthrough=mode != "cached", shared=shared)
            telling.start_soon(served.tasks.run)
            yield served
            for unique in list(served.session.waiting.by_unique):
                served.request(Opcode.INTERRUPT, 0, wire.INTERRUPT_IN.pack(unique))
            await served.finish()
            assert {unique: len(found) for unique, found in served.replies.items()} == {
                unique: count for unique, count in served.expected.items() if count
            }
            served.let_go()
            await served.finish()
            assert not backings.registered, "the kernel still holds files of ours"
            check(store.namespace)
            named = {inode.extent for inode in store.namespace.inodes.values()} - {0}
            assert set(store.extents) == named
            served.tasks.stop()
        served.close()
        async with embedded_store(directory) as store:
            check(store.namespace)
    assert open_files() == before


def serve(mode: str, messages: list[bytes]) -> None:
    """Serve a store with a few files, and send it the messages, one after the other."""

    async def main() -> None:
        async with serving(mode) as served:
            populate(served)
            for data in messages:
                served.send(data)
                await served.settle()

    trio.run(main)


# -- requests ----------------------------------------------------------------------------------------

# Inode numbers count from 1, further nodes from 2^48, handles from 1: small numbers often exist.
node_ids = st.integers(1, 8) | st.integers(2**48, 2**48 + 4) | st.sampled_from([0, 2**63, U64])
handles = st.integers(1, 6) | st.sampled_from([0, U64])
u32 = st.integers(0, 8) | st.sampled_from([4096, 65536, 2**31 - 1, 2**31, U32])
u64 = st.integers(0, 10_000) | st.sampled_from([2**31, 2**32, 2**63 - 1, 2**63, U64])
# Lengths of memory that is allocated at once: little, or more than any machine has.
lengths = st.integers(0, 10_000) | st.sampled_from([2**63 - 1, 2**63, U64])
i64 = st.integers(-10, 10_000) | st.sampled_from([2**63 - 1, -(2**63)])
pids = st.sampled_from([0, 1, 2, 4242, U32])
plain_names = st.sampled_from([b"a", b"b", b"c", b"\xff\xfe", b"n" * 255])
raw_names = plain_names | st.sampled_from(
    [b".", b"..", b"n" * 256, b"user.x", b"user.irdmafs.discard"]
)
names = raw_names.map(lambda name: name + b"\0")
modes = st.sampled_from([0o644, 0o755, 0o100644, 0o40755, 0o10644, 0o104755]) | u32
open_flags = (
    st.sampled_from([os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC])
    | st.sampled_from([os.O_RDWR | os.O_TRUNC, os.O_WRONLY | os.O_EXCL, 3])
    | u32
)


def body(layout: struct.Struct, *fields: st.SearchStrategy[int]) -> st.SearchStrategy[bytes]:
    return st.builds(layout.pack, *fields)


def joined(*parts: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.tuples(*parts).map(b"".join)


def with_size(layout: struct.Struct, *fields: st.SearchStrategy[int]) -> st.SearchStrategy[bytes]:
    """A WRITE: the size of the data stands third."""
    return st.tuples(st.binary(max_size=64), *fields).map(
        lambda drawn: layout.pack(*drawn[1:3], len(drawn[0]), *drawn[3:]) + drawn[0]
    )


locks = body(
    wire.LOCK_IN, handles, st.integers(1, 3), u64, u64, st.integers(0, 3), u32, st.integers(0, 1)
)
open_body = body(wire.OPEN_IN, open_flags, u32)
create_body = joined(body(wire.CREATE_IN, open_flags, modes, u32), names)
release_body = body(wire.RELEASE_IN, handles, st.integers(0, 3))
read_body = body(wire.READ_IN, handles, u64, st.integers(0, 70_000))
BODIES: dict[Opcode, st.SearchStrategy[bytes]] = {
    Opcode.LOOKUP: names,
    Opcode.FORGET: body(wire.FORGET_IN, u64),
    Opcode.GETATTR: st.just(bytes(16)),
    Opcode.SETATTR: body(
        wire.SETATTR_IN, *(st.integers(0, 0xFFF), handles, u64, i64, i64, u32, u32, modes, u32, u32)
    ),
    Opcode.READLINK: st.just(b""),
    Opcode.SYMLINK: joined(names, names),
    Opcode.MKNOD: joined(body(wire.MKNOD_IN, modes, u32, u32), names),
    Opcode.MKDIR: joined(body(wire.MKDIR_IN, modes, u32), names),
    Opcode.UNLINK: names,
    Opcode.RMDIR: names,
    Opcode.RENAME: joined(body(wire.RENAME_IN, node_ids), names, names),
    Opcode.LINK: joined(body(wire.LINK_IN, node_ids), names),
    Opcode.OPEN: open_body,
    Opcode.READ: read_body,
    Opcode.WRITE: with_size(wire.WRITE_IN, handles, u64, st.integers(0, 7)),
    Opcode.STATFS: st.just(b""),
    Opcode.RELEASE: release_body,
    Opcode.FSYNC: body(wire.FSYNC_IN, handles),
    Opcode.SETXATTR: st.tuples(names, st.binary(max_size=64), st.integers(0, 3)).map(
        lambda drawn: wire.SETXATTR_IN.pack(len(drawn[1]), drawn[2], 0) + drawn[0] + drawn[1]
    ),
    Opcode.GETXATTR: joined(body(wire.GETXATTR_IN, u32), names),
    Opcode.LISTXATTR: body(wire.GETXATTR_IN, u32),
    Opcode.REMOVEXATTR: names,
    Opcode.FLUSH: body(wire.FLUSH_IN, handles, st.integers(1, 3)),
    Opcode.INIT: body(wire.INIT_IN, u32, u32, u32, u32),
    Opcode.OPENDIR: open_body,
    Opcode.READDIR: read_body,
    Opcode.RELEASEDIR: release_body,
    Opcode.FSYNCDIR: body(wire.FSYNC_IN, handles),
    Opcode.GETLK: locks,
    Opcode.SETLK: locks,
    Opcode.SETLKW: locks,
    Opcode.ACCESS: body(struct.Struct("<II"), u32, u32),
    Opcode.CREATE: create_body,
    Opcode.INTERRUPT: body(wire.INTERRUPT_IN, u64),
    Opcode.DESTROY: st.just(b""),
    Opcode.POLL: body(wire.POLL_IN, handles, u64, u32),
    Opcode.BATCH_FORGET: st.lists(body(wire.FORGET_ONE, node_ids, u64), max_size=4).map(
        lambda nodes: wire.BATCH_FORGET_IN.pack(len(nodes)) + b"".join(nodes)
    ),
    Opcode.FALLOCATE: body(wire.FALLOCATE_IN, handles, u64, lengths, st.integers(0, 0x7F)),
    Opcode.READDIRPLUS: read_body,
    Opcode.RENAME2: joined(body(wire.RENAME2_IN, node_ids, st.integers(0, 4)), names, names),
    Opcode.LSEEK: body(LSEEK_IN, handles, u64, st.integers(0, 6) | u32),
    Opcode.COPY_FILE_RANGE: body(wire.COPY_FILE_RANGE_IN, handles, u64, handles, u64, u64),
    Opcode.SYNCFS: st.just(bytes(8)),
    Opcode.TMPFILE: create_body,
}
# What makes and opens things comes more often: the rest needs something to work on.
_OFTEN = [Opcode.CREATE, Opcode.OPEN, Opcode.LOOKUP, Opcode.WRITE, Opcode.RELEASE, Opcode.MKDIR]


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, int, int, bytes]:
    """Opcode, node id, pid and a body that fits the opcode."""
    opcode = draw(st.sampled_from([*BODIES, *_OFTEN, *_OFTEN]))
    return opcode, draw(node_ids), draw(pids), draw(BODIES[opcode])


def messages_of(drawn: list[tuple[int, int, int, bytes]]) -> list[bytes]:
    return [
        message(opcode, nodeid, data, unique=2 * number, pid=pid)
        for number, (opcode, nodeid, pid, data) in enumerate(drawn, 1)
    ]


def populate(served: Served) -> None:
    """A directory a, a file b that is open, a file c that is closed, a symlink."""
    served.request(Opcode.MKDIR, ROOT, wire.MKDIR_IN.pack(0o755, 0) + b"a\0")
    for name in (b"b", b"c"):
        data = wire.CREATE_IN.pack(os.O_RDWR, 0o644, 0) + name + b"\0"
        error, payload = served.request(Opcode.CREATE, ROOT, data)
        if error:
            continue
        fh = wire.OPEN_OUT.unpack_from(payload, _ENTRY)[0]
        node_id = wire.ENTRY_OUT.unpack_from(payload)[0]
        served.request(Opcode.WRITE, node_id, wire.WRITE_IN.pack(fh, 0, 4, 0) + b"data")
        served.request(Opcode.FLUSH, node_id, wire.FLUSH_IN.pack(fh, 1))
        if name == b"c":
            served.request(Opcode.RELEASE, node_id, wire.RELEASE_IN.pack(fh, 0))
    served.request(Opcode.SYMLINK, ROOT, b"\xff\xfe\0target\0")


fuzzing = settings(deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def whole_or_damaged(draw: st.DrawFn) -> list[bytes]:
    found = messages_of(draw(st.lists(requests(), min_size=1, max_size=40)))
    for _ in range(draw(st.just(0) | st.integers(1, 10))):
        # Not the number of the request (bytes 8 to 15): two waiting ones of one number cannot be told
        # apart by INTERRUPT.
        positions = st.integers(0, 7) | st.integers(16, 150)
        which = draw(st.integers(0, len(found) - 1))
        flips = draw(st.lists(st.tuples(positions, st.integers(1, 255)), max_size=3))
        broken = bytearray(found[which][: draw(st.none() | st.integers(0, 120))])
        for position, bits in flips:
            if position < len(broken):
                broken[position] ^= bits
        if draw(st.booleans()) and len(broken) >= 4:
            broken[:4] = len(broken).to_bytes(4, "little")  # its length tells where it was cut
        found[which] = bytes(broken)
    return found


any_body = st.tuples(st.integers(0, 64) | u32, node_ids, pids, st.binary(max_size=200))
any_messages = (
    st.lists(st.binary(max_size=300), max_size=20)
    | st.lists(any_body, max_size=30).map(messages_of)
    | whole_or_damaged()
)


@pytest.mark.long
@settings(fuzzing, max_examples=160)
@given(messages=any_messages, mode=st.sampled_from(MODES))
def test_whatever_comes_is_answered_once_and_does_no_harm(messages: list[bytes], mode: str) -> None:
    serve(mode, messages)


# -- one promise each ------------------------------------------------------------------------------


def create(served: Served, name: bytes, flags: int = os.O_WRONLY) -> tuple[int, int]:
    """Node id and handle of a new file."""
    data = wire.CREATE_IN.pack(flags, 0o644, 0) + name + b"\0"
    error, payload = served.request(Opcode.CREATE, ROOT, data)
    assert error == 0
    return wire.ENTRY_OUT.unpack_from(payload)[0], wire.OPEN_OUT.unpack_from(payload, _ENTRY)[0]


def opened(served: Served, node_id: int, flags: int, pid: int = 4242) -> tuple[int, int]:
    """The error of an OPEN, and the handle if there was none."""
    error, payload = served.request(Opcode.OPEN, node_id, wire.OPEN_IN.pack(flags, 0), pid=pid)
    return error, 0 if error else wire.OPEN_OUT.unpack(payload)[0]


def close(served: Served, node_id: int, fh: int) -> None:
    assert served.request(Opcode.FLUSH, node_id, wire.FLUSH_IN.pack(fh, 1))[0] == 0
    assert served.request(Opcode.RELEASE, node_id, wire.RELEASE_IN.pack(fh, 0))[0] == 0


def content_of(served: Served, fh: int) -> Content:
    content = served.nodes.handles[fh].content
    assert content is not None
    return content


def lookup(served: Served, name: bytes, pid: int = 4242) -> int:
    error, payload = served.request(Opcode.LOOKUP, ROOT, name + b"\0", pid=pid)
    assert error == 0
    return int(wire.ENTRY_OUT.unpack(payload)[0])


def write_whole(served: Served, name: bytes, content: bytes) -> int:
    node_id, fh = create(served, name)
    extent = content_of(served, fh).extent
    with served.store.extents.opened(extent, os.O_RDWR) as fd:
        os.write(fd, content)  # as the kernel does, or as a WRITE would
    close(served, node_id, fh)
    return node_id


@pytest.mark.parametrize(
    "mode, umask, made",
    [
        (0o644, 0, stat.S_IFREG | 0o644),
        (stat.S_IFIFO | 0o644, 0o7, stat.S_IFIFO | 0o640),
        (1 << 16 | stat.S_IFREG | 0o644, 0, stat.S_IFREG | 0o644),
        (stat.S_IFREG | 0o644, 0xFFFFFFFF, stat.S_IFREG),
        (stat.S_IFDIR | 0o755, 0, None),
        (0o170644, 0, None),
    ],
)
async def test_mknod_makes_only_known_types(mode: int, umask: int, made: int | None) -> None:
    async with serving() as served:
        data = wire.MKNOD_IN.pack(mode, 0, umask) + b"node\0"
        error, _ = served.request(Opcode.MKNOD, ROOT, data)
        assert error == (0 if made else errno.EINVAL)
        found = served.store.namespace.lookup(ROOT, b"node")
        assert (found and found.mode) == made


async def test_a_name_that_others_make_and_remove_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving("passthrough", shared=True) as served:
        namespace = served.store.namespace
        makes = Mock(side_effect=[*[FileExistsError(errno.EEXIST, "")] * 100, namespace.create])
        monkeypatch.setattr(namespace, "create", lambda *a, **what: makes()(*a, **what))
        create(served, b"file", os.O_WRONLY | os.O_CREAT)


@pytest.mark.parametrize("opcode", [Opcode.CREATE, Opcode.TMPFILE])
@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR])
async def test_a_failed_creation_leaves_neither_handle_nor_node_nor_descriptor(
    opcode: Opcode, flags: int
) -> None:
    async with serving("passthrough that fails") as served:
        now_ns()  # the clock keeps a descriptor
        before = open_files()
        data = wire.CREATE_IN.pack(flags, 0o644, 0) + b"file\0"
        for _ in range(3):
            assert served.request(opcode, ROOT, data) == (errno.ENOTTY, b"")
        assert open_files() == before
        assert not served.nodes.handles and list(served.nodes.by_id) == [ROOT]
        assert set(served.store.extents) == set()
        found = served.store.namespace.lookup(ROOT, b"file")
        assert found is None or found.version == 0


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_TRUNC])
async def test_a_failed_open_leaves_the_file(flags: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(connection: Connection, backing_fd: int) -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    async with serving("passthrough") as served:
        node_id = write_whole(served, b"file", b"weights")
        served.request(Opcode.FORGET, node_id, wire.FORGET_IN.pack(1))
        before, inode = open_files(), served.store.namespace.lookup(ROOT, b"file")
        assert inode is not None
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "register", fails)
            error, _ = opened(served, lookup(served, b"file"), flags)
            if error == errno.ESTALE:
                error, _ = opened(served, lookup(served, b"file"), flags)
            assert error == errno.ENOMEM
        assert open_files() == before
        assert not served.nodes.handles
        assert served.store.namespace.inode(inode.ino).version == inode.version
        assert Path(served.store.extents.path(inode.extent)).read_bytes() == b"weights"
        assert set(served.store.extents) == {inode.extent}


@pytest.mark.parametrize("mode", ["passthrough", "cached"])
async def test_open_that_never_came_back_for_a_file_since_removed_hurts_no_other(mode: str) -> None:
    """The opener is sent to another node, and finds the name gone when it looks again."""
    async with serving(mode) as served:
        for name in (b"file", b"other"):
            write_whole(served, name, b"weights")
        assert opened(served, lookup(served, b"file"), EMPTYING)[0] == errno.ESTALE
        assert served.request(Opcode.UNLINK, ROOT, b"file\0")[0] == 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("irdmafs.coherence.routes._MAX_AGE_S", -1)
            assert opened(served, lookup(served, b"other"), EMPTYING)[0] == errno.ESTALE


@pytest.mark.parametrize(
    "flags", [os.O_WRONLY | os.O_TRUNC, os.O_WRONLY | os.O_APPEND, os.O_RDONLY | O_LARGEFILE]
)
@pytest.mark.parametrize("mode", ["passthrough", "cached"])
async def test_an_open_whose_name_means_another_busy_file_at_its_second_try_gets_that_one(
    mode: str, flags: int
) -> None:
    async with serving(mode) as served:
        new, old = busy(served, b"new", flags), busy(served, b"file", flags)
        assert opened(served, old, flags)[0] == errno.ESTALE
        rename(served, b"new", b"file")
        error, fh = opened(served, lookup(served, b"file"), flags)
        assert error == 0
        assert served.nodes.handles[fh].node.ino == served.nodes.by_id[new].ino
        for fh, handle in list(served.nodes.handles.items()):
            served.request(Opcode.RELEASE, handle.node.id, wire.RELEASE_IN.pack(fh, 0))


def busy(served: Served, name: bytes, flags: int) -> int:
    """Make a file, and return a node of it that cannot show what an open by `flags` gets."""
    node_id = write_whole(served, name, b"old")
    assert opened(served, node_id, os.O_RDONLY, pid=1)[0] == 0
    if flags & os.O_TRUNC:
        return node_id
    assert opened(served, node_id, EMPTYING, pid=2)[0] == errno.ESTALE
    other = lookup(served, name, pid=2)
    _, fh = opened(served, other, EMPTYING, pid=2)
    if flags & os.O_ACCMODE == os.O_RDONLY:
        close(served, other, fh)
    return node_id


def rename(served: Served, old: bytes, new: bytes) -> None:
    body = wire.RENAME_IN.pack(ROOT) + old + b"\0" + new + b"\0"
    assert served.request(Opcode.RENAME, ROOT, body, pid=1)[0] == 0


def look_for_removed(served: Served, name: bytes) -> None:
    """Have an open that empties a file come too late, and not find it when it comes again."""
    removed = write_whole(served, name, b"weights")
    assert served.request(Opcode.UNLINK, ROOT, name + b"\0", pid=1)[0] == 0
    assert opened(served, removed, EMPTYING)[0] == errno.ESTALE
    assert lookup(served, name) == 0


async def test_what_is_believed_below_a_directory_is_forgotten_however_deep_it_is() -> None:
    async with serving(shared=True) as served:
        way = [ROOT]
        for _ in range(sys.getrecursionlimit()):
            making = wire.MKDIR_IN.pack(0o755, 0) + b"d\0"
            _, entry = served.request(Opcode.MKDIR, way[-1], making)
            way.append(wire.ENTRY_OUT.unpack(entry)[0])
        name, believed = (way[-2], b"d"), way[-1]
        served.beliefs.say(believed, 60.0, name)
        assert served.beliefs.holds(name, believed, 0.0)
        served.beliefs.not_followed(way[1])
        assert not served.beliefs.holds(name, believed, 0.0)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("lookups", [0, 1])
async def test_an_open_by_a_believed_name_finds_what_replaces_it(
    shared: bool, lookups: int
) -> None:
    """The last name of the file that the kernel asked for is another one."""
    async with serving("passthrough", shared=shared) as served:
        write_whole(served, b"new", b"weights")
        node_id = write_whole(served, b"file", b"weights")
        linking = wire.LINK_IN.pack(node_id) + b"link\0"
        assert served.request(Opcode.LINK, ROOT, linking, pid=1)[0] == 0
        assert opened(served, node_id, EMPTYING)[0] == errno.ESTALE
        for _ in range(lookups):
            lookup(served, b"file")
        rename(served, b"new", b"file")
        assert opened(served, lookup(served, b"file"), EMPTYING)[0] == 0


@pytest.mark.parametrize("shared", [False, True])
async def test_an_open_finds_what_others_make_while_it_looks_its_name_up_again(
    shared: bool,
) -> None:
    """The kernel asks for the entry that it has, for that of another program, and once more."""
    async with serving("passthrough", shared=shared) as served:
        write_whole(served, b"new", b"weights")
        look_for_removed(served, b"file")
        rename(served, b"new", b"file")
        found = lookup(served, b"file")
        assert lookup(served, b"file") == found
        assert opened(served, found, EMPTYING)[0] == 0


async def test_an_open_after_one_that_found_nothing_fetches_what_it_reads() -> None:
    async with serving("passthrough", shared=True) as served:
        new = write_whole(served, b"new", b"weights")
        look_for_removed(served, b"file")
        rename(served, b"new", b"file")
        fetch = AsyncMock(side_effect=served.store.namespace.inode)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(served.store, "bring", fetch)
            patch.setattr(served.store, "is_here", lambda extent: False)
            reading = wire.OPEN_IN.pack(os.O_RDONLY, 0)
            served.send(message(Opcode.OPEN, lookup(served, b"file"), reading, unique=1))
            await served.finish()
        fetch.assert_awaited_once_with(new)


async def test_a_file_that_was_made_after_a_miss_shows_its_size() -> None:
    async with serving("passthrough", shared=True) as served:
        look_for_removed(served, b"file")
        write_whole(served, b"file", b"weights")
        _, entry = served.request(Opcode.LOOKUP, ROOT, b"file\0")
        assert wire.ENTRY_OUT.unpack(entry)[7] == len(b"weights")


async def test_second_try_finds_a_file_whose_newest_version_is_lost_with_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another host has published and removed it, and a program here writes it in place."""
    async with serving("passthrough", shared=True) as served:
        node_id = busy(served, b"file", os.O_WRONLY)
        [_, writer] = served.nodes.handles.values()
        served.request(Opcode.FLUSH, writer.node.id, wire.FLUSH_IN.pack(writer.fh, 1))
        assert opened(served, node_id, os.O_WRONLY)[0] == errno.ESTALE
        await served.store.publish(NewVersion(writer.node.ino, NO_CONTENT, 0, 0, 0))
        assert served.request(Opcode.UNLINK, ROOT, b"file\0", pid=1)[0] == 0
        monkeypatch.setattr(served.store, "bring", AsyncMock(side_effect=OSError(errno.ESTALE, "")))
        assert opened(served, lookup(served, b"file"), os.O_WRONLY)[0] == 0


@pytest.mark.parametrize("mode", ["passthrough", "cached"])
async def test_a_creation_ends_the_second_try_of_an_open(mode: str) -> None:
    """What its thread looks up next is shown as it is."""
    async with serving(mode) as served:
        node_id = write_whole(served, b"file", b"weights")
        write_whole(served, b"other", b"weights")
        assert opened(served, node_id, EMPTYING)[0] == errno.ESTALE
        assert served.request(Opcode.UNLINK, ROOT, b"file\0", pid=1)[0] == 0
        create(served, b"file", EMPTYING | os.O_CREAT)
        _, entry = served.request(Opcode.LOOKUP, ROOT, b"other\0")
        assert wire.ENTRY_OUT.unpack(entry)[7] == len(b"weights")


@pytest.mark.parametrize("mode", ["passthrough", "cached"])
async def test_nobody_joins_a_replacement_whose_opener_died_on_the_way(mode: str) -> None:
    dead = os.spawnlp(os.P_NOWAIT, "true", "true")
    os.waitpid(dead, 0)
    async with serving(mode) as served:
        node_id = write_whole(served, b"file", b"weights")
        for pid, age_s in ((dead, 10), (1, -1)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("irdmafs.coherence.routes._MAX_AGE_S", age_s)
                assert opened(served, node_id, os.O_WRONLY | os.O_TRUNC, pid)[0] == errno.ESTALE
                error, fh = opened(served, node_id, os.O_WRONLY | os.O_APPEND, pid=2)
            assert error == 0
            assert served.store.extents.stat(content_of(served, fh).extent).st_size == 7
            close(served, node_id, fh)


async def test_an_open_pins_a_file_before_it_asks_if_that_is_here() -> None:
    """A store node that has freed the file is noticed then, and not by the first read."""
    async with serving("passthrough") as served:
        served.store.is_here = served.store.counts.__contains__  # type: ignore[method-assign, assignment]
        error, fh = opened(served, write_whole(served, b"file", b"weights"), os.O_RDONLY)
        assert (error, served.nodes.handles[fh].node.cached) == (0, False)


@pytest.mark.parametrize("content", [b"", b"weights"])
@pytest.mark.parametrize("mode", ["passthrough", "cached"])
async def test_opens_for_writing_that_were_lost_leave_nothing(mode: str, content: bytes) -> None:
    async with serving(mode) as served:
        node_id = write_whole(served, b"file", content)
        # An open that replaces the file is sent to another node. So is one that joins it while others read.
        assert opened(served, node_id, os.O_RDONLY)[0] == 0
        for pid, flags in ((1, os.O_WRONLY | os.O_TRUNC), (2, os.O_WRONLY)):
            assert opened(served, node_id, flags, pid)[0] == errno.ESTALE


async def test_every_request_is_carried_out_but_those_that_the_kernel_answers_itself() -> None:
    unknown = {
        *(Opcode.INIT, Opcode.ACCESS, Opcode.BMAP, Opcode.NOTIFY_REPLY),
        *(Opcode.SETUPMAPPING, Opcode.REMOVEMAPPING, Opcode.IOCTL, Opcode.POLL),
    }
    async with serving() as served:
        refused = {
            kind for kind in Opcode if served.request(kind, ROOT, bytes(100))[0] == errno.ENOSYS
        }
        assert refused == unknown


async def test_locks_that_wait_are_answered_when_they_are_interrupted() -> None:
    async with serving() as served:
        node_id, fh = create(served, b"file", os.O_RDWR)
        for owner, opcode in ((1, Opcode.SETLK), (2, Opcode.SETLKW), (3, Opcode.SETLKW)):
            lock = wire.LOCK_IN.pack(fh, owner, 0, 100, fcntl.F_WRLCK, 7, 0)
            served.send(message(opcode, node_id, lock, unique=owner))
        assert served.replies[1] == [(0, b"")]
        assert 2 not in served.replies and 3 not in served.replies
    assert served.replies[2] == served.replies[3] == [(errno.EINTR, b"")]


async def test_calls_that_never_end_leave_threads_to_other_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A user can keep a file locked for ever that he writes, and have any number of calls wait for that."""
    may_cut, cut = threading.Event(), os.ftruncate

    def cut_when_unlocked(fd: int, size: int) -> None:
        if size != 7 or may_cut.wait(30):
            cut(fd, size)

    monkeypatch.setattr(os, "ftruncate", cut_when_unlocked)
    monkeypatch.setattr(extents, "_places", Places(2))
    async with serving("passthrough") as served:
        for unique, uid, size in ((1, 1000, 7), (2, 1000, 7), (3, 1001, 8)):
            node_id, _ = create(served, b"%d" % unique)
            data = wire.SETATTR_IN.pack(wire.Valid.SIZE, 0, size, *(0,) * 7)
            served.send(message(Opcode.SETATTR, node_id, data, unique=unique, uid=uid))
            await served.settle()
        with trio.fail_after(10):
            while 3 not in served.replies:
                await trio.sleep(0.001)
                served.collect()
        assert not {1, 2} & served.replies.keys()
        may_cut.set()


async def test_kinds_of_handles_and_nodes_are_not_mixed_up() -> None:
    async with serving() as served:
        served.request(Opcode.MKDIR, ROOT, wire.MKDIR_IN.pack(0o755, 0) + b"directory\0")
        directory = lookup(served, b"directory")
        file, file_fh = create(served, b"file")
        close(served, file, file_fh)
        _, reading = opened(served, file, os.O_RDONLY)
        _, answer = served.request(Opcode.OPENDIR, directory, wire.OPEN_IN.pack(os.O_RDONLY, 0))
        listing = wire.OPEN_OUT.unpack(answer)[0]
        resize = bytearray(wire.SETATTR_IN.size)
        wire.SETATTR_IN.pack_into(resize, 0, wire.Valid.SIZE, *(0,) * 9)
        for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
            assert opened(served, directory, flags)[0] == errno.EISDIR
            data = wire.CREATE_IN.pack(flags, 0o644, 0) + b"directory\0"
            assert served.request(Opcode.CREATE, ROOT, data)[0] == errno.EISDIR
        read = wire.READ_IN.pack(reading, 0, 1000)
        write = wire.WRITE_IN.pack(reading, 0, 1, 0) + b"x"
        for opcode, node_id, data, error in (
            (Opcode.SETATTR, directory, bytes(resize), errno.EISDIR),
            (Opcode.OPENDIR, file, wire.OPEN_IN.pack(0, 0), errno.ENOTDIR),
            (Opcode.WRITE, file, write, errno.EBADF),
            (Opcode.FALLOCATE, file, wire.FALLOCATE_IN.pack(reading, 0, 10, 0), errno.EBADF),
            (Opcode.READ, directory, wire.READ_IN.pack(listing, 0, 10), errno.EBADF),
            (Opcode.READDIR, file, read, errno.ENOTDIR),
            (Opcode.READDIRPLUS, file, read, errno.ENOTDIR),
            (Opcode.RELEASE, directory, wire.RELEASE_IN.pack(listing, 0), errno.EBADF),
            (Opcode.RELEASEDIR, file, wire.RELEASE_IN.pack(reading, 0), errno.ENOTDIR),
        ):
            assert served.request(opcode, node_id, data)[0] == error, opcode
        assert len(served.nodes.handles) == 2


async def test_offsets_beyond_the_largest_file_and_impossible_times_are_refused() -> None:
    async with serving() as served:
        node_id, fh = create(served, b"file", os.O_RDWR)
        for offset in (2**63, U64):
            for opcode, data in (
                (Opcode.READ, wire.READ_IN.pack(fh, offset, 10)),
                (Opcode.WRITE, wire.WRITE_IN.pack(fh, offset, 1, 0) + b"x"),
                (Opcode.LSEEK, LSEEK_IN.pack(fh, 0, U32)),
            ):
                assert served.request(opcode, node_id, data)[0] == errno.EINVAL
            copy = wire.COPY_FILE_RANGE_IN.pack(fh, offset, fh, 0, 10)
            error, _ = served.request(Opcode.COPY_FILE_RANGE, node_id, copy)
            assert error in (errno.EINVAL, errno.EOVERFLOW)
        for nanoseconds in ((10**9, 0), (0, 10**9), (U32, U32)):
            wanted = wire.Valid.ATIME | wire.Valid.MTIME
            seconds = 2**63 - 1
            times = wire.SETATTR_IN.pack(wanted, 0, 0, seconds, seconds, *nanoseconds, *(0,) * 3)
            assert served.request(Opcode.SETATTR, ROOT, times)[0] == errno.EINVAL


# -- the handshake -----------------------------------------------------------------------------------


def test_the_handshake_agrees_on_passthrough() -> None:
    asked = init_message(7, 45, (1 << 64) - 1)
    connection = Connection(device(asked))
    written = os.pread(connection.fd, 1000, len(asked))
    assert wire.OUT_HEADER.unpack_from(written) == (len(written), 0, 1)
    major, minor, _, flags, *_, flags2, depth, _ = wire.INIT_OUT.unpack_from(written, 16)
    assert (major, minor) == (wire.MAJOR, wire.MINOR)
    assert (flags | flags2 << 32) & wire.Init.PASSTHROUGH
    assert depth >= 1
    assert not os.get_blocking(connection.fd)
    connection.close()


@pytest.mark.parametrize(
    "asked",
    [
        init_message(7, 30, (1 << 64) - 1),
        init_message(6, 45, (1 << 64) - 1),
        init_message(7, 45, 0xFFFFFFFF),
    ],
)
def test_a_kernel_without_what_is_needed_is_told_so(asked: bytes) -> None:
    fd = device(asked)
    with pytest.raises(ProtocolError):
        Connection(fd)
    written = os.pread(fd, 1000, len(asked))
    assert wire.OUT_HEADER.unpack(written) == (16, -errno.EPROTO, 1)
    os.close(fd)


@settings(fuzzing, max_examples=100)
@given(
    data=st.binary(max_size=120),
    flips=st.lists(st.tuples(st.integers(0, 99), st.integers(1, 255)), max_size=4),
    sound=st.booleans(),
)
def test_a_broken_handshake_is_refused_or_answered(
    data: bytes, flips: list[tuple[int, int]], sound: bool
) -> None:
    asked = bytearray(init_message(7, 45, (1 << 64) - 1) if sound else data)
    for position, bits in flips:
        if position < len(asked):
            asked[position] ^= bits
    fd = device(bytes(asked))
    try:
        Connection(fd)
    except (Malformed, ProtocolError):
        return
    else:
        written = os.pread(fd, 1000, len(asked))
        assert wire.OUT_HEADER.unpack_from(written)[:2] == (len(written), 0)
    finally:
        os.close(fd)
