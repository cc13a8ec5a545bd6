#!/usr/bin/env python3
"""Show what irdmafs keeps in memory: the daemon with many small files, and one large file that
many processes map at once."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import numpy as np
from _bench.places import (
    Mount,
    Unavailable,
    cached_bytes,
    huge_page_tmpfs,
    meminfo,
    mounted,
    read_status,
    signals_end_the_block,
    temporary_directory,
)
from rich import box
from rich.console import Console
from rich.table import Table

MIB = 1 << 20
FILES_PER_DIRECTORY = 1000
SMALL_FILE = 1024
RSS_BAR = 500 * 10**6
# The large file's bytes in memory, with its readers, per byte of it.
COPIES_BAR = 1.05


def create_files(mountpoint: Path, count: int) -> float:
    """Write ``count`` files of 1 KiB, 1,000 to a directory. Seconds."""
    content = os.urandom(SMALL_FILE)
    start = time.perf_counter()
    for index in range(count):
        number, within = divmod(index, FILES_PER_DIRECTORY)
        directory = f"{mountpoint}/{number:03}"
        if within == 0:
            os.mkdir(directory)
        fd = os.open(f"{directory}/{within:03}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        os.write(fd, content)
        os.close(fd)
    return time.perf_counter() - start


def find_files(mountpoint: Path) -> tuple[int, float]:
    """How many files ``find`` sees with the size that was written, and seconds."""
    start = time.perf_counter()
    command = ["find", str(mountpoint), "-type", "f", "-size", f"{SMALL_FILE}c", "-printf", "."]
    found = subprocess.run(command, capture_output=True, check=True, timeout=600).stdout
    return len(found), time.perf_counter() - start


def map_and_wait(path: str, parent: Connection) -> None:
    """Map a file, read all of it, tell the sum, and keep the map until told to end."""
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    parent.send(int(np.frombuffer(mapping, np.uint8).sum(dtype=np.uint64)))
    parent.recv()


def write_large(path: Path, size: int) -> int:
    """Write random MiBs; the sum of all bytes."""
    total = 0
    with open(path, "wb", buffering=0) as file:
        block = np.frombuffer(os.urandom(MIB), np.uint8)
        total = int(block.sum(dtype=np.uint64)) * (size // MIB)
        for _ in range(size // MIB):
            file.write(block.data)
    return total


def processes_mapping(path: Path, processes: int, expected: int) -> contextlib.ExitStack:
    """Start processes that have the file mapped and read when this returns, until the stack that
    it returns is closed. Raises ValueError where one read something else than was written."""
    context = multiprocessing.get_context("fork")
    with contextlib.ExitStack() as stack:
        ends = []
        for _ in range(processes):
            ours, theirs = context.Pipe()
            child = context.Process(target=map_and_wait, args=(str(path), theirs), daemon=True)
            child.start()
            theirs.close()
            stack.callback(child.join, 10)
            stack.callback(child.terminate)
            ends.append(ours)
        if any(end.recv() != expected for end in ends):
            raise ValueError(f"a process that maps {path} read wrong bytes")
        return stack.pop_all()


class Report:
    """Two tables that fill up, and whether a bar was missed."""

    def __init__(self) -> None:
        self.daemon = Table(box=box.SIMPLE_HEAD, title="memory of the daemon", title_justify="left")
        for column in ("when", "status, MiB", "/proc, MiB", "of it anonymous", "files", "seconds"):
            self.daemon.add_column(column, justify="left" if column == "when" else "right")
        self.missed: list[str] = []

    def add(self, when: str, mount: Mount, seconds: float | None = None) -> None:
        status: dict[str, Any] = read_status(mount.mountpoint)
        told = int(status["daemon_rss_bytes"])
        resident = mount.rss_bytes()
        self.daemon.add_row(
            when,
            f"{told / MIB:.1f}",
            f"{resident / MIB:.1f}",
            f"{_anonymous(mount.pid) / MIB:.1f}",
            f"{status.get('files', 0):,}",
            "" if seconds is None else f"{seconds:.1f}",
        )
        if max(told, resident) > RSS_BAR:
            self.missed.append(f"{when}: the daemon has {resident / MIB:.0f} MiB")


def _anonymous(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def measure_daemon(
    report: Report, session: str, store: Path, mountpoint: Path, log: Path, files: int
) -> None:
    with mounted(session, store, mountpoint, log) as mount:
        report.add("mounted, empty", mount)
        seconds = create_files(mountpoint, files)
        report.add(f"{files:,} files of 1 KiB written", mount, seconds)
        found, seconds = find_files(mountpoint)
        report.add("after find", mount, seconds)
        if found != files:
            report.missed.append(f"find sees {found:,} of {files:,} files")
    start = time.perf_counter()
    with mounted(session, store, mountpoint, log) as mount:
        report.add("unmounted and mounted again", mount, time.perf_counter() - start)
        found, seconds = find_files(mountpoint)
        report.add("after find", mount, seconds)
        if found != files:
            report.missed.append(f"mounted again, find sees {found:,} of {files:,} files")


def measure_copies(
    report: Report, mount: Mount, store: Path, size: int, processes: int, console: Console
) -> None:
    large = mount.mountpoint / "large"
    title = f"one file of {size // MIB:,} MiB: memory it takes, in MiB"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("when")
    for column in ("in the store", "page cache of the mount", "daemon", "Shmem of the machine"):
        table.add_column(column, justify="right")

    def look() -> tuple[int, int, int, int]:
        space = os.statvfs(store)
        used = (space.f_blocks - space.f_bfree) * space.f_frsize
        above = (cached_bytes(large) or 0) if large.exists() else 0
        return used, above, mount.rss_bytes(), meminfo()["Shmem"]

    start = look()

    def add(when: str) -> int:
        used, above, daemon, shmem = (now - then for now, then in zip(look(), start, strict=True))
        table.add_row(when, *(f"{value / MIB:+,.1f}" for value in (used, above, daemon, shmem)))
        return used + above + max(daemon, 0)

    expected = write_large(large, size)
    add("written")
    with processes_mapping(large, processes, expected):
        copies = add(f"mapped and read by {processes} processes") / size
    console.print(table)
    if copies > COPIES_BAR:
        report.missed.append(f"the file is in memory {copies:.2f} times")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--files", type=click.IntRange(1), default=100_000, show_default=True)
@click.option("--processes", type=click.IntRange(1), default=8, show_default=True)
@click.option("--size", type=click.IntRange(1), default=1024, show_default=True, help="MiB.")
@click.option(
    "--session", type=click.Choice(("kernel", "pyfuse3")), default="kernel", show_default=True
)
@click.option("--assert", "assert_", is_flag=True, help="Fail if a bar is missed.")
def main(files: int, processes: int, size: int, session: str, assert_: bool) -> None:
    """Show the daemon's memory with many small files, and that one large file, mapped by many
    processes, is in memory once."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    report = Report()
    with signals_end_the_block(), contextlib.ExitStack() as stack:
        scratch = stack.enter_context(temporary_directory())
        try:
            try:
                stores = stack.enter_context(huge_page_tmpfs(scratch / "tmpfs", 6 << 30))
            except Unavailable as error:
                console.print(f"{error}; the mount keeps its data in /dev/shm instead")
                stores = stack.enter_context(temporary_directory(Path("/dev/shm")))
            many, one = stores / "many", stores / "one"
            many.mkdir()
            one.mkdir()
            log = scratch / "log"
            measure_daemon(report, session, many, scratch / "many", log, files)
            console.print(report.daemon)
            with mounted(session, one, scratch / "one", log) as mount:
                measure_copies(report, mount, one, size * MIB, processes, console)
        except Unavailable as error:
            raise click.ClickException(str(error)) from None
    for text in report.missed:
        console.print(f"[bold red]MISSED[/]  {text}")
    if not report.missed:
        console.print(
            f"reached: the daemon under {RSS_BAR // 10**6} MB, and the large file in memory once"
        )
    sys.exit(1 if assert_ and report.missed else 0)


if __name__ == "__main__":
    main()
