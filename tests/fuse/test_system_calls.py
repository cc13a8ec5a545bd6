"""What operations cost the daemon, counted in its system calls."""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.mountpoint import Mount
from harness.processes import Process

pytestmark = pytest.mark.kernel_session("without passthrough every byte is a request")

FILES = 50
WRITE = """
for n in range(files):
    fd = os.open(f'{d}/{n}', os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(fd, bytes(4096))
    os.close(fd)
"""

_CALL = re.compile(r"^(?:\d+ +)?(\w+)\(", re.MULTILINE)
# System calls of waiting and looking for requests: how many there are differs from run to run.
_WAITING = re.compile("clock_gettime|epoll_ctl|epoll_wait|futex|poll|read|readv|timerfd_settime")


@contextlib.contextmanager
def system_calls(pid: int) -> Iterator[Counter[str]]:
    """Count what all threads of a process call inside the block, without what it calls to wait for
    requests and to read them."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    counted: Counter[str] = Counter()
    with tempfile.NamedTemporaryFile() as trace:
        tracer = subprocess.Popen(
            [strace, "-f", "-o", trace.name, "-p", str(pid)],
            stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert tracer.stderr is not None
            said = tracer.stderr.readline()
            if "attached" not in said:
                pytest.skip(f"no process may be traced here: {said.strip()}")
            yield counted
        finally:
            tracer.terminate()
            tracer.communicate()
        counted.update(_CALL.findall(Path(trace.name).read_text(errors="replace")))
    for kind in filter(_WAITING.fullmatch, list(counted)):
        del counted[kind]


def each(mount: Mount, worker: Process, step: str, **values: object) -> Counter[str]:
    """Return the calls that one file of a step takes, rounded down: what happens now and then is not
    of one file."""
    with system_calls(mount.pid) as counted:
        worker.do(step, files=FILES, **values)
    return Counter({kind: n // FILES for kind, n in counted.items() if n >= FILES})


STATS = ("newfstatat", "fstat", "statx")


def stats(calls: Counter[str]) -> int:
    """Leaves out those of the clock (irdmafs.backend.model.clock), each of which follows a utimensat."""
    return sum(calls[kind] for kind in STATS) - calls["utimensat"]


def test_a_new_file_is_opened_once_and_looked_at_a_few_times_and_its_close_asks_once_for_the_writer(
    mount: Mount, folder: Path, writer: Process
) -> None:
    os.mkdir(folder / "d")
    calls = each(mount, writer, WRITE, d=str(folder / "d"))
    assert calls["pread64"] <= 1, calls
    assert calls["openat"] <= 1, calls
    assert stats(calls) <= 5, calls
    calls = each(mount, writer, WRITE, d=str(folder / "d"))
    assert calls["openat"] <= 1, f"overwriting: {calls}"
    assert stats(calls) <= 5, f"overwriting: {calls}"


def test_attributes_of_a_file_that_nobody_has_open_take_no_look_at_its_extent(
    mount: Mount, folder: Path, reader: Process
) -> None:
    os.mkdir(folder / "d")
    reader.do(WRITE, files=FILES, d=str(folder / "d"))
    read = """
for n in range(files):
    fd = os.open(f'{d}/{n}', os.O_RDONLY)
    os.read(fd, 4096)
    os.close(fd)
"""
    look = "[os.stat(f'{d}/{n}').st_atime_ns for n in range(files)]"
    # An open that empties a file is answered when all that were released are.
    released = "for _ in range(2): open(f'{d}/emptied', 'wb').close()"
    for step in (read, released, look):
        reader.do(step, files=FILES, d=str(folder / "d"))
    # What the kernel knows is no request: a name that is new to it is.
    again = "for n in range(files): os.rename(f'{d}/{n}', f'{d}/_{n}'); os.stat(f'{d}/_{n}')"
    with mount.requests() as asked:
        calls = each(mount, reader, again, d=str(folder / "d"))
    assert asked["GETATTR"] >= FILES, asked
    assert stats(calls) <= 0, calls
