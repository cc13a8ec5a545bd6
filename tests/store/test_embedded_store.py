"""The store directory and its node: extents, pins, what is freed when, and what a crash leaves."""

import errno
import os
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.models.invariants import check
from harness.open_inodes import while_open
from harness.processes import Program
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from irdmafs.backend.files.extents import ExtentStore, StoreInUse, copy_contents
from irdmafs.backend.files.extents import in_memory as lies_in_memory
from irdmafs.backend.kv import Damaged, NoSpace
from irdmafs.backend.model.records import NO_CONTENT, ContentId
from irdmafs.backend.namespace import ROOT_INO, Inode, NewVersion
from irdmafs.backend.store import embedded as node
from irdmafs.backend.store.embedded import EmbeddedStore, embedded_store
from irdmafs.inline import run

FILE = stat.S_IFREG | 0o644


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# -- extents -----------------------------------------------------------------------------------------


@pytest.fixture
def extents(tmp_path: Path) -> Iterator[ExtentStore]:
    store = ExtentStore(str(tmp_path / "extents"))
    yield store
    store.close()


def write(extents: ExtentStore, content: bytes) -> ContentId:
    extent, fd = extents.allocate()
    os.write(fd, content)
    os.close(fd)
    return extent


def test_an_extent_is_empty_at_first_and_keeps_what_is_written(extents: ExtentStore) -> None:
    extent, fd = extents.allocate()
    assert os.fstat(fd).st_size == 0
    os.write(fd, b"weights")
    os.close(fd)
    with extents.opened(extent) as reader:
        assert os.read(reader, 100) == b"weights"
        with pytest.raises(OSError, match="descriptor"):
            os.write(reader, b"x")
    assert extents.stat(extent).st_size == 7
    assert Path(extents.path(extent)).read_bytes() == b"weights"
    assert stat.S_IMODE(extents.stat(extent).st_mode) == 0o600


def test_other_files_in_the_directory_are_no_extents(extents: ExtentStore) -> None:
    Path(extents.directory, "lost+found").mkdir()
    Path(extents.directory, "notes.txt").write_text("mine")
    extent = write(extents, b"x")
    assert list(extents) == [extent]


def test_a_freed_extent_can_be_read_by_who_has_it_open(extents: ExtentStore) -> None:
    extent = write(extents, b"weights")
    with extents.opened(extent) as fd:
        extents.free(extent)
        extents.free(extent)
        assert list(extents) == []
        assert os.read(fd, 100) == b"weights"


def test_opening_a_lost_extent_is_EIO_and_names_its_path(extents: ExtentStore) -> None:
    extent = write(extents, b"x")
    extents.free(extent)
    with pytest.raises(OSError, match="missing from the store") as caught:
        extents.open(extent)
    assert caught.value.errno == errno.EIO
    assert caught.value.filename == extents.path(extent)


def test_allocating_without_descriptors_left_takes_no_number(
    extents: ExtentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptors(*args: object, **kwargs: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = write(extents, b"x")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", no_descriptors)
        with pytest.raises(OSError, match="Too many open files"):
            extents.allocate()
    assert write(extents, b"y") == before + 1


# -- copying -----------------------------------------------------------------------------------------

PAGE = 4096
# What a file is made of, piece by piece: (is it data, how many bytes).
segments = st.lists(
    st.tuples(
        st.booleans(),
        st.one_of(st.integers(0, 70), st.integers(0, 16).map(PAGE.__mul__), st.integers(0, 70_000)),
    ),
    max_size=8,
)


def write_segments(fd: int, layout: list[tuple[bool, int]]) -> bytes:
    content = b""
    for number, (is_data, size) in enumerate(layout):
        piece = bytes([number + 1]) * size if is_data else bytes(size)
        if is_data:
            os.pwrite(fd, piece, len(content))
        content += piece
    os.ftruncate(fd, len(content))
    return content


def data_ranges(fd: int) -> list[tuple[int, int]]:
    ranges = []
    end, size = 0, os.fstat(fd).st_size
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            assert error.errno == errno.ENXIO
            break
        end = os.lseek(fd, start, os.SEEK_HOLE)
        ranges.append((start, end))
    return ranges


def make_file(kind: str) -> int:
    if kind == "tmpfs":
        return os.memfd_create("copy", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(buffering=0) as file:
        return os.dup(file.fileno())


# From tmpfs to a disk and back the kernel cannot copy by itself: the other way is taken.
@pytest.mark.parametrize("source_kind", ["tmpfs", "disk"])
@pytest.mark.parametrize("target_kind", ["tmpfs", "disk"])
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(layout=segments, at_once=st.sampled_from([1000, 1 << 28]))
def test_a_copy_has_the_same_bytes_and_the_same_holes(
    source_kind: str, target_kind: str, layout: list[tuple[bool, int]], at_once: int
) -> None:
    source, target = make_file(source_kind), make_file(target_kind)
    try:
        content = write_segments(source, layout)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("irdmafs.backend.files.extents._COPY_CHUNK_BYTES", at_once)
            copy_contents(source, target)
        assert os.pread(target, len(content) + 1, 0) == content
        if source_kind == target_kind == "tmpfs":
            assert data_ranges(target) == data_ranges(source)
            assert os.fstat(target).st_blocks == os.fstat(source).st_blocks
        assert os.pread(source, len(content) + 1, 0) == content
    finally:
        os.close(source)
        os.close(target)


def test_file_that_shrinks_while_it_is_copied_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = make_file("tmpfs"), make_file("tmpfs")
    write_segments(source, [(True, 10_000)])
    monkeypatch.setattr(os, "copy_file_range", lambda *args: 0)
    with pytest.raises(OSError, match="shrank") as caught:
        copy_contents(source, target)
    assert caught.value.errno == errno.EIO
    os.close(source)
    os.close(target)


# -- the node ----------------------------------------------------------------------------------------


def make_version(store: EmbeddedStore, ino: int, content: bytes) -> Inode:
    """Publish as the cache does: an empty extent is freed by who allocated it."""
    extent, fd = store.allocate(store.namespace.inode(ino))
    os.write(fd, content)
    status = os.fstat(fd)
    os.close(fd)
    inode = run(store.publish(NewVersion.of_file(ino, extent, status, status.st_mtime_ns)))
    if not inode.extent:
        store.extents.free(extent)
    return inode


def make_file_of(store: EmbeddedStore, name: bytes, content: bytes) -> Inode:
    inode = run(store.namespace.create(ROOT_INO, name, FILE, 0, 0))
    return make_version(store, inode.ino, content)


def content_of(store: EmbeddedStore, extent: ContentId) -> bytes:
    return Path(store.extents.path(extent)).read_bytes()


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test wait for a disk."""
    monkeypatch.setattr(node, "in_memory", lambda path: True)


class Store:
    """A store node, entered and left from synchronous code."""

    def __init__(self, directory: Path) -> None:
        self.node = embedded_store(str(directory))

    def __enter__(self) -> EmbeddedStore:
        return run(self.node.__aenter__())

    def __exit__(self, *args: object) -> None:
        run(self.node.__aexit__(None, None, None))


@pytest.fixture
def store(tmp_path: Path, in_memory: None) -> Iterator[EmbeddedStore]:
    with Store(tmp_path) as opened:
        yield opened


def test_a_retired_extent_that_is_published_after_all_is_kept(store: EmbeddedStore) -> None:
    inode = make_file_of(store, b"file", b"one")
    store.pin(inode.extent)
    make_version(store, inode.ino, b"two")
    status = store.extents.stat(inode.extent)
    run(store.publish(NewVersion.of_file(inode.ino, inode.extent, status, 5)))
    store.unpin(inode.extent)
    assert set(store.extents) == {inode.extent}


@pytest.mark.parametrize("power_safe", [True, False])
async def test_only_a_store_on_a_disk_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, power_safe: bool
) -> None:
    monkeypatch.setattr(node, "in_memory", lambda path: not power_safe)
    synced: list[str] = []
    sync = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        sync(fd)

    async with embedded_store(str(tmp_path)) as store:
        inode = await store.namespace.create(ROOT_INO, b"file", FILE, 0, 0)
        extent = write(store.extents, b"one")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            await store.publish(
                NewVersion.of_file(inode.ino, extent, store.extents.stat(extent), 1)
            )
        expected = [store.extents.path(extent), store.extents.directory]
        assert [path for path in synced if path in expected] == (expected if power_safe else [])


def test_a_directory_on_tmpfs_is_known_to_be_in_memory() -> None:
    if not os.path.ismount("/dev/shm"):
        pytest.skip("/dev/shm is no tmpfs here")
    assert lies_in_memory("/dev/shm")
    assert not lies_in_memory("/proc")


# -- starting ----------------------------------------------------------------------------------------

HOLDER = """
import os, sys, trio
from irdmafs.backend.store.embedded import embedded_store

async def main():
    async with embedded_store(sys.argv[1]):
        print("open", flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)

trio.run(main)
"""


def test_a_store_serves_one_process_and_is_free_when_that_dies(tmp_path: Path) -> None:
    with Program(sys.executable, "-c", HOLDER, tmp_path) as holder:
        try:
            assert holder.stdout.readline() == "open\n"
            before = open_files()
            with pytest.raises(StoreInUse, match=rf"pid {holder.pid}\b") as caught, Store(tmp_path):
                pass
            assert caught.value.errno == errno.EBUSY
            assert caught.value.filename == str(tmp_path)
            assert open_files() == before
        finally:
            holder.send_signal(signal.SIGKILL)
    with Store(tmp_path) as store:
        assert set(store.namespace.inodes) == {ROOT_INO}
        with pytest.raises(StoreInUse, match=rf"pid {os.getpid()}\b"), Store(tmp_path):
            pass


def test_an_unloadable_store_is_left_unlocked_and_closed(tmp_path: Path, in_memory: None) -> None:
    with Store(tmp_path) as store:
        make_file_of(store, b"file", b"one")
        store.namespace.tree.records.put(b"i" + (2).to_bytes(8, "big"), b"garbage")
    (tmp_path / "names-closed").unlink()  # all is read after a crash
    before = open_files()
    for _ in range(2):
        with pytest.raises(OSError, match="damaged") as caught, Store(tmp_path):
            pass
        assert caught.value.errno == errno.EIO
    assert open_files() == before
    (tmp_path / "names").write_bytes(b"not a database" * 1000)
    with pytest.raises(Damaged), Store(tmp_path):
        pass
    assert open_files() == before


def test_a_full_disk_at_the_end_still_lets_go_of_the_store(
    tmp_path: Path, in_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.rename

    def full(source: str, target: str) -> None:
        if "closed" in target:
            raise NoSpace(target)
        real(source, target)

    before = open_files()
    with Store(tmp_path) as store:
        inode = make_file_of(store, b"file", b"one")
        monkeypatch.setattr(os, "rename", full)
    assert open_files() == before
    with Store(tmp_path) as store:
        assert content_of(store, inode.extent) == b"one"


class StoreAgainstModel(RuleBasedStateMachine):
    """The extents there are: those of current versions, those that are pinned, and working copies."""

    files = st.integers(0, 3)

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(node, "in_memory", lambda path: True)
        self.base = Path(tempfile.mkdtemp(prefix="irdmafs-store-"))
        self.directory = self.base / "store"
        self.opened = Store(self.directory)
        self.store = self.opened.__enter__()
        self.contents: dict[ContentId, bytes] = {}  # by extent
        self.current: dict[int, tuple[int, int, ContentId]] = {}  # file -> ino, version, extent
        self.working: list[ContentId] = []
        self.pins: list[ContentId] = []

    def teardown(self) -> None:
        self.opened.__exit__()
        self.patch.undo()
        shutil.rmtree(self.base)

    @rule(size=st.integers(0, 20))
    def allocate(self, size: int) -> None:
        content = os.urandom(size)
        extent, fd = self.store.allocate(self.store.namespace.inode(ROOT_INO))
        os.write(fd, content)
        os.close(fd)
        assert extent not in self.expected()
        self.contents[extent] = content
        self.working.append(extent)

    @rule(file=files, which=st.integers(0, 9))
    def publish(self, file: int, which: int) -> None:
        if not self.working:
            return
        if file not in self.current:
            made = run(self.store.namespace.create(ROOT_INO, b"%d" % file, FILE, 0, 0))
            self.current[file] = made.ino, 0, NO_CONTENT
        ino, version, _ = self.current[file]
        extent = self.working[which % len(self.working)]
        status = self.store.extents.stat(extent)
        inode = run(self.store.publish(NewVersion.of_file(ino, extent, status, 1)))
        assert inode.version == version + 1
        if status.st_size:
            assert inode.extent == extent
            self.working.remove(extent)
        else:
            assert inode.extent == 0  # and the working copy stays its owner's
        self.current[file] = ino, inode.version, inode.extent

    @rule(file=files)
    def publish_in_place(self, file: int) -> None:
        """Publish a file again that was written on after its first version."""
        ino, version, extent = self.current.get(file, (0, 0, NO_CONTENT))
        if extent:
            status = self.store.extents.stat(extent)
            run(self.store.publish(NewVersion.of_file(ino, extent, status, 1)))
            self.current[file] = ino, version + 1, extent

    @rule(which=st.integers(0, 9))
    def give_up(self, which: int) -> None:
        if self.working:
            self.store.retire(self.working.pop(which % len(self.working)))

    @rule(which=st.integers(0, 9))
    def pin(self, which: int) -> None:
        extents = sorted({NO_CONTENT, *self.expected()})
        extent = extents[which % len(extents)]
        self.store.pin(extent)
        self.pins.append(extent)

    @rule(which=st.integers(0, 9))
    def unpin(self, which: int) -> None:
        if self.pins:
            self.store.unpin(self.pins.pop(which % len(self.pins)))

    @rule(file=files, held=st.booleans())
    def unlink(self, file: int, held: bool) -> None:
        if file not in self.current:
            return
        _, _, extent = self.current.pop(file)
        namespace = self.store.namespace
        removing = namespace.unlink(ROOT_INO, b"%d" % file)
        inode = run(while_open(namespace, removing, is_open=held))
        if held:
            run(self.store.forget(inode))
        else:
            self.store.retire(extent)

    @rule(killed=st.booleans())
    def restart(self, killed: bool) -> None:
        left = self.base / "left"
        if killed:
            shutil.copytree(self.directory, left)
        self.opened.__exit__()
        if killed:
            shutil.rmtree(self.directory)
            left.rename(self.directory)
        self.opened = Store(self.directory)
        self.store = self.opened.__enter__()
        self.working.clear()
        self.pins.clear()
        self.current = {file: kept for file, kept in self.current.items() if kept[1]}

    def expected(self) -> set[ContentId]:
        return {*(extent for _, _, extent in self.current.values()), *self.working, *self.pins} - {
            NO_CONTENT
        }

    @invariant()
    def nothing_is_lost_and_nothing_leaks(self) -> None:
        assert set(self.store.extents) == self.expected()
        assert all(
            content_of(self.store, extent) == self.contents[extent] for extent in self.expected()
        )
        check(self.store.namespace)


StoreAgainstModel.TestCase.settings = settings(
    max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStoreAgainstModel = StoreAgainstModel.TestCase
