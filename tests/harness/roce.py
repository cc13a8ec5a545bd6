"""The RDMA device that tests and benches use."""

from __future__ import annotations

from typing import NamedTuple

from irdmafs.backend.transport.verbs import devices

from .network import Unavailable


class Way(NamedTuple):
    """A port of a device, and the entry of its table of GIDs that has this IPv4 address."""

    device: str
    port: int
    gid_index: int
    address: str


def find_way() -> Way:
    """The first RoCE v2 entry with an IPv4 address that can be used. Raises Unavailable."""
    found = devices.find()
    for device in found:
        for port in device.ports if not device.obstacle else ():
            for gid in port.gids:
                if port.state == "ACTIVE" and gid.kind == "RoCE v2" and gid.address.version == 4:
                    return Way(device.name, port.number, gid.number, str(gid.address))
    raise Unavailable(devices.explain(found) or "no RDMA device has an IPv4 address")
