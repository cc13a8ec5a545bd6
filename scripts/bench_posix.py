#!/usr/bin/env python3
"""Measure irdmafs mounts beside the tmpfs below them, /dev/shm, and any directory.

Every round takes every measure on every target in turn, beginning with another target each
time. Shown are medians, and medians of the ratios of each round. Run it on a quiet machine.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import click
from _bench.measures import MEASURES, Measure, NotHere, measures_named
from _bench.places import (
    Mount,
    Unavailable,
    free_memory,
    huge_page_tmpfs,
    mounted,
    read_status,
    signals_end_the_block,
    temporary_directory,
)
from _bench.results import Cost, Results, as_json, judge, show
from _bench.workspace import LARGE_CHUNK, Scale, Workspace, WrongData
from rich.console import Console

from irdmafs.config import MountError, parse_size

TARGETS = ("kernel", "pyfuse3", "tmpfs", "shm")
TMPFS_SIZE = 6 << 30
QUICK = Scale(size=64 << 20, small_files=300, names=500, iterations=1000)
# A measure that takes longer than this on a mount has met a daemon that does not answer.
STUCK_SECONDS = 300.0


@dataclass(slots=True)
class Target:
    """One column: a directory to work in, and the mount it is on where that is an irdmafs.

    ``ours`` tells a mount of this script: its daemon may be killed when it does not answer.
    """

    name: str
    workspace: Workspace
    mount: Mount | None
    ours: bool
    stuck: bool = False

    def take(self, measure: Measure) -> tuple[list[float], Cost | None]:
        """Take one measure once. Raises OSError, WrongData or NotHere."""
        watchdog = threading.Timer(STUCK_SECONDS, self._give_up)
        watchdog.daemon = True
        watchdog.start()
        try:
            measure.prepare(self.workspace)
            if self.mount is None:
                return list(measure.run(self.workspace)), None
            requests, cpu = self.mount.requests(), self.mount.cpu_seconds()
            values = list(measure.run(self.workspace))
            # Asking for the requests waits for those that trail the measure, so it comes first.
            requests = self.mount.requests() - requests
            cpu = self.mount.cpu_seconds() - cpu
            return values, Cost(requests, cpu, self.mount.rss_bytes())
        finally:
            watchdog.cancel()

    def _give_up(self) -> None:
        self.stuck = True
        if self.mount is not None and self.ours:
            self.mount.kill()


def open_targets(
    names: list[str],
    directories: tuple[str, ...],
    scale: Scale,
    results: Results,
    stack: contextlib.ExitStack,
) -> list[Target]:
    """Make what is to be measured; what cannot be made becomes a note and an empty column."""
    scratch = stack.enter_context(temporary_directory())
    below: Path | None = None
    if {"kernel", "pyfuse3", "tmpfs"} & set(names):
        try:
            size = max(TMPFS_SIZE, 6 * scale.size)
            below = stack.enter_context(huge_page_tmpfs(scratch / "tmpfs", size))
        except Unavailable as error:
            results.note(f"tmpfs: {error}; the mounts keep their data in /dev/shm instead")
            if "tmpfs" in names:
                names.remove("tmpfs")
    shm = Path("/dev/shm")
    targets = []
    for name in names:
        mount: Mount | None = None
        try:
            if name in ("kernel", "pyfuse3"):
                store = stack.enter_context(temporary_directory(below or shm))
                log = scratch / f"{name}.log"
                mount = stack.enter_context(mounted(name, store, scratch / name, log))
                parent = mount.mountpoint
            else:
                parent = below if name == "tmpfs" and below else shm
            directory = stack.enter_context(temporary_directory(parent))
        except (Unavailable, OSError) as error:
            results.note(f"{name}: cannot run here: {error}")
            continue
        targets.append(Target(name, Workspace(directory, scale), mount, mount is not None))
    for name in directories:
        try:
            directory = stack.enter_context(temporary_directory(Path(name)))
        except OSError as error:
            results.note(f"{name}: cannot run here: {error}")
            continue
        targets.append(Target(name, Workspace(directory, scale), mount_of(directory), False))
    return targets


def mount_of(directory: Path) -> Mount | None:
    """The irdmafs mount that holds a directory, None where it is on something else."""
    mountpoint = directory.resolve()
    while not mountpoint.is_mount():
        mountpoint = mountpoint.parent
    try:
        read_status(mountpoint)
    except OSError:
        return None
    return Mount(mountpoint)


def measure_all(targets: list[Target], rounds: int, results: Results) -> None:
    progress = Console(stderr=True)
    skipped = set()
    for number in range(rounds):
        first = number % len(targets)
        for measure in results.measures:
            # The line is printed before the clock runs: a progress bar's thread would disturb it.
            if progress.is_terminal:
                progress.print(f"round {number + 1}/{rounds}  {measure.name:20}", end="\r")
            for target in targets[first:] + targets[:first]:
                if target.stuck or (target.name, measure.name) in skipped:
                    continue
                gc.collect()
                try:
                    values, cost = target.take(measure)
                except NotHere as error:
                    skipped.add((target.name, measure.name))
                    results.note(f"{measure.name}: {error}")
                    continue
                except (OSError, WrongData) as error:
                    skipped.add((target.name, measure.name))
                    why = f"no answer in {STUCK_SECONDS:g} s" if target.stuck else str(error)
                    results.failures.append(f"{target.name}: {measure.name}: {why}")
                    continue
                for row, value in zip(measure.rows, values, strict=True):
                    results.values[target.name, row.key][number] = value
                if cost is not None:
                    results.costs[target.name, measure.name].append(cost)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("directories", metavar="[DIR]...", nargs=-1, type=click.Path(exists=True))
@click.option("--targets", default=",".join(TARGETS), show_default=True, help='"" for none.')
@click.option("--size", help="Of the large file, a multiple of 4 MiB.  [default: 1G, quick: 64M]")
@click.option("--rounds", type=click.IntRange(1), help="[default: 5, quick: 2]")
@click.option("--only", default="", metavar="NAME,...", help="Only these measures.")
@click.option("--quick", is_flag=True, help="Less of everything: a look, not a measurement.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write every number there.",
)
@click.option("--assert", "assert_", is_flag=True, help="Fail if kernel misses a bar.")
def main(
    directories: tuple[str, ...],
    targets: str,
    size: str | None,
    rounds: int | None,
    only: str,
    quick: bool,
    json_file: Path | None,
    assert_: bool,
) -> None:
    """Measure irdmafs mounts beside the tmpfs below them, /dev/shm, and any DIR."""
    names = [name for name in targets.split(",") if name]
    for name in names:
        if name not in TARGETS:
            raise click.BadParameter(f"no target {name!r}; there are {', '.join(TARGETS)}")
    try:
        measures = measures_named(only.split(",")) if only else MEASURES
        scale = QUICK if quick else Scale()
        if size is not None:
            small, empty, iterations = scale.small_files, scale.names, scale.iterations
            scale = Scale(parse_size(size), small, empty, iterations)
    except (MountError, ValueError) as error:
        raise click.BadParameter(str(error)) from None
    if scale.size % LARGE_CHUNK:
        raise click.BadParameter("--size must be a multiple of 4 MiB")
    if len(set(names) | set(directories)) == 0:
        raise click.BadParameter("nothing to measure")
    rounds = rounds or (2 if quick else 5)
    # Each target keeps its large file, a replaced one may go a moment after the new one came, and
    # touch_memory takes some for a moment.
    need = (len(names) + len(directories) + 3) * scale.size
    if need > free_memory():
        raise click.ClickException(
            f"this needs {need >> 20:,} MiB of memory and {free_memory() >> 20:,} MiB are free; "
            "take a smaller --size or fewer --targets"
        )
    results = Results([*dict.fromkeys([*names, *directories])], measures)
    gc.disable()
    with signals_end_the_block(), contextlib.ExitStack() as stack:
        opened = open_targets(names, tuple(dict.fromkeys(directories)), scale, results, stack)
        if opened:
            measure_all(opened, rounds, results)
    # A narrow terminal shall break lines, not cut numbers off.
    console = Console(width=max(Console().width, 60 + 32 * len(results.targets)))
    show(results, console)
    missed = report_bars(results, console) if "kernel" in names else False
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(results, scale, rounds), indent=1) + "\n")
    sys.exit(1 if results.failures or (assert_ and missed) else 0)


def report_bars(results: Results, console: Console) -> bool:
    """Print what the kernel session has to reach, and whether it did. True if it missed one."""
    judged = judge(results)
    for text, number, reached in judged:
        if number is None:
            console.print(f"not measured  {text}")
        else:
            verdict = "reached" if reached else "[bold red]MISSED[/] "
            console.print(f"{verdict}  {text}: {number:,.2f}")
    return not all(reached for _, _, reached in judged)


if __name__ == "__main__":
    main()
