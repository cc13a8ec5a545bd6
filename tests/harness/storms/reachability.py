"""How long writers wrote nothing although they had what writing takes.

A program on the host of each mount looks at etcd, again and again, as a client of its own. A look is
*clear* if

- etcd answered it with a linearizable read: a majority of etcd's members is together, and one that belongs
  to it can be reached from the host,
- the mount is mounted, and no fault harms its process or its whole host,
- each group has a member in sync that no fault harms, and whose link to the host is not cut.

So a time in which a storm keeps a majority of etcd or all replicas of a group away is not counted. Looks
are counted and not seconds: a machine that is too busy for the mounts is too busy for the looks, too.

    python reachability.py MOUNTPOINT HOST:PORT...    prints a line for each look
"""

from __future__ import annotations

import base64
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING

# Run by its path: what `harness` is must be found beside this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.scratch import mount_points
from irdmafs.backend.model.records import GroupConfig, NodeAddress, decode

if TYPE_CHECKING:
    from harness.clusters import Cluster

LOOK_EVERY_S = 0.2
ANSWER_S = 0.5
PREFIX = b"/irdmafs/default/"

NO_MORE = sys.maxsize, False
# can_write(when, groups): no fault stopped a writer then, when the members in sync were on these hosts.
CanWrite = Callable[[int, Collection[Collection[str]]], bool]


@dataclass(frozen=True, slots=True)
class Gap:
    """A time without success, in nanoseconds, and how many looks in succession were clear in it at most."""

    began: int
    ended: int
    clear: int

    def __str__(self) -> str:
        seconds = (self.ended - self.began) / 1e9
        return f"{seconds:.1f} s from {self.began / 1e9:.3f}, {self.clear} clear looks"


def gaps(successes: Sequence[int], looks: Path, can_write: CanWrite) -> list[Gap]:
    """Return the times between successes of one writer, whose host made these looks."""
    found = []
    # The last line may have been cut short.
    seen = (json.loads(line) for line in looks.read_text().splitlines()[:-1])
    judged = ((when, groups is not None and can_write(when, groups)) for when, groups in seen)
    when, clear = next(judged, NO_MORE)
    for began, ended in itertools.pairwise(successes):
        longest = run = 0
        while when < ended:
            run = run + 1 if clear and when > began else 0
            longest = max(longest, run)
            when, clear = next(judged, NO_MORE)
        found.append(Gap(began, ended, longest))
    return found


class Lookouts:
    """The programs that look, one on the host of each mount. A context manager.

    Looks of host NAME are in `logs`/NAME.looks."""

    def __init__(self, cluster: Cluster, logs: Path) -> None:
        self._running = []
        for mount in cluster.mounts:
            command = [*mount.host.launcher, sys.executable, __file__, str(mount.path)]
            with (logs / f"{mount.host.name}.looks").open("wb") as log:
                self._running.append(
                    subprocess.Popen([*command, *cluster.etcd.endpoints], stdout=log)
                )

    def __enter__(self) -> Lookouts:
        return self

    def __exit__(self, *_exc: object) -> None:
        some_ended = any(program.poll() is not None for program in self._running)
        for program in self._running:
            program.kill()
            program.wait()
        assert not some_ended, "nobody looked whether a writer could write"


class Looks:
    def __init__(self, mountpoint: str, endpoints: Sequence[str]) -> None:
        self._mountpoint = mountpoint
        self._endpoints = list(endpoints)
        self._hosts: dict[bytes, str] = {}

    def look(self) -> list[list[str]] | None:
        """Return the hosts of the members in sync of each group; None: nothing could be written."""
        if self._mountpoint not in mount_points():
            return None
        for endpoint in self._endpoints:
            try:
                nodes, groups = self._records(endpoint, b"n"), self._records(endpoint, b"g")
            except (OSError, HTTPException, ValueError):
                continue
            self._endpoints.remove(endpoint)
            self._endpoints.insert(0, endpoint)
            for key, value in nodes.items():
                self._hosts[key] = decode(value, NodeAddress).host
            sets = {decode(value, GroupConfig).in_sync for value in groups.values()}
            return [[self._host(node) for node in nodes] for nodes in sets]
        return None

    def _host(self, node: int) -> str:
        return self._hosts.get(node.to_bytes(8, "big"), "")

    @staticmethod
    def _records(endpoint: str, kind: bytes) -> dict[bytes, bytes]:
        start = PREFIX + kind
        connection = HTTPConnection(endpoint, timeout=ANSWER_S)
        try:
            ends = {"key": start, "range_end": PREFIX + bytes([kind[0] + 1])}
            body = {name: base64.b64encode(key).decode() for name, key in ends.items()}
            connection.request("POST", "/v3/kv/range", json.dumps(body))
            with connection.getresponse() as response:
                found = json.loads(response.read())["kvs"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{endpoint} has no {kind!r}") from error
        finally:
            connection.close()
        decoded = base64.b64decode
        return {decoded(one["key"])[len(start) :]: decoded(one["value"]) for one in found}


if __name__ == "__main__":
    looks = Looks(sys.argv[1], sys.argv[2:])
    while True:
        began = time.monotonic()
        print(json.dumps([time.monotonic_ns(), looks.look()]), flush=True)
        time.sleep(max(0.0, began + LOOK_EVERY_S - time.monotonic()))
