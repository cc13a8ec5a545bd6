"""Copies that cost no bytes (`client.clone`): of files, of directories, of versions."""

import errno
import json
import mmap
import os
import stat
from contextlib import closing, suppress
from pathlib import Path

import pytest
from harness.cloned_files import ClonedFiles
from harness.errors import fails_with
from harness.mountpoint import Mount, eventually, irdmafs
from harness.patterns import pattern
from harness.processes import Process
from harness.seeds import seeded

from irdmafs import client

MIB = 1 << 20
STEPS = 300


def room_of(mount: Mount) -> int:
    """Return how many bytes the files of a store take."""
    found = dict[int, int]()
    for one in mount.extents():
        with suppress(FileNotFoundError):  # freed a moment ago
            found[one.stat().st_ino] = one.stat().st_blocks * 512
    return sum(found.values())


def test_a_clone_is_what_cp_makes_and_takes_no_room(mount: Mount, folder: Path) -> None:
    source, target = folder / "source", folder / "target"
    (source / "below").mkdir(parents=True)
    (source / "large").write_bytes(pattern(1, 4 * MIB))
    (source / "empty").touch()
    (source / "below" / "small").write_bytes(b"small")
    (source / "link").symlink_to("large")
    os.mkfifo(source / "fifo")
    for link in ("another", "below/third"):
        os.link(source / "large", source / link)
    os.setxattr(source / "large", "user.colour", b"blue")
    (source / "large").chmod(0o640)
    for path in (source / "large", source):
        os.utime(path, ns=(5 * 10**9, 6 * 10**9))
    files, room = len(mount.extents()), room_of(mount)
    for _ in range(3):  # the last one goes, in one change
        assert client.clone(source, target) == (3, 4 * MIB + 5, 0, 0)
    taken = files + 2, room
    eventually(lambda: (len(mount.extents()), room_of(mount)) == taken, "it takes no room")
    with fails_with(errno.EINVAL):
        client.clone(source, source / "below" / "new")
    assert sorted(os.listdir(target)) == sorted(os.listdir(source))
    assert (target / "large").read_bytes() == pattern(1, 4 * MIB)
    assert (target / "below" / "small").read_bytes() == b"small"
    assert os.readlink(target / "link") == "large"
    assert stat.S_ISFIFO((target / "fifo").stat().st_mode)
    assert os.getxattr(target / "large", "user.colour") == b"blue"
    found = {(target / link).stat().st_ino for link in ("large", "another", "below/third")}
    assert len(found) == 1 and (target / "large").stat().st_nlink == 3
    for name in ("large", ""):
        old, new = (source / name).stat(), (target / name).stat()
        assert (old.st_mode, old.st_mtime_ns) == (new.st_mode, new.st_mtime_ns)
    for top in (source, target):
        assert (top / "large").read_bytes() == pattern(1, 4 * MIB)
        for link in ("large", "another", "below/third"):
            (top / link).unlink()
    eventually(lambda: room_of(mount) <= room - 4 * MIB, "the bytes go with their last name")
    with pytest.raises(NotADirectoryError, match=f"'{target}/empty'$"):
        client.clone(source, target / "empty")


def test_what_a_program_has_mapped_for_writing_is_copied(folder: Path) -> None:
    one, other = folder / "one", folder / "other"
    one.write_bytes(pattern(1, MIB))
    with one.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
        assert client.clone(one, other) == (0, 0, 1, MIB)
    assert client.clone(one, other) == (0, 0, 1, MIB)
    memory[:7] = b"changed"
    assert other.read_bytes() == pattern(1, MIB)


def test_random_clones_and_changes(folder: Path) -> None:
    with closing(ClonedFiles([folder], seeded())) as files:
        for _ in range(STEPS):
            files.step()
        files.check_all()


def test_clones_outlive_killed_daemons_and_keep_what_was_written_in_place(own_mount: Mount) -> None:
    one, other, third = (own_mount.path / name for name in ("one", "other", "third"))
    one.write_bytes(pattern(1, MIB))
    client.clone(one, other)
    client.clone(one, third)
    fd = os.open(one, os.O_RDWR)
    os.write(fd, b"changed")
    own_mount.kill9()
    with pytest.raises(OSError):
        os.close(fd)
    own_mount.mount()
    assert one.read_bytes() == b"changed" + pattern(1, MIB)[7:]
    assert other.read_bytes() == third.read_bytes() == pattern(1, MIB)
    own_mount.restart()
    with other.open("r+b") as writer:
        writer.write(b"another")
    assert third.read_bytes() == pattern(1, MIB)
    for path in (one, other, third):
        path.unlink()
    own_mount.restart()
    assert own_mount.extents() == []


def test_a_quota_counts_a_clone_as_a_copy(folder: Path) -> None:
    (folder / "file").write_bytes(bytes(MIB))
    (folder / "small").write_bytes(b"small")
    (folder / "full").mkdir()
    os.setxattr(folder / "full", "user.irdmafs.quota_bytes", b"1.5M")
    client.clone(folder / "file", folder / "full" / "first")
    with fails_with(errno.EDQUOT):
        client.clone(folder / "file", folder / "full" / "second")
    assert os.listdir(folder / "full") == ["first"]
    assert client.clone(folder / "small", folder / "full" / "third") == (1, 5, 0, 0)


def test_a_user_clones_what_he_may_read_where_he_may_write(folder: Path, nobody: Process) -> None:
    folder.chmod(0o755)
    (folder / "secret").mkdir(mode=0o700)
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    for name in ("secret/file", "file"):
        (folder / name).write_bytes(b"bytes")
        (folder / name).chmod(0o4755)
    ticket = os.getxattr(folder / "secret" / "file", "user.irdmafs.clone").decode()
    forged = ticket[:-1] + ("0" if ticket[-1] != "0" else "1")
    for nonsense in ([("name", forged)], [("name", ticket)] * 2, [("..", ticket)], [], 7, [[7, 7]]):
        with fails_with(errno.EINVAL):
            os.setxattr(folder, "user.irdmafs.clone", json.dumps(nonsense).encode())
    clone = """
def clone(source, target, name):
    ticket = os.getxattr(f"{place}/{source}", "user.irdmafs.clone").decode()
    os.setxattr(f"{place}/{target}", "user.irdmafs.clone", f'[["{name}", "{ticket}"]]'.encode())
"""
    nobody.do(clone + "clone('file', 'open', 'mine')", place=str(folder))
    for refused in ("clone('secret/file', 'open', 'other')", "clone('file', '', 'mine')"):
        with fails_with(errno.EACCES):
            nobody.do(clone + refused, place=str(folder))
    made = (folder / "open" / "mine").stat()
    assert (made.st_uid, stat.S_IMODE(made.st_mode)) == (65534, 0o755)


def test_a_draft_begins_with_the_files_of_a_version(mount: Mount, folder: Path) -> None:
    versions = client.Versions(folder)
    with versions.draft() as directory:
        for name in ("same", "other"):
            Path(directory, name).write_bytes(pattern(1, MIB))
    room = room_of(mount)
    with versions.draft(base=1) as directory:
        Path(directory, "other").write_bytes(b"new")
    assert room_of(mount) - room < MIB
    assert Path(versions.path(1), "other").read_bytes() == pattern(1, MIB)
    assert Path(versions.path(2), "same").read_bytes() == pattern(1, MIB)
    assert Path(versions.path(2), "other").read_bytes() == b"new"
    with pytest.raises(FileNotFoundError, match="no version 7"), versions.draft(base=7):
        pass


def test_the_command_tells_what_was_shared(folder: Path, tmp_path: Path) -> None:
    (folder / "file").write_bytes(bytes(3 * MIB))
    done = irdmafs("clone", folder / "file", folder / "target")
    assert done.stdout == "1 files shared (3.0 MiB), 0 copied (0 B)\n"
    done = irdmafs("clone", folder, tmp_path / "target")
    assert done.stdout == "0 files shared (0 B), 2 copied (6.0 MiB)\n"
    missing = irdmafs("clone", folder / "none", folder / "target")
    assert (missing.returncode, missing.stderr) == (
        1, f"irdmafs: {folder}/none: No such file or directory\n"
    )  # fmt: skip
