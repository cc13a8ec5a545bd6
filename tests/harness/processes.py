"""Other processes, driven one step at a time.

A `Process` keeps a Python interpreter whose names live on between steps, so that a test can hold a
descriptor, a mapping or a lock in one process while it does something in another. Steps are ordered
by their replies.
"""

import ast
import contextlib
import gc
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from harness.closing import Closing

STEP_TIMEOUT_S = 60.0
# For a step: what tries to lock a file, or asks who is in the way.
TRY_LOCKS = """
def try_lock(fd, kind, start=0, length=0):
    try:
        fcntl.lockf(fd, kind | fcntl.LOCK_NB, length, start)
        return True
    except (BlockingIOError, PermissionError):
        return False
def try_flock(fd, kind):
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
def query(fd, kind):
    import struct
    asked = struct.pack('hhqqi4x', kind, 0, 0, 0, 0)
    return struct.unpack('hhqqi4x', fcntl.fcntl(fd, fcntl.F_GETLK, asked))
"""
# The user who owns nothing.
NOBODY = 65534


def as_user(user: int) -> tuple[str, ...]:
    """Return the command prefix that makes a program a user's, who is in no group but his own."""
    return ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups")


AS_NOBODY = as_user(NOBODY)
# The capability to open every file is kept, too: the interpreter may lie below a private home directory.
WHO_OPENS_ALL = ("--inh-caps=-all,+dac_override", "--ambient-caps=-all,+dac_override")
AS_NOBODY_WHO_OPENS_ALL = (*AS_NOBODY, *WHO_OPENS_ALL)


def is_waiting(pid: int) -> bool:
    """Return whether a process sleeps in a call that waits for an answer of a mount."""
    return Path(f"/proc/{pid}/wchan").read_text() == "request_wait_answer"


def has_ended(pid: int) -> bool:
    """Return whether a process has ended; one that nobody has reaped yet has no command line any more."""
    with contextlib.suppress(OSError):
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    return True


class Program(subprocess.Popen[str]):
    """A program that is told things, and tells them, as text in pipes."""

    stdin: IO[str]
    stdout: IO[str]
    stderr: IO[str]

    def __init__(self, *command: object, **options: Any) -> None:
        """`options` are those of Popen; standard error is a pipe only with one of them."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        super().__init__([*map(str, command)], **(pipes | options))


_MANY = """
import os, sys, threading
threading.stack_size(1 << 16)
answers = []
call = lambda: answers.append(eval(sys.argv[1]))
threads = [threading.Thread(target=call) for _ in range(int(sys.argv[2]))]
for thread in threads: thread.start()
print('started', flush=True)
for thread in threads: thread.join()
print(len(answers), repr(set(answers)), flush=True)
"""


@contextlib.contextmanager
def many_waiting(call: str, count: int) -> Iterator[Callable[[], set[Any]]]:
    """Have many threads of a process make a call that waits; yield what waits for all their answers."""
    command = [sys.executable, "-c", _MANY, call, str(count)]
    with Program(*command) as waiters:
        output = waiters.stdout
        assert output.readline() == "started\n"

        def answers() -> set[Any]:
            answered, _, different = output.readline().partition(" ")
            assert int(answered) == count
            return set(ast.literal_eval(different))

        yield answers


class Process(Closing):
    """A Python interpreter of its own. A context manager; leaving it kills the process."""

    def __init__(self, launcher: tuple[str, ...] = (), pass_fds: tuple[int, ...] = ()) -> None:
        """`launcher` is a command prefix, such as setpriv and its options; `pass_fds` it inherits."""
        ours, theirs = os.pipe(), os.pipe()
        self._sender = Connection(theirs[1], readable=False)
        self._receiver = Connection(ours[0], writable=False)
        command = [*launcher, sys.executable, __file__, str(theirs[0]), str(ours[1])]
        self._popen = subprocess.Popen(
            command,
            pass_fds=(theirs[0], ours[1], *pass_fds),
            stdin=subprocess.DEVNULL,
            cwd="/",
            # It imports the modules of what it is sent.
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        os.close(theirs[0])
        os.close(ours[1])
        self.pid = self._popen.pid
        self._busy = False

    def start(self, source: str, /, **values: object) -> None:
        """Begin to run `source` with `values` as names; collect the outcome with `result`."""
        self._sender.send((source, values))
        self._busy = True

    def result(self, timeout_s: float = STEP_TIMEOUT_S) -> Any:
        """The value of the last expression of what was started.

        Raises what the step raised, TimeoutError (the process is then killed), EOFError when it died.
        """
        if not self._receiver.poll(timeout_s):
            self.kill()
            raise TimeoutError(f"the step did not end within {timeout_s} s; process killed")
        succeeded, value = self._receiver.recv()
        self._busy = False
        if not succeeded:
            raise value
        return value

    def do(self, source: str, /, **values: object) -> Any:
        """Run one step and wait for it: `start` and `result`."""
        self.start(source, **values)
        return self.result()

    def finished(self, within_s: float = 0.0) -> bool:
        """Whether the step that was started has an outcome by now."""
        return self._receiver.poll(within_s)

    def send_signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def reset(self) -> bool:
        """Forget names and close descriptors. False when the process is not usable any more."""
        if self._busy:
            return False
        try:
            self.start("__reset__")
            return bool(self.result(10) == "reset")
        except (OSError, EOFError):
            return False

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End it by a signal and wait until it is gone (its files are closed then)."""
        self._popen.send_signal(number)
        self._popen.wait(STEP_TIMEOUT_S)

    def close(self) -> None:
        if self._popen.poll() is None:
            self._popen.kill()
            try:
                self._popen.wait(10)
            except subprocess.TimeoutExpired:
                print(f"process {self.pid} does not die: stuck in the kernel", file=sys.stderr)
        self._sender.close()
        self._receiver.close()


TakeProcess = Callable[[], Process]


def _evaluate(source: str, names: dict[str, Any]) -> Any:
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<step>", "exec"), names)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), "<step>", "eval"), names)


def _fresh_names() -> dict[str, Any]:
    import ctypes
    import errno
    import fcntl
    import mmap

    from harness.patterns import pattern, version_of

    modules = (ctypes, errno, fcntl, mmap, os, signal, stat, subprocess, sys)
    names: dict[str, Any] = {module.__name__: module for module in modules}
    return names | {"pattern": pattern, "version_of": version_of}


def _close_files() -> None:
    """Close files and directories, but not the sockets and pipes that a library's threads use."""
    # Objects that still own a descriptor would close it later, when its number is another file's.
    gc.collect()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            mode = os.fstat(int(name)).st_mode
            if int(name) > 2 and (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                os.close(int(name))
    os.chdir("/")


def _serve(receiver: Connection, sender: Connection) -> None:
    # What it starts itself shall not hold our end of the pipes.
    os.set_inheritable(receiver.fileno(), False)
    os.set_inheritable(sender.fileno(), False)
    names = _fresh_names()
    # Imported modules own no descriptors that `_close_files` would have to find.
    gc.freeze()
    outcome: tuple[bool, Any] | None
    while True:
        try:
            source, values = receiver.recv()
        except EOFError:
            return
        if source == "__reset__":
            names.clear()
            outcome = None
            _close_files()
            names = _fresh_names()
            sender.send((True, "reset"))
            continue
        names.update(values)
        try:
            outcome = (True, _evaluate(source, names))
        except BaseException as error:
            error.add_note(f"in process {os.getpid()}, step: {source}")
            outcome = (False, error)
        try:
            sender.send(outcome)
        except Exception:
            sender.send((False, RuntimeError(f"cannot be sent: {outcome!r}")))


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    _serve(
        Connection(int(sys.argv[1]), writable=False), Connection(int(sys.argv[2]), readable=False)
    )
