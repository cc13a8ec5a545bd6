"""Which rails of two hosts are paired. Needs no device."""

import ipaddress
import socket

import msgspec
import pytest

from irdmafs.backend.transport.frames import BadMessage
from irdmafs.backend.transport.movers import all_movers
from irdmafs.backend.transport.operations import codec_for
from irdmafs.backend.transport.verbs import devices, messages, networks
from irdmafs.backend.transport.verbs.devices import Device, Gid, Obstacle, Port, Route
from irdmafs.backend.transport.verbs.messages import RAILS_MAX, Rail
from irdmafs.backend.transport.verbs.rails import OwnRail, find_rails, pair


def gid(address: str) -> bytes:
    parsed = ipaddress.ip_address(address)
    return (
        parsed.packed if parsed.version == 6 else ipaddress.IPv6Address(f"::ffff:{address}").packed
    )


def rail(
    name: str,
    network: str,
    *,
    kind: str = "RoCE v2",
    mbit_s: int = 100_000,
    soft: bool = False,
    on_way: bool = False,
) -> Rail:
    address, _, bits = network.partition("/")
    offset = 96 if "." in address else 0
    return Rail(name, gid(address), int(bits) + offset, kind, mbit_s, soft, on_way)


def own(each: Rail, is_near: bool = True) -> OwnRail:
    there = device("a", ("10.1.0.1", V2))
    return OwnRail(each, Route(there, there.ports[0], there.ports[0].gids[0]), is_near)


def names(here: list[OwnRail], there: list[Rail]) -> list[tuple[str, str]]:
    return [(mine.rail.name, other.name) for mine, other in pair(here, there)]


def test_rails_of_one_network_are_paired_whatever_their_order() -> None:
    here = [own(rail("a/1", "10.1.0.1/16")), own(rail("b/1", "10.2.0.1/16"))]
    there = [rail("x/1", "10.2.0.9/16"), rail("y/1", "10.1.0.9/16"), rail("z/1", "10.3.0.9/16")]
    assert sorted(names(here, there)) == [("a/1", "y/1"), ("b/1", "x/1")]


def test_rails_are_on_one_network_only_if_both_ends_say_so() -> None:
    here = [own(rail("a/1", "10.1.0.1/24"))]
    assert not names(here, [rail("x/1", "10.1.0.2/16")])
    assert not names(here, [rail("x/1", "10.1.1.2/24")])
    assert not names(here, [rail("x/1", "10.1.0.2/24", kind="RoCE v1")])
    assert not names(
        [own(rail("a/1", "fe80::1/64", kind="InfiniBand"))], [rail("x/1", "fe80::2/64")]
    )


def test_the_rails_of_the_control_connection_are_paired_across_networks_and_come_first() -> None:
    here = [own(rail("a/1", "10.1.0.1/24", on_way=True)), own(rail("b/1", "10.9.0.1/24"))]
    there = [rail("x/1", "10.2.0.1/24", on_way=True), rail("y/1", "10.9.0.2/24")]
    assert names(here, there) == [("a/1", "x/1"), ("b/1", "y/1")]
    assert names(here, there[1:]) == [("b/1", "y/1")]


def test_fabrics_of_infiniband_are_told_apart_by_their_prefix() -> None:
    here = [own(rail("a/1", "fec0::a/64", kind="InfiniBand"))]
    there = [
        rail("x/1", "fec1::1/64", kind="InfiniBand"),
        rail("y/1", "fec0::1/64", kind="InfiniBand"),
    ]
    assert names(here, there) == [("a/1", "y/1")]


def test_each_port_of_one_network_has_a_partner_of_its_own() -> None:
    here = [own(rail(f"{name}/1", f"10.1.0.{at}/24")) for at, name in enumerate("abc", 1)]
    there = [rail(f"{name}/1", f"10.1.0.{at}/24") for at, name in enumerate("xyz", 101)]
    found = names(here, there)
    assert len(found) == 3
    assert len({mine for mine, _ in found}) == len({other for _, other in found}) == 3
    found = names(here[:1], there)
    assert sorted(found) == [("a/1", "x/1"), ("a/1", "y/1"), ("a/1", "z/1")]


def test_a_port_with_several_addresses_is_used_once() -> None:
    here = [own(rail("a/1", "10.1.0.1/24")), own(rail("a/1", "fd00::1/64"))]
    there = [rail("x/1", "10.1.0.2/24"), rail("x/1", "fd00::2/64")]
    assert len(names(here, there)) == 1


def test_software_is_left_aside_where_there_is_hardware_and_the_nearest_and_fastest_come_first() -> (
    None
):
    here = [
        own(rail("rxe0/1", "10.1.0.1/24", soft=True, on_way=True)),
        own(rail("far/1", "10.2.0.1/24"), is_near=False),
        own(rail("slow/1", "10.3.0.1/24", mbit_s=25_000)),
        own(rail("fast/1", "10.4.0.1/24")),
    ]
    there = [
        rail("rxe0/1", "10.1.0.2/24", soft=True, on_way=True),
        *(rail(f"m{at}/1", f"10.{at}.0.2/24") for at in (2, 3, 4)),
    ]
    assert [mine for mine, _ in names(here, there)] == ["fast/1", "slow/1", "far/1"]
    assert names(here[:1], there) == [("rxe0/1", "rxe0/1")]


def device(
    name: str, *gids: tuple[str, str], state: str = "ACTIVE", layer: str = "Ethernet"
) -> Device:
    table = tuple(Gid(at, gid(address), kind, "eth") for at, (address, kind) in enumerate(gids))
    port = Port(1, state, layer, 0, table, "eth", 100_000)
    return Device(name, "RoCE", (port,), "", -1, Obstacle())


V2 = "RoCE v2"


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host has 10.1.0.1/16, 10.2.0.1/16 and fe80::5/64."""
    known = {"10.1.0.1": 16, "10.2.0.1": 16, "fe80::5": 64, "127.0.0.1": 8}
    found = {ipaddress.ip_address(one): networks.Own(bits, 1) for one, bits in known.items()}
    monkeypatch.setattr(networks, "own_addresses", lambda: found)


@pytest.mark.usefixtures("addresses")
def test_rails_are_the_active_ports_with_an_address_of_this_host() -> None:
    found = [
        device("a", ("fe80::5", V2), ("10.1.0.1", "RoCE v1"), ("10.1.0.1", V2)),
        device("b", ("10.2.0.1", V2)),
        device("down", ("10.2.0.1", V2), state="DOWN"),
        device("other-namespace", ("10.7.0.1", V2)),
    ]
    listed = find_rails(found, "10.2.0.1")
    assert [(each.rail.name, each.rail.on_way, each.rail.bits) for each in listed] == [
        ("b/1", True, 112),
        ("a/1", False, 112),
    ]
    # One whose control connection does not pass any of them still has rails.
    assert [each.rail.on_way for each in find_rails(found, "127.0.0.1")] == [False, False]
    assert [each.rail.name for each in find_rails(found, "10.1.0.1", "a")] == ["a/1"]
    assert len(find_rails(found, "10.1.0.1", "a, b")) == 2
    with pytest.raises(OSError, match="no GID"):
        find_rails(found[2:], "10.2.0.1")


def test_this_hosts_own_addresses_have_prefixes_and_interfaces() -> None:
    loopback = ipaddress.ip_address("127.0.0.1")
    own = networks.own_addresses()
    assert own[loopback].bits == 8
    assert socket.if_indextoname(own[loopback].interface) == "lo"
    assert ipaddress.ip_address("192.0.2.255") not in own


def test_a_device_is_near_a_process_that_may_run_beside_it() -> None:
    assert devices.is_near(device("a", ("10.1.0.1", V2)))
    assert devices.is_near(device("a", ("10.1.0.1", V2))._replace(numa=0))


@pytest.mark.parametrize(
    "changes", [{"gid": b"short"}, {"bits": 129}, {"bits": -1}, {"mbit_s": -1}, {"name": "x" * 300}]
)
def test_what_a_node_says_of_its_rails_is_checked(changes: dict[str, object]) -> None:
    codec = codec_for(all_movers())

    def say(rails: list[Rail]) -> None:
        codec.decode_answer(msgspec.msgpack.encode(messages.RailsFound(rails)))

    good = rail("a/1", "10.1.0.1/24")
    say([good] * RAILS_MAX)
    fields = {name: getattr(good, name) for name in good.__struct_fields__}
    for wrong in ([Rail(**{**fields, **changes})], [good] * (RAILS_MAX + 1)):
        with pytest.raises(BadMessage):
            say(wrong)
