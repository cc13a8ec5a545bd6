"""RDMA devices of this host, as listed in sysfs, and which one leads to a peer.

No device is opened and no library is needed here, so that `doctor` can explain a host where both fail.
"""

import errno
import ipaddress
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

from ...process import has_capability
from . import networks

_SYS = "/sys/class/infiniband"
_CAP_IPC_LOCK = 14
# With less than this, registering an ordinary model would fail.
MEMLOCK_BYTES_MIN = 64 << 20
_GIDS_MAX = 1024
# How many empty entries end the search: reading each of about a thousand costs system calls.
_EMPTY_GIDS_MAX = 32
_ZERO_GID = bytes(16)
_DATAGRAM_PORT = 9
_REMEDY_MEMLOCK = (
    "ulimit -l unlimited (for good: LimitMEMLOCK=infinity in the unit, or memlock in "
    "/etc/security/limits.conf; in a container: docker run --ulimit memlock=-1)"
)


class Obstacle(str):
    """An obstacle to RDMA, and the command that removes it: as text, both in one line, or "" for none."""

    found: str
    remedy: str

    def __new__(cls, found: str = "", remedy: str = "") -> Self:
        self = super().__new__(cls, f"{found}; {remedy}" if remedy else found)
        self.found, self.remedy = found, remedy
        return self


class Gid(NamedTuple):
    """One entry of a port's GID table, with its index. `kind` is "RoCE v2", "RoCE v1" or "InfiniBand"."""

    number: int
    value: bytes
    kind: str
    netdev: str

    @property
    def address(self) -> networks.Address:
        """Return the IP address that the GID stands for, on RoCE."""
        address = ipaddress.IPv6Address(self.value)
        return address.ipv4_mapped or address

    @property
    def weakness(self) -> str:
        """Return why this GID reaches few peers, or "" if it does not."""
        if self.kind != "InfiniBand" and self.address.is_link_local:
            return "a link-local address, which leads to no peer that has another"
        if self.kind == "RoCE v1":
            return "RoCE v1, which no router passes on and RoCE v2 does not answer"
        return ""


class Port(NamedTuple):
    """`state`: "ACTIVE", "DOWN"...; `link_layer`: "InfiniBand" or "Ethernet"; `netdev`: its interface."""

    number: int
    state: str
    link_layer: str
    lid: int
    gids: tuple[Gid, ...]
    netdev: str
    mbit_s: int


class Device(NamedTuple):
    """`kind` is the usual name of the technology; `obstacle` is why it cannot be used, "" if it can. `pci`
    and `numa` are its PCI address and NUMA node ("" and -1: none, or not known)."""

    name: str
    kind: str
    ports: tuple[Port, ...]
    pci: str
    numa: int
    obstacle: Obstacle

    @property
    def is_soft(self) -> bool:
        return self.kind.startswith("soft-")


class Route(NamedTuple):
    """The device, its port and the entry of the port's GID table that a peer is reached by."""

    device: Device
    port: Port
    gid: Gid


def find(sys: str = _SYS) -> list[Device]:
    """Return all devices, sorted by name; none if the kernel has no RDMA."""
    try:
        names = sorted(os.listdir(sys))
    except OSError:
        return []
    return [_device(Path(sys, name)) for name in names]


def explain(devices: list[Device], wanted: str | None = None) -> Obstacle:
    """Return why none of the devices (that are `wanted`) can be used; "" if one can."""
    if names := wanted_names(wanted):
        there = ", ".join(device.name for device in devices) or "none"
        missing = names - {device.name for device in devices}
        if missing:
            return Obstacle(
                f"there is no RDMA device {', '.join(sorted(missing))}",
                f"there are: {there} (--rdma-device)",
            )
        devices = [device for device in devices if device.name in names]
    elif not devices:
        return Obstacle("this host has no RDMA device")
    if usable_of(devices, None):
        return memlock_obstacle()
    if len(devices) == 1:
        (device,) = devices
        return Obstacle(f"{device.name}: {device.obstacle.found}", device.obstacle.remedy)
    return Obstacle("; ".join(f"{device.name}: {device.obstacle}" for device in devices))


def wanted_names(wanted: str | None) -> set[str]:
    """Return the wanted devices, given as names between commas; none means any."""
    return {name for name in (wanted or "").replace(" ", "").split(",") if name}


def is_near(device: Device) -> bool:
    """Return whether this process may run on a processor near the device, or the device is near none."""
    if device.numa < 0:
        return True
    processors = os.sched_getaffinity(0)
    where = Path(f"/sys/devices/system/node/node{device.numa}")
    return not where.exists() or any((where / f"cpu{each}").exists() for each in processors)


def memlock_limit() -> int | None:
    """Return how many bytes this process may lock, and so register; None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY or has_capability(_CAP_IPC_LOCK) else soft


def memlock_obstacle() -> Obstacle:
    limit = memlock_limit()
    if limit is None or limit >= MEMLOCK_BYTES_MIN:
        return Obstacle()
    return Obstacle(f"only {limit >> 10} KiB of memory may be locked", _REMEDY_MEMLOCK)


def choose(devices: list[Device], local: str, device: str | None = None) -> Route:
    """Return the route that this host's address `local` belongs to: the GID that stands for it, or the port
    whose network interface has it (InfiniBand). Hardware comes before software, RoCE v2 before v1.

    Raises OSError ENODEV.
    """
    address = ipaddress.ip_address(local.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    found = [route for route in entries(devices, device) if _leads_to(route, address)]
    if not found:
        names = ", ".join(each.name for each in usable_of(devices, device)) or "no usable device"
        raise OSError(errno.ENODEV, f"no GID for this host's address {local} on {names}")
    return min(found, key=lambda route: (route.device.is_soft, route.gid.kind == "RoCE v1"))


def local_address(peer: str) -> str:
    """Return this host's address on the route to `peer`. Nothing is sent. Raises OSError."""
    family, kind, _, _, where = socket.getaddrinfo(peer, _DATAGRAM_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def usable_of(devices: list[Device], wanted: str | None) -> list[Device]:
    """Return the devices without an obstacle, of those that are `wanted`."""
    names = wanted_names(wanted)
    return [each for each in devices if not each.obstacle and (not names or each.name in names)]


def entries(devices: list[Device], wanted: str | None) -> Iterator[Route]:
    """Yield the GIDs of active ports of usable devices: all of Ethernet, the first of InfiniBand."""
    for device in usable_of(devices, wanted):
        for port in device.ports:
            is_any = port.link_layer == "Ethernet"
            if port.state == "ACTIVE":
                gids = (gid for gid in port.gids if is_any or gid.number == 0)
                yield from (Route(device, port, gid) for gid in gids)


def _leads_to(route: Route, address: networks.Address) -> bool:
    device, port, gid = route
    if port.link_layer == "Ethernet":
        return gid.address == address
    own = networks.own_addresses().get(address)
    if own is None:
        return False
    where = Path("/sys/class/net", socket.if_indextoname(own.interface))
    return (where / "device" / "infiniband" / device.name).exists() and (
        _number(where / "dev_port", 0) == port.number - 1
    )


def _device(where: Path) -> Device:
    name = where.name
    ports = tuple(
        _port(where, where / "ports" / number)
        for number in sorted(os.listdir(where / "ports"), key=int)
    )
    node_type = _text(where / "node_type")
    driver = pci = ""
    if (where / "device" / "driver").exists():
        driver = os.path.basename(os.path.realpath(where / "device" / "driver"))
        pci = os.path.basename(os.path.realpath(where / "device"))
    kind = _kind(node_type, driver, ports)
    numa = _number(where / "device" / "numa_node", -1)
    return Device(name, kind, ports, pci, numa, _obstacle(name, kind, ports))


def _kind(node_type: str, driver: str, ports: tuple[Port, ...]) -> str:
    if driver == "efa":
        return "EFA"
    soft = "" if driver else "soft-"
    if "RNIC" in node_type:
        return f"{soft}iWARP"
    if any(port.link_layer == "InfiniBand" for port in ports):
        return "InfiniBand"
    return f"{soft}RoCE"


def _obstacle(name: str, kind: str, ports: tuple[Port, ...]) -> Obstacle:
    if kind == "EFA":
        return Obstacle("EFA has no reliable connections, only datagrams of its own (SRD)")
    if kind.endswith("iWARP"):
        return Obstacle(
            "iWARP connects through its own handshake only and has no WRITE with immediate data"
        )
    if not ports:
        return Obstacle("it has no port")
    netdev = next((port.netdev for port in ports if port.netdev), "NETDEV")
    if all(port.state != "ACTIVE" for port in ports):
        states = ", ".join(f"port {port.number} is {port.state}" for port in ports)
        if ports[0].link_layer == "InfiniBand":
            return Obstacle(
                states, "check the cable (ibstat) and that a subnet manager runs (opensm)"
            )
        return Obstacle(states, f"ip link set {netdev} up (and check the cable: ethtool {netdev})")
    if not any(port.gids for port in ports if port.state == "ACTIVE"):
        return Obstacle("its GID table is empty", f"ip address add ADDRESS/LENGTH dev {netdev}")
    has_v2 = any(gid.kind == "RoCE v2" for port in ports for gid in port.gids)
    if kind.endswith("RoCE") and not has_v2:
        return Obstacle(
            "it has no GID of RoCE v2",
            f"cma_roce_mode -d {name} -p {ports[0].number} -m 2, or the card's firmware",
        )
    return _access_obstacle(name)


def _access_obstacle(name: str) -> Obstacle:
    for entry in Path("/sys/class/infiniband_verbs").glob("uverbs*"):
        if _text(entry / "ibdev") == name:
            path = f"/dev/infiniband/{entry.name}"
            if not os.path.exists(path):
                return Obstacle(
                    f"{path} is missing",
                    f"modprobe ib_uverbs; in a container: docker run --device {path}",
                )
            if not os.access(path, os.R_OK | os.W_OK):
                return Obstacle(
                    f"no permission to open {path}",
                    f"as root: chmod 666 {path}, and for good a udev rule: "
                    'SUBSYSTEM=="infiniband_verbs", MODE="0666"',
                )
            return Obstacle()
    return Obstacle("the kernel gives no access to programs", "modprobe ib_uverbs")


def _port(device: Path, where: Path) -> Port:
    link_layer = _text(where / "link_layer") or "InfiniBand"
    gids: list[Gid] = []
    empty = 0
    for index in range(_GIDS_MAX):
        try:
            text = (where / "gids" / str(index)).read_text().strip()
        except FileNotFoundError:
            break
        except OSError:
            continue
        value = ipaddress.IPv6Address(text).packed
        # A link without a prefix yet has only the interface's number in its GID, which reaches nobody.
        if value == _ZERO_GID:
            empty += 1
            if empty == _EMPTY_GIDS_MAX:
                break
            continue
        empty = 0
        netdev = _text(where / "gid_attrs" / "ndevs" / str(index))
        gids.append(Gid(index, value, _gid_kind(where, index, link_layer), netdev))
    state = _text(where / "state").partition(": ")[2]
    netdev = next((gid.netdev for gid in gids if gid.netdev), "")
    # Soft devices name the interface that they were made on even while it is down.
    netdev = netdev or _text(where / "gid_attrs" / "ndevs" / "0") or _text(device / "parent")
    number, lid = int(where.name), _number(where / "lid", 0)
    return Port(number, state, link_layer, lid, tuple(gids), netdev, _mbit_s(where))


def _mbit_s(port: Path) -> int:
    """Return the port's speed in Mbit/s, 0 if it is not known."""
    number, _, unit = _text(port / "rate").partition(" Gb/sec")
    try:
        return int(float(number) * 1000) if unit else 0
    except ValueError:
        return 0


def _gid_kind(where: Path, index: int, link_layer: str) -> str:
    if link_layer != "Ethernet":
        return "InfiniBand"
    kind = _text(where / "gid_attrs" / "types" / str(index))
    return "RoCE v2" if kind == "RoCE v2" else "RoCE v1"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path, default: int) -> int:
    try:
        return int(_text(path), 0)
    except ValueError:
        return default
