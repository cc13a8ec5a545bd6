"""The differences to tmpfs that docs/posix.md lists: each as it is here, and as it is there."""

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.mountpoint import run_checked

SESSIONS = ("kernel",)
pytestmark = pytest.mark.beyond_posix
needs_chattr = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("chattr") is None, reason="needs root and e2fsprogs"
)


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="test-irdmafs-tmpfs-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


def outcome(step: Callable[[], Any]) -> str:
    try:
        step()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"


def test_seeking_for_data_in_a_directory(folder: Path, tmpfs: Path) -> None:
    found = []
    for place in (tmpfs, folder):
        fd = os.open(place, os.O_RDONLY)
        found.append(outcome(lambda fd=fd: os.lseek(fd, 0, os.SEEK_DATA)))  # type: ignore[misc]
        os.close(fd)
    assert found == ["EINVAL", "ENXIO"]


@needs_chattr
def test_an_append_only_file_that_is_open(folder: Path, tmpfs: Path) -> None:
    found = []
    for place in (tmpfs, folder):
        file = place / "file"
        file.write_bytes(b"x" * 4096)
        run_checked("chattr", "+a", file)
        fd = os.open(file, os.O_RDWR | os.O_APPEND)
        try:
            takes = outcome(lambda fd=fd: fcntl.fcntl(fd, fcntl.F_SETFL, 0))  # type: ignore[misc]
            maps = outcome(lambda fd=fd: mmap.mmap(fd, 4096).close())  # type: ignore[misc]
            if takes == "done":
                outcome(lambda fd=fd: os.pwrite(fd, b"y", 0))  # type: ignore[misc]
            assert file.read_bytes()[:4096] == b"x" * 4096
            found.append((takes, maps))
        finally:
            os.close(fd)
            run_checked("chattr", "-a", file)
    assert found == [("EPERM", "EACCES"), ("done", "done")]


@needs_chattr
def test_flags_are_told_by_lsattr_and_not_by_statx(folder: Path, tmpfs: Path) -> None:
    for place in (tmpfs, folder):
        file = place / "file"
        file.touch()
        run_checked("chattr", "+i", file)
        try:
            assert "i" in run_checked("lsattr", file).split()[0]
        finally:
            run_checked("chattr", "-i", file)
