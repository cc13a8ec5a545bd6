"""The RDMA device that tests and benches use."""

from __future__ import annotations

from typing import NamedTuple

from irdmafs.backend.transport.verbs import devices

from .network import Unavailable


class Way(NamedTuple):
    """A port of a device, and the entry of its table of GIDs that has this address."""

    device: str
    port: int
    gid_index: int
    address: str


def find_ways() -> list[Way]:
    """Return the active ports of usable devices, each with the GID by which others reach it: InfiniBand's
    first one, or the first that RoCE v2 routes by IPv4."""
    return [
        next(
            Way(device.name, port.number, gid.number, str(gid.address))
            for gid in port.gids
            if _is_routed(gid)
        )
        for device in devices.find()
        for port in device.ports
        if not device.obstacle and port.state == "ACTIVE" and any(map(_is_routed, port.gids))
    ]


def _is_routed(gid: devices.Gid) -> bool:
    return gid.kind == "InfiniBand" or (gid.kind == "RoCE v2" and gid.address.version == 4)


def find_way() -> Way:
    """Return the first one with an IPv4 address. Raises Unavailable."""
    for way in find_ways():
        if "." in way.address:
            return way
    raise Unavailable(devices.explain(devices.find()) or "no RDMA device has an IPv4 address")
