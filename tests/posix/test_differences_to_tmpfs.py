"""The differences to tmpfs that docs/posix.md lists: each as it is here, and as it is there."""

import fcntl
import os
from pathlib import Path

import pytest
from harness.models.namespace import error_of

SESSIONS = ("kernel",)


def test_seeking_for_data_in_a_directory(folder: Path, tmpfs: Path) -> None:
    found = []
    for place in (tmpfs, folder):
        fd = os.open(place, os.O_RDONLY)
        found.append(error_of(lambda fd=fd: os.lseek(fd, 0, os.SEEK_DATA)))  # type: ignore[misc]
        os.close(fd)
    assert found == ["EINVAL", "ENXIO"]


# asm-generic/ioctls.h: get and set flags, get and set flags with a project.
GETFLAGS, SETFLAGS = 0x80086601, 0x40086602
FSGETXATTR, FSSETXATTR = 0x801C581F, 0x401C5820


@pytest.mark.parametrize("name", ["file", "dir"])
@pytest.mark.parametrize("command", [GETFLAGS, SETFLAGS, FSGETXATTR, FSSETXATTR])
def test_flags_of_chattr_are_no_ioctl_here(
    folder: Path, tmpfs: Path, command: int, name: str
) -> None:
    found = []
    for place in (tmpfs, folder):
        (place / "file").touch()
        (place / "dir").mkdir()
        fd = os.open(place / name, os.O_RDONLY)
        found.append(error_of(lambda fd=fd: fcntl.ioctl(fd, command, bytes(28))))  # type: ignore[misc]
        os.close(fd)
        (place / "file").write_bytes(b"x")
        (place / "file").unlink()
    assert found == ["ok", "ENOTTY"]


def test_times_are_kept_between_1677_and_2262(folder: Path, tmpfs: Path) -> None:
    found = []
    for place in (tmpfs, folder):
        (place / "file").touch()
        os.utime(place / "file", (-(1 << 40), 1 << 40))
        status = (place / "file").stat()
        found.append((status.st_atime_ns, status.st_mtime_ns))
    second_ns = 1_000_000_000
    assert found == [(-(second_ns << 40), second_ns << 40), (-(1 << 63), (1 << 63) - 1)]
