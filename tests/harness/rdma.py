"""RDMA for tests: which port to use, and devices that are not there."""

import fcntl
import importlib.util
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from harness.network import Unavailable
from harness.roce import Way, find_way, find_ways
from irdmafs.backend.transport.verbs.regions import Region, Regions

DEVICES = Path("/sys/class/infiniband")
IN_GUEST = "IRDMAFS_GUEST" in os.environ
REMEDY = "scripts/rdma_guest test runs this in a guest that has one"

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1


def need_ports(count: int = 1) -> list[Way]:
    """Active ports. Skips the test where they are missing; in a guest, which is to have them, fails."""
    found = find_ways()
    missing = None
    if len(found) < count:
        missing = f"{len(found)} of {count} active RDMA ports here; {REMEDY}"
    elif importlib.util.find_spec("pyverbs") is None:
        missing = "pyverbs is not installed; scripts/install test verbs"
    if missing is not None:
        (pytest.fail if IN_GUEST else pytest.skip)(missing)
    return found[:count]


def need_way() -> Way:
    """A port with an IPv4 address of this host's. Skips the test as `need_ports` does."""
    need_ports()
    try:
        return find_way()
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
