#!/usr/bin/env python3
"""Measure what checking costs: a file published and fetched by mounts that verify, and by ones that do not.

One store node and four mounts on this machine, over TCP on loopback; the two kinds take turns in every
round. A quiet machine and root are needed.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import click
from _cluster.cluster import MIB, Cluster, Plan

KINDS = {"verify": (), "no-verify": ("--no-verify",)}


def publish_s(path: Path, content: bytes) -> float:
    """Seconds that close(2) takes."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(fd, content)
    start = time.perf_counter()
    os.close(fd)
    return time.perf_counter() - start


def fetch_s(path: Path) -> float:
    """Seconds that open(2) takes."""
    start = time.perf_counter()
    fd = os.open(path, os.O_RDONLY)
    seconds = time.perf_counter() - start
    os.close(fd)
    return seconds


@click.command(help=__doc__)
@click.option("--size", default=100, show_default=True, help="MiB of the file.")
@click.option("--rounds", default=15, show_default=True)
def main(size: int, rounds: int) -> None:
    content = os.urandom(MIB) * size
    room = 8 * size * MIB
    plan = Plan(nodes=1, mounts=0, replicas=1, store_bytes=room, cache_bytes=room, namespaces=False)
    seconds: dict[tuple[str, str], list[float]] = {}
    with Cluster(plan) as cluster:
        pairs = {
            kind: (cluster.add_mount(*flags), cluster.add_mount(*flags))
            for kind, flags in KINDS.items()
        }
        for number in range(rounds + 1):
            for kind in sorted(KINDS, reverse=bool(number % 2)):
                writer, reader = pairs[kind]
                published = publish_s(writer.path / kind, content)
                fetched = fetch_s(reader.path / kind)
                if number:  # the first takes memory that the others find
                    seconds.setdefault(("publish", kind), []).append(published)
                    seconds.setdefault(("fetch", kind), []).append(fetched)
    for what in ("publish", "fetch"):
        checked, unchecked = (statistics.median(seconds[what, kind]) for kind in KINDS)
        ratios = [a / b for a, b in zip(*(seconds[what, kind] for kind in KINDS), strict=True)]
        click.echo(
            f"{what} {size} MiB: {checked * 1e3:.1f} ms checked, {unchecked * 1e3:.1f} ms unchecked, "
            f"median of the rounds' ratios {statistics.median(ratios):.3f}"
        )


if __name__ == "__main__":
    main()
