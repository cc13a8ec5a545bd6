"""Run the daemon: in this process, or in one of its own that outlives the command."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import TypeAlias

from ..backend.model.values import ConfigError
from ..backend.process import MANAGER_VARIABLE, has_terminal
from ..mount_options import MountConfig, MountError

# The default log is in the store, where its bytes are memory.
_LOG_LIMIT_BYTES = 1 << 20
_TAIL_LINES = 10
_PR_SET_PDEATHSIG = 1
_ENDING = (signal.SIGTERM, signal.SIGHUP)

# The work of a process in the background. It is given two functions that send text to the command that
# started the process: one to say, once, that it is ready; one to say before that what it waits for.
_Run: TypeAlias = Callable[[Callable[[str], None], Callable[[str], None]], None]

_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None)


class DaemonFailedError(MountError):
    """The daemon ended for a reason it did not foresee; its log says more."""


@contextlib.contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """Have SIGTERM and SIGHUP interrupt the block as Ctrl-C does; then they end this process."""
    got: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        got.append(number)
        ctrl_c = signal.getsignal(signal.SIGINT)  # perhaps trio's
        (ctrl_c if callable(ctrl_c) else signal.default_int_handler)(number, frame)

    taken = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
        if got:
            signal.raise_signal(got[0])


def log_path(config: MountConfig) -> str:
    """Return the path of the log of a daemon in the background."""
    return config.log_file or os.path.join(config.store, "irdmafs.log")


def _set_up_logging(config: MountConfig) -> None:
    from ..backend.observe.logs import set_up_logging

    to_terminal = config.foreground and config.log_file is None
    file = None if to_terminal else log_path(config)
    if config.cluster is None:
        set_up_logging("", "text", config.log_level, file, limit_bytes=_LOG_LIMIT_BYTES)
    else:
        set_up_logging("mount", config.cluster.log.format, config.log_level, file)


def run_here(config: MountConfig, ready: Callable[[str], None]) -> None:
    """Serve the mount in this process until it is unmounted.

    `ready` gets the session's name, and after a newline why it is not a faster one. Raises
    MountError where it cannot be mounted.
    """
    import trio

    from . import daemon

    _set_up_logging(config)
    trio.run(daemon.serve, config, ready)


def start(config: MountConfig) -> str:
    """Serve the mount in a new process in the background, and return the text that it gave to `ready`.
    Raises as start_process does."""
    return start_process(log_path(config), lambda ready, waits: run_here(config, ready))


def start_process(path: str, run: _Run, waits: Callable[[str], None] = lambda text: None) -> str:
    """Call `run` in a new process in the background, with its output in the log `path`, and return the text
    that `run` gave to its first argument. Each text that it gives to the second one before that is given to
    `waits`.

    Raises MountError with the daemon's reason, DaemonFailedError with the end of its log where it
    died without one. If this process ends before, by any signal, the new one gets SIGTERM.
    """
    # Python code that runs at a fork would swallow Ctrl-C, and nobody would close what is open by then.
    signals = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_ENDING})
    try:
        log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        raise MountError(f"cannot log to {path}: {error.strerror}") from error
    log_start = os.fstat(log).st_size
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    # Fork before any thread is started: a forked process inherits threads' locks, but not the threads.
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        for number in filter(lambda one: callable(signal.getsignal(one)), _ENDING):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        os.close(reader)
        if os.getppid() == parent:
            _daemonize(run, log, writer, signals)
        os._exit(1)
    os.close(log)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)
            while (message := _message(pipe.readline())) and "waits" in message:
                waits(message["waits"])
        except KeyboardInterrupt:
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
            raise
    if "ready" in message:
        return str(message["ready"])
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if "error" in message:
        raise MountError(message["error"])
    if "failure" in message:
        raise DaemonFailedError(f"the daemon failed: {message['failure']} (see {path})")
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    tail = _tail(path, log_start)
    raise DaemonFailedError(f"the daemon {how} before it answered{tail or f'; see {path}'}")


def _message(line: bytes) -> dict[str, str]:
    """Return a message of the daemon; {} if it ended before it had sent all of it."""
    return dict(json.loads(line)) if line.endswith(b"\n") else {}


def _daemonize(run: _Run, log: int, writer: int, signals: Iterable[int]) -> None:
    """Run the forked process to its end. SIGINT is blocked until it leaves the session of the command; then
    `signals` are. Never returns."""
    code = 1
    pipe = os.fdopen(writer, "wb", buffering=0)

    def tell(**message: str) -> None:
        if not pipe.closed:
            # The command that started this process may have been ended.
            with contextlib.suppress(BrokenPipeError):
                pipe.write(json.dumps(message).encode() + b"\n")

    def answer(**message: str) -> None:
        tell(**message)
        pipe.close()

    def detach() -> None:
        """Leave the session of the command."""
        if os.getsid(0) != os.getpid():
            os.setsid()
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)

    def ready(text: str) -> None:
        detach()
        _libc.prctl(_PR_SET_PDEATHSIG, 0)
        answer(ready=text)

    # A service manager waits for the command, if for any process.
    os.environ.pop(MANAGER_VARIABLE, None)
    try:
        # Under an automounter (x-systemd.automount), which has no terminal, only its own process group may
        # reach the mountpoint before the command has ended.
        if has_terminal():
            detach()
        os.chdir("/")
        with open(os.devnull) as null:
            os.dup2(null.fileno(), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        run(ready, lambda text: tell(waits=text))
        answer(error="it was ended before it answered")
        code = 0
    except ConfigError as error:
        _log.error("%s", error)
        answer(error=str(error))
    except BaseException as error:
        _log.exception("the daemon failed")
        answer(failure=f"{type(error).__name__}: {error}")
    finally:
        logging.shutdown()
        # Not sys.exit: exit handlers that the parent registered must run in the parent only.
        os._exit(code)


def _tail(path: str, start: int) -> str:
    lines: list[str] = []
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(start)
        lines = file.read(_LOG_LIMIT_BYTES).decode(errors="replace").splitlines()
    return "; the end of its log:\n" + "\n".join(lines[-_TAIL_LINES:]) if lines else ""
