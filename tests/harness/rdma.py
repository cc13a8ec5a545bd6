"""RDMA for tests: which port to use, and the two ends of a reliable connection on it."""

import ctypes
import fcntl
import importlib.util
import mmap
import os
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.network import Unavailable
from harness.roce import find_way
from irdmafs.backend.transport.verbs.regions import Region, Regions

DEVICES = Path("/sys/class/infiniband")
IN_GUEST = "IRDMAFS_GUEST" in os.environ
REMEDY = "scripts/rdma_guest test runs this in a guest that has one"

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
REQUEST_BYTES = 1 << 20
REQUESTS_MAX = 8
# 4.096 us * 2 ** 18: a peer whose processor others share may need a second.
TIMEOUT_EXPONENT = 18


@dataclass(frozen=True)
class Port:
    """An active port, and the index of the GID by which others reach it."""

    device: str
    number: int
    gid_index: int


def ports() -> list[Port]:
    """The active ports of this machine, by name."""
    found = []
    for path in sorted(DEVICES.glob("*/ports/*")):
        if not (path / "state").read_text().startswith("4:"):
            continue
        index = _gid_index(path)
        if index is not None:
            found.append(Port(path.parts[-3], int(path.name), index))
    return found


def _gid_index(port: Path) -> int | None:
    """InfiniBand's only one; of Ethernet's the first that RoCE v2 routes by IPv4."""
    if (port / "link_layer").read_text().strip() != "Ethernet":
        return 0
    for index in range(len(list((port / "gids").iterdir()))):
        try:
            kind = (port / f"gid_attrs/types/{index}").read_text().strip()
        except OSError:  # an entry without an address
            continue
        gid = (port / f"gids/{index}").read_text().strip()
        if kind == "RoCE v2" and gid.startswith("0000:0000:0000:0000:0000:ffff:"):
            return index
    return None


def need_ports(count: int = 1) -> list[Port]:
    """Active ports. Skips the test where they are missing; in a guest, which is to have them, fails."""
    found = ports()
    missing = None
    if len(found) < count:
        missing = f"{len(found)} of {count} active RDMA ports here; {REMEDY}"
    elif importlib.util.find_spec("pyverbs") is None:
        missing = "pyverbs is not installed; scripts/install test verbs"
    if missing is not None:
        (pytest.fail if IN_GUEST else pytest.skip)(missing)
    return found[:count]


def need_address() -> str:
    """One of this host's that a usable device has. Skips the test as `need_ports` does."""
    need_ports()
    try:
        return find_way().address
    except Unavailable as error:
        pytest.skip(f"{error}; {REMEDY}")


def set_links(*names: str, up: bool) -> None:
    """Set network links up or down, as ip(8) does, which takes longer to start than a transfer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for name in names:
            asked = struct.pack("16sh22x", name.encode(), 0)
            flags: int = struct.unpack("16sh22x", fcntl.ioctl(control, SIOCGIFFLAGS, asked))[1]
            wanted = flags | IFF_UP if up else flags & ~IFF_UP
            fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh22x", name.encode(), wanted))


def constant(name: str) -> Any:
    """A constant of verbs. Newer releases of pyverbs keep them in classes of another module."""
    enums = _enums()
    if hasattr(enums, name):
        return getattr(enums, name)
    for value in vars(enums).values():
        if isinstance(value, type) and hasattr(value, name):
            return getattr(value, name)
    raise AttributeError(name)


def _enums() -> Any:
    try:
        import pyverbs.enums as enums
    except ImportError:
        import pyverbs.libibverbs_enums as enums
    return enums


@dataclass(frozen=True)
class Address:
    """What the other end has to know."""

    gid: str
    lid: int
    qp_number: int
    remote_key: int
    address: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class End:
    """A mapped file, registered, and one end of a reliable connection. A context manager."""

    def __init__(self, port: Port, file: Path, size_bytes: int) -> None:
        from pyverbs.cq import CQ, CompChannel
        from pyverbs.device import Context
        from pyverbs.mr import MR
        from pyverbs.pd import PD
        from pyverbs.qp import QP, QPCap, QPInitAttr

        self._port = port
        self._access = sum(
            constant(f"IBV_ACCESS_{right}")
            for right in ("LOCAL_WRITE", "REMOTE_WRITE", "REMOTE_READ")
        )
        with file.open("w+b") as opened:
            opened.truncate(size_bytes)
            self.memory = mmap.mmap(opened.fileno(), size_bytes)
        self._mapped = ctypes.c_char.from_buffer(self.memory)
        self._address = ctypes.addressof(self._mapped)
        self._context = Context(name=port.device)
        domain = PD(self._context)
        self._region = MR(domain, size_bytes, self._access, address=self._address)
        self._channel = CompChannel(self._context)
        self._queue = CQ(self._context, 2 * REQUESTS_MAX, channel=self._channel)
        self._queue.req_notify()
        self._pair = QP(
            domain,
            QPInitAttr(
                qp_type=constant("IBV_QPT_RC"),
                scq=self._queue,
                rcq=self._queue,
                cap=QPCap(max_send_wr=2 * REQUESTS_MAX, max_recv_wr=1),
            ),
        )

    def __enter__(self) -> "End":
        return self

    def __exit__(self, *_exc: object) -> None:
        self._context.close()
        del self._mapped
        self.memory.close()

    @property
    def address(self) -> Address:
        return Address(
            gid=str(self._context.query_gid(self._port.number, self._port.gid_index)),
            lid=self._context.query_port(self._port.number).lid,
            qp_number=self._pair.qp_num,
            remote_key=self._region.rkey,
            address=self._address,
        )

    def connect(self, peer: Address) -> None:
        from pyverbs.addr import GID, AHAttr, GlobalRoute
        from pyverbs.qp import QPAttr

        number = self._port.number
        attributes = QPAttr(port_num=number, path_mtu=self._context.query_port(number).active_mtu)
        attributes.qp_access_flags = self._access
        route = GlobalRoute(dgid=GID(peer.gid), sgid_index=self._port.gid_index)
        attributes.ah_attr = AHAttr(port_num=number, is_global=1, gr=route, dlid=peer.lid)
        attributes.dest_qp_num = peer.qp_number
        attributes.sq_psn = attributes.rq_psn = 0
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 8
        attributes.min_rnr_timer = 12
        attributes.timeout = TIMEOUT_EXPONENT
        attributes.retry_cnt = attributes.rnr_retry = 7
        self._pair.to_rts(attributes)

    def write(self, peer: Address) -> None:
        """Copy all of the memory to the peer's."""
        self._move("IBV_WR_RDMA_WRITE", peer)

    def read(self, peer: Address) -> None:
        """Copy all of the peer's memory here."""
        self._move("IBV_WR_RDMA_READ", peer)

    def _move(self, verb: str, peer: Address) -> None:
        from pyverbs.wr import SGE, SendWR

        size = len(self.memory)
        in_flight = 0
        for offset in range(0, size, REQUEST_BYTES):
            if in_flight == REQUESTS_MAX:
                in_flight -= self._completed()
            length = min(REQUEST_BYTES, size - offset)
            request = SendWR(
                num_sge=1,
                sg=[SGE(self._address + offset, length, self._region.lkey)],
                opcode=constant(verb),
                send_flags=constant("IBV_SEND_SIGNALED"),
            )
            request.set_wr_rdma(peer.remote_key, peer.address + offset)
            self._pair.post_send(request)
            in_flight += 1
        while in_flight:
            in_flight -= self._completed()

    def _completed(self) -> int:
        """Wait for completions; how many there were. Raises AssertionError if one is a failure."""
        while True:
            for count in self._poll():
                return count
            self._channel.get_cq_event(self._queue)
            self._queue.ack_events(1)
            self._queue.req_notify()
            # One may have come before the notification was asked for again.
            for count in self._poll():
                return count

    def _poll(self) -> Iterator[int]:
        count, completions = self._queue.poll(REQUESTS_MAX)
        for completion in completions or ():
            assert completion.status == 0, f"work completion status {completion.status}"
        if count:
            yield count


@asynccontextmanager
async def registered(regions: Regions, fd: int) -> AsyncIterator[Region]:
    """A region over a file, in use as long as the block."""
    region = await regions.acquire(fd, os.fstat(fd).st_size)
    try:
        yield region
    finally:
        regions.release(region)


def add_device(
    sys: Path,
    name: str,
    gids: dict[int, tuple[str, str]],
    *,
    node_type: str = "1: CA",
    state: str = "4: ACTIVE",
    link_layer: str = "Ethernet",
    driver: str = "",
    netdev: str = "",
) -> None:
    """Add a device with one port to what stands for sysfs; `gids` are {index: (IPv6 notation, type)}."""
    where = sys / name
    port = where / "ports" / "1"
    (port / "gid_attrs" / "types").mkdir(parents=True)
    (port / "gid_attrs" / "ndevs").mkdir()
    (port / "gids").mkdir()
    (where / "node_type").write_text(f"{node_type}\n")
    (port / "state").write_text(f"{state}\n")
    (port / "link_layer").write_text(f"{link_layer}\n")
    for index in range(max(gids, default=-1) + 1):
        value, kind = gids.get(index, ("::", ""))
        (port / "gids" / str(index)).write_text(f"{value}\n")
        (port / "gid_attrs" / "types" / str(index)).write_text(f"{kind}\n")
        if netdev:
            (port / "gid_attrs" / "ndevs" / str(index)).write_text(f"{netdev}\n")
    if driver:
        (sys.parent / f"{name}-pci" / driver).mkdir(parents=True)
        (where / "device").mkdir()
        (where / "device" / "driver").symlink_to(sys.parent / f"{name}-pci" / driver)
