"""What operations cost the daemon, counted in its system calls."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from mountpoint import Mount
from processes import Process
from system_calls import system_calls

TakeProcess = Callable[[], Process]
pytestmark = [
    pytest.mark.beyond_posix,
    pytest.mark.kernel_session("without passthrough every byte is a request"),
]

FILES = 50
WRITE = """
for n in range(files):
    fd = os.open(f'{d}/{n}', os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(fd, bytes(4096))
    os.close(fd)
"""


def each(mount: Mount, worker: Process, step: str, **values: object) -> Counter[str]:
    """Return the calls that one file of a step takes, rounded down: what happens now and then is not
    of one file."""
    with system_calls(mount.pid) as counted:
        worker.do(step, files=FILES, **values)
    return Counter({kind: n // FILES for kind, n in counted.items() if n >= FILES})


def test_closing_a_file_asks_once_for_the_writer(
    mount: Mount, folder: Path, process: TakeProcess
) -> None:
    writer = process()
    os.mkdir(folder / "d")
    calls = each(mount, writer, WRITE, d=str(folder / "d"))
    assert calls["pread64"] <= 1, calls
