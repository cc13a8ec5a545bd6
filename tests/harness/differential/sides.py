"""One side of a differential test: its processes, and what they say in a form that can be compared."""

import contextlib
import json
import marshal
import os
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.closing import Closing
from harness.differential.actor import MESSAGE_MAX_BYTES
from harness.differential.steps import ACTORS, Step

REPLY_TIMEOUT_S = 20.0
_EXPLICIT_NS_MAX = 10**17  # times that steps set lie in the years before this
Value = Any


class Hang(Exception):
    """A process did not answer in time."""


class Died(Exception):
    """A process ended when it was to answer."""


class Normal:
    """Makes what one side says comparable: numbers of inodes and processes by the order in which they
    appear, times by whether they moved."""

    def __init__(self, *, times: bool = True) -> None:
        self._with_times = times
        self._inodes: dict[int, int] = {}
        self._times: dict[int, tuple[int, int]] = {}
        self._stored = False
        self.processes: dict[int, int] = {}

    def stored(self) -> None:
        """Note a store through a mapping: it moves times when it is the first of a page, large or small;
        with pyfuse3 when the kernel writes the page."""
        self._stored = True

    def value(self, found: Value) -> Value:
        """The same for both sides, if they did the same."""
        if not isinstance(found, tuple):
            return found
        if found and found[0] == "stat":
            _, ino, mode, nlink, uid, gid, size, _atime, mtime, ctime = found
            # Not compared: access times, which follow those of the extents; and of more hosts than one the
            # links of directories, which are 1 where nobody has looked into them.
            moved = self._moved(ino, mtime, ctime) if self._with_times else {}
            return {
                "inode": self._inode(ino),
                "mode": oct(mode),
                "nlink": nlink if self._with_times or not stat.S_ISDIR(mode) else bool(nlink),
                "owner": (uid, gid),
                "size": size,
                **moved,
            }
        if found and found[0] == "ino":
            return ("inode", self._inode(found[1]))
        if found and found[0] == "pid":
            return ("process", self.processes.get(found[1], found[1]))
        return tuple(self.value(part) for part in found)

    def known(self, ino: int) -> int | None:
        """The number that an inode has in results, if it was in one."""
        return self._inodes.get(ino)

    def _inode(self, ino: int) -> int:
        return self._inodes.setdefault(ino, len(self._inodes))

    def _moved(self, ino: int, mtime: int, ctime: int) -> dict[str, Value]:
        before = self._times.get(ino)
        self._times[ino] = (mtime, ctime)
        if self._stored:
            return {"mtime": "unknown"}
        if before is None:
            return {"mtime": _told(mtime)}
        return {"mtime": _told(mtime, before[0]), "ctime": _order(ctime, before[1])}


def _told(time_ns: int, before_ns: int | None = None) -> Value:
    """A time that a step set, or how another one moved."""
    if time_ns < _EXPLICIT_NS_MAX:
        return time_ns
    return "now" if before_ns is None else _order(time_ns, before_ns)


def _order(time_ns: int, before_ns: int) -> str:
    return "same" if time_ns == before_ns else "later" if time_ns > before_ns else "EARLIER"


class Side(Closing):
    """The processes that work in one directory. A context manager.

    `tops` are mounts of the same filesystem on one or more hosts: processes stand in them by turns.
    """

    def __init__(self, tops: Sequence[Path], *, times: bool) -> None:
        self._tops = tops
        self._with_times = times
        self._roots: list[str] = []
        pairs = [
            socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(ACTORS + 1)
        ]
        self._control = pairs[0][0]
        self._channels = [pair[0] for pair in pairs[1:]]
        theirs = [pair[1] for pair in pairs]
        numbers = [one.fileno() for one in theirs]
        state = {"control": numbers[0], "sockets": numbers[1:], "times": times}
        actor = Path(__file__).with_name("actor.py")
        self._popen = subprocess.Popen(
            [sys.executable, "-SEI", actor, json.dumps(state)], pass_fds=numbers, cwd="/"
        )
        for one in theirs:
            one.close()
        self._lives: dict[int, int] = {}  # the number of an actor -> its pidfd
        self.normal = Normal(times=times)

    def begin(self, name: str, actors: int) -> None:
        """Make a new directory, and processes that stand in it."""
        self._roots = [f"{top}/{name}" for top in self._tops]
        self.normal = Normal(times=self._with_times)
        self._ask("begin", self._roots[0])
        for number in range(actors):
            self._lives[number] = -1
            root = self._roots[number % len(self._roots)]
            self._born(number, self._ask("actor", number, root))

    def _born(self, number: int, pid: int) -> None:
        self.normal.processes[pid] = number
        self._lives[number] = os.pidfd_open(pid)

    def is_alive(self, number: int) -> bool:
        return number in self._lives

    def send(self, steps: Sequence[Step], *, observed: bool) -> None:
        """Have one process carry out steps, one after the other."""
        message = marshal.dumps(([(step.op, step.arguments) for step in steps], observed))
        self._channels[steps[0].actor].send(message)

    def receive(self, steps: Sequence[Step]) -> list[Value]:
        """The results of what was sent. Raises Hang, Died."""
        actor = steps[0].actor
        if steps[0].op == "exit":
            self._wait_for_end(actor)
            return [None]
        results = []
        answers = marshal.loads(self._hear(self._channels[actor], self._lives[actor]))
        for step, (result, seen) in zip(steps, answers, strict=True):
            if step.op == "fork":
                self._born(step.arguments["child"], result[1])
            if step.op == "store":
                self.normal.stored()
            results.append((self.normal.value(result), self.normal.value(seen)))
        return results

    def _wait_for_end(self, number: int) -> None:
        pidfd = self._lives.pop(number)
        if not select.select([pidfd], [], [], REPLY_TIMEOUT_S)[0]:
            raise Hang(f"process {number} does not end")
        os.close(pidfd)

    def _hear(self, channel: socket.socket, pidfd: int) -> bytes:
        ready = select.select([channel.fileno(), pidfd], [], [], REPLY_TIMEOUT_S)[0]
        if not ready:
            raise Hang("no answer")
        if channel.fileno() not in ready:
            raise Died("a process died")
        return channel.recv(MESSAGE_MAX_BYTES)

    def _ask(self, op: str, *arguments: Value) -> Value:
        self._control.send(marshal.dumps((op, arguments)))
        if not select.select([self._control], [], [], REPLY_TIMEOUT_S)[0]:
            raise Hang(op)
        answer = self._control.recv(MESSAGE_MAX_BYTES)
        if not answer:
            raise Died(f"the parent of all processes died of {op}")
        return marshal.loads(answer)

    def tree(self, host: int = 0) -> Value:
        """Every name and what it leads to, as a process on that host sees it that has nothing open."""
        return self.normal.value(self._ask("tree", self._roots[host]))

    def end(self) -> None:
        """End what lives, and remove the directory."""
        for number in list(self._lives):
            self.send([Step(number, "exit", {})], observed=False)
            self._wait_for_end(number)
        self._ask("end", self._roots[0])

    def close(self) -> None:
        self._control.close()
        for channel in self._channels:
            channel.close()
        for pidfd in self._lives.values():
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        self._popen.kill()
        self._popen.wait(10)
