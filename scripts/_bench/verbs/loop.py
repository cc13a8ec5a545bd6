"""A training loop in its steady state: what publishing and fetching the next version still asks for.

Registrations and files are counted from outside, by what the kernel knows: every registration has a number
of its own (`rdma resource`), and every file an inode number that its tmpfs gives only once.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from harness.cluster import Cluster
from harness.daemons import Daemon
from harness.parts import StoreNode

from irdmafs.backend.transport.verbs.library import load

from ..files import MIB, Files

WARM_UP = 8
_SCRAPE_S = 10.0
# What these say changes by itself.
_CLOCKS = ("uptime", "valid", "age", "pid")
_PREFIX = "irdmafs_"


@dataclass(frozen=True)
class Row:
    """`expected` is None where the number is shown only."""

    what: str
    counted: float
    expected: float | None

    @property
    def is_wrong(self) -> bool:
        return self.expected is not None and self.counted != self.expected


@dataclass(frozen=True)
class Outcome:
    """`changed` are all figures that the processes tell and that changed, by their names."""

    rows: list[Row]
    changed: dict[str, float]
    seconds: list[float]


class Loop:
    """A file of `size` bytes, written on the cluster's first mount and read on its second."""

    def __init__(self, cluster: Cluster, device: str, metrics_port: int, size: int) -> None:
        self._writer, self._reader = cluster.mounts
        (self._node,) = cluster.nodes
        self._device = device
        self._metrics_port = metrics_port
        self._size = size
        self._files = Files()
        # Of each process: the numbers of its registrations, and the inodes of its files.
        self._registrations: dict[str, set[int]] = {part.name: set() for part in self._parts}
        self._inodes: dict[str, set[tuple[int, int]]] = {part.name: set() for part in self._parts}

    @property
    def _parts(self) -> tuple[Daemon, ...]:
        return (self._node, self._writer, self._reader)

    def run(self, versions: int) -> Outcome:
        """Raises WrongData."""
        for number in range(WARM_UP):
            self._version(number)
        registered, files = _counts(self._registrations), _counts(self._inodes)
        before, first = self._figures(), next_registration(self._device)
        seconds = [self._version(WARM_UP + number) for number in range(versions)]
        # The last of these two is one itself.
        made = next_registration(self._device) - first - 1
        after = self._figures()
        changed = {
            name: value - before.get(name, 0.0)
            for name, value in after.items()
            if value != before.get(name, 0.0) and not any(word in name for word in _CLOCKS)
        }
        rows = []
        for name in registered:
            more = len(self._registrations[name]) - registered[name]
            rows.append(Row(f"registrations, {name}", more, 0))
            expected = 0 if name == self._node.name else None
            rows.append(Row(f"files made, {name}", len(self._inodes[name]) - files[name], expected))
        rows.append(Row("registrations, all processes, by the kernel's count", made, 0))
        for mount in (self._writer, self._reader):
            requests = f"{mount.name}.requests"
            count = changed.get(f"{requests}.READ", 0) + changed.get(f"{requests}.WRITE", 0)
            rows.append(Row(f"reads and writes through Python, {mount.name}", count, 0))
        fallbacks = sum(value for name, value in changed.items() if "fallbacks" in name)
        rows.append(Row("transfers that fell back to TCP", fallbacks, 0))
        moved = sum(value for name, value in changed.items() if name.endswith(".rdma_bytes"))
        # Each version comes in once and goes out once.
        rows.append(Row("bytes by verbs, per version", moved / versions, 2 * self._size))
        return Outcome(rows, changed, seconds)

    def _version(self, number: int) -> float:
        began = time.perf_counter()
        self._files.write(self._writer.path / "weights", self._size, number)
        self._files.read(self._reader.path / "weights", self._size, number)
        took_s = time.perf_counter() - began
        self._look()
        return took_s

    def _look(self) -> None:
        by_pid = registrations_by_pid()
        for part in self._parts:
            self._registrations[part.name] |= by_pid.get(part.pid, set())
        self._inodes[self._node.name] |= files_below(self._node.store)
        for mount in (self._writer, self._reader):
            self._inodes[mount.name] |= files_below(mount.cache)

    def _figures(self) -> dict[str, float]:
        """Every metric of the node, and every number of the mounts' status."""
        found = node_figures(self._node, self._metrics_port)
        for mount in (self._writer, self._reader):
            found |= dict(_numbers(mount.name, mount.status()))
        return found


def _counts(sets: Mapping[str, Collection[object]]) -> dict[str, int]:
    return {name: len(one) for name, one in sets.items()}


def registrations_by_pid() -> dict[int, set[int]]:
    """The numbers of the memory regions that processes have now."""
    done = subprocess.run(
        ["rdma", "-j", "resource", "show", "mr"], capture_output=True, text=True, check=True
    )
    found: dict[int, set[int]] = {}
    for one in json.loads(done.stdout or "[]"):
        if "pid" in one:
            found.setdefault(int(one["pid"]), set()).add(int(one["mrn"]))
    return found


def next_registration(device: str) -> int:
    """The number that a registration gets now: the kernel counts them, of all processes."""
    library = load()
    context, _ = library.open(device)
    with mmap.mmap(-1, mmap.PAGESIZE) as memory, context, library.errors:
        anchor = ctypes.c_char.from_buffer(memory)
        domain = library.PD(context)
        region = library.MR(
            domain,
            mmap.PAGESIZE,
            library.enum("ACCESS_LOCAL_WRITE"),
            address=ctypes.addressof(anchor),
        )
        (number,) = registrations_by_pid()[os.getpid()]
        region.close()
        domain.close()
        del anchor
    return number


def files_below(directory: Path) -> set[tuple[int, int]]:
    """Of at least a mebibyte: what else lies there are records."""
    found = set()
    for parent, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                status = os.stat(os.path.join(parent, name))
                if status.st_size >= MIB:
                    found.add((status.st_dev, status.st_ino))
    return found


def node_figures(node: StoreNode, metrics_port: int) -> dict[str, float]:
    """Every metric of it."""
    found: defaultdict[str, float] = defaultdict(float)
    with urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=_SCRAPE_S) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(_PREFIX) and "_created" not in line:
                name, _, value = line.rpartition(" ")
                labels = name.partition("{")[2].rstrip("}").split(",")
                label = "".join(word for word in labels if word and not word.startswith("node="))
                base = name.partition("{")[0].removeprefix(_PREFIX)
                found[f"{node.name}.{base}{'{' + label + '}' if label else ''}"] += float(value)
    return dict(found)


def _numbers(prefix: str, value: Any) -> Iterable[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _numbers(f"{prefix}.{key}" if key != "cluster" else prefix, each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield prefix, float(value)
