"""Guests as processes: started, their output passed on, ended whatever happens.

A guest is one process group of this user. What it is to do it reads from a directory (`init` says how);
what it has to say comes through pipes that are its consoles. It owns nothing outside itself, so it is
not shut down: once its command's exit status is here, it is killed.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

INIT = Path(__file__).resolve().with_name("init")
# In the environment of the command: that it runs in a guest, and the guest's number.
IN_GUEST = "IRDMAFS_GUEST"
NODE = "IRDMAFS_GUEST_NODE"
NODES = "IRDMAFS_GUEST_NODES"

TIMED_OUT = 124
NO_STATUS = 125
LINKS_MAX = 8
# What the kernel says is shown only if the guest ends without an exit status.
_KERNEL_LINES_MAX = 60
# Outlives us if we are killed: the end of its input is the end of the guest. A guest's programs are
# processes that do not die with its kernel.
_KEEPER = 'read -r _; kill -KILL "-$1"; rm -rf -- "$2"'
_SOCKET_BUFFER_BYTES = 4 << 20


class GuestError(Exception):
    """A guest cannot be started; the text says why."""


@dataclass(frozen=True)
class Order:
    """What a guest is and does. `out` is a directory that is writable in the guest."""

    command: Sequence[str]
    directory: Path
    environment: Mapping[str, str]
    memory_bytes: int = 2 << 30
    links: Sequence[str] = ("roce0",)
    out: Path | None = None


@dataclass
class Guest:
    """One running guest. `ends` are the sockets that join its links to those of another guest."""

    kernel: Path
    order: Order
    node: int = 0
    nodes: int = 1
    ends: Sequence[socket.socket] = ()
    status: int | None = None
    kernel_log: deque[bytes] = field(default_factory=lambda: deque(maxlen=_KERNEL_LINES_MAX))

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: subprocess.Popen[bytes] | None = None
        self._pipes: dict[str, int] = {}

    def __enter__(self) -> Guest:
        self._directory = Path(tempfile.mkdtemp(prefix="irdmafs-guest-", dir="/tmp"))
        try:
            self._write_order()
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @property
    def pipes(self) -> Mapping[str, int]:
        """Descriptors to read: `stdout` and `stderr` of the command, `kernel`, `status`."""
        return self._pipes

    def _write_order(self) -> None:
        order = self.order
        environment = {
            **order.environment,
            IN_GUEST: "1",
            NODE: str(self.node),
            NODES: str(self.nodes),
        }
        (self._directory / "command").write_bytes(_words(order.command))
        (self._directory / "environment").write_bytes(
            _words([f"{name}={value}" for name, value in environment.items()])
        )
        settings = {
            "directory": shlex.quote(str(order.directory)),
            "node": str(self.node),
            "out": shlex.quote(str(order.out or "")),
            "links": f"({' '.join(map(shlex.quote, order.links))})",
            "joined": "yes" if self.ends else "no",
        }
        text = "".join(f"{name}={value}\n" for name, value in settings.items())
        (self._directory / "settings").write_bytes(os.fsencode(text))

    def _start(self) -> None:
        home = str(self._directory)
        memory = _memory_directory(self.order.memory_bytes)
        writers: dict[str, int] = {}
        for name in ("stdout", "stderr", "status", "kernel"):
            self._pipes[name], writers[name] = os.pipe()
        consoles = [
            f"con{number}=null,fd:{writers[name]}"
            for number, name in enumerate(("kernel", "stdout", "stderr", "status"))
        ]
        links = [
            f"vec{i}:transport=fd,fd={end.fileno()},depth=128,mtu=9000,vec=0,"
            f"mac=02:00:00:00:{i:02x}:{self.node + 1:02x}"
            for i, end in enumerate(self.ends)
        ]
        command = [
            str(self.kernel),
            f"mem={self.order.memory_bytes >> 20}M",
            f"uml_dir={home}/",
            f"umid=guest{self.node}",
            *("root=none", "rootfstype=hostfs", "rootflags=/", "ro", "quiet"),
            *("con=null", "ssl=null", *consoles, *links),
            f"init={INIT}",
            f"guest={home}",
        ]
        passed = [*writers.values(), *(end.fileno() for end in self.ends)]
        try:
            with _on_one_processor(self.node):
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=writers["kernel"],
                    stderr=subprocess.STDOUT,
                    pass_fds=passed,
                    start_new_session=True,
                    cwd="/",
                    env={"PATH": os.defpath, "HOME": home, "TMPDIR": memory},
                )
        except OSError as error:
            raise GuestError(f"cannot start {self.kernel}: {error}") from None
        finally:
            for writer in writers.values():
                os.close(writer)
        self._keeper = subprocess.Popen(
            ["sh", "-c", _KEEPER, "keeper", str(self.pid), home],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Kill it, with all its processes; their ends of the pipes are closed then."""
        # It leads a group that nobody else has joined. It is not reaped before this, so the number
        # is still its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.kill()
            self._keeper.communicate()
            self._keeper = None
        if self._process is not None:
            self.kill()
            self._process.wait()
            self._process = None
        for pipe in self._pipes.values():
            os.close(pipe)
        self._pipes.clear()
        shutil.rmtree(self._directory, ignore_errors=True)


@contextlib.contextmanager
def _on_one_processor(node: int) -> Iterator[None]:
    """What is started meanwhile stays on one processor. A guest has only one; its system calls go to and
    fro between two processes, which costs several times as much between two processors."""
    allowed = os.sched_getaffinity(0)
    chosen = sorted(allowed)[(os.getpid() + node) % len(allowed)]
    os.sched_setaffinity(0, {chosen})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _words(words: Sequence[str]) -> bytes:
    for word in words:
        if "\0" in word:
            raise GuestError("a word has a NUL in it")
    return b"".join(os.fsencode(word) + b"\0" for word in words)


def _memory_directory(memory_bytes: int) -> str:
    """Where the guest's memory is a file, which its programs are mapped from."""
    for directory in ("/dev/shm", "/tmp"):
        if not os.access(directory, os.W_OK):
            continue
        found = os.statvfs(directory)
        if not found.f_flag & os.ST_NOEXEC and found.f_bavail * found.f_frsize >= memory_bytes:
            return directory
    raise GuestError(
        f"neither /dev/shm nor /tmp has {memory_bytes >> 20} MiB for the guest's memory, from which "
        "programs may be run: see --memory"
    )


@contextlib.contextmanager
def guests(kernel: Path, order: Order, nodes: int) -> Iterator[list[Guest]]:
    """One guest, or two whose links are joined, each carrying out `order`."""
    assert nodes in (1, 2)
    if len(order.links) > LINKS_MAX:
        raise GuestError(f"a guest has at most {LINKS_MAX} links")
    with contextlib.ExitStack() as stack:
        ends: list[list[socket.socket]] = [[] for _ in range(nodes)]
        if nodes == 2:
            for _ in order.links:
                pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
                for side, end in zip(ends, pair, strict=True):
                    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                        end.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
                    side.append(stack.enter_context(end))
        started = [
            stack.enter_context(Guest(kernel, order, node, nodes, ends[node]))
            for node in range(nodes)
        ]
        for side in ends:
            for end in side:
                end.close()
        yield started
