"""Only the kernel session finds deadlocks, lets descriptors be opened again, and wakes callers fast."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.errors import fails_with
from harness.mountpoint import Mount, eventually
from harness.patterns import pattern, version_of
from harness.processes import Process, TakeProcess

from irdmafs.fuse.wakeups import halts_at_once

pytestmark = pytest.mark.kernel_session("pyfuse3 does not carry it")


def test_deadlock_of_posix_locks_is_refused(file: Path, process: TakeProcess) -> None:
    file.write_bytes(b"ab")
    one, two = process(), process()
    for each in (one, two):
        each.do("import fcntl; f = open(file, 'r+b')", file=str(file))
    one.do("fcntl.lockf(f, fcntl.LOCK_EX, 1, 0)")
    two.do("fcntl.lockf(f, fcntl.LOCK_EX, 1, 1)")
    one.start("fcntl.lockf(f, fcntl.LOCK_EX, 1, 1); 'mine'")
    assert not one.finished(within_s=0.2)
    with fails_with(errno.EDEADLK):
        two.do("fcntl.lockf(f, fcntl.LOCK_EX, 1, 0)")
    two.do("f.close()")
    assert one.result() == "mine"


def test_reopening_through_proc_shares_what_the_descriptor_has(
    file: Path, reader: Process, writer: Process
) -> None:
    file.write_bytes(pattern(1, 8192))
    reader.do("fd = os.open(file, os.O_RDONLY)", file=str(file))
    writer.do("open(file, 'wb').write(pattern(2, 8192))", file=str(file))
    assert reader.do("version_of(open(f'/proc/self/fd/{fd}', 'rb').read())") == 1
    writer.do("w = open(file, 'wb', buffering=0); w.write(b'part')", file=str(file))
    assert writer.do("open(f'/proc/self/fd/{w.fileno()}', 'rb').read()") == b"part"
    assert version_of(reader.do("open(file, 'rb').read()", file=str(file))) == 2


NewMount = Callable[..., Mount]


def demanded_latency_us() -> int:
    if not os.access("/dev/cpu_dma_latency", os.W_OK):
        return 0
    with open("/dev/cpu_dma_latency", "rb") as device:
        return int.from_bytes(device.read(4), "little", signed=True)


@pytest.mark.skipif(not halts_at_once(), reason="idle processors of this machine are woken fast")
@pytest.mark.skipif(demanded_latency_us() == 0, reason="somebody else holds /dev/cpu_dma_latency")
def test_wakeups_are_fast_while_requests_come_and_not_for_longer(new_mount: NewMount) -> None:
    mount = new_mount()
    assert mount.status()["fast_wakeups"] is True
    eventually(lambda: demanded_latency_us() > 0, "idle processors may sleep")

    def demanded_after_a_request() -> bool:
        os.path.exists(mount.path / f"missing{os.urandom(4).hex()}")
        return demanded_latency_us() == 0

    eventually(demanded_after_a_request, "idle processors poll while requests come")
    eventually(lambda: demanded_latency_us() > 0, "idle processors may sleep again")
    mount.unmount()


def test_release_that_has_to_tell_the_other_names_is_carried_out_whole(
    mount: Mount, folder: Path, process: TakeProcess, writer: Process
) -> None:
    one, other = folder / "one", folder / "other"

    def descriptors() -> int:
        files = map(os.path.realpath, Path(f"/proc/{mount.pid}/fd").iterdir())
        return sum(not file.startswith("/proc/") for file in files)  # those are of its callers

    before = descriptors()
    one.write_bytes(b"x" * 8192)
    os.link(one, other)
    writer.do(
        "import mmap; fd = os.open(one, os.O_RDWR); os.write(fd, b'y')\n"
        "m = mmap.mmap(fd, 8192)\n"
        "os.closerange(fd, fd + 2)",  # its own, and the duplicate that Python's mmap makes
        one=str(one),
    )
    writer.do("m[8191] = ord('z'); m.close()")  # the release publishes what no close saw
    eventually(lambda: descriptors() <= before, "its descriptor is closed")
    read = "open(f, 'rb').read()"
    assert process().do(read, f=str(other)) == b"y" + b"x" * 8190 + b"z"
    assert "releasing handle" not in mount.log.read_text()
