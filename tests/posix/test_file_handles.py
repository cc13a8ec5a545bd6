"""File handles: name_to_handle_at(2), open_by_handle_at(2), by which NFS servers and backups find files."""

import ctypes
import errno
import os
import struct
from pathlib import Path

import pytest
from harness.closing import descriptor
from harness.cluster_mount import CLUSTER
from harness.errors import fails_with
from harness.mountpoint import Mount
from harness.processes import Process

SESSIONS = ("kernel", CLUSTER)
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs CAP_DAC_READ_SEARCH")
libc = ctypes.CDLL(None, use_errno=True)
_HEAD = struct.Struct("<Ii")


def handle_of(path: Path) -> bytes:
    buffer = ctypes.create_string_buffer(_HEAD.pack(128, 0) + bytes(128))
    mount_id = ctypes.c_int()
    if libc.name_to_handle_at(-100, os.fsencode(path), buffer, ctypes.byref(mount_id), 0):
        raise OSError(ctypes.get_errno(), "name_to_handle_at")
    size, _ = _HEAD.unpack_from(buffer.raw)
    return buffer.raw[: _HEAD.size + size]


def open_by(mount: Path, handle: bytes, flags: int = os.O_RDONLY) -> int:
    with descriptor(os.open(mount, os.O_RDONLY | os.O_DIRECTORY)) as directory:
        fd: int = libc.open_by_handle_at(directory, handle, flags)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "open_by_handle_at")
    return fd


def content_by(mount: Path, handle: bytes) -> bytes:
    with os.fdopen(open_by(mount, handle), "rb") as file:
        return file.read()


def test_a_handle_leads_to_its_file_whatever_it_is_called(mount: Mount, folder: Path) -> None:
    (folder / "file").write_bytes(b"content")
    handle = handle_of(folder / "file")
    assert content_by(mount.path, handle) == b"content"
    os.rename(folder / "file", folder / "moved")
    (folder / "file").write_bytes(b"other")
    assert content_by(mount.path, handle) == b"content"
    (folder / "moved").write_bytes(b"newer content")
    assert content_by(mount.path, handle) == b"newer content"
    with os.fdopen(open_by(mount.path, handle, os.O_RDWR), "r+b") as file:
        file.write(b"older")
    assert (folder / "moved").read_bytes() == b"older content"


def test_a_handle_of_a_directory_leads_there(mount: Mount, folder: Path) -> None:
    (folder / "dir").mkdir()
    (folder / "dir" / "file").write_bytes(b"content")
    with descriptor(
        open_by(mount.path, handle_of(folder / "dir"), os.O_RDONLY | os.O_DIRECTORY)
    ) as fd:
        assert os.listdir(fd) == ["file"]
        # The kernel asks for its parent to find its place in the tree.
        assert os.readlink(f"/proc/self/fd/{fd}") == str(folder / "dir")


def test_handles_outlive_the_daemon_and_never_lead_to_another_file(own_mount: Mount) -> None:
    directory, file, gone = (own_mount.path / name for name in ("dir", "dir/file", "gone"))
    directory.mkdir()
    file.write_bytes(b"first")
    file.write_bytes(b"content")
    gone.write_bytes(b"gone")
    handles = [handle_of(path) for path in (own_mount.path, directory, file, gone)]
    gone.unlink()
    own_mount.restart()
    for number in range(5):
        (own_mount.path / f"new{number}").write_bytes(b"new")
    root, *_ = handles
    os.close(open_by(own_mount.path, root, os.O_RDONLY | os.O_DIRECTORY))
    fd = open_by(own_mount.path, handles[1], os.O_RDONLY | os.O_DIRECTORY)
    assert os.listdir(fd) == ["file"]
    os.close(fd)
    assert content_by(own_mount.path, handles[2]) == b"content"
    with fails_with(errno.ESTALE):
        open_by(own_mount.path, handles[3])


def test_handle_of_a_replaced_version_leads_to_the_file(own_mount: Mount, reader: Process) -> None:
    file = own_mount.path / "file"
    file.write_bytes(b"first")
    reader.do("held = open(f, 'rb')", f=str(file))
    file.write_bytes(b"second")
    handle = handle_of(file)
    assert content_by(own_mount.path, handle) == b"second"
    reader.do("held.close()")
    own_mount.restart()
    assert content_by(own_mount.path, handle) == b"second"
