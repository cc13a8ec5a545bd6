"""The doctor's checks of RDMA: each device, port and GID, and the obstacles to using it."""

from __future__ import annotations

import ipaddress
import os
import resource
from pathlib import Path

from ..backend.model.values import human_bytes
from ..backend.transport.verbs import devices
from ..backend.transport.verbs.devices import Device, Gid, Obstacle, Port
from ..backend.transport.verbs.library import Library, VerbsMissing, load
from ..backend.transport.verbs.rdma import Choice
from ..backend.transport.verbs.regions import MTUS
from . import Check, Verdict

_NAME = "RDMA"
# Holds a packet of the largest RDMA MTU, 4096, with its headers.
_NETDEV_MTU_COMFORTABLE = 4200
_GIDS_SHOWN = 8
_REMEDY_LIBRARY = (
    "apt install python3-pyverbs ibverbs-providers (for Debian's own Python 3), or "
    "pip install 'irdmafs[verbs]'"
)
_REMEDY_TCP = 'use TCP (rdma = "auto"), or another device'


def check_rdma(choice: Choice, peer: str | None = None) -> list[Check]:
    """Check whether RDMA can be used as `choice` asks for, with a line for each device, port and GID.
    `peer` is the host to reach by it."""
    found = devices.find()
    library, missing = _library()
    lines = []
    for device in found:
        lines += _check_device(device, library)
    if choice.mode == "off":
        off = Check(_NAME, "info", "switched off; TCP is used", "rdma = \"auto\" in [cluster], and no "
                    "encrypt_data, which RDMA cannot do")  # fmt: skip
        return [off, *lines]
    obstacle = devices.explain(found, choice.device) or missing
    way = ""
    if not obstacle and peer is not None:
        way, obstacle = _way_to(found, choice, peer)
    return [_summary(found, choice, obstacle, way), *lines]


def _summary(found: list[Device], choice: Choice, obstacle: Obstacle, way: str) -> Check:
    if not obstacle:
        usable = ", ".join(device.name for device in found if not device.obstacle)
        return Check(_NAME, "ok", way or f"parameters can move through {usable}")
    why, remedy = obstacle.found, obstacle.remedy
    if choice.mode == "require":
        return Check(_NAME, "fail", f"required, but {why}", remedy or _remedy_device())
    if not found:
        return Check(_NAME, "info", f"{why}; TCP and shared memory are used", _remedy_device())
    return Check(_NAME, "warn", f"{why}; TCP is used instead", remedy or _REMEDY_TCP)


def _remedy_device() -> str:
    modules = Path("/lib/modules", os.uname().release, "kernel/drivers/infiniband")
    if not modules.is_dir() and not os.path.isdir("/sys/class/infiniband"):
        return (
            f"this kernel has none and {modules} is missing: install its modules (apt install "
            "linux-modules-extra-$(uname -r)), or a kernel with CONFIG_INFINIBAND"
        )
    return (
        "for a card load its driver (modprobe mlx5_ib, bnxt_re, irdma...; in a container: docker run "
        "--device /dev/infiniband); in software: modprobe rdma_rxe && rdma link add rxe0 type rxe netdev "
        "NETDEV"
    )


def _library() -> tuple[Library | None, Obstacle]:
    try:
        return load(), Obstacle()
    except VerbsMissing as error:
        return None, Obstacle(str(error.strerror).partition("; ")[0], _REMEDY_LIBRARY)


def _way_to(found: list[Device], choice: Choice, peer: str) -> tuple[str, Obstacle]:
    """Return the route to `peer`, or why there is none."""
    try:
        local = devices.local_address(peer)
    except OSError as error:
        return "", Obstacle(f"no way to {peer}: {error.strerror}", f"ip route get {peer}")
    try:
        route = devices.choose(found, local, choice.device)
    except OSError as error:
        return "", Obstacle(
            str(error.strerror),
            f"that is the address on the way to {peer}: give the nodes' addresses on the device's network "
            "(irdmafs serve --listen ADDRESS), or the device's interface one on that way",
        )
    port = f"{route.device.name} port {route.port.number}"
    return f"the way to {peer} is {port}, GID {route.gid.number}", Obstacle()


def _check_device(device: Device, library: Library | None) -> list[Check]:
    where = f" at {device.pci}" if device.pci else ""
    node = f"NUMA node {device.numa}" if device.numa >= 0 else "no NUMA node"
    found = f"{device.kind}{where}, {node}"
    mtus: dict[int, int] = {}
    if not device.obstacle and library is not None:
        try:
            limits, mtus = _limits(device, library)
            found += limits
        except OSError as error:
            return [Check(device.name, "warn", f"{found}; it cannot be opened: {error.strerror}",
                          "dmesg says why; ls -l /dev/infiniband")]  # fmt: skip
    lines = [Check(device.name, "ok", found)]
    if device.obstacle:
        remedy = device.obstacle.remedy or _REMEDY_TCP
        lines = [Check(device.name, "warn", f"{found}; {device.obstacle.found}", remedy)]
    for port in device.ports:
        lines.append(_check_port(device, port, mtus.get(port.number, 0)))
        lines += [_check_gid(device, gid) for gid in port.gids[:_GIDS_SHOWN]]
        if len(port.gids) > _GIDS_SHOWN:
            more = f"{len(port.gids) - _GIDS_SHOWN} more GIDs on port {port.number}"
            lines.append(Check(device.name, "info", more))
    return lines


def _limits(device: Device, library: Library) -> tuple[str, dict[int, int]]:
    """Return the limits of a device in words, and the RDMA MTUs of its ports by number. Raises OSError."""
    context, _ = library.open(device.name)
    with context, library.errors:
        limits = context.query_device()
        mtus = {
            port.number: MTUS.get(int(context.query_port(port.number).active_mtu), 0)
            for port in device.ports
        }
        windows = int(limits.device_cap_flags) & library.enum("DEVICE_MEM_WINDOW_TYPE_2B")
        # A software device has no limit, which it reports as all ones.
        size = int(limits.max_mr_size)
        largest = "unlimited" if size >= 1 << 63 else human_bytes(size)
        return f", max_mr_size {largest}, {'' if windows else 'no '}memory windows", mtus


def _check_port(device: Device, port: Port, rdma_mtu: int) -> Check:
    name = f"{device.name} port {port.number}"
    found = f"{port.state}, {port.link_layer}"
    remedy = ""
    if port.netdev:
        found += f" on {port.netdev}"
        mtu = _netdev_mtu(port.netdev)
        found += f" (MTU {mtu})" if mtu else ""
        if 0 < mtu < _NETDEV_MTU_COMFORTABLE and port.link_layer == "Ethernet":
            remedy = f"large packets cost less: ip link set {port.netdev} mtu 9000 (the switch too)"
    if rdma_mtu:
        found += f", RDMA MTU {rdma_mtu}"
    if port.state != "ACTIVE":
        how = f"ip link set {port.netdev or 'NETDEV'} up"
        return Check(name, "warn", found, "ibstat" if port.link_layer == "InfiniBand" else how)
    return Check(name, "info" if remedy else "ok", found, remedy)


def _check_gid(device: Device, gid: Gid) -> Check:
    name = f"{device.name} GID {gid.number}"
    address = ipaddress.IPv6Address(gid.value) if gid.kind == "InfiniBand" else gid.address
    found = f"{address}, {gid.kind}" + (f" on {gid.netdev}" if gid.netdev else "")
    verdict: Verdict = "info" if gid.weakness else "ok"
    return Check(name, verdict, f"{found}: {gid.weakness}" if gid.weakness else found)


def _netdev_mtu(netdev: str) -> int:
    try:
        return int(Path("/sys/class/net", netdev, "mtu").read_text())
    except (OSError, ValueError):
        return 0


def check_memlock() -> Check:
    soft, hard = (
        "unlimited" if limit == resource.RLIM_INFINITY else human_bytes(limit)
        for limit in resource.getrlimit(resource.RLIMIT_MEMLOCK)
    )
    found = f"soft {soft}, hard {hard}"
    obstacle = devices.memlock_obstacle()
    if obstacle:
        verdict: Verdict = "warn" if devices.find() else "info"
        remedy = f"RDMA locks the memory it moves: {obstacle.remedy}"
        return Check("locked memory", verdict, found, remedy)
    if devices.memlock_limit() is None and soft != "unlimited":
        found += ", which does not bind this user (CAP_IPC_LOCK)"
    return Check("locked memory", "ok", found)
