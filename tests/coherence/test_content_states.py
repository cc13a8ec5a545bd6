"""Contents without a kernel: random opens, writes, closes and publications by two stores, against what each
descriptor wrote.

`Sending` stands for the store of a cluster: the file of a version must not be written, and another host
publishes versions, too.
"""

import errno
import os
import shutil
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import trio
from harness.scratch import scratch_directory
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from irdmafs.backend.files.extents import ExtentStore, copy_contents
from irdmafs.backend.kv.map import Map
from irdmafs.backend.model.records import ContentId
from irdmafs.backend.namespace import ROOT_INO, Inode, NewVersion
from irdmafs.backend.store.embedded import EmbeddedStore
from irdmafs.coherence.cache import Cache
from irdmafs.coherence.content import Content, State
from irdmafs.coherence.nodes import Handle

FILES = 2
PID = 77
CURRENT = {State.VERSION, State.NEW, State.IN_PLACE, State.LEFT}

DESCRIPTORS = Bundle("descriptors")
NUMBERS = st.integers(0, FILES - 1)
BYTES = st.binary(min_size=1, max_size=4)
FLAGS = st.sampled_from([
    os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_RDWR | os.O_TRUNC, os.O_WRONLY | os.O_APPEND,
    os.O_RDONLY | os.O_TRUNC,
])  # fmt: skip


class Sending(EmbeddedStore):
    """A store whose versions are copied before they are written, as those that a store node here has."""

    sends = True
    freshness: Any = object()

    def is_lent(self, extent: ContentId) -> bool:
        return any(inode.extent == extent for inode in self.namespace.inodes.values() if extent)

    async def begin_in_place(self, inode: Inode, extent: ContentId) -> ContentId:
        number, fd = self.extents.allocate()
        with self.extents.opened(extent) as source:
            copy_contents(source, fd)
        os.close(fd)
        return number

    async def is_same(self, inode: Inode, extent: ContentId) -> bool:
        if inode.extent not in set(self.extents):
            return not inode.extent and not read(self, extent)  # else it cannot be known
        return read(self, inode.extent) == read(self, extent)


class Silent(SimpleNamespace):
    """The kernel, which is told everything and notes nothing."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: None

    async def forget_content(self, node: object) -> None: ...


class Callers:
    """The processes that make requests: one, which may be killed."""

    def __init__(self) -> None:
        self.killed = False

    async def of(self, pid: int) -> Any:
        return SimpleNamespace(
            killed_by_signal=lambda: self.killed, tell_once=lambda: False, is_in_exec=lambda: True
        )


def read(store: EmbeddedStore, extent: ContentId) -> bytes:
    if not extent:
        return b""
    with store.extents.opened(extent) as fd:
        return os.pread(fd, 1 << 20, 0)


class Contents(RuleBasedStateMachine):
    """Alone on its host. `wholes` has, for each file, every sequence of bytes that may be a version of it:
    what a content held when a close, an fsync or a request published it."""

    store_class: type[EmbeddedStore] = EmbeddedStore

    def __init__(self) -> None:
        super().__init__()
        self.directory = scratch_directory()
        self.records = Map(f"{self.directory}/names")
        self.extents = ExtentStore(f"{self.directory}/extents")
        self.store = self.store_class(self.records, self.extents, waits=self.store_class is Sending)
        trio.run(self.store.begin)
        self.namespace = self.store.namespace
        self.callers = Callers()
        kernel: Any = Silent()
        processes: Any = self.callers
        self.cache = Cache(self.store, kernel, processes, isolates=True, passthrough=True)
        self.table = self.cache.host.table
        self.inos: list[int] = []
        self.handles: list[Handle] = []
        # The bytes of contents that were opened; those contents that have something to publish.
        self.written: dict[Content, bytes] = {}
        self.unpublished: set[Content] = set()
        self.wrote: set[Handle] = set()
        self.wholes: dict[int, set[bytes]] = {}
        self.next_extent = 1 << 20

    def run(self, step: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        return trio.run(step, *args)

    def teardown(self) -> None:
        try:
            for handle in list(self.handles):
                self.run(self._close, handle)
            self.check()
            assert not any(self.table.private.values())
            named = {inode.extent for inode in self.namespace.inodes.values()} - {0}
            left = {c.extent for c in self.table.current.values() if c.state is State.LEFT}
            assert set(self.extents) == named | left, "an extent leaks, or is missing"
        finally:
            self.records.close()
            self.extents.close()
            shutil.rmtree(self.directory)

    # -- what programs do ------------------------------------------------------------------------

    @initialize()
    def make_files(self) -> None:
        for number in range(FILES):
            inode = self.run(self._create, b"%d" % number, 1)
            self.inos.append(inode.ino)
            self.wholes[inode.ino] = {b""}

    async def _create(self, name: bytes, version: int) -> Inode:
        made: Inode = await self.namespace.create(ROOT_INO, name, 0o100644, 0, 0, version=version)
        return made

    @rule(target=DESCRIPTORS, number=NUMBERS, flags=FLAGS)
    def open(self, number: int, flags: int) -> Any:
        return self.run(self._open, self.inos[number], flags)

    async def _open(self, ino: int, flags: int) -> Any:
        """Open as the kernel does: look the name up, and once more if the answer is ESTALE."""
        for last in (False, True):
            inode = self.namespace.inodes[ino]
            node = self.cache.routes.node_of(inode, PID)
            node.lookups += 1
            if flags & os.O_TRUNC:
                self.wholes[ino].add(b"")
            try:
                handle = await self.cache.open(inode, node, flags, PID, None)
            except OSError as error:
                assert error.errno == errno.ESTALE and not last
            else:
                break
        content = handle.content
        assert content is not None
        if flags & os.O_TRUNC:
            self.written[content] = b""  # it gives way to a version of others unless it is written
            self.unpublished.discard(content)
        else:
            self.written.setdefault(content, read(self.store, content.extent))
        self.handles.append(handle)
        return handle

    @rule(handle=DESCRIPTORS, data=BYTES, offset=st.integers(0, 3))
    def write(self, handle: Handle, data: bytes, offset: int) -> None:
        if handle not in self.handles or not handle.writing:
            return
        content = handle.content
        assert content is not None
        self.run(self.cache.carried.write, handle, offset, data)
        self.written.setdefault(content, b"")
        before = self.written[content].ljust(offset, b"\0")
        self.written[content] = before[:offset] + data + before[offset + len(data) :]
        if content.state is not State.GIVEN_UP:
            self.unpublished.add(content)
            self.wrote.add(handle)

    @rule(handle=consumes(DESCRIPTORS), killed=st.booleans())
    def close(self, handle: Handle, killed: bool) -> None:
        if handle in self.handles:
            self.callers.killed = killed
            self.run(self._close, handle)
            self.callers.killed = False

    async def _close(self, handle: Handle) -> None:
        content = handle.content
        assert content is not None
        self._may_publish(content)
        self.handles.remove(handle)
        try:
            await self.cache.publisher.flush(handle, PID)
        except OSError as error:
            assert error.errno == errno.ESTALE and self.store.sends
            self._look_again(content)  # it goes on with the newest version
        published = not (handle.aborted or content.state is State.GIVEN_UP)
        if published and content in self.unpublished:
            is_newest = self._is_newest(content)
            assert is_newest or handle not in self.wrote, "a close published nothing"
            if is_newest:
                self.unpublished.discard(content)
        await self.cache.release(handle.fh)
        if not any(other.content is content for other in self.handles):
            self.unpublished.discard(content)
            self.written.pop(content, None)

    @rule(handle=DESCRIPTORS)
    def fsync(self, handle: Handle) -> None:
        if handle in self.handles and handle.writing:
            content = handle.content
            assert content is not None
            self._may_publish(content)
            try:
                self.run(self.cache.publisher.fsync, handle)
            except OSError as error:
                assert error.errno == errno.ESTALE and self.store.sends
                self._look_again(content)
            else:
                if handle in self.wrote or self._is_newest(content):
                    self.unpublished.discard(content)

    @rule(handle=DESCRIPTORS)
    def give_up(self, handle: Handle) -> None:
        if handle in self.handles and handle.writing and handle.node.content is handle.content:
            content = handle.content
            assert content is not None
            seen = content.seen is not None or not content.whole
            try:
                self.cache.sharing.discard(handle.node)
            except OSError as error:
                assert error.errno == errno.EBUSY and seen
            else:
                self.unpublished.discard(content)

    @rule(number=NUMBERS, size=st.integers(0, 3))
    def truncate(self, number: int, size: int) -> None:
        inode = self.namespace.inodes[self.inos[number]]
        content = self.cache.sharing.newest(inode)
        self.written.setdefault(content, read(self.store, content.extent))
        cut = self.written[content][:size].ljust(size, b"\0")
        self.wholes[inode.ino].add(cut)
        try:
            self.run(self.cache.carried.truncate, inode, size)
        except OSError as error:
            assert error.errno == errno.ESTALE and self.store.sends
            self._look_again(content)
            return
        self.written[content] = cut
        if self.namespace.inodes[inode.ino].version > inode.version:
            self.unpublished.discard(content)
        if not content.opens:
            del self.written[content]

    def _look_again(self, content: Content) -> None:
        """Note that a content was set aside, or may show a newer version now."""
        self.written.pop(content, None)
        self.unpublished.discard(content)
        if content.opens:
            self.written[content] = read(self.store, content.extent)

    def _is_newest(self, content: Content) -> bool:
        """Return whether the newest version holds what was written: any descriptor publishes it."""
        newest = read(self.store, self.namespace.inodes[content.ino].extent)
        return newest == self.written[content]

    def _may_publish(self, content: Content) -> None:
        if content in self.written:
            self.wholes[content.ino].add(self.written[content])

    # -- what holds ------------------------------------------------------------------------------

    @invariant()
    def check(self) -> None:
        contents = {handle.content for handle in self.handles if handle.content is not None}
        for ino, content in self.table.current.items():
            assert content.ino == ino and content.state in CURRENT, content
        for private in self.table.private.values():
            assert private and all(content.state is State.REPLACING for content in private)
        in_tables = {*self.table.current.values()}.union(*self.table.private.values())
        for content in contents:
            assert content.state.ended or content in in_tables, content
            assert content.holds >= content.opens >= content.writers >= 0
        owners: dict[int, Content] = {}
        for content in sorted(contents | in_tables, key=lambda each: each.state.writable):
            if content.extent:
                other = owners.get(content.extent)
                assert other is None or not content.state.writable, (
                    f"{content}, {other}: one extent"
                )
                owners[content.extent] = content
        for content, expected in self.written.items():
            if content in contents and content.extent:
                assert read(self.store, content.extent) == expected, content
        for ino in self.inos:
            inode = self.namespace.inodes[ino]
            owner = owners.get(inode.extent)
            if owner is None or not owner.state.writable:
                assert read(self.store, inode.extent) in self.wholes[ino], (
                    "half a write is published"
                )
            else:
                assert not self.store.sends, "the file of a version may be written"


class ContentsOfACluster(Contents):
    """One host of several: others publish versions of the same files."""

    store_class = Sending

    @rule(number=NUMBERS, data=BYTES)
    def another_host_publishes(self, number: int, data: bytes) -> None:
        ino = self.inos[number]
        extent, fd = self.extents.allocate()
        os.write(fd, data)
        status = os.fstat(fd)
        os.close(fd)
        self.wholes[ino].add(data)
        before = self.namespace.inodes[ino].extent
        self.run(self.namespace.publish, NewVersion.of_file(ino, extent, status, 5))
        self.store.retire(before)

    @rule(number=NUMBERS)
    def show_newest(self, number: int) -> None:
        """As before a lock is granted: what was written in place here is published, or set aside."""
        content = self.table.current.get(self.inos[number])
        if content is not None:
            self._may_publish(content)
        try:
            self.run(self.cache.publisher.show_newest, self.inos[number])
        except OSError as error:
            assert error.errno == errno.ESTALE
        if content is not None:
            self._look_again(content)


Contents.TestCase.settings = settings(max_examples=12, stateful_step_count=15, deadline=None)
ContentsOfACluster.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None
)
TestContents = Contents.TestCase
TestContentsOfACluster = ContentsOfACluster.TestCase
