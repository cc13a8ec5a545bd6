"""What checking costs: a file published and fetched by mounts that verify, and by ones that do not."""

from __future__ import annotations

import os
from pathlib import Path

import click
from harness.cluster import Cluster, Plan

from .command import SETTINGS, finish, json_file, measuring, turned
from .files import MIB, now
from .machine import processor_s
from .tables import Rates, Row

OURS, BASE = "verify", "no-verify"
KINDS = {OURS: (), BASE: ("--no-verify",)}
ROWS = (
    Row("publish", "publish", "ms"),
    Row("publish-cpu", "  processor time of the mount", "ms"),
    Row("fetch", "fetch", "ms"),
    Row("fetch-cpu", "  processor time of the mount", "ms"),
)


def publish_s(path: Path, content: bytes) -> float:
    """Seconds that close(2) takes."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(fd, content)
    start = now()
    os.close(fd)
    return now() - start


def fetch_s(path: Path) -> float:
    """Seconds that open(2) takes."""
    start = now()
    fd = os.open(path, os.O_RDONLY)
    seconds = now() - start
    os.close(fd)
    return seconds


@click.command(context_settings=SETTINGS)
@click.option("--size", default=100, show_default=True, help="MiB of the file.")
@click.option("--rounds", default=15, show_default=True)
@json_file
def verify(size: int, rounds: int, json_file: Path | None) -> None:
    """Measure what checking costs: a file published and fetched by mounts that verify, and by ones that
    do not.

    One store node and four mounts on this machine, over TCP on loopback; the two kinds take turns in every
    round. A quiet machine and root are needed.
    """
    content = os.urandom(MIB) * size
    room = 8 * size * MIB
    plan = Plan(nodes=1, mounts=0, replicas=1, store_bytes=room, cache_bytes=room, namespaces=False)
    rates = Rates(ROWS, OURS, BASE, tuple(KINDS))
    with measuring(), Cluster(plan) as cluster:
        mounts = {
            (what, kind): cluster.add_mount(*flags)
            for kind, flags in KINDS.items()
            for what in ("publish", "fetch")
        }

        def take(kind: str) -> tuple[float, float]:
            publishing, fetching = (mounts[what, kind].path / kind for what in ("publish", "fetch"))
            return publish_s(publishing, content), fetch_s(fetching)

        for kind in KINDS:  # takes memory that the rounds find
            take(kind)
        before = {key: processor_s(mount.pid) for key, mount in mounts.items()}
        for number in range(rounds):
            for kind in turned(list(KINDS), number):
                for what, seconds in zip(("publish", "fetch"), take(kind), strict=True):
                    rates.add(kind, what, number, seconds * 1e3)
        for (what, kind), mount in mounts.items():
            used_s = processor_s(mount.pid) - before[what, kind]
            # The kernel counts it in ticks, of which a round has few.
            rates.add(kind, f"{what}-cpu", 0, used_s / rounds * 1e3)
    finish(rates, 100, json_file, assert_=False)
