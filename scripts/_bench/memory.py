"""Memory: the daemon's with many small files, and that of one file that many processes map at once."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import click
import numpy as np
from harness.network import Unavailable
from rich.console import Console

from .command import SETTINGS, asserting, measuring
from .files import MIB, WrongData, now
from .machine import (
    cached_bytes,
    huge_page_tmpfs,
    meminfo,
    process_status,
    resident_bytes,
    temporary_directory,
)
from .mounts import Mount, mounted, read_status
from .tables import table

FILES_PER_DIRECTORY = 1000
SMALL_FILE = 1024
RSS_BAR = 500 * 10**6
# The large file's bytes in memory, with its readers, per byte of it.
COPIES_BAR = 1.05


def create_files(top: Path, count: int) -> float:
    """Write `count` files of 1 KiB, 1,000 to a directory. Seconds."""
    content = os.urandom(SMALL_FILE)
    start = now()
    for index in range(count):
        number, within = divmod(index, FILES_PER_DIRECTORY)
        directory = f"{top}/{number:03}"
        if within == 0:
            os.mkdir(directory)
        fd = os.open(f"{directory}/{within:03}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        os.write(fd, content)
        os.close(fd)
    return now() - start


def map_and_wait(path: Path, parent: Connection) -> None:
    """Map a file, read all of it, tell the sum, and keep the map until told to end."""
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    parent.send(int(np.frombuffer(mapping, np.uint8).sum(dtype=np.uint64)))
    parent.recv()


def write_large(path: Path, size: int) -> int:
    """Write random MiBs; the sum of all bytes."""
    block = np.frombuffer(os.urandom(MIB), np.uint8)
    with open(path, "wb", buffering=0) as file:
        for _ in range(size // MIB):
            file.write(block.data)
    return int(block.sum(dtype=np.uint64)) * (size // MIB)


def processes_mapping(path: Path, processes: int, expected: int) -> contextlib.ExitStack:
    """Start processes that have the file mapped and read when this returns, until the stack that
    it returns is closed. Raises WrongData where one read something else than was written."""
    context = multiprocessing.get_context("fork")
    with contextlib.ExitStack() as stack:
        ends = []
        for _ in range(processes):
            ours, theirs = context.Pipe()
            child = context.Process(target=map_and_wait, args=(path, theirs), daemon=True)
            child.start()
            theirs.close()
            stack.callback(child.join, 10)
            stack.callback(child.terminate)
            ends.append(ours)
        if any(end.recv() != expected for end in ends):
            raise WrongData(f"a process that maps {path} read wrong bytes")
        return stack.pop_all()


class Report:
    """A table that fills up, and the bars that were missed."""

    def __init__(self) -> None:
        columns = ("when", "status, MiB", "/proc, MiB", "of it anonymous", "files", "seconds")
        self.daemon = table("memory of the daemon", *columns, numbers=True)
        self.missed: list[str] = []

    def add(self, when: str, mount: Mount, seconds: float | None = None) -> None:
        status = read_status(mount.path)
        told = int(status["daemon_rss_bytes"])
        resident = resident_bytes(mount.pid)
        self.daemon.add_row(
            when,
            f"{told / MIB:.1f}",
            f"{resident / MIB:.1f}",
            f"{process_status(mount.pid)['RssAnon'] / 1024:.1f}",
            f"{status.get('files', 0):,}",
            "" if seconds is None else f"{seconds:.1f}",
        )
        if max(told, resident) > RSS_BAR:
            self.missed.append(f"{when}: the daemon has {resident / MIB:.0f} MiB")

    def add_find(self, mount: Mount, files: int, again: str = "") -> None:
        """Have `find` see all files with the size that was written."""
        start = now()
        command = ["find", str(mount.path), "-type", "f", "-size", f"{SMALL_FILE}c", "-printf", "."]
        found = len(subprocess.run(command, capture_output=True, check=True, timeout=600).stdout)
        self.add("after find", mount, now() - start)
        if found != files:
            self.missed.append(f"{again}find sees {found:,} of {files:,} files")


def measure_daemon(report: Report, session: str, store: Path, files: int) -> None:
    with mounted(session, store) as mount:
        report.add("mounted, empty", mount)
        seconds = create_files(mount.path, files)
        report.add(f"{files:,} files of 1 KiB written", mount, seconds)
        report.add_find(mount, files)
    start = now()
    with mounted(session, store) as mount:
        report.add("unmounted and mounted again", mount, now() - start)
        report.add_find(mount, files, "mounted again, ")


def measure_copies(
    report: Report, mount: Mount, store: Path, size: int, processes: int, console: Console
) -> None:
    large = mount.path / "large"
    title = f"one file of {size // MIB:,} MiB: memory it takes, in MiB"
    columns = ("when", "in the store", "page cache of the mount", "daemon", "Shmem of the machine")
    shown = table(title, *columns, numbers=True)

    def look() -> tuple[int, int, int, int]:
        space = os.statvfs(store)
        used = (space.f_blocks - space.f_bfree) * space.f_frsize
        above = (cached_bytes(large) or 0) if large.exists() else 0
        return used, above, resident_bytes(mount.pid), meminfo()["Shmem"]

    start = look()

    def add(when: str) -> int:
        used, above, daemon, shmem = (now - then for now, then in zip(look(), start, strict=True))
        shown.add_row(when, *(f"{value / MIB:+,.1f}" for value in (used, above, daemon, shmem)))
        return used + above + max(daemon, 0)

    expected = write_large(large, size)
    add("written")
    with processes_mapping(large, processes, expected):
        copies = add(f"mapped and read by {processes} processes") / size
    console.print(shown)
    if copies > COPIES_BAR:
        report.missed.append(f"the file is in memory {copies:.2f} times")


@click.command(context_settings=SETTINGS)
@click.option("--files", type=click.IntRange(1), default=100_000, show_default=True)
@click.option("--processes", type=click.IntRange(1), default=8, show_default=True)
@click.option("--size", type=click.IntRange(1), default=1024, show_default=True, help="MiB.")
@click.option(
    "--session", type=click.Choice(("kernel", "pyfuse3")), default="kernel", show_default=True
)
@asserting
def memory(files: int, processes: int, size: int, session: str, assert_: bool) -> None:
    """Show the daemon's memory with many small files, and that one large file, mapped by many
    processes, is in memory once."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    report = Report()
    with measuring(), contextlib.ExitStack() as stack:
        scratch = stack.enter_context(temporary_directory())
        try:
            stores = stack.enter_context(huge_page_tmpfs(scratch / "tmpfs", 6 << 30))
        except Unavailable as error:
            console.print(f"{error}; the mount keeps its data in /dev/shm instead")
            stores = stack.enter_context(temporary_directory(Path("/dev/shm")))
        many, one = stores / "many", stores / "one"
        many.mkdir()
        one.mkdir()
        measure_daemon(report, session, many, files)
        console.print(report.daemon)
        with mounted(session, one) as mount:
            measure_copies(report, mount, one, size * MIB, processes, console)
    for text in report.missed:
        console.print(f"[bold red]MISSED[/]  {text}")
    if not report.missed:
        console.print(
            f"reached: the daemon under {RSS_BAR // 10**6} MB, and the large file in memory once"
        )
    sys.exit(1 if assert_ and report.missed else 0)
