"""Rails: the ports of this host that can carry parameters, and which rails of a peer each one reaches.

Two rails reach each other if the kinds of their GIDs and their networks are the same: an IP network with
its prefix (RoCE), or the subnet prefix of the fabric (InfiniBand). The two rails that the control
connection goes through reach each other on any networks: routing has shown it. Two networks may have the
same number, so a queue pair is probed before it is used.
"""

from typing import NamedTuple

from . import networks
from .devices import Device, Route, choose, entries, is_near
from .messages import RAILS_MAX, Rail

_MAPPED_BITS = 96
_FABRIC_BITS = 64


class OwnRail(NamedTuple):
    """A rail of this host. `is_near`: its device is near a processor that this process may run on."""

    rail: Rail
    route: Route
    is_near: bool


def find_rails(found: list[Device], local: str, device: str | None = None) -> list[OwnRail]:
    """Return this host's rails, that with the address `local` first. Raises ENODEV if there is none."""
    own = networks.own_addresses()
    routes = [route for route in entries(found, device) if _can_be_paired(route, own)]
    way: Route | None = None
    try:
        way = choose(found, local, device)
        routes = [way, *(route for route in routes if route != way)]
    except OSError:
        if not routes:
            raise
    return [_rail(route, own, on_way=route is way) for route in routes[:RAILS_MAX]]


def pair(here: list[OwnRail], there: list[Rail]) -> list[tuple[OwnRail, Rail]]:
    """Return the pairs of rails to set queue pairs up between, the best first. Each port has one partner,
    and a second one only if the other end has more ports. Soft-RoCE is used only if no pair is hardware."""
    pairs = [
        (mine, other)
        for mine in here
        for other in there
        if mine.rail.network == other.network
        or (mine.rail.on_way and other.on_way and mine.rail.kind == other.kind)
    ]
    if any(not (mine.rail.is_soft or other.is_soft) for mine, other in pairs):
        pairs = [each for each in pairs if not (each[0].rail.is_soft or each[1].is_soft)]
    pairs.sort(key=_order)
    taken: list[tuple[OwnRail, Rail]] = []
    used: set[tuple[bool, str]] = set()
    for partners in (0, 1):
        for mine, other in pairs:
            ends = (True, mine.rail.name), (False, other.name)
            if sum(end in used for end in ends) <= partners and not any(
                one.rail.name == mine.rail.name and two.name == other.name for one, two in taken
            ):
                taken.append((mine, other))
                used.update(ends)
    return taken


def _order(each: tuple[OwnRail, Rail]) -> tuple[object, ...]:
    mine, other = each
    on_way = mine.rail.on_way and other.on_way
    rate = min(mine.rail.mbit_s, other.mbit_s)
    return not on_way, not mine.is_near, -rate, mine.rail.gid, other.gid


def _can_be_paired(route: Route, own: networks.Addresses) -> bool:
    gid = route.gid
    if route.port.link_layer != "Ethernet":
        return True
    # An address of another network namespace does not belong to this process.
    return (
        gid.kind == "RoCE v2"
        and gid.address in own
        and not gid.address.is_link_local
        and not gid.address.is_loopback
    )


def _rail(route: Route, own: networks.Addresses, on_way: bool) -> OwnRail:
    device, port, gid = route
    bits = _FABRIC_BITS
    if port.link_layer == "Ethernet":
        known = own.get(gid.address)
        bits = known.bits if known is not None else gid.address.max_prefixlen
        bits += _MAPPED_BITS if gid.address.version == 4 else 0
    name = f"{device.name}/{port.number}"
    rail = Rail(name, gid.value, bits, gid.kind, port.mbit_s, device.is_soft, on_way)
    return OwnRail(rail, route, is_near(device))
