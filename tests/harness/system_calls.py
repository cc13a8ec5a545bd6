"""Count the system calls of a daemon: a cost that no timing can blur."""

import contextlib
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

_CALL = re.compile(r"^(?:\d+ +)?(\w+)\(", re.MULTILINE)
# What waiting and looking for requests takes, which differs from run to run.
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
