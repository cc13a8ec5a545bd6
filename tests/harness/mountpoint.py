"""A mounted irdmafs for tests: made by the command line, as users do it, and always cleaned up."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from harness import forks
from harness.closing import Closing, descriptor
from harness.daemons import wait_until
from harness.mount_namespaces import none_is_made
from harness.network import COMMAND_TIMEOUT_S, run
from harness.processes import has_ended
from harness.scratch import is_mounted, scratch_directory
from irdmafs.mount.mounting import can_mount

needs_fuse = pytest.mark.skipif(
    not (can_mount() and os.path.exists("/dev/fuse")), reason="needs /dev/fuse and CAP_SYS_ADMIN"
)

# Requests the kernel does not wait for: a program is not slowed down by them.
NOT_BLOCKING = frozenset(
    {"FORGET", "BATCH_FORGET", "INTERRUPT", "RELEASE", "RELEASEDIR", "NOTIFY_REPLY"}
)

living: set["Mount"] = set()


IRDMAFS = forks.PREFIX


def irdmafs(
    *arguments: str | os.PathLike[str], launcher: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the command line tool; its exit code is for the caller to judge."""
    return _run([*IRDMAFS, *(str(word) for word in arguments)], launcher)


def _run(words: list[str], launcher: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    with none_is_made() if "umount" in words else contextlib.nullcontext():
        return forks.run(words, launcher, timeout_s=COMMAND_TIMEOUT_S)


def can_be_opened(path: Path) -> bool:
    """Return whether a path leads to something. stat(2) may see for a moment what another host removed, an
    open does not (docs/cluster.md)."""
    try:
        os.close(os.open(path, os.O_RDONLY))
    except FileNotFoundError:
        return False
    return True


def fsync(path: Path) -> None:
    """Have all that was done to a file or a directory stored. Raises OSError."""
    with descriptor(os.open(path, os.O_RDONLY)) as fd:
        os.fsync(fd)


def succeeded(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """Return a command that has ended, and without an error."""
    assert done.returncode == 0, done
    return done


def one_line(done: subprocess.CompletedProcess[str], code: int = 1) -> str:
    """Return the only line that a failed command printed, without the name of the command."""
    assert (done.returncode, done.stdout) == (code, ""), done
    [line] = done.stderr.splitlines()
    assert line.startswith("irdmafs: ")
    return line.removeprefix("irdmafs: ")


# How a program ends at Ctrl-C. `python -m` dies of the signal itself when that came while a string was
# executed (a dataclass being made, in a module being imported), although the exception was handled. To a
# shell both are 130.
INTERRUPTED = (128 + signal.SIGINT, -signal.SIGINT)


def eventually(condition: Callable[[], bool], what: str, within_s: float = 10.0) -> None:
    """Wait for something that happens soon but sends no event. Raises AssertionError."""
    wait_until(condition, f"not within {within_s} s: {what}", within_s, error=AssertionError)


class Mount(Closing):
    """One mountpoint with a store of its own. A context manager: mounts, and cleans up at the end.

    Attributes: `path` and `store` (directories), `log` (the daemon's log file), `session`.
    """

    def __init__(
        self,
        session: str,
        *,
        arguments: tuple[str, ...] = (),
        launcher: tuple[str, ...] = (),
        store_size: str | None = None,
        store: Path | None = None,
    ) -> None:
        """`store_size` puts the store on a tmpfs of that size (needs root); `store` is one that stays."""
        self.session = session
        self.arguments = arguments
        self.launcher = launcher
        self._top = scratch_directory()
        self.path = self._top / "mount"
        self.store = store or self._top / "store"
        self.log = self._top / "log"
        self.path.mkdir()
        self.store.mkdir(exist_ok=True)
        self._small_store = store_size is not None
        if store_size is not None:
            run("mount", "-t", "tmpfs", "-o", f"size={store_size}", "none", self.store)
        if launcher:
            for directory in (self._top, self.path, self.store):
                os.chown(directory, 65534, 65534)

    # -- mounting ---------------------------------------------------------------------------

    def try_mount(self) -> subprocess.CompletedProcess[str]:
        """Run the command; its exit status and output are for the caller to judge."""
        return self._run(
            *IRDMAFS,
            *("mount", self.path, "--store", self.store, "--log-file", self.log),
            *("--session", self.session, *self.arguments),
        )

    def _run(self, *words: str | os.PathLike[str]) -> subprocess.CompletedProcess[str]:
        return _run([os.fspath(word) for word in words], self.launcher)

    def mount(self) -> None:
        done = self.try_mount()
        assert done.returncode == 0, f"irdmafs mount failed\n{self.explain(done)}"
        assert self.is_mounted(), f"irdmafs mount returned but it is not mounted\n{done}"
        living.add(self)

    remount = mount

    def unmount(self) -> None:
        done = self._run(*IRDMAFS, "umount", self.path)
        assert done.returncode == 0, f"irdmafs umount failed\n{self.explain(done)}"
        eventually(lambda: not self.is_mounted(), f"{self.path} unmounted")
        eventually(lambda: not self.pids(), f"the daemon of {self.path} ends after umount")
        living.discard(self)

    def restart(self) -> None:
        self.unmount()
        self.mount()

    def explain(self, done: subprocess.CompletedProcess[str]) -> str:
        return f"exit {done.returncode}\n{done.stdout}{done.stderr}\nlog:\n{self.log_tail()}"

    def is_mounted(self) -> bool:
        """Whether the mount table has it; asks nothing of the filesystem itself."""
        return is_mounted(self.path)

    # -- the daemon ---------------------------------------------------------------------------

    def pids(self) -> list[int]:
        """Processes that serve this mount, found by their command line."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
                if {b"irdmafs", b"mount", bytes(self.store)} <= {*file.read().split(b"\0")}:
                    found.append(int(pid))
        return found

    @property
    def pid(self) -> int:
        return int(self.status()["pid"])

    def kill9(self) -> None:
        """Kill the daemon the hard way and wait until it is gone. The mountpoint stays, stale."""
        if self._signal(signal.SIGKILL):
            assert not self.pids()

    def _signal(self, number: int) -> list[int]:
        """Send a signal to the processes of this mount, and return them when they are gone."""
        pids = self.pids()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        eventually(lambda: all(map(has_ended, pids)), f"the daemon of {self.path} ends")
        return pids

    def log_tail(self, characters: int = 3000) -> str:
        with contextlib.suppress(OSError):
            return self.log.read_text(errors="replace")[-characters:]
        return "(no log)"

    # -- what it says of itself -------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(os.getxattr(self.path, "user.irdmafs.status"))
        return answer

    def versions(self, file: Path) -> list[dict[str, Any]]:
        answer = json.loads(os.getxattr(file, "user.irdmafs.versions"))
        return list(answer["versions"])

    def _requests_so_far(self) -> Counter[str]:
        return Counter({kind.upper(): n for kind, n in self.status()["requests"].items()})

    @contextlib.contextmanager
    def requests(self) -> Iterator[Counter[str]]:
        """Requests to the daemon inside the block, by kind; what the asking costs is taken off."""
        counted: Counter[str] = Counter()
        first = self._requests_so_far()
        before = self._requests_so_far()
        yield counted
        after = self._requests_so_far()
        counted.update(after)
        counted.subtract(before)
        counted.subtract(before - first)
        for kind in [kind for kind, n in counted.items() if n <= 0]:
            del counted[kind]

    def extents(self) -> list[Path]:
        return list((self.store / "extents").iterdir())

    # -- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        living.discard(self)
        try:
            # In order, but without a command for it, which takes longer than all else here.
            with contextlib.suppress(AssertionError):
                self._signal(signal.SIGTERM)
            self.kill9()
            while self.is_mounted():
                run("umount", "-il", self.path)
        finally:
            if self._small_store:
                run("umount", "-l", self.store)
            shutil.rmtree(self._top, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            if not self.is_mounted():
                self.mount()
        except BaseException:
            self.close()
            raise
        return self
