"""Scenarios: steps of processes that come to the same on a mount as on a tmpfs.

A line of a scenario is `PROCESS: CODE`. Processes are made when they are first named, and begin in the
directory of the scenario. The process `nobody` is one of a user who owns nothing.
"""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from harness.processes import Process

_PRELUDE = """
import zlib
libc = ctypes.CDLL(None, use_errno=True)
def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def renameat2(old, new, flags):
    checked(libc.renameat2(-100, old.encode(), -100, new.encode(), flags))
def write(path, content='x', mode='w'):
    with open(path, mode) as file: file.write(content)
def read(path):
    with open(path) as file: return file.read()
def told(content):
    return len(content), bytes(content[:50]), bytes(content[-50:]), zlib.crc32(content)
def content(path):
    with open(path, 'rb') as file: return told(file.read())
def open_fd(path, flags=os.O_RDWR, mode=0o644):
    return os.open(path, flags, mode)
def reopened(fd, flags):
    again = os.open(f'/proc/self/fd/{fd}', flags)
    os.close(fd)
    return again
def moved(path, change):
    # Tells whether ctime and mtime of the directory and of the file move.
    for one in ('.', path):
        os.utime(one, ns=(10**9, 10**9))
    before = [os.stat(one).st_ctime_ns for one in ('.', path)]
    change()
    after = [os.stat(one) for one in ('.', path)]
    return [(s.st_mtime_ns != 10**9, s.st_ctime_ns > was) for s, was in zip(after, before)]
def tree():
    return sorted(os.path.join(top, name) for top, *rest in os.walk('.') for name in sum(rest, []))
"""


class AsOnTmpfs(Protocol):
    """Compares what a scenario comes to on a mount and a tmpfs. `begin`: what each process does first."""

    def __call__(self, scenario: str, begin: str = "") -> None: ...


def outcomes(
    scenario: str, begin: str, place: Path, take: Callable[[str], Process]
) -> list[tuple[str, object]]:
    """Run a scenario in a directory, and return what each line came to: its value, or its errno.
    `take` gives the process of a name."""
    actors: dict[str, Process] = {}
    found: list[tuple[str, Any]] = []
    for line in scenario.strip().splitlines():
        name, _, code = line.strip().partition(": ")
        if name not in actors:
            actors[name] = take(name)
            actors[name].do(f"{_PRELUDE}os.chdir(place)\n{begin}", place=str(place))
        try:
            found.append((line, actors[name].do(code)))
        except OSError as error:
            found.append((line, errno.errorcode[error.errno or 0]))
    for name in actors:
        actors[name].do("os.chdir('/')")
    return found
