#!/usr/bin/env python3
"""Measure the transport beside iperf3, on the same links in the same minute.

A worker and two store nodes get a network namespace each, in a row: worker - node - node. Every round
runs iperf3 (plain, and storing what it receives in the same tmpfs) and our reads and writes in turn, with
each number of streams. A round's ratio takes the best number of streams of either side; shown
are medians over the rounds. With --prefaulted, the memory of the files that receive is there already, as
it is in a store that keeps some in stock. Needs root, iperf3, ip and tc. Run it on a quiet machine.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import trio
from _cluster.measures import make_real
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from irdmafs.backend.transport import Extent, FileRange, Target
from irdmafs.backend.transport.peers import Peers
from transport_nodes import NodeProcess, resolver

WORKER, NODE, NEXT = "worker", "node", "next"
ADDRESSES = {(WORKER, NODE): ("10.98.1.1", "10.98.1.2"), (NODE, NEXT): ("10.98.2.1", "10.98.2.2")}
MEASURES = ("iperf3", "iperf3 -F", "read", "write 1 replica", "write 2 replicas")
IPERF_LIMIT_S = 120.0
WARM_UP_BYTES = 64 << 20
MADV_POPULATE_WRITE = 23


class Namespaces:
    """Three namespaces in a row, joined by veth pairs; `rate` shapes every link in both directions."""

    def __init__(self, rate: str | None, mtu: int) -> None:
        self.rate = rate
        self.mtu = mtu
        self.names = {name: f"tb{os.getpid()}{name}" for name in (WORKER, NODE, NEXT)}

    def __enter__(self) -> Namespaces:
        try:
            for name in self.names.values():
                _run("ip", "netns", "add", name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            for (left, right), addresses in ADDRESSES.items():
                self._join(left, right, addresses)
            _run(
                "ip", "-n", self.names[WORKER], "route", "add", "10.98.2.0/24",
                "via", ADDRESSES[WORKER, NODE][1],
            )  # fmt: skip
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names.values():
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)

    def _join(self, left: str, right: str, addresses: tuple[str, str]) -> None:
        ends = (self.names[left], f"to-{right}"), (self.names[right], f"to-{left}")
        _run(
            "ip", "link", "add", "name", ends[0][1], "netns", ends[0][0], "type", "veth",
            "peer", "name", ends[1][1], "netns", ends[1][0],
        )  # fmt: skip
        for (namespace, device), address in zip(ends, addresses, strict=True):
            _run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", device)
            _run("ip", "-n", namespace, "link", "set", device, "mtu", str(self.mtu), "up")
            if self.rate is not None:
                _run(
                    "tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf",
                    "rate", self.rate, "burst", "1mb", "latency", "20ms",
                )  # fmt: skip

    def inside(self, name: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.names[name])


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


@contextlib.contextmanager
def huge_page_tmpfs(size_bytes: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="bench-transport-") as directory:
        options = f"huge=within_size,size={size_bytes}"
        _run("mount", "-t", "tmpfs", "-o", options, "none", directory)
        try:
            yield directory
        finally:
            _run("umount", directory)


def iperf3(network: Namespaces, size_bytes: int, streams: int, file: str | None) -> float:
    """Bytes per second that the worker receives from the node."""
    command = [*network.inside(WORKER), "iperf3", "-s", "-1", "--forceflush"]
    if file is not None:
        command += ["-F", file]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            if server.poll() is not None:
                raise click.ClickException("iperf3 -s ended")
        result = subprocess.run(
            [
                *network.inside(NODE), "iperf3", "-J", "-c", ADDRESSES[WORKER, NODE][0],
                "-P", str(streams), "-n", str(size_bytes // streams),
            ],
            capture_output=True, timeout=IPERF_LIMIT_S,
        )  # fmt: skip
        report = json.loads(result.stdout)
        if "error" in report:
            raise click.ClickException(f"iperf3: {report['error']}")
        return float(report["end"]["sum_received"]["bits_per_second"]) / 8
    finally:
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()
        if file is not None:
            Path(file).unlink(missing_ok=True)


class Worker:
    """This script in the worker's namespace, told what to measure."""

    def __init__(
        self, network: Namespaces, directory: str, size_bytes: int, prefaulted: bool
    ) -> None:
        self._process = subprocess.Popen(
            [
                *network.inside(WORKER),
                sys.executable,
                __file__,
                "worker",
                directory,
                str(size_bytes),
                str(int(prefaulted)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()

    def measure(self, measure: str, streams: int) -> float:
        """Bytes per second."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([measure, streams]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise click.ClickException("the worker ended")
        return float(answer)


async def _work(directory: str, size_bytes: int, prefaulted: bool) -> None:
    """The worker's side: one measure per line of standard input."""
    lines = trio.wrap_file(sys.stdin)
    source = os.open(f"{directory}/source", os.O_RDWR)
    content = 0
    async for line in lines:
        measure, streams = json.loads(line)
        content += 1
        async with Peers(
            resolver(f"{directory}/addresses"), name="bench", role="mount", streams=streams
        ) as peers:
            device = peers.device(1)
            chain = (2,) if measure == "write 2 replicas" else ()
            # Connections are made before the clock runs, as they live longer than one transfer.
            warm_up = Extent(content, 1)
            await device.write(
                warm_up, Target(1, 1, chain), FileRange(source, 0, min(WARM_UP_BYTES, size_bytes))
            )
            extent = Extent(content, 0)
            if prefaulted:
                places = (
                    ["target"]
                    if measure == "read"
                    else [f"{n}/spare/{size_bytes}" for n in (1, *chain)]
                )
                for place in places:
                    _prefault(f"{directory}/{place}", size_bytes)
            if measure == "read":
                os.link(f"{directory}/source", f"{directory}/1/{content:x}.0")
                target = os.open(f"{directory}/target", os.O_RDWR | os.O_CREAT)
                began = time.perf_counter()
                os.posix_fallocate(target, 0, size_bytes)
                await device.read(extent, 0, FileRange(target, 0, size_bytes))
                took_s = time.perf_counter() - began
                _check_same(source, target, size_bytes)
                os.close(target)
                os.unlink(f"{directory}/target")
            else:
                began = time.perf_counter()
                await device.write(extent, Target(1, 1, chain), FileRange(source, 0, size_bytes))
                took_s = time.perf_counter() - began
            for node in (1, *chain):
                for stripe in (0, 1):
                    os.unlink(f"{directory}/{node}/{content:x}.{stripe}")
        print(size_bytes / took_s, flush=True)
    os.close(source)


def _prefault(path: str, size_bytes: int) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, size_bytes)
    with mmap.mmap(fd, size_bytes) as mapped:
        mapped.madvise(MADV_POPULATE_WRITE)
    os.close(fd)


def _check_same(source: int, target: int, size_bytes: int) -> None:
    step = 64 << 20
    for offset in range(0, size_bytes, step):
        if os.pread(source, 4096, offset) != os.pread(target, 4096, offset):
            raise click.ClickException(f"wrong bytes at {offset}")


Rates = dict[str, dict[int, float]]


def _round(
    network: Namespaces,
    worker: Worker,
    directory: str,
    size_bytes: int,
    streams: list[int],
    number: int,
) -> Rates:
    rates: Rates = {measure: {} for measure in MEASURES}
    order = MEASURES[number % len(MEASURES) :] + MEASURES[: number % len(MEASURES)]
    for count in streams:
        for measure in order:
            # As much as two nodes take.
            make_real(2 * size_bytes)
            if measure.startswith("iperf3"):
                file = f"{directory}/iperf" if measure.endswith("-F") else None
                rates[measure][count] = iperf3(network, size_bytes, count, file)
            else:
                rates[measure][count] = worker.measure(measure, count)
    return rates


def _show(console: Console, title: str, rounds: list[Rates], rate: float | None) -> None:
    table = Table(title=title)
    for column in ("", "GB/s", "streams", "of iperf3 -F", *(("of the link",) if rate else ())):
        table.add_column(column, justify="left" if not column else "right")
    for measure in MEASURES:
        best = [max(rates[measure].values()) for rates in rounds]
        counts = [max(rates[measure], key=rates[measure].__getitem__) for rates in rounds]
        ratios = [
            mine / max(rates["iperf3 -F"].values())
            for mine, rates in zip(best, rounds, strict=True)
        ]
        row = [
            measure,
            f"{statistics.median(best) / 1e9:.3f}",
            str(statistics.mode(counts)),
            f"{statistics.median(ratios):.2f}",
        ]
        if rate is not None:
            row.append(f"{statistics.median(best) * 8 / rate:.3f}")
        table.add_row(*row)
    console.print(table)


@click.group(invoke_without_command=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--size", "size_mib", default=1024, show_default=True, help="MiB to move.")
@click.option("--streams", default="1,2,4", show_default=True, help="Numbers of streams to try.")
@click.option(
    "--links",
    default="veth,1gbit,10gbit",
    show_default=True,
    help="Rates for tc; veth: not shaped.",
)
@click.option("--mtu", default=0, help="Of the links; by default 1500, and 9000 if shaped.")
@click.option("--prefaulted", is_flag=True, help="Receive into memory that is there already.")
@click.option("--json", "as_json", is_flag=True, help="Print every figure of every round.")
@click.pass_context
def main(
    context: click.Context,
    rounds: int,
    size_mib: int,
    streams: str,
    links: str,
    mtu: int,
    prefaulted: bool,
    as_json: bool,
) -> None:
    """Compare the transport with iperf3."""
    if context.invoked_subcommand is not None:
        return
    if os.geteuid() != 0:
        raise click.ClickException("network namespaces need root")
    if shutil.which("iperf3") is None:
        raise click.ClickException("iperf3 is missing: apt install iperf3")
    counts = [int(count) for count in streams.split(",")]
    size_bytes = size_mib << 20
    console = Console()
    figures: dict[str, list[Rates]] = {}
    for link in links.split(","):
        rate = None if link == "veth" else link
        link_mtu = mtu or (1500 if rate is None else 9000)
        with contextlib.ExitStack() as stack:
            network = stack.enter_context(Namespaces(rate, link_mtu))
            directory = stack.enter_context(huge_page_tmpfs(6 * size_bytes + (1 << 29)))
            _make_source(f"{directory}/source", size_bytes)
            os.mkdir(f"{directory}/addresses")
            for node, (name, ends) in enumerate(
                ((NODE, (WORKER, NODE)), (NEXT, (NODE, NEXT))), start=1
            ):
                stack.enter_context(
                    NodeProcess(
                        f"{directory}/{node}", node, f"{directory}/addresses",
                        ADDRESSES[ends][1], prefix=network.inside(name),
                    )
                )  # fmt: skip
            worker = stack.enter_context(Worker(network, directory, size_bytes, prefaulted))
            done = figures[link] = [
                _round(network, worker, directory, size_bytes, counts, number)
                for number in range(rounds)
            ]
        title = f"{size_mib} MiB, {link}, mtu {link_mtu}, median of {rounds} rounds"
        if prefaulted:
            title += ", prefaulted"
        _show(console, title, done, _bits(rate))
    if as_json:
        print(json.dumps(figures))


def _bits(rate: str | None) -> float | None:
    if rate is None:
        return None
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise click.ClickException(f"a rate is 10gbit or 500mbit, not {rate}")


def _make_source(path: str, size_bytes: int) -> None:
    with open(path, "wb") as file:
        for _ in range(0, size_bytes, 1 << 20):
            file.write(os.urandom(1 << 20))


@main.command(hidden=True)
@click.argument("directory")
@click.argument("size_bytes", type=int)
@click.argument("prefaulted", type=int)
def worker(directory: str, size_bytes: int, prefaulted: int) -> Any:
    trio.run(_work, directory, size_bytes, bool(prefaulted))


if __name__ == "__main__":
    main()
