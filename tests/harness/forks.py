"""Commands of irdmafs as processes: forked from one that has imported it already, or started by exec.

A command spends 0.3 s of a processor on imports, and tests start thousands of them. So tests call
`fork_commands`. Measurements do not, and tests of the command itself take `real_commands`. Nothing is
forked where the environment has IRDMAFS_REAL_COMMANDS.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from .fork_server import NUMBER, PACKAGE, REQUEST_MAX_BYTES, Request
from .tiers import Tier, allow

REAL = "IRDMAFS_REAL_COMMANDS"
PREFIX = (sys.executable, "-m", PACKAGE)
# Programs that import irdmafs; most are its command with changes.
PROGRAMS = Path(__file__).with_name("programs")
_SERVER = Path(__file__).with_name("fork_server.py")
# For the longest command line.
_ROOM_BYTES = 4096
# Python, the linker and the allocator read these when a program starts, which a forked one does not.
_READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_")
_ENTER_NAMESPACE = "--net="


class Running(Protocol):
    """A started process, as far as subprocess.Popen and Forked are the same."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int, /) -> None: ...


class Forked:
    """A child of the server. Its methods are those of subprocess.Popen."""

    def __init__(self, command: Sequence[str], numbers: int) -> None:
        """`numbers` is the pipe on which the server tells its pid and its status. Raises OSError."""
        self._command = list(command)
        self._numbers = open(numbers, "rb", buffering=0)  # noqa: SIM115
        self.returncode: int | None = None
        self.pid = self._number()

    def _number(self) -> int:
        found = self._numbers.read(NUMBER.size)
        if len(found or b"") != NUMBER.size:
            raise ChildProcessError(f"the process that forks commands is gone: {self._command}")
        return int(NUMBER.unpack(found)[0])

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status, of a signal the negative number. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._numbers, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(self._command, timeout or 0)
            self.returncode = os.waitstatus_to_exitcode(self._number())
            self._numbers.close()
        return self.returncode

    def send_signal(self, sig: int, /) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


class ForkServer:
    """The process fork_server.py. It ends with this one, or when this is forgotten."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._environment = os.environ.copy()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, _SERVER, str(number), "." * _ROOM_BYTES],
                pass_fds=(number,),
                stdin=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )

    def suits(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Return whether a child would not differ from the command in this environment."""

        def of_start(variables: Mapping[str, str]) -> dict[str, str]:
            return {k: v for k, v in variables.items() if k.startswith(_READ_AT_START)}

        room = sum(len(os.fsencode(word)) + 1 for word in command) <= _ROOM_BYTES
        return room and of_start(environment) == of_start(self._environment)

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        namespace: str,
        output: int,
        errors: int,
    ) -> Forked:
        """Fork a child that runs PREFIX, or a program of ours, and further words. Raises OSError."""
        request = Request(command=list(command), environment=dict(environment), namespace=namespace)
        message = json.dumps(request).encode()
        assert len(message) <= REQUEST_MAX_BYTES
        ours, theirs = os.pipe()
        try:
            socket.send_fds(self._channel, [message], [output, errors, theirs])
        finally:
            os.close(theirs)
        return Forked(command, ours)

    def close(self) -> None:
        self._channel.close()
        self._process.wait()


class _State:
    """Keeps the server, and whether commands are forked now."""

    def __init__(self) -> None:
        self.forks = False
        self.server: ForkServer | None = None
        self.lock = threading.Lock()


_state = _State()


def fork_commands() -> None:
    """Fork commands from now on, in the processes that do not call `real_commands`."""
    _state.forks = not os.environ.get(REAL)


def end_forking() -> None:
    """End the server, if there is one."""
    _state.forks = False
    if _state.server is not None and _state.server.owner == os.getpid():
        _state.server.close()
        _state.server = None


@contextlib.contextmanager
def real_commands() -> Iterator[None]:
    before, _state.forks = _state.forks, False
    try:
        yield
    finally:
        _state.forks = before


def _server() -> ForkServer:
    with _state.lock:
        # A process that was forked from the server's owner takes one of its own.
        if _state.server is None or _state.server.owner != os.getpid():
            _state.server = ForkServer()
        return _state.server


def namespace_of(launcher: Sequence[str]) -> str | None:
    """Return the network namespace that a launcher enters, "" for none; None if it does anything else."""
    match list(launcher):
        case []:
            return ""
        case ["nsenter", word, "--"] if word.startswith(_ENTER_NAMESPACE):
            return word.removeprefix(_ENTER_NAMESPACE)
    return None


def start(
    command: Sequence[str],
    launcher: Sequence[str] = (),
    *,
    output: BinaryIO | int,
    errors: BinaryIO | int,
    environment: Mapping[str, str] | None = None,
) -> Running:
    """Start a program in "/" and a session of its own, without input. `launcher` is a command prefix that
    prepares it, `environment` is added to that of this process. Raises OSError."""
    allow(Tier.PROMISES, " ".join(command))
    variables = os.environ | dict(environment or {})
    namespace = namespace_of(launcher)
    python, program, *_ = (*command, "", "")
    is_ours = python == sys.executable and Path(program).parent == PROGRAMS
    can_be_forked = is_ours or tuple(command[: len(PREFIX)]) == PREFIX
    if _state.forks and namespace is not None and can_be_forked:
        server = _server()
        if server.suits(command, variables):
            fds = (fd if isinstance(fd, int) else fd.fileno() for fd in (output, errors))
            return server.start(command, variables, namespace, *fds)
    return subprocess.Popen(
        [*launcher, *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        cwd="/",
        start_new_session=True,
        env=variables,
    )


def run(
    command: Sequence[str], launcher: Sequence[str] = (), *, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run a program as `start` does, and return what it wrote. Raises OSError, and
    subprocess.TimeoutExpired if it had to be killed."""
    words = [*launcher, *command]
    with _memory() as output, _memory() as errors:
        running = start(command, launcher, output=output, errors=errors)
        try:
            status = running.wait(timeout_s)
        except BaseException:
            running.send_signal(signal.SIGKILL)
            running.wait()
            raise
        return subprocess.CompletedProcess(words, status, _text(output), _text(errors))


def _memory() -> BinaryIO:
    return open(os.memfd_create("output"), "r+b", buffering=0)


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode())
