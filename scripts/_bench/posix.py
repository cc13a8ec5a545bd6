"""irdmafs mounts beside the tmpfs below them, /dev/shm, and any directory."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import click
from harness.network import Unavailable
from rich.console import Console

from .command import SETTINGS, Names, Size, json_file, measuring, turned, wide_console
from .files import CHUNK, WrongData
from .machine import huge_page_tmpfs, meminfo, processor_s, resident_bytes, temporary_directory
from .mounts import Mount, mount_of, mounted
from .posix_measures import BY_ROW, MEASURES, Measure
from .posix_results import Cost, Results
from .tables import save
from .workspace import Scale, Workspace

TARGETS = ("kernel", "pyfuse3", "tmpfs", "shm")
SHM = Path("/dev/shm")
TMPFS_SIZE = 6 << 30
QUICK = Scale(size=64 << 20, small_files=300, names=500, iterations=1000)
# A measure that takes longer than this on a mount has met a daemon that does not answer.
STUCK_SECONDS = 300.0


@dataclass(slots=True)
class Target:
    """One column: a directory to work in, and the mount it is on where that is an irdmafs.

    `ours` tells a mount of this program: its daemon may be killed when it does not answer.
    """

    name: str
    workspace: Workspace
    mount: Mount | None
    ours: bool
    stuck: bool = False

    def take(self, measure: Measure) -> tuple[list[float], Cost | None]:
        """Take one measure once. Raises OSError, WrongData, Unavailable."""
        watchdog = threading.Timer(STUCK_SECONDS, self._give_up)
        watchdog.daemon = True
        watchdog.start()
        try:
            measure.prepare(self.workspace)
            if self.mount is None:
                return list(measure.run(self.workspace)), None
            requests, cpu = self.mount.requests(), processor_s(self.mount.pid)
            values = list(measure.run(self.workspace))
            # Asking for the requests waits for those that trail the measure, so it comes first.
            requests = self.mount.requests() - requests
            cpu = processor_s(self.mount.pid) - cpu
            return values, Cost(requests, cpu, resident_bytes(self.mount.pid))
        finally:
            watchdog.cancel()

    def _give_up(self) -> None:
        self.stuck = True
        if self.mount is not None and self.ours:
            self.mount.kill()


def open_targets(
    names: list[str],
    directories: list[str],
    scale: Scale,
    results: Results,
    stack: contextlib.ExitStack,
) -> list[Target]:
    """Make what is to be measured; what cannot be made becomes a note and an empty column."""
    scratch = stack.enter_context(temporary_directory())
    below = SHM
    if {"kernel", "pyfuse3", "tmpfs"} & set(names):
        try:
            size = max(TMPFS_SIZE, 6 * scale.size)
            below = stack.enter_context(huge_page_tmpfs(scratch / "tmpfs", size))
        except Unavailable as error:
            results.note(f"tmpfs: {error}; the mounts keep their data in /dev/shm instead")
            if "tmpfs" in names:
                names.remove("tmpfs")
    targets = []
    for name in (*names, *directories):
        mount = None
        try:
            if name in ("kernel", "pyfuse3"):
                store = stack.enter_context(temporary_directory(below))
                mount = stack.enter_context(mounted(name, store))
                parent = mount.path
            else:
                parent = {"tmpfs": below, "shm": SHM}.get(name, Path(name))
            directory = stack.enter_context(temporary_directory(parent))
        except (Unavailable, OSError) as error:
            results.note(f"{name}: cannot run here: {error}")
            continue
        there = mount or (mount_of(directory) if name in directories else None)
        targets.append(Target(name, Workspace(directory, scale), there, mount is not None))
    return targets


def measure_all(targets: list[Target], rounds: int, results: Results) -> None:
    progress = Console(stderr=True)
    skipped = set()
    for number in range(rounds):
        for measure in results.measures:
            # The line is printed before the clock runs: a progress bar's thread would disturb it.
            if progress.is_terminal:
                progress.print(f"round {number + 1}/{rounds}  {measure.name:20}", end="\r")
            for target in turned(targets, number):
                if target.stuck or (target.name, measure.name) in skipped:
                    continue
                gc.collect()
                try:
                    values, cost = target.take(measure)
                except Unavailable as error:
                    skipped.add((target.name, measure.name))
                    results.note(f"{measure.name}: {error}")
                    continue
                except (OSError, WrongData) as error:
                    skipped.add((target.name, measure.name))
                    why = f"no answer in {STUCK_SECONDS:g} s" if target.stuck else str(error)
                    results.failures.append(f"{target.name}: {measure.name}: {why}")
                    continue
                for row, value in zip(measure.rows, values, strict=True):
                    results.rates.add(target.name, row.key, number, value)
                if cost is not None:
                    results.costs[target.name, measure.name].append(cost)


@click.command(context_settings=SETTINGS)
@click.argument("directories", metavar="[DIR]...", nargs=-1, type=click.Path(exists=True))
@click.option(
    "--targets",
    type=Names("target", TARGETS),
    default=",".join(TARGETS),
    show_default=True,
    help='"" for none.',
)
@click.option(
    "--size",
    type=Size(CHUNK),
    help="Of the large file, a multiple of 4 MiB.  [default: 1G, quick: 64M]",
)
@click.option("--rounds", type=click.IntRange(1), help="[default: 5, quick: 2]")
@click.option(
    "--only",
    type=Names("measure", list(BY_ROW)),
    default="",
    metavar="NAME,...",
    help="Only these measures.",
)
@click.option("--quick", is_flag=True, help="Less of everything: a look, not a measurement.")
@json_file
@click.option("--assert", "assert_", is_flag=True, help="Fail if kernel misses a bar.")
def posix(
    directories: tuple[str, ...],
    targets: tuple[str, ...],
    size: int | None,
    rounds: int | None,
    only: tuple[str, ...],
    quick: bool,
    json_file: Path | None,
    assert_: bool,
) -> None:
    """Measure irdmafs mounts beside the tmpfs below them, /dev/shm, and any DIR.

    Every round takes every measure on every target in turn, beginning with another target each
    time. Shown are medians, and medians of the ratios of each round. Run it on a quiet machine.
    """
    scale = QUICK if quick else Scale()
    if size is not None:
        scale = replace(scale, size=size)
    columns = list(dict.fromkeys([*targets, *directories]))
    if not columns:
        raise click.BadParameter("nothing to measure")
    rounds = rounds or (2 if quick else 5)
    # Each target keeps its large file, a replaced one may go a moment after the new one came, and
    # making memory real takes some for a moment.
    need, free = (len(columns) + 3) * scale.size, meminfo()["MemAvailable"]
    if need > free:
        raise click.ClickException(
            f"this needs {need >> 20:,} MiB of memory and {free >> 20:,} MiB are free; "
            "take a smaller --size or fewer --targets"
        )
    wanted = {BY_ROW[name].name for name in only or BY_ROW}
    results = Results(columns, [measure for measure in MEASURES if measure.name in wanted])
    with measuring(), contextlib.ExitStack() as stack:
        others = [name for name in columns if name in directories]
        opened = open_targets(list(dict.fromkeys(targets)), others, scale, results, stack)
        if opened:
            measure_all(opened, rounds, results)
    console = wide_console(60 + 32 * len(columns))
    results.show(console)
    missed = results.show_bars(console) if "kernel" in targets else False
    save(results.as_json(scale, rounds), json_file)
    sys.exit(1 if results.failures or (assert_ and missed) else 0)
