"""What programs on several mounts did and saw, and whether a filesystem may have behaved so.

Workers are processes that write, replace, unlink and read whole files on one mount each. What is in
a file says who wrote it. Every operation is recorded with the times, on the clock that all processes
of the machine share, between which it took effect: a write in its close(), a read in its open().

The checker takes each name as a register. Contents are unique, so a read tells which write it saw,
and the order can be decided in n log n: all that tells of one content (its write and the reads that
saw it) spans a zone of time, and a register could have done this exactly if no two zones in which a
content must have been there overlap, and nothing else has to have happened within one.
(Gibbons, Korach: Testing shared memories, SIAM J. Comput. 26, 1997, theorem 4.3.)
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import json
import math
import os
import random
import select
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

# Run by its path: what `harness` is must be found beside this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.closing import Closing
from harness.patterns import HEADER_BYTES, PAGE_BYTES, pattern, version_of

LARGEST_BYTES = 8 << 20
STOP_TIMEOUT_S = 90.0
RETRY_S = 0.05
# What was on its way when an operation failed arrives within this time or not at all.
LATE_NS = 10e9

Kind = Literal["write", "create", "replace", "unlink", "read"]
# failed: an error was returned, and it may have taken effect all the same, then or later.
# unknown: it has not returned. absent, exists: the answers ENOENT and EEXIST.
Outcome = Literal["ok", "failed", "unknown", "absent", "exists", "torn"]

EMPTY = ""  # the content of a name that was created and not published yet


@dataclass(frozen=True, slots=True)
class Operation:
    """`began` is when its first system call was made, `start` and `end` enclose the one in which it
    takes effect; all in nanoseconds. `value` is what was written or read. `final`: a read after all
    is over, which has to succeed."""

    worker: int
    number: int
    host: str
    kind: Kind
    path: str
    began: float
    start: float
    end: float
    outcome: Outcome
    value: str | None = None
    detail: str = ""
    final: bool = False

    def __str__(self) -> str:
        what = "" if self.value is None else f" {self.value or '(empty)'}"
        return (
            f"{self.kind}{what} of {self.path} by worker {self.worker} on {self.host}, "
            f"{self.start / 1e9:.6f}..{self.end / 1e9:.6f}: {self.outcome} {self.detail}".rstrip()
        )


# -- contents -----------------------------------------------------------------------------------


def content_of(worker: int, number: int, size: int) -> bytes:
    """A content of at least 24 bytes that nobody else writes and that is different on every page."""
    assert size >= HEADER_BYTES
    return pattern(worker << 32 | number, size)


def tiny_content(worker: int, workers: int, count: int, size: int) -> bytes | None:
    """The `count`-th content of fewer than 24 bytes of a worker, for one name; None: used up."""
    code = count * workers + worker
    return code.to_bytes(size, "big") if code < 256**size else None


def value_of(content: bytes) -> str:
    """Return who wrote a content. Raises AssertionError with what is wrong, if nobody wrote it whole."""
    if len(content) < HEADER_BYTES:
        return f"bytes {content.hex()}" if content else EMPTY
    version = version_of(content)
    return f"{version >> 32}.{version & 0xFFFFFFFF}"


# -- the checker --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Violation:
    """kind: "torn" (not what anybody wrote), "future" (read before it was written), "stale" (read
    after something newer was acknowledged), "back" (read after something newer had been read),
    "vanished" (absent or empty though written), "resurrected" (read after it was unlinked),
    "unreadable" (an error when all is over)."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class _Zone:
    """What tells of one content. If `fixed` (the first end) is before `seen` (the last start) the
    content was there in between; else it was there at some moment between `seen` and `fixed`."""

    fixed: float
    seen: float
    first: Operation
    last: Operation


def _changes(operation: Operation) -> bool:
    return operation.kind != "read" and operation.outcome in ("ok", "failed", "unknown")


def check(operations: Iterable[Operation], *, across_hosts: bool = True) -> list[Violation]:
    """Everything that a filesystem with close-to-open consistency cannot have done.

    across_hosts=False: what one host has read says nothing about what another one reads before the
    writer's close() has returned (hosts that follow a directory are told one after the other).
    """
    by_path: dict[str, list[Operation]] = defaultdict(list)
    violations = []
    for operation in operations:
        if operation.final and operation.outcome not in ("ok", "absent", "torn"):
            violations.append(Violation("unreadable", str(operation)))
        else:
            by_path[operation.path].append(operation)
    for history in by_path.values():
        if across_hosts:
            violations += _check_name(history)
            continue
        for host in sorted({operation.host for operation in history}):
            seen = [o for o in history if _changes(o) or o.host == host]
            violations += _check_name(seen)
    return list(dict.fromkeys(violations))


def _check_name(history: list[Operation]) -> list[Violation]:
    removing = [o for o in history if o.kind in ("unlink", "replace") and _changes(o)]
    # Acknowledged and surely seen by those who opened the name: a file that is unlinked or replaced
    # while it is open for writing is published all the same, but not under this name.
    lasting = [
        o
        for o in history
        if o.outcome == "ok"
        and (o.kind == "replace" or (o.kind in ("write", "create") and not _overlaps(o, removing)))
    ]
    absence = _Absence(lasting, removing)
    violations, zones, moments = [], [], []
    writes = {o.value: o for o in history if o.kind in ("write", "create", "replace")}
    reads: dict[str, list[Operation]] = defaultdict(list)
    for operation in history:
        if operation.kind == "read" and operation.outcome == "ok":
            assert operation.value is not None
            if operation.value == EMPTY:
                moments.append(operation)
                violations += _check_empty(operation, history)
            elif operation.value not in writes:
                violations.append(Violation("torn", f"nobody wrote this: {operation}"))
            else:
                reads[operation.value].append(operation)
        elif operation.outcome == "torn":
            if not any(_is_of_growing(operation, write, absence) for write in writes.values()):
                violations.append(Violation("torn", str(operation)))
        elif operation.outcome == "absent":
            moments.append(operation)
            violations += absence.check(operation)
        elif operation.outcome == "ok" and operation.kind == "create":
            # It was the first: the name was absent when it was opened.
            violations += absence.check(_opening(operation, operation.end))
        elif operation.outcome == "ok" and operation.kind == "unlink":
            moments.append(operation)
    lasting_values = {write.value for write in lasting}
    for value, write in writes.items():
        assert value is not None
        seen = reads[value]
        if not seen and value not in lasting_values:
            continue
        published = [read for read in seen if not _is_of_growing(read, write, absence)]
        early = [read for read in published if read.end < write.start]
        if early:
            violations.append(Violation("future", f"{early[0]}\nbefore {write}"))
        else:
            zones.append(_zone(write, seen, published))
    zones += [_Zone(o.end, o.start, o, o) for o in moments]
    return violations + _check_zones(zones)


def _overlaps(write: Operation, others: Iterable[Operation]) -> bool:
    return any(
        other is not write and other.start < write.end and write.began < _latest_effect(other)
        for other in others
    )


def _latest_effect(operation: Operation) -> float:
    if operation.outcome == "unknown":
        return math.inf
    return operation.end if operation.outcome == "ok" else operation.end + LATE_NS


def _opening(write: Operation, end: float) -> Operation:
    """Return the open, before `end`, of a write that made the file: it found the name absent."""
    return replace(write, start=write.began, end=end, outcome="absent", value=None)


def _is_of_growing(read: Operation, write: Operation, absence: _Absence) -> bool:
    """Return whether a read may be of a file that the write was making. A new file is seen on its own host
    as it grows, in part and before it is published."""
    return (
        write.kind in ("write", "create")
        and _changes(write)
        and read.host == write.host
        and write.began <= read.end
        and read.start <= _latest_effect(write)
        and not absence.check(_opening(write, read.end))
    )


def _zone(write: Operation, reads: Sequence[Operation], published: Iterable[Operation]) -> _Zone:
    """Return the zone of a content. Only a read that is `published` tells that the content was."""
    acknowledged = replace(write, end=_latest_effect(write))
    first = min((acknowledged, *published), key=lambda o: o.end)
    last = max((acknowledged, *reads), key=lambda o: o.start)
    return _Zone(first.end, last.start, first, last)


class _Absence:
    """A name is absent at first, and after it was unlinked until it is written again."""

    def __init__(self, lasting: Iterable[Operation], removing: Iterable[Operation]) -> None:
        self._written = sorted(lasting, key=lambda o: o.end)
        self._ends = [o.end for o in self._written]
        # The latest of all up to each, which many operations are compared with.
        self._latest_start = list(accumulate((o.start for o in self._written), max))
        unlinks = sorted((o for o in removing if o.kind == "unlink"), key=lambda o: o.start)
        self._starts = [o.start for o in unlinks]
        self._latest_effect = list(accumulate(map(_latest_effect, unlinks), max))

    def check(self, seen: Operation) -> list[Violation]:
        written = bisect.bisect_left(self._ends, seen.start)
        unlinked = bisect.bisect_left(self._starts, seen.end)
        if not written or (
            unlinked and self._latest_effect[unlinked - 1] >= self._latest_start[written - 1]
        ):
            return []
        return [Violation("vanished", f"{seen}\nthough {self._written[written - 1]}")]


def _check_empty(seen: Operation, history: Sequence[Operation]) -> list[Violation]:
    """A name is empty from its creation until its first content is published."""
    settled = [o for o in history if o.outcome == "ok" and o.kind != "read" and o.end < seen.start]
    for creation in history:
        if creation.kind not in ("write", "create") or not _changes(creation):
            continue
        if creation.began < seen.end:
            if creation.outcome == "ok" and seen.start < creation.end:
                return []
            if creation.outcome != "ok" and not any(creation.end < o.start for o in settled):
                return []
    return [Violation("vanished", f"nothing had just created what is empty: {seen}")]


def _check_zones(zones: Sequence[_Zone]) -> list[Violation]:
    violations = []
    held = sorted((z for z in zones if z.fixed < z.seen), key=lambda z: z.fixed)
    longest: _Zone | None = None
    for zone in held:
        if longest is not None and zone.fixed < longest.seen:
            violations.append(_conflict(longest, zone))
        if longest is None or zone.seen > longest.seen:
            longest = zone
    starts = [zone.fixed for zone in held]
    for zone in zones:
        if zone.fixed < zone.seen:
            continue
        i = bisect.bisect_left(starts, zone.seen)
        if i and zone.fixed < held[i - 1].seen:
            violations.append(_conflict(held[i - 1], zone))
    return violations


def _conflict(held: _Zone, other: _Zone) -> Violation:
    """`held` was there before and after something of `other`."""
    if other.first.kind == "unlink":
        kind = "resurrected"
    elif other.first.outcome == "absent" or other.first.value == EMPTY:
        kind = "vanished"
    elif other.first.kind == "read":
        kind = "back"
    else:
        kind = "stale"
    text = f"{held.first}\n{held.last}\nwith this in between: {other.first}"
    return Violation(kind, text)


# -- workers ------------------------------------------------------------------------------------


@dataclass
class Worker:
    """One process's work on one mount. Only `writes` of its names may be opened for writing, so that
    no two processes of a host write one file at a time: they would share a working copy."""

    worker: int
    workers: int
    host: str
    directory: str
    names: Sequence[str]
    writes: Sequence[str]
    seed: int
    log: str
    pause_s: float = 0.02
    largest_bytes: int = LARGEST_BYTES
    operations: float = math.inf
    final: bool = False

    def __post_init__(self) -> None:
        self._random = random.Random(f"{self.seed} {self.worker}")
        self._log = open(self.log, "w", buffering=1)  # noqa: SIM115 (as long as the process)
        self._number = 0
        self._tiny: dict[tuple[str, int], int] = defaultdict(int)
        self._folder: int | None = None
        self._leftovers: list[str] = []

    def run(self) -> None:
        """Work until standard input ends, or `operations` are done; `final`: read each name once."""
        for path in self.names if self.final else ():
            self._number += 1
            self._read(path)
        while not self.final and self._number < self.operations:
            if select.select([sys.stdin], [], [], self._random.uniform(0, self.pause_s))[0]:
                break
            self._number += 1
            if not self.writes or self._random.random() < 0.25:
                self._read(self._random.choice(self.names))
            else:
                path = self._random.choice(self.writes)
                kinds: list[Kind] = ["write", "replace", "unlink", "create"]
                self._change(self._random.choices(kinds, (50, 25, 15, 10))[0], path)
        self._log.close()

    def _read(self, path: str) -> None:
        operation = self._begin("read", path, None)
        try:
            start = time.monotonic_ns()
            fd = self._open(path, os.O_RDONLY)
            end = time.monotonic_ns()
            operation = replace(operation, start=start)
            try:
                value = value_of(self._read_whole(fd))
                self._end(operation, "ok", end=end, value=value)
            finally:
                os.close(fd)
        except AssertionError as error:
            self._end(operation, "torn", detail=str(error))
        except OSError as error:
            self._fail(operation, error)

    def _read_whole(self, fd: int) -> bytes:
        content = b"".join(iter(lambda: os.read(fd, 1 << 20), b""))
        if content and self._random.random() < 0.2:
            time.sleep(self._random.uniform(0, 0.05))
            offset = self._random.randrange(len(content))
            if os.pread(fd, PAGE_BYTES, offset) != content[offset : offset + PAGE_BYTES]:
                raise AssertionError("another content in a file that stayed open")
        return content

    def _change(self, kind: Kind, path: str) -> None:
        content = b"" if kind == "unlink" else self._content(path)
        value = None if kind == "unlink" else value_of(content)
        operation = self._begin(kind, path, value)
        try:
            if kind == "unlink":
                folder = self._open_folder()
                start = time.monotonic_ns()
                os.unlink(path, dir_fd=folder)
            elif kind == "replace":
                folder = self._open_folder()
                self._remove_leftovers(folder)
                new = f".new-{self.worker}-{self._number}"
                self._leftovers.append(new)
                self._write(new, content, os.O_CREAT | os.O_EXCL)
                start = time.monotonic_ns()
                operation = replace(operation, start=start)
                os.rename(new, path, src_dir_fd=folder, dst_dir_fd=folder)
                self._leftovers.remove(new)
            else:
                start = self._write(path, content, os.O_CREAT | self._flag(kind))
            self._end(replace(operation, start=start), "ok")
        except OSError as error:
            self._fail(operation, error)

    def _remove_leftovers(self, folder: int) -> None:
        # Each has a name of its own: a rename that failed may still be carried out.
        while self._leftovers:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._leftovers[-1], dir_fd=folder)
            self._leftovers.pop()

    def _flag(self, kind: Kind) -> int:
        return os.O_EXCL if kind == "create" else os.O_TRUNC

    def _write(self, path: str, content: bytes, flags: int) -> int:
        """When close() was called, which publishes it."""
        fd = self._open(path, os.O_WRONLY | flags)
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(fd, view[: 1 << 20]) :]
        except BaseException:
            # What is closed here is published: part of a content that this reports as failed.
            with contextlib.suppress(OSError):
                os.setxattr(fd, "user.irdmafs.discard", b"")
            os.close(fd)
            raise
        start = time.monotonic_ns()
        os.close(fd)
        return start

    def _content(self, path: str) -> bytes:
        size = int(math.exp(self._random.uniform(0, math.log(self.largest_bytes))))
        if size < HEADER_BYTES:
            count = self._tiny[path, size]
            self._tiny[path, size] += 1
            content = tiny_content(self.worker, self.workers, count, size)
            if content is not None:
                return content
            size = HEADER_BYTES
        return content_of(self.worker, self._number, size)

    # While nothing is mounted the mountpoint is an empty directory. The folder in between tells an
    # absent name from an absent filesystem.

    def _open_folder(self) -> int:
        if self._folder is None:
            try:
                self._folder = os.open(self.directory, os.O_PATH | os.O_DIRECTORY)
            except FileNotFoundError:
                raise OSError(errno.ENOTCONN, "nothing is mounted") from None
        return self._folder

    def _open(self, path: str, flags: int) -> int:
        return os.open(path, flags, 0o644, dir_fd=self._open_folder())

    def _begin(self, kind: Kind, path: str, value: str | None) -> Operation:
        now = time.monotonic_ns()
        operation = Operation(
            *(self.worker, self._number, self.host, kind, path, now, now, math.inf, "unknown"),
            value=value,
            final=self.final,
        )
        self._record(operation)
        return operation

    def _end(self, operation: Operation, outcome: Outcome, **changes: Any) -> None:
        changes = {"end": time.monotonic_ns()} | changes
        self._record(replace(operation, outcome=outcome, **changes))

    def _fail(self, operation: Operation, error: OSError) -> None:
        if error.errno == errno.ENOENT and operation.kind in ("read", "unlink"):
            self._end(operation, "absent")
        elif error.errno == errno.EEXIST and operation.kind == "create":
            self._end(operation, "exists")
        else:
            code = errno.errorcode.get(error.errno or 0, str(error))
            self._end(operation, "failed", detail=code)
            if error.errno in (errno.ENOTCONN, errno.ECONNABORTED, errno.ESTALE, errno.ENOENT):
                if self._folder is not None:
                    os.close(self._folder)
                self._folder = None
            time.sleep(RETRY_S)

    def _record(self, operation: Operation) -> None:
        self._log.write(json.dumps(asdict(operation)) + "\n")


class Workers(Closing):
    """`writers` and `readers` processes for each mounted directory. A context manager.

    mounts: host name -> directory on its mount, which exists. logs: a directory for what they did.
    """

    def __init__(
        self,
        mounts: dict[str, Path],
        logs: Path,
        *,
        names: int = 12,
        writers: int = 1,
        readers: int = 1,
        **each: Any,
    ) -> None:
        """`each`: what every worker is told, its seed, and how many operations it does before `stop`."""
        logs.mkdir(exist_ok=True)
        self._names = [f"file{i}" for i in range(names)]
        self._mounts = mounts
        self._logs = logs
        self._each = each
        self._processes: list[subprocess.Popen[bytes]] = []
        count = writers + readers
        self._workers = count * len(mounts)
        for place, host in enumerate(mounts):
            for i in range(count):
                writes = self._names[i::writers] if i < writers else []
                self._start(place * count + i, host, writes)

    def _start(self, worker: int, host: str, writes: list[str], **other: Any) -> None:
        arguments = self._each | other
        arguments |= {"worker": worker, "workers": self._workers, "names": self._names}
        arguments |= {"host": host, "directory": str(self._mounts[host]), "writes": writes}
        arguments["log"] = str(self._logs / f"worker{worker}.jsonl")
        command = [sys.executable, __file__, json.dumps(arguments)]
        # A session of its own: Ctrl-C is for whoever started them, and ends them in order.
        self._processes.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, cwd="/", start_new_session=True)
        )

    def stop(self, within_s: float = STOP_TIMEOUT_S) -> None:
        """Let everyone finish what it does. Raises TimeoutError if someone cannot."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        self.wait(within_s)

    def wait(self, within_s: float = STOP_TIMEOUT_S) -> None:
        """Until everyone is done. Raises TimeoutError."""
        deadline = time.monotonic() + within_s
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                unfinished = [o for o in self.operations() if o.outcome == "unknown"]
                lines = "\n".join(map(str, unfinished))
                raise TimeoutError(f"still busy after {within_s} s:\n{lines}") from None
            assert process.returncode == 0, f"a worker ended with {process.returncode}"

    def final_reads(self) -> None:
        """Read every name on every mount, after everything. Raises TimeoutError."""
        for i, host in enumerate(self._mounts):
            self._start(self._workers + i, host, [], pause_s=0, final=True)
        self.stop()

    def operations(self) -> list[Operation]:
        """What was recorded so far, the newest record of each operation, in the order they began."""
        found: dict[tuple[int, int], Operation] = {}
        for log in self._logs.glob("*.jsonl"):
            with log.open() as lines:
                for line in lines:
                    # The last line may be being written.
                    with contextlib.suppress(json.JSONDecodeError):
                        operation = Operation(**json.loads(line))
                        found[operation.worker, operation.number] = operation
        return sorted(found.values(), key=lambda o: o.began)

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            if process.stdin is not None:
                process.stdin.close()


if __name__ == "__main__":
    Worker(**json.loads(sys.argv[1])).run()
