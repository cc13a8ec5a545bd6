"""A cluster under mixed load for a long time: whether anything grows."""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
from harness.cluster import MIB, Cluster, Plan
from harness.daemons import Daemon
from harness.network import CommandFailed
from harness.storms.history import Workers, check
from rich.console import Console

from .command import SETTINGS, measuring, wide_console
from .machine import process_status
from .tables import table

SAMPLES_MIN = 9
SMALL_FILES = 200


@dataclass(frozen=True, slots=True)
class Limit:
    """What may be added in a third of the run, as a share or in units, whichever is more."""

    unit: str
    share: float
    least: float


LIMITS = {
    "memory": Limit("MiB", 0.03, 2.0),
    "descriptors": Limit("", 0.05, 6.0),
    "threads": Limit("", 0.05, 2.0),
    "keys": Limit("", 0.05, 40.0),
    "files": Limit("", 0.05, 10.0),
}
# It keeps some thousand revisions and frees memory when Go's collector likes.
ETCD_MEMORY = Limit("MiB", 0.25, 64.0)


class Samples:
    """Values over time by (who, what)."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], list[float]] = defaultdict(list)

    def take(self, cluster: Cluster) -> None:
        for part in cluster.parts():
            for what, value in process_numbers(part).items():
                self.values[part.name, what].append(value)
        for node in cluster.nodes:
            count = sum(1 for _ in os.scandir(node.store / "extents"))
            self.values[node.name, "files"].append(count)
        self.values["etcd", "keys"].append(cluster.key_count())


def process_numbers(part: Daemon) -> dict[str, float]:
    """Raises CommandFailed when the process has ended."""
    try:
        fields = process_status(part.pid)
        return {
            # Its own: what it maps of a tmpfs is the file's.
            "memory": fields["RssAnon"] / 1024,
            "threads": fields["Threads"],
            "descriptors": len(os.listdir(f"/proc/{part.pid}/fd")),
        }
    except (OSError, KeyError):
        raise CommandFailed(f"{part.name} has ended:\n{part.log_tail()}") from None


def growth(values: Sequence[float]) -> tuple[float, float]:
    """The medians of the second and the last third."""
    third = len(values) // 3
    return median(values[third : 2 * third]), median(values[2 * third :])


def churn_names(folders: Sequence[Path], round_: int) -> None:
    """Many small files: made on one host, read and listed on another, removed by it."""
    here, there = folders[round_ % len(folders)], folders[(round_ + 1) % len(folders)]
    name = f"small{round_}"
    (here / name).mkdir()
    for i in range(SMALL_FILES):
        (here / name / str(i)).write_bytes(b"%d" % i * 100)
    for entry in list((there / name).iterdir()):
        if entry.read_bytes() != entry.name.encode() * 100:
            raise CommandFailed(f"{entry} has other bytes than were written")
        entry.unlink()
    (there / name).rmdir()


def report(samples: Samples, console: Console) -> bool:
    """Print a line for each number. True if all are flat."""
    shown = table("", "", "", "first", "second third", "last third", "max", "")
    flat = True
    for (who, what), values in samples.values.items():
        before, after = growth(values)
        limit = ETCD_MEMORY if who.startswith("etcd") and what == "memory" else LIMITS[what]
        good = after - before <= max(before * limit.share, limit.least)
        flat = flat and good
        cells = [f"{value:,.1f}" for value in (values[0], before, after, max(values))]
        verdict = "flat" if good else "[bold red]grows[/]"
        shown.add_row(who, f"{what} {limit.unit}".strip(), *cells, verdict)
    console.print(shown)
    return flat


@click.command(context_settings=SETTINGS)
@click.option("--minutes", type=click.FloatRange(0.5), default=30, show_default=True)
@click.option("--nodes", type=click.IntRange(1, 16), default=3, show_default=True)
@click.option("--mounts", type=click.IntRange(2, 16), default=2, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
def soak(minutes: float, nodes: int, mounts: int, seed: int) -> None:
    """Run a cluster under mixed load and say whether memory, descriptors, threads and keys are flat.

    Memory, descriptors and threads of every process, and the cluster's keys in etcd, are sampled; the last
    third of the run is compared with the third before.
    """
    plan = Plan(
        nodes=nodes, mounts=mounts, lease_ttl_s=5, store_bytes=1024 * MIB, cache_bytes=64 * MIB
    )
    samples = Samples()
    console = wide_console(100)
    progress = Console(stderr=True)
    with measuring(), Cluster(plan) as cluster:
        (cluster.mounts[0].path / "work").mkdir()
        folders = {mount.name: mount.path / "work" for mount in cluster.mounts}
        with Workers(folders, cluster.directory / "history", seed=seed, pause_s=0.05) as load:
            work(cluster, list(folders.values()), samples, minutes * 60, progress)
            load.stop()
            load.final_reads()
            operations = load.operations()
    wrong = check(operations, across_hosts=False)
    flat = report(samples, console)
    failed = sum(operation.outcome == "failed" for operation in operations)
    console.print(f"{len(operations):,} operations, {failed} failed, {len(wrong)} not allowed")
    for violation in wrong[:10]:
        console.print(f"{violation.kind}: {violation.text}")
    sys.exit(0 if flat and not wrong and not failed else 1)


def work(
    cluster: Cluster, folders: Sequence[Path], samples: Samples, seconds: float, out: Console
) -> None:
    """Churn and sample until the time is over."""
    # Often enough for a verdict, however short the run.
    period_s = min(10.0, seconds / (SAMPLES_MIN + 1))
    start = time.monotonic()
    next_sample = start + period_s
    round_ = 0
    while time.monotonic() < start + seconds or len(samples.values["etcd", "keys"]) < SAMPLES_MIN:
        churn_names(folders, round_)
        round_ += 1
        if time.monotonic() >= next_sample:
            samples.take(cluster)
            next_sample += period_s
            keys = samples.values["etcd", "keys"][-1]
            out.print(f"{time.monotonic() - start:6.0f} s, {round_} rounds, {keys:.0f} keys")
