"""The process that commands of tests are forked from: it has imported irdmafs, which takes 0.3 s, before.

    python fork_server.py SOCKET ROOM

SOCKET is the number of an inherited socket on which forks.py sends requests. ROOM only makes the
command line long enough for that of any command: a child writes its own in its place, because processes
are found by it. The server ends when the other end of the socket is closed. It has one thread, so that a
fork copies all of it.

A child is what `python -m irdmafs`, or a program that changes it, would be: a session of its own in "/",
with the output, the environment and the network namespace of the request, no other descriptors, and signals
as Python sets them.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import runpy
import select
import socket
import struct
import sys
import threading
from importlib import import_module
from typing import NamedTuple, TypedDict

# Modules that commands import, some of them late. Importing them starts no thread and opens no file.
MODULES = (
    "encodings.idna",
    "irdmafs.cli.cluster_admin",
    "irdmafs.cli.cluster_members",
    "irdmafs.cli.cluster_status",
    "irdmafs.cli.command",
    "irdmafs.mount.daemon",
    "irdmafs.backend.cluster.overview",
    "irdmafs.backend.cluster.report",
    "irdmafs.backend.model.rendezvous",
    "irdmafs.backend.node.daemon",
    "irdmafs.backend.store.remote.store",
    "irdmafs.backend.observe.logs",
    "irdmafs.fuse.portable",
    "irdmafs.train",
)
PACKAGE = "irdmafs"
REQUEST_MAX_BYTES = 1 << 17
# The pid of a child, once it is what it is to be, and after its end the status of wait(2).
NUMBER = struct.Struct("=i")
CLONE_NEWNET = 0x40000000
_FIRST_OWN_FD, _AFTER_ALL_FDS = 3, 1 << 16


class Request(TypedDict):
    """Describes a child. Its descriptors come with the message: output, error output and the pipe that its
    numbers are written to. An empty `namespace` is the server's own."""

    command: list[str]
    environment: dict[str, str]
    namespace: str


class _Started(NamedTuple):
    pid: int
    numbers: int


class _Server:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._children: dict[int, _Started] = {}
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)

    def run(self) -> Request | None:
        """Serve until the other end is closed, and return None; return a request in the child for it."""
        while True:
            for fd, _ in self._poll.poll():
                if fd in self._children:
                    self._tell_end(fd)
                    continue
                message, descriptors, _, _ = socket.recv_fds(self._channel, REQUEST_MAX_BYTES, 3)
                if not message:
                    return None
                request: Request = json.loads(message)
                if self._is_child_after_fork(request, *descriptors):
                    return request

    def _tell_end(self, pidfd: int) -> None:
        self._poll.unregister(pidfd)
        os.close(pidfd)
        child = self._children.pop(pidfd)
        _tell(child.numbers, os.waitpid(child.pid, 0)[1])
        os.close(child.numbers)

    def _is_child_after_fork(
        self, request: Request, output: int, errors: int, numbers: int
    ) -> bool:
        pid = os.fork()
        if pid == 0:
            try:
                _become(request, output, errors)
            finally:
                _tell(numbers, os.getpid())
                os.closerange(_FIRST_OWN_FD, _AFTER_ALL_FDS)
            return True
        os.close(output)
        os.close(errors)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = _Started(pid, numbers)
        self._poll.register(pidfd, select.POLLIN)
        return False


def _tell(numbers: int, number: int) -> None:
    try:
        os.write(numbers, NUMBER.pack(number))
    except BrokenPipeError:
        pass  # nobody waits for this child any more


def _become(request: Request, output: int, errors: int) -> None:
    """Be in the state in which `python` would begin to run the command. Raises OSError."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    if request["namespace"]:
        enter(request["namespace"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _show_command_line(request["command"])
    sys.orig_argv = list(request["command"])
    # sys.argv[0] is set by who runs the module.
    sys.argv[1:] = request["command"][3 if _is_package(request) else 2 :]
    gc.enable()


def _is_package(request: Request) -> bool:
    return request["command"][1] == "-m"


def enter(namespace: str) -> None:
    """Have this thread be in a network namespace, which a path leads to. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(namespace, os.O_RDONLY)
    if libc.setns(fd, CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), namespace)


def _show_command_line(words: list[str]) -> None:
    """Write a command line over that of the server (proc(5): arg_start and arg_end of /proc/PID/stat)."""
    with open("/proc/self/stat", "rb") as stat:
        start, end = map(int, stat.read().rpartition(b")")[2].split()[45:47])
    line = b"".join(os.fsencode(word) + b"\0" for word in words)
    assert len(line) <= end - start, "the command line has no room"
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(line.ljust(end - start, b"\0"))


def main() -> None:
    # `python -m` looks for modules in "/", where it is started, and not beside this file.
    sys.path[0] = "/"
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # otherwise numpy starts threads when it is imported
    for name in MODULES:
        import_module(name)
    # msgspec looks at the types of a configuration and of messages when they are first used.
    config = import_module("irdmafs.backend.cluster.config")
    config.ClusterConfig.load(os.devnull, {"cluster": {"etcd": ["localhost:1"]}})
    import_module("irdmafs.backend.transport.operations").codec_for(())
    gc.disable()
    # A collection in a child would copy all pages that it looks at.
    gc.freeze()
    request = _Server(socket.socket(fileno=int(sys.argv[1]))).run()
    # Here the child has nothing of the server on its stack or in a local name.
    if request is None:
        return
    try:
        if _is_package(request):
            runpy.run_module(PACKAGE, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(request["command"][1], run_name="__main__")
    except SystemExit as end:
        # Freeing each object, and thereby copying each page they lie in, takes longer than most commands.
        if isinstance(end.code, int):
            with contextlib.suppress(OSError):
                threading._shutdown()  # type: ignore[attr-defined]
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(end.code)
        raise


if __name__ == "__main__":
    main()
