"""Files of superseded extents that become files of new ones, and those that never do."""

import errno
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from harness.errors import fails_with
from test_store_node import files

from irdmafs.backend.files.extents import FULL, look_for_room
from irdmafs.backend.model.records import ContentId
from irdmafs.backend.node import directory as directory_module
from irdmafs.backend.node import incoming as incoming_module
from irdmafs.backend.node.files import Files
from irdmafs.backend.node.incoming import SPARE_BYTES_MIN, SPARE_S, SPARES_MAX, Incoming
from irdmafs.backend.store.remote.contents import Contents
from irdmafs.backend.transport import Extent
from irdmafs.backend.transport.verbs.rdma import Choice, Rdma

__all__ = ["files"]

SESSION = 1000
CONTENT = SESSION << 24 | 1
LENGTH = 3 << 20


def taken(files: Files, length: int) -> Incoming:
    """As a node takes an extent in."""
    return files.incoming.take_spare(length) or files.create(length)


def keep(files: Files, number: int, length: int = LENGTH, byte: bytes = b"x") -> int:
    """Returns the inode number of the file that it is in."""
    incoming = taken(files, length)
    os.pwrite(incoming.fd, byte * length, 0)
    files.seal(incoming, Extent(number, 0))
    ino = os.fstat(incoming.fd).st_ino
    incoming.close()
    return ino


# -- what is used again --------------------------------------------------------------------------


def test_versions_of_one_size_take_turns_in_two_files(files: Files) -> None:
    inos = []
    for version in range(10):
        inos.append(keep(files, version, byte=b"%d" % version))
        if version:
            files.free(Extent(version - 1, 0))
        held = files.hold(Extent(version, 0))
        assert os.pread(held.fd, LENGTH + 1, 0) == b"%d" % version * LENGTH
        held.close()
    assert inos == [inos[0], inos[1]] * 5
    assert (files.figures().created_files, files.figures().reused_files) == (2, 8)


def test_only_a_file_of_exactly_the_same_length_is_used_again(files: Files) -> None:
    first = keep(files, 1)
    files.free(Extent(1, 0))
    assert keep(files, 2, LENGTH - 1) != first
    assert keep(files, 3, LENGTH + 1) != first
    assert keep(files, 4, LENGTH) == first


def test_small_files_are_not_worth_keeping(files: Files, memory: Path) -> None:
    keep(files, 1, SPARE_BYTES_MIN - 1)
    files.free(Extent(1, 0))
    assert not list((memory / "store/incoming").iterdir())


# -- what is not ---------------------------------------------------------------------------------


def is_used_again(files: Files, number: int) -> bool:
    before = files.figures().reused_files
    files.free(Extent(number, 0))
    keep(files, number + 1000)
    return files.figures().reused_files > before


def is_own(files: Files, extent: Extent) -> bool:
    with closing(files.hold(extent)) as held:
        return held.is_own


@pytest.mark.parametrize("way", ["opened", "handed on"])
def test_a_file_that_was_sent_is_never_used_again(files: Files, way: str) -> None:
    incoming = files.create(LENGTH)
    if way == "handed on":
        incoming.lend()
    files.seal(incoming, Extent(1, 0))
    incoming.close()
    if way == "opened":
        with closing(files.hold(Extent(1, 0))) as held:
            held.lend()
    assert not is_used_again(files, 1)


def test_a_file_waits_for_whoever_holds_it(files: Files) -> None:
    first = keep(files, 1, byte=b"a")
    held = files.hold(Extent(1, 0))
    files.free(Extent(1, 0))
    assert keep(files, 2) != first
    assert os.pread(held.fd, LENGTH, 0) == b"a" * LENGTH
    held.close()
    assert keep(files, 3) == first


def test_file_that_anybody_has_open_or_mapped_is_not_used_again(files: Files, memory: Path) -> None:
    for number, is_mapped in ((1, False), (2, True)):
        keep(files, number)
        with (
            open(memory / f"store/extents/{number}.0", "rb") as file,
            mmap.mmap(file.fileno(), LENGTH, prot=mmap.PROT_READ),
        ):
            if is_mapped:
                file.close()
            assert not is_used_again(files, number)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: os.link(path, path.with_name("backup")),
        lambda path: os.truncate(path, LENGTH - 1),
    ],
    ids=["it has another name", "it was cut short"],
)
def test_a_file_that_was_changed_is_not_used_again(
    files: Files, memory: Path, change: Callable[[Path], None]
) -> None:
    keep(files, 1)
    change(memory / "store/extents/1.0")
    assert not is_used_again(files, 1)


def test_a_working_copy_that_was_taken_over_is_never_used_again(files: Files, memory: Path) -> None:
    (memory / f"store/incoming/{CONTENT:x}").write_bytes(bytes(LENGTH))
    incoming = files.incoming.take_over(f"{CONTENT:x}", CONTENT)
    assert not incoming.is_own
    files.seal(incoming, Extent(CONTENT, 0))
    incoming.close()
    assert not is_own(files, Extent(CONTENT, 0))
    assert not is_used_again(files, CONTENT)


@pytest.fixture
def contents(memory: Path) -> Iterator[Contents]:
    """A mount's contents, without its cluster, which is told of those that left its host."""
    gone: list[int] = []
    config = SimpleNamespace(mount=SimpleNamespace(cache_size=None))
    changes = SimpleNamespace(content_gone=gone.append, gone=gone, content_listeners=[])
    cluster: Any = SimpleNamespace(config=config, changes=changes)
    with closing(Contents(cluster, f"{memory}/cache")) as contents:
        yield contents


ONE = ContentId(1)


def test_what_a_mount_here_has_opened_is_never_used_again(files: Files, contents: Contents) -> None:
    for number in (1, 2):
        keep(files, number)
    assert contents.borrow(ONE, files.directory)
    os.close(contents.open(ONE))
    contents.free(ONE)
    assert not is_used_again(files, 1)
    assert is_used_again(files, 2)
    assert not contents.borrow(ContentId(2), files.directory), "it is gone"


def test_file_of_a_reader_that_keeps_no_pages_is_used_again_when_it_is_closed_and_unmapped(
    files: Files, contents: Contents
) -> None:
    first = keep(files, 1, byte=b"a")
    assert contents.borrow(ONE, files.directory)
    contents.pin(ONE)
    fd = contents.open(ONE)
    files.free(Extent(1, 0))
    assert keep(files, 2, byte=b"b") != first, "it is held"
    mapped = mmap.mmap(fd, LENGTH, prot=mmap.PROT_READ)
    contents.unpin(ONE)
    os.close(fd)
    assert keep(files, 3, byte=b"c") != first, "it is mapped"
    assert mapped[:1] == b"a"
    mapped.close()
    assert keep(files, 4, byte=b"d") == first


@pytest.mark.parametrize("is_freed", [False, True], ids=["kept", "freed before"])
def test_file_whose_pages_program_may_keep_is_never_used_again(
    files: Files, contents: Contents, is_freed: bool
) -> None:
    first = keep(files, 1)
    assert contents.borrow(ONE, files.directory)
    contents.pin(ONE)
    if is_freed:
        files.free(Extent(1, 0))
    contents.lend(ONE)
    contents.unpin(ONE)
    files.free(Extent(1, 0))
    assert keep(files, 2) != first
    assert files.figures().reused_files == 0


def test_file_is_not_used_again_where_the_kernel_does_not_tell_who_has_it_mapped(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_leases(fd: int, command: int, argument: int = 0) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    keep(files, 1)
    monkeypatch.setattr(fcntl, "fcntl", no_leases)
    assert not is_used_again(files, 1)


async def test_extent_of_an_application_is_copied_once_into_a_file_that_is_used_again(
    files: Files, memory: Path
) -> None:
    spare = keep(files, 1)
    files.free(Extent(1, 0))
    extent = Extent(CONTENT, 0)
    adopted = memory / f"store/incoming/{CONTENT:x}"
    adopted.write_bytes(b"x" * LENGTH)
    with closing(files.incoming.take_over(f"{CONTENT:x}", CONTENT)) as incoming:
        files.seal(incoming, extent)
    path = memory / f"store/extents/{CONTENT:x}.0"
    reader = os.open(path, os.O_RDONLY)

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(files.make_own, extent)
    assert path.stat().st_ino == spare != os.fstat(reader).st_ino
    assert path.read_bytes() == os.read(reader, LENGTH) == b"x" * LENGTH
    assert files.figures().reused_files == 1
    assert is_own(files, extent)
    os.close(reader)
    assert is_used_again(files, CONTENT)


def test_content_that_is_fetched_never_takes_the_place_of_a_file_here(contents: Contents) -> None:
    changes: Any = contents._member.changes
    for number, is_published in ((ONE, False), (ContentId(2), True)):
        os.close(contents.make(number, 10))
        path = Path(contents.path(number))
        path.write_bytes(b"first")
        if is_published:
            contents.publishing.add(number)
            assert contents.has(number)
        else:
            contents.keep(number, 10)
        contents.admit(number, 10)
        if is_published:
            contents.not_published(number)
        assert path.read_bytes() == b"first"
    assert sorted(os.listdir(contents.directory)) == ["1", "2"] and not changes.gone
    contents.free(ONE)
    assert changes.gone == [1]


def test_a_working_copy_is_not_here_for_whoever_names_its_number_before_its_writer(
    files: Files, contents: Contents
) -> None:
    contents._member.session = cast(Any, SimpleNamespace(number=5))
    extent, fd = contents.allocate_in(files.directory)
    os.close(fd)
    assert not contents.has(extent)
    contents.publishing.add(extent)
    assert contents.has(extent)


class Mapped(Rdma):
    """Has any file mapped through the descriptors `mapped`."""

    def __init__(self) -> None:
        super().__init__(Choice("off"))
        self.mapped: list[int] = []

    def descriptors(self, file: tuple[int, int]) -> list[int]:
        return self.mapped


def test_a_file_that_is_registered_and_in_use_is_not_used_again(memory: Path) -> None:
    rdma = Mapped()
    with Files(f"{memory}/store", rdma=rdma) as files:
        first = keep(files, 1)
        held = files.hold(Extent(1, 0))
        rdma.mapped.append(os.open(memory / "store/extents/1.0", os.O_RDWR))
        files.free(Extent(1, 0))
        assert keep(files, 2) != first, "somebody reads it"
        held.close()
        rdma.mapped.append(os.dup(rdma.mapped[0]))
        assert keep(files, 3) != first, "it is registered twice"
        os.close(rdma.mapped.pop())
        assert keep(files, 4) == first
        os.close(rdma.mapped.pop())


def test_no_file_of_an_earlier_process_is_used_again(memory: Path) -> None:
    with Files(f"{memory}/store") as files:
        keep(files, 1)
        keep(files, 2)
        files.free(Extent(1, 0))
    with Files(f"{memory}/store") as files:
        assert not list((memory / "store/incoming").iterdir())
        assert is_own(files, Extent(2, 0)), "the node made it, whichever process did"
        assert not is_used_again(files, 2)


def test_on_a_disk_no_file_is_used_again(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power loss could give it its old name back."""
    monkeypatch.setattr(directory_module, "in_memory", lambda directory: False)
    with Files(f"{memory}/store") as files:
        keep(files, 1)
        assert not is_used_again(files, 1)


# -- room ----------------------------------------------------------------------------------------


def test_spare_files_are_free_room_and_make_room(memory: Path) -> None:
    with Files(f"{memory}/store", limit_bytes=10 << 20) as files:
        keep(files, 1)
        files.free(Extent(1, 0))
        assert files.space() == (0, 10 << 20, 10 << 20)
        with pytest.raises(OSError, match="No space"):
            files.create(8 << 20)
        files.incoming.give_up_spares()
        assert files.incoming.has_condemned
        files.reap()
        files.create(8 << 20).close()


def test_a_file_of_the_right_length_fits_into_a_full_store(memory: Path) -> None:
    with Files(f"{memory}/store", limit_bytes=2 * LENGTH) as files:
        first = keep(files, 1)
        files.free(Extent(1, 0))
        keep(files, 2, LENGTH)
        assert os.stat(memory / "store/extents/2.0").st_ino == first
        assert files.space().free == LENGTH


@pytest.mark.parametrize(("spares_max", "kept"), [(SPARES_MAX, 5), (3, 3)])
def test_spare_files_are_limited_in_bytes_and_in_number(
    memory: Path, monkeypatch: pytest.MonkeyPatch, spares_max: int, kept: int
) -> None:
    monkeypatch.setattr(incoming_module, "SPARES_MAX", spares_max)
    with Files(f"{memory}/store", limit_bytes=10 * LENGTH) as files:
        for number in range(8):
            keep(files, number)
        for number in range(8):
            files.free(Extent(number, 0))
        files.reap()
        assert len(list((memory / "store/incoming").iterdir())) == kept


def test_nothing_is_spare_when_there_is_hardly_any_room(small_tmpfs: Path) -> None:
    with Files(f"{small_tmpfs}/store") as files:
        keep(files, 1)
        with open(small_tmpfs / "working copy", "wb") as other:
            other.write(bytes((12 << 20) + (512 << 10)))
        files.free(Extent(1, 0))
        files.reap()
        assert not list((small_tmpfs / "store/incoming").iterdir())


def test_what_is_not_used_goes(files: Files, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(files, 1)
    files.free(Extent(1, 0))
    files.incoming.give_up_spares(SPARE_S)
    files.reap()
    assert len(list((memory / "store/incoming").iterdir())) == 1
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + SPARE_S)
    files.incoming.give_up_spares(SPARE_S)
    files.reap()
    assert not list((memory / "store/incoming").iterdir())


def test_an_allocation_that_fails_fills_the_store(files: Files, contents: Contents) -> None:
    """Whoever wrote then may have been refused."""
    os.utime(f"{files.directory}/{FULL}", (0, 0))
    assert contents.look_for_room(ONE) == look_for_room(files.directory) == 0
    with fails_with(errno.ENOSPC):
        contents.make(ONE, 1 << 40)
    with fails_with(errno.ENOSPC):
        files.create(1 << 40)
    assert contents.look_for_room(ONE) > 0 < look_for_room(files.directory)
