"""The effects of ioctls and statx: chattr's flags as tmpfs has them, the time of birth."""

import errno
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.cluster_mount import CLUSTER
from harness.mountpoint import Mount, run_checked
from harness.processes import Process

SESSIONS = ("kernel", CLUSTER)
TakeProcess = Callable[[], Process]
GETFLAGS, SETFLAGS = 0x80086601, 0x40086602
FSGETXATTR, FSSETXATTR = 0x801C581F, 0x401C5820

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="chattr needs root"),
    pytest.mark.skipif(shutil.which("chattr") is None, reason="e2fsprogs is not installed"),
]


def chattr(flags: str, *paths: Path) -> None:
    run_checked("chattr", flags, *paths)


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="test-irdmafs-tmpfs-", dir="/dev/shm"))
    yield path
    subprocess.run(["chattr", "-R", "-i", "-a", path], stderr=subprocess.DEVNULL, check=False)
    shutil.rmtree(path)


TRY = {
    "read": "os.close(os.open(f, os.O_RDONLY))",
    "write": "os.close(os.open(f, os.O_WRONLY))",
    "append": "fd = os.open(f, os.O_WRONLY | os.O_APPEND); os.write(fd, b'x'); os.close(fd)",
    "append and truncate": "os.close(os.open(f, os.O_WRONLY | os.O_APPEND | os.O_TRUNC))",
    "truncate": "os.truncate(f, 1)",
    "chmod": "os.chmod(f, 0o600)",
    "chown": "os.chown(f, 1, 1)",
    "utime": "os.utime(f, (1, 1))",
    "touch": "os.utime(f)",
    "setxattr": "os.setxattr(f, 'user.new', b'x')",
    "removexattr": "os.removexattr(f, 'user.old')",
    "link": "os.link(f, f + '-link')",
    "rename": "os.rename(f, f + '-new')",
    "rename over": "open(f + '-other', 'w').close(); os.rename(f + '-other', f)",
    "unlink": "os.unlink(f)",
    "create in": "open(d + '/new', 'w').close()",
    "mkdir in": "os.mkdir(d + '/newdir')",
    "unlink in": "os.unlink(d + '/old')",
    "rename in": "os.rename(d + '/old2', d + '/old3')",
    "rename into": "open(d + '-outside', 'w').close(); os.rename(d + '-outside', d + '/inside')",
    "rename out": "os.rename(d + '/old4', d + '-old4')",
    "link into": "open(d + '-outside2', 'w').close(); os.link(d + '-outside2', d + '/linked')",
    "chmod of it": "os.chmod(d, 0o700)",
    "rename of it": "os.rename(d, d + '-renamed'); os.rename(d + '-renamed', d)",
    "rmdir": "os.rmdir(d + '/empty')",
    "rmdir of it": "os.rmdir(e)",
    "write to what was open": "os.write(held, b'x')",
    "truncation of what was open": "os.ftruncate(held, 3)",
    "fallocate of what was open": "os.posix_fallocate(held, 0, 100)",
}


def outcomes(place: Path, by: Process, flags: str) -> dict[str, str]:
    file, directory, empty = place / "file", place / "dir", place / "empty"
    file.write_bytes(b"content")
    os.setxattr(file, "user.old", b"x")
    directory.mkdir()
    empty.mkdir()
    (directory / "empty").mkdir()
    for name in ("old", "old2", "old4"):
        (directory / name).touch()
    by.do("held = os.open(f, os.O_RDWR)", f=str(file), d=str(directory), e=str(empty))
    if flags:
        chattr(flags, file, directory, empty)
    found = {}
    for name, step in TRY.items():
        try:
            by.do(step)
            found[name] = "done"
        except OSError as error:
            found[name] = errno.errorcode[error.errno or 0]
    by.do("os.close(held)")
    if flags:
        left = [path for path in (file, directory, empty) if path.exists()]
        chattr(flags.replace("+", "-"), *left)
    return found


@pytest.mark.parametrize("flags", ["+i", "+a", ""])
def test_immutable_and_append_only_forbid_what_they_forbid_on_tmpfs(
    folder: Path, tmpfs: Path, process: TakeProcess, flags: str
) -> None:
    expected = outcomes(tmpfs, process(), flags)
    assert outcomes(folder, process(), flags) == expected
    assert ("EPERM" in expected.values()) == bool(flags)


ASK = """
import fcntl
fd = os.open(f, os.O_RDONLY)
try:
    answer = fcntl.ioctl(fd, command, data)
except OSError as error:
    answer = error.errno
os.close(fd)
answer
"""


@pytest.mark.parametrize("name", ["file", "dir"])
def test_flags_are_told_and_set_by_either_kind_of_ioctl(
    folder: Path, tmpfs: Path, process: TakeProcess, name: str
) -> None:
    asked: list[tuple[int, bytes]] = [(GETFLAGS, bytes(8)), (FSGETXATTR, bytes(28))]
    for flags in (0x10, 0x20, 0xC0, 0xF0, 0, 0x1, 0x8, 0x80000, 0x10000000):
        asked += [(SETFLAGS, struct.pack("<Q", flags)), *asked[:2]]
    for flags in (0x8, 0x10, 0xC0, 0x20, 0):
        asked += [(FSSETXATTR, struct.pack("<I", flags) + bytes(24)), *asked[:2]]

    def seen(place: Path) -> list[object]:
        (place / "file").touch()
        (place / "dir").mkdir()
        one = process()
        return [one.do(ASK, f=str(place / name), command=c, data=data) for c, data in asked]

    assert seen(folder) == seen(tmpfs)


def test_what_is_made_in_a_directory_gets_only_the_flags_that_are_handed_down(
    folder: Path, tmpfs: Path, process: TakeProcess
) -> None:
    def seen(place: Path) -> list[object]:
        chattr("+adA", place)
        (place / "file").touch()
        (place / "dir").mkdir()
        one = process()
        found = [
            one.do(ASK, f=str(place / name), command=GETFLAGS, data=bytes(8))
            for name in ("file", "dir", ".")
        ]
        chattr("-adA", place)
        return found

    assert seen(folder) == seen(tmpfs)


def test_an_immutable_file_stays_so_when_the_daemon_is_started_again(
    new_mount: Callable[..., Mount],
) -> None:
    mount = new_mount()
    mount.mount()
    file = mount.path / "file"
    file.write_bytes(b"x")
    chattr("+i", file)
    mount.unmount()
    mount.remount()
    with pytest.raises(PermissionError):
        file.unlink()
    with pytest.raises(PermissionError):
        file.write_bytes(b"y")
    chattr("-i", file)
    file.unlink()


def birth(path: Path) -> float:
    return float(run_checked("stat", "--format=%.9W", path))


def test_the_time_of_birth_is_told_and_never_changes(
    new_mount: Callable[..., Mount], process: TakeProcess
) -> None:
    mount = new_mount()
    mount.mount()
    file, directory = mount.path / "file", mount.path / "dir"
    file.write_bytes(b"x")
    directory.mkdir()
    born = [birth(path) for path in (file, directory)]
    made = file.stat().st_mtime
    assert abs(made - born[0]) < 10
    process().do("import time; time.sleep(0.02); open(f, 'wb').write(b'other')", f=str(file))
    os.utime(file, (1, 1))
    os.chmod(file, 0o600)
    os.rename(file, mount.path / "moved")
    assert birth(mount.path / "moved") == born[0]
    mount.unmount()
    mount.remount()
    assert [birth(path) for path in (mount.path / "moved", directory)] == born
