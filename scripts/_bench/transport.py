"""The transport beside iperf3, on the same links in the same minute."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import statistics
import time
from pathlib import Path

import click
from harness.network import Host, Namespaces
from harness.transport_nodes import NodeProcess, resolver
from rich.console import Console

from irdmafs.backend.transport import Extent, FileRange, Target
from irdmafs.backend.transport.movers import all_movers
from irdmafs.backend.transport.peers import open_peers

from .command import SETTINGS, measuring, turned
from .files import MIB, PAGE, WrongData
from .iperf import iperf3, need_iperf3
from .machine import huge_page_tmpfs, make_real, temporary_directory
from .tables import table
from .workers import Worker, serve_jobs

MEASURES = ("iperf3", "iperf3 -F", "read", "write 1 replica", "write 2 replicas")
WARM_UP_BYTES = 64 * MIB
MADV_POPULATE_WRITE = 23
MTU, SHAPED_MTU = 1500, 9000

Rates = dict[str, dict[int, float]]


class Jobs:
    """The worker's side: reads and writes on two store nodes, beside which its own files are."""

    def __init__(self, directory: str, size: int, prefaulted: bool) -> None:
        self._directory = directory
        self._size = size
        self._prefaulted = prefaulted
        self._source = os.open(f"{directory}/source", os.O_RDWR)
        self._content = 0

    async def measure(self, what: str, streams: int) -> float:
        """Bytes per second. Raises WrongData."""
        size, directory = self._size, self._directory
        self._content += 1
        extent = Extent(self._content, 0)
        chain = (2,) if what == "write 2 replicas" else ()
        where, movers = resolver(Path(directory)), all_movers(streams=streams)
        async with open_peers(where, movers, name="bench", role="mount") as peers:
            device = peers.device(1)
            # Connections are made before the clock runs, as they live longer than one transfer.
            warm_up = FileRange(self._source, 0, min(WARM_UP_BYTES, size))
            await device.write(Extent(self._content, 1), Target(1, 1, chain), warm_up)
            if self._prefaulted:
                spares = [f"{node}/spare/{size}" for node in (1, *chain)]
                for place in ["target"] if what == "read" else spares:
                    self._prefault(place)
            if what == "read":
                os.link(f"{directory}/source", f"{directory}/1/{self._content:x}.0")
                target = os.open(f"{directory}/target", os.O_RDWR | os.O_CREAT)
                began = time.perf_counter()
                os.posix_fallocate(target, 0, size)
                await device.read(extent, 0, FileRange(target, 0, size))
                took_s = time.perf_counter() - began
                self._check_same(target)
                os.close(target)
                os.unlink(f"{directory}/target")
            else:
                began = time.perf_counter()
                await device.write(extent, Target(1, 1, chain), FileRange(self._source, 0, size))
                took_s = time.perf_counter() - began
            for node in (1, *chain):
                for stripe in (0, 1):
                    os.unlink(f"{directory}/{node}/{self._content:x}.{stripe}")
        return size / took_s

    def _prefault(self, place: str) -> None:
        fd = os.open(f"{self._directory}/{place}", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(fd, 0, self._size)
        with mmap.mmap(fd, self._size) as mapped:
            mapped.madvise(MADV_POPULATE_WRITE)
        os.close(fd)

    def _check_same(self, target: int) -> None:
        for offset in range(0, self._size, 64 * MIB):
            if os.pread(self._source, PAGE, offset) != os.pread(target, PAGE, offset):
                raise WrongData(f"wrong bytes at {offset}")


async def work(directory: str, size: int, prefaulted: bool) -> None:
    await serve_jobs(Jobs(directory, size, prefaulted))


def measure_round(
    ends: tuple[Host, Host], worker: Worker, sink: Path, size: int, streams: list[int], number: int
) -> Rates:
    """One round; iperf3 sends from the first of `ends` to the second."""
    rates: Rates = {measure: {} for measure in MEASURES}
    for count in streams:
        for measure in turned(MEASURES, number):
            # As much as two nodes take.
            make_real(2 * size)
            if measure.startswith("iperf3"):
                file = sink if measure.endswith("-F") else None
                rates[measure][count] = iperf3(*ends, size, count, file)
            else:
                (rates[measure][count],) = worker.do("measure", measure, count)
    return rates


def measure_link(
    bits_per_s: float | None, mtu: int, size: int, streams: list[int], rounds: int, prefaulted: bool
) -> list[Rates]:
    """A worker and two store nodes on a host each, with links in a row: worker - node - node."""
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Namespaces())
        first, middle, last = network.add_hosts(["worker", "node", "next"])
        worker_host, node_host = network.join(first, middle, mtu, bits_per_s)
        _, next_host = network.join(middle, last, mtu, bits_per_s)
        scratch = stack.enter_context(temporary_directory())
        directory = stack.enter_context(huge_page_tmpfs(scratch / "memory", 6 * size + 512 * MIB))
        with (directory / "source").open("wb") as file:
            for _ in range(0, size, MIB):
                file.write(os.urandom(MIB))
        for node, host in enumerate((node_host, next_host), start=1):
            stack.enter_context(NodeProcess(directory, node, host.address, prefix=host.launcher))
        plan = {"directory": str(directory), "size": size, "prefaulted": prefaulted}
        where = "_bench.transport:work"
        worker = stack.enter_context(Worker("transport", where, plan, worker_host.launcher))
        ends = (node_host, worker_host)
        return [
            measure_round(ends, worker, directory / "iperf", size, streams, number)
            for number in range(rounds)
        ]


def show(console: Console, title: str, rounds: list[Rates], bits_per_s: float | None) -> None:
    columns = ["", "GB/s", "streams", "of iperf3 -F", *(["of the link"] if bits_per_s else [])]
    shown = table(title, *columns, numbers=True)
    for measure in MEASURES:
        best = [max(rates[measure].values()) for rates in rounds]
        counts = [max(rates[measure], key=rates[measure].__getitem__) for rates in rounds]
        base = [max(rates["iperf3 -F"].values()) for rates in rounds]
        ratios = [mine / theirs for mine, theirs in zip(best, base, strict=True)]
        row = [
            measure,
            f"{statistics.median(best) / 1e9:.3f}",
            str(statistics.mode(counts)),
            f"{statistics.median(ratios):.2f}",
        ]
        if bits_per_s is not None:
            row.append(f"{statistics.median(best) * 8 / bits_per_s:.3f}")
        shown.add_row(*row)
    console.print(shown)


def bits_of(link: str) -> float | None:
    if link == "veth":
        return None
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6)):
        if link.endswith(unit):
            return float(link.removesuffix(unit)) * factor
    raise click.ClickException(f"a rate is 10gbit or 500mbit, not {link}")


@click.command(context_settings=SETTINGS)
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
def transport(
    rounds: int, size_mib: int, streams: str, links: str, mtu: int, prefaulted: bool, as_json: bool
) -> None:
    """Compare the transport with iperf3, on the same links in the same minute.

    A worker and two store nodes get a network namespace each, in a row: worker - node - node. Every round
    runs iperf3 (plain, and storing what it receives in the same tmpfs) and our reads and writes in turn,
    with each number of streams. A round's ratio takes the best number of streams of either side; shown are
    medians over the rounds. With --prefaulted, the memory of the files that receive is there already, as it
    is in a store that keeps some in stock. Needs root, iperf3, ip and tc.
    """
    need_iperf3()
    counts = [int(count) for count in streams.split(",")]
    console = Console()
    figures: dict[str, list[Rates]] = {}
    for link in links.split(","):
        bits_per_s = bits_of(link)
        link_mtu = mtu or (MTU if bits_per_s is None else SHAPED_MTU)
        with measuring():
            done = measure_link(bits_per_s, link_mtu, size_mib * MIB, counts, rounds, prefaulted)
        figures[link] = done
        title = f"{size_mib} MiB, {link}, mtu {link_mtu}, median of {rounds} rounds"
        show(console, f"{title}, prefaulted" if prefaulted else title, done, bits_per_s)
    if as_json:
        print(json.dumps(figures))
