"""An answer reaches the kernel before a change, and is taken in by the thread that asked only after it."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator

import pytest
from harness.mountpoint import Mount, eventually
from harness.processes import Program, is_waiting

READER = """
import os, sys
os.sched_setaffinity(0, {0})
sys.stdin.readline()
fd = os.open(sys.argv[1], os.O_RDONLY)
print(len(os.read(fd, 1000)), os.fstat(fd).st_size)
"""
BUSY = """
import os, sys
os.sched_setaffinity(0, {0})
sys.stdin.readline()
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
print("busy", flush=True)
while True:
    pass
"""


@contextlib.contextmanager
def python(program: str, *arguments: object) -> Iterator[Program]:
    with Program(sys.executable, "-c", program, *arguments) as process:
        try:
            yield process
        finally:
            process.kill()


def on_the_other_processor(pid: int) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {1})


@pytest.fixture
def processors() -> Iterator[None]:
    """Keep this process, and so its children, on the second processor."""
    before = os.sched_getaffinity(0)
    if not {0, 1} <= before:
        pytest.skip("it needs processors 0 and 1")
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    except PermissionError:
        pytest.skip("it needs the right to real-time scheduling")
    os.sched_setaffinity(0, {1})
    yield
    os.sched_setaffinity(0, before)


def begin(process: Program) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def test_a_reader_that_looked_a_file_up_before_a_publish_reads_all_of_what_it_opens(
    new_mount: Callable[..., Mount], processors: None
) -> None:
    with new_mount() as mount:
        path = mount.path / "file"
        path.write_bytes(b"first")
        daemon = mount.pid
        on_the_other_processor(daemon)
        with python(READER, path) as reader, python(BUSY) as busy:
            writer = os.open(path, os.O_WRONLY | os.O_TRUNC)
            os.write(writer, b"second" * 10)
            os.kill(daemon, signal.SIGSTOP)
            try:
                begin(reader)
                eventually(lambda: is_waiting(reader.pid), "the reader looks it up")
                begin(busy)
                assert busy.stdout.readline() == "busy\n"
            finally:
                os.kill(daemon, signal.SIGCONT)
            os.close(writer)
            busy.kill()
            assert reader.stdout.read().split() == ["60", "60"]
