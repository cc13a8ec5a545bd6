"""What checking costs: a file published and fetched by mounts that verify, and by ones that do not."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import click
from harness.cluster import Cluster, Plan

from .command import SETTINGS, measuring, turned
from .files import MIB, now
from .machine import processor_s

KINDS = {"verify": (), "no-verify": ("--no-verify",)}


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
def verify(size: int, rounds: int) -> None:
    """Measure what checking costs: a file published and fetched by mounts that verify, and by ones that
    do not.

    One store node and four mounts on this machine, over TCP on loopback; the two kinds take turns in every
    round. A quiet machine and root are needed.
    """
    content = os.urandom(MIB) * size
    room = 8 * size * MIB
    plan = Plan(nodes=1, mounts=0, replicas=1, store_bytes=room, cache_bytes=room, namespaces=False)
    seconds: dict[tuple[str, str], list[float]] = {}
    processor: dict[tuple[str, str], float] = {}
    with measuring(), Cluster(plan) as cluster:
        mounts = {
            (what, kind): cluster.add_mount(*flags)
            for kind, flags in KINDS.items()
            for what in ("publish", "fetch")
        }
        for number in range(rounds + 1):
            if number == 1:  # the first round takes memory that the others find
                processor = {key: processor_s(mount.pid) for key, mount in mounts.items()}
                seconds.clear()
            for kind in turned(list(KINDS), number):
                took = publish_s(mounts["publish", kind].path / kind, content)
                seconds.setdefault(("publish", kind), []).append(took)
                took = fetch_s(mounts["fetch", kind].path / kind)
                seconds.setdefault(("fetch", kind), []).append(took)
        for key, mount in mounts.items():
            processor[key] = processor_s(mount.pid) - processor[key]
    for what in ("publish", "fetch"):
        checked, unchecked = (seconds[what, kind] for kind in KINDS)
        ratios = [a / b for a, b in zip(checked, unchecked, strict=True)]
        click.echo(
            f"{what} {size} MiB: {statistics.median(checked) * 1e3:.1f} ms checked, "
            f"{statistics.median(unchecked) * 1e3:.1f} ms unchecked, least {min(checked) * 1e3:.1f} and "
            f"{min(unchecked) * 1e3:.1f}, median of the rounds' ratios {statistics.median(ratios):.2f}; "
            "processor time of the mount "
            + " and ".join(f"{processor[what, kind] / rounds * 1e3:.1f} ms" for kind in KINDS)
        )
