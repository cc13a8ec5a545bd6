"""A store node: the directory it keeps, what it frees and when, and the process around it."""

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from harness.errors import fails_with

from irdmafs.backend.kv import Damaged
from irdmafs.backend.node.files import Files
from irdmafs.backend.store.remote.places import Holds
from irdmafs.backend.transport import Extent

SESSION = 1000
CONTENT = SESSION << 24 | 1


@pytest.fixture
def files(memory: Path) -> Iterator[Files]:
    with Files(f"{memory}/store") as files:
        yield files


def keep(files: Files, extent: Extent, data: bytes) -> None:
    incoming = files.create(len(data))
    os.pwrite(incoming.fd, data, 0)
    files.seal(incoming, extent)
    os.close(incoming.fd)


def contents_of(files: Files, extent: Extent) -> bytes:
    with closing(files.hold(extent)) as held:
        return os.pread(held.fd, 1 << 20, 0)


def test_a_store_is_one_node_of_one_cluster_as_long_as_its_directory_lives(memory: Path) -> None:
    with Files(f"{memory}/store") as files:
        node = files.node
        files.identity.bind("one")
    assert 0 < node < 1 << 63
    with Files(f"{memory}/store") as files:
        assert (files.node, files.identity.cluster) == (node, "one")
        files.identity.bind("one")
        with pytest.raises(OSError, match="belongs to cluster one, not to two"):
            files.identity.bind("two")
    assert int(json.loads((memory / "store/node.json").read_text())["id"], 16) == node


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format":1,"id":"0","cluster":""}', "\xff"])
def test_a_damaged_identity_is_not_replaced_by_a_guess(memory: Path, text: str) -> None:
    with Files(f"{memory}/store"):
        pass
    (memory / "store/node.json").write_text(text)
    with pytest.raises(Damaged, match=r"node\.json is damaged"), Files(f"{memory}/store"):
        pass
    assert (memory / "store/node.json").read_text() == text


def test_only_its_own_user_can_look_into_a_store(memory: Path) -> None:
    previous = os.umask(0)
    try:
        with Files(f"{memory}/store") as files:
            keep(files, Extent(CONTENT, 0), b"secret")
    finally:
        os.umask(previous)
    for path in [memory / "store", *(memory / "store").rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_sealed_extents_are_found_again_and_unsealed_ones_are_not(memory: Path) -> None:
    with Files(f"{memory}/store") as files:
        keep(files, Extent(CONTENT, 0), b"whole")
        keep(files, Extent(CONTENT, 0x1F), b"another stripe")
        incoming = files.create(100)
        os.close(incoming.fd)
    with Files(f"{memory}/store") as files:
        assert set(files) == {Extent(CONTENT, 0), Extent(CONTENT, 0x1F)}
        assert contents_of(files, Extent(CONTENT, 0x1F)) == b"another stripe"
        assert files.used_bytes == len(b"whole" + b"another stripe")
        assert not list((memory / "store/incoming").iterdir())


def test_what_does_not_look_like_an_extent_is_left_alone(memory: Path) -> None:
    with Files(f"{memory}/store"):
        pass
    for name in ("note.txt", "A.0", "0x1.0", "1_0.0", "1", ".1"):
        (memory / "store/extents" / name).write_bytes(b"not ours")
    (memory / "store/extents/b.0").symlink_to("/etc/passwd")
    with Files(f"{memory}/store") as files:
        assert len(files) == 0
    assert len(list((memory / "store/extents").iterdir())) == 7


def test_a_full_store_says_so_before_a_byte_is_sent(small_tmpfs: Path) -> None:
    with Files(f"{small_tmpfs}/store") as files:
        keep(files, Extent(CONTENT, 0), bytes(1000))
        with fails_with(errno.ENOSPC):
            files.create(32 << 20)
        assert not list((small_tmpfs / "store/incoming").iterdir())
        keep(files, Extent(CONTENT, 1), bytes(8 << 20))


def test_what_is_allocated_cannot_be_taken_by_others(small_tmpfs: Path) -> None:
    with Files(f"{small_tmpfs}/store") as files:
        incoming = files.create(8 << 20)
        with pytest.raises(OSError, match="No space"), open(small_tmpfs / "hog", "wb") as hog:
            hog.write(bytes(16 << 20))
        assert os.pwrite(incoming.fd, bytes(8 << 20), 0) == 8 << 20
        files.seal(incoming, Extent(CONTENT, 0))
        os.close(incoming.fd)


@pytest.mark.parametrize("size", [100, 3 << 20], ids=["small", "large"])
def test_a_freed_extent_goes_and_stays_for_readers(files: Files, memory: Path, size: int) -> None:
    keep(files, Extent(CONTENT, 0), b"x" * size)
    held = files.hold(Extent(CONTENT, 0))
    held.lend()
    files.free(Extent(CONTENT, 0))
    assert Extent(CONTENT, 0) not in files
    assert files.used_bytes == 0
    with pytest.raises(FileNotFoundError):
        files.hold(Extent(CONTENT, 0))
    # The same number may come again at once; it is not confused with the one on its way out.
    keep(files, Extent(CONTENT, 0), b"y" * size)
    files.reap()
    assert contents_of(files, Extent(CONTENT, 0))[:1] == b"y"
    assert os.pread(held.fd, size, 0) == b"x" * size
    held.close()
    assert not list((memory / "store/incoming").iterdir())


def test_what_is_sealed_is_never_replaced(files: Files) -> None:
    keep(files, Extent(CONTENT, 0), b"the first")
    with pytest.raises(FileExistsError):
        keep(files, Extent(CONTENT, 0), b"another")
    assert files.used_bytes == len(b"the first")
    assert contents_of(files, Extent(CONTENT, 0)) == b"the first"


def test_a_working_copy_is_taken_over_without_a_copy(files: Files, memory: Path) -> None:
    path = memory / f"store/incoming/{CONTENT:x}"
    path.write_bytes(b"written by a mount")
    path.chmod(0o600)
    ino = path.stat().st_ino
    assert files.incoming.working_copies() == {f"{CONTENT:x}": CONTENT}
    incoming = files.incoming.take_over(f"{CONTENT:x}", CONTENT)
    files.seal(incoming, Extent(CONTENT, 0))
    os.close(incoming.fd)
    assert contents_of(files, Extent(CONTENT, 0)) == b"written by a mount"
    assert os.stat(memory / f"store/extents/{CONTENT:x}.0").st_ino == ino
    assert files.incoming.working_copies() == {}


def test_only_the_contents_own_working_copy_is_taken_over(files: Files, memory: Path) -> None:
    incoming = files.create(10)
    os.symlink("/etc/passwd", memory / f"store/incoming/{CONTENT:x}")
    os.mkfifo(memory / f"store/incoming/{CONTENT + 1:x}")
    for name, content, code in (
        ("../node.json", CONTENT, errno.EPERM),
        (incoming.name, CONTENT, errno.EPERM),
        (f"{CONTENT + 1:x}", CONTENT, errno.EPERM),
        (f"{CONTENT:x}", CONTENT, errno.ELOOP),
        (f"{CONTENT + 1:x}", CONTENT + 1, errno.EPERM),
        (f"{CONTENT + 2:x}", CONTENT + 2, errno.ENOENT),
    ):
        with fails_with(code):
            files.incoming.take_over(name, content)
    os.close(incoming.fd)


def test_a_store_on_a_disk_is_power_safe_one_in_memory_not(memory: Path, tmp_path: Path) -> None:
    with Files(f"{memory}/store") as files:
        assert not files.power_safe
    on_disk = subprocess.check_output(["stat", "-f", "-c", "%T", tmp_path], text=True).strip()
    with Files(f"{tmp_path}/store") as files:
        assert files.power_safe == (on_disk != "tmpfs")


def test_a_store_can_be_limited_to_less_than_its_filesystem_has(memory: Path) -> None:
    with Files(f"{memory}/store", limit_bytes=1000) as files:
        keep(files, Extent(CONTENT, 0), bytes(400))
        incoming = files.create(400)
        assert files.space() == (400, 1000, 200)
        with pytest.raises(OSError, match="No space"):
            files.create(201)
        incoming.close()
        files.free(Extent(CONTENT, 0))
        keep(files, Extent(CONTENT, 1), bytes(1000))


async def test_on_a_disk_bytes_are_safe_before_the_name_and_the_name_before_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        done.append("sync " + os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        real_fsync(fd)

    def rename(*arguments: object, **options: object) -> None:
        done.append("rename")
        real_rename(*arguments, **options)  # type: ignore[arg-type]

    with Files(f"{tmp_path}/store") as files:
        if not files.power_safe:
            pytest.skip("temporary files are in memory here")
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "rename", rename)
        with closing(files.create(5)) as incoming:
            await files.harden(incoming)
            files.seal(incoming, Extent(CONTENT, 0))
            await files.settle()
        done.append("answered")
    assert done == ["sync _1", "rename", "sync extents", "answered"]


def test_what_a_mount_holds_stays_until_it_has_ended(memory: Path) -> None:
    store = f"{memory}/store"
    extent = Extent(CONTENT, 0)
    with Files(store) as files:
        keep(files, extent, b"bytes")
        living, dead = Holds(store), Holds(store)
        path = f"{store}/extents/{CONTENT:x}.0"
        mine, orphaned = (Path(one.add(path, f"{CONTENT:x}")) for one in (living, dead))
        os.close(dead._fd)  # as at the end of its process
        files.free(extent)
        files.reap()
        assert mine.read_bytes() == b"bytes"
        assert not orphaned.parent.exists()
    with Files(store) as files:
        files.reap()
        assert mine.read_bytes() == b"bytes", "its mount outlives the store node's process"
        living.close()
        assert not os.listdir(f"{store}/held")
