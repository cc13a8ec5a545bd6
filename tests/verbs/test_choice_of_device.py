"""Which RDMA device is used, and why none is; what peers may say of queue pairs. Needs no device."""

import errno
import resource
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from harness.clusters import Cluster, Plan, run_irdmafs
from harness.rdma import add_device
from hypothesis import given
from hypothesis import strategies as st

from irdmafs.backend.cluster.config_sections import ClusterSection
from irdmafs.backend.model.records import SIZE_MAX
from irdmafs.backend.model.values import ConfigError
from irdmafs.backend.transport import CHAIN_MAX, Extent, Target, messages
from irdmafs.backend.transport.device import Growth
from irdmafs.backend.transport.frames import BadMessage
from irdmafs.backend.transport.messages import Message, Request
from irdmafs.backend.transport.movers import all_movers
from irdmafs.backend.transport.operations import codec_for
from irdmafs.backend.transport.tcp.wire import Admit
from irdmafs.backend.transport.verbs import devices
from irdmafs.backend.transport.verbs import messages as verbs
from irdmafs.backend.transport.verbs.library import immediate
from irdmafs.backend.transport.verbs.messages import QueueEnd
from irdmafs.backend.transport.verbs.path import piece_bytes
from irdmafs.backend.transport.verbs.queue import timeout_exponent
from irdmafs.backend.transport.verbs.rdma import Choice, Rdma, RdmaUnavailable
from irdmafs.doctor.rdma import check_rdma

KiB = 1 << 10


@pytest.fixture
def sys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Like /sys/class/infiniband, with nothing in it; devices in it may be opened."""
    monkeypatch.setattr(devices, "_access_obstacle", lambda name: devices.Obstacle())
    monkeypatch.setattr(devices, "memlock_limit", lambda: None)
    (tmp_path / "sys").mkdir()
    return tmp_path / "sys"


V1, V2 = "IB/RoCE v1", "RoCE v2"
ONE, TWO = "0000:0000:0000:0000:0000:ffff:0a09:0001", "0000:0000:0000:0000:0000:ffff:0a09:0101"


# -- the way to the peer -------------------------------------------------------------------------


def test_the_gid_of_the_address_on_the_way_is_chosen_and_roce_v2_before_v1(sys: Path) -> None:
    add_device(sys, "a", {0: (TWO, V1), 1: (TWO, V2)})
    add_device(sys, "b", {0: ("fe80::1", V1), 2: (ONE, V1), 3: (ONE, V2)})
    route = devices.choose(devices.find(str(sys)), "10.9.0.1")
    assert (route.device.name, route.port.number) == ("b", 1)
    assert (route.gid.number, route.gid.kind) == (3, "RoCE v2")
    route = devices.choose(devices.find(str(sys)), "10.9.1.1")
    assert (route.device.name, route.gid.number) == ("a", 1)


def test_hardware_comes_before_software(sys: Path) -> None:
    add_device(sys, "a", {1: (ONE, V2)})
    add_device(sys, "b", {1: (ONE, V2)}, driver="mlx5_core")
    assert devices.choose(devices.find(str(sys)), "10.9.0.1").device.name == "b"


def test_what_is_asked_for_is_taken_or_nothing(sys: Path) -> None:
    add_device(sys, "a", {0: (ONE, V1), 1: (ONE, V2)})
    add_device(sys, "b", {0: (TWO, V2)})
    found = devices.find(str(sys))
    assert devices.choose(found, "10.9.0.1", "a").device.name == "a"
    for device in ("b", "c"):
        with pytest.raises(OSError, match=r"10\.9\.0\.1") as caught:
            devices.choose(found, "10.9.0.1", device)
        assert caught.value.errno == errno.ENODEV


# -- what is in the way --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        ({}, "soft-RoCE", ""),
        ({"driver": "mlx5_core"}, "RoCE", ""),
        ({"driver": "mlx5_core", "link_layer": "InfiniBand"}, "InfiniBand", ""),
        ({"driver": "efa"}, "EFA", "SRD"),
        ({"node_type": "4: RNIC"}, "soft-iWARP", "handshake"),
        ({"node_type": "4: RNIC", "driver": "iw_cxgb4"}, "iWARP", "handshake"),
        ({"state": "1: DOWN"}, "soft-RoCE", "port 1 is DOWN"),
        ({"gids": {}}, "soft-RoCE", "table is empty"),
        ({"gids": {0: (ONE, V1)}}, "soft-RoCE", "no GID of RoCE v2"),
    ],
)
def test_a_device_is_named_and_what_stops_it_is_said(
    sys: Path, changes: dict[str, object], kind: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_device(sys, "a", **{"gids": {1: (ONE, V2)}, **changes})  # type: ignore[arg-type]
    (device,) = found = devices.find(str(sys))
    monkeypatch.setattr(devices, "find", lambda: found)
    assert device.kind == kind
    assert says in device.obstacle
    assert bool(says) == bool(device.obstacle)
    assert bool(says) == bool(devices.explain([device]))
    (told, *_) = (check.found for check in check_rdma(Choice()) if check.name == "a")
    assert told.startswith(kind) and "\n" not in told


def test_no_device_and_not_the_wanted_one_are_told_apart(sys: Path) -> None:
    assert devices.explain(devices.find(str(sys))) == "this host has no RDMA device"
    assert devices.find(str(sys / "nothing")) == []
    add_device(sys, "a", {1: (ONE, V2)})
    other = devices.explain(devices.find(str(sys)), "b")
    assert (other.found, other.remedy[:12]) == ("there is no RDMA device b", "there are: a")


def test_a_low_limit_of_locked_memory_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    monkeypatch.setattr(devices, "has_capability", lambda capability: False)
    assert "64 KiB" in devices.memlock_obstacle()
    monkeypatch.setattr(devices, "has_capability", lambda capability: True)
    assert not devices.memlock_obstacle()


def test_required_rdma_that_cannot_be_had_refuses_and_wished_for_says_why(
    sys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "find", lambda: [])
    with pytest.raises(RdmaUnavailable, match="no RDMA device"), Rdma(Choice("require")):
        pass
    for mode in ("auto", "off"):
        with Rdma(Choice(mode)) as rdma:
            assert not rdma.is_usable
            assert rdma.why_not
            with pytest.raises(OSError):
                rdma.rails("10.9.0.1")


def test_data_that_has_to_be_encrypted_never_moves_by_rdma() -> None:
    assert ClusterSection().rdma_choice(encrypt_data=False).mode == "auto"
    assert ClusterSection().rdma_choice(encrypt_data=True).mode == "off"
    with pytest.raises(ConfigError, match="encrypt"):
        ClusterSection(rdma="require").rdma_choice(encrypt_data=True)


# -- what peers say ------------------------------------------------------------------------------

numbers = st.integers(-(1 << 63), (1 << 64) - 1)
CODEC = codec_for(all_movers())
HERE, THERE = Extent(1, 0), Target(1, 1, ())
END = QueueEnd(bytes(16), 0, 1, 1, 1024, 1)


def take(message: Message) -> None:
    """Take a message as a node does."""
    taken = CODEC.decode(msgspec.msgpack.encode(message))
    assert taken == message
    if isinstance(taken, Request):
        taken.check()


@given(st.binary(max_size=20), numbers, numbers, numbers, numbers, numbers)
def test_a_queue_pair_that_cannot_be_is_refused(
    gid: bytes, lid: int, number: int, psn: int, mtu: Any, reads: int
) -> None:
    try:
        take(verbs.Attach(QueueEnd(gid, lid, number, psn, mtu, reads), 0, "a/1", gid))
    except BadMessage:
        return
    assert len(gid) == 16
    assert max(number, psn) < 1 << 24
    assert min(lid, number, psn) >= 0


@given(numbers, numbers)
def test_a_reservation_has_a_bounded_number_of_pieces(length: int, piece: int) -> None:
    try:
        take(verbs.Reserve(HERE, THERE, length, piece, 0))
    except BadMessage:
        return
    assert 0 < piece <= length <= SIZE_MAX
    assert -(-length // piece) <= verbs.PIECES_MAX


@given(st.integers(1, SIZE_MAX))
def test_what_a_caller_reserves_is_accepted(length: int) -> None:
    take(verbs.Reserve(HERE, THERE, length, piece_bytes(length), 0))


def put(*parcel: Any) -> messages.Put:
    return messages.Put([messages.Parcel(*parcel)])


REFUSED = [
    put(HERE, THERE, bytes(messages.PUT_BYTES_MAX + 1)), put(Extent(-1, 0), THERE, b""),
    put(Extent(1, 1 << 32), THERE, b""), put(HERE, Target(1 << 63, 1, ()), b""),
    put(HERE, Target(1, 1, (1,) * (CHAIN_MAX + 1)), b""), messages.Get([Extent(1 << 63, 0)], 1),
    messages.Get([HERE] * (messages.GET_EXTENTS_MAX + 1), 1),
    messages.Get([HERE], messages.PUT_BYTES_MAX + 1), messages.Abort(-1),
    messages.Adopt(HERE, THERE, "a" * (messages.NAME_MAX + 1)), messages.Suspect(-1, 1),
    messages.Suspect(1, 1 << 63), messages.Share(HERE, THERE, Extent(-1, 0), 1),
    messages.Share(HERE, THERE, HERE, 0),
    messages.AskEtcd("/method", bytes(messages.ETCD_REQUEST_BYTES_MAX + 1)),
    verbs.Attach(END, verbs.QUEUE_PAIRS_MAX, "a/1", END.gid), verbs.Expose(HERE, -1, 1),
    verbs.Expose(HERE, 0, SIZE_MAX + 1), verbs.Reserve(HERE, THERE, 1, 1, 0, -1),
]  # fmt: skip


@pytest.mark.parametrize("message", REFUSED, ids=lambda message: type(message).__name__)
def test_a_message_that_our_software_never_sends_is_refused(message: Message) -> None:
    with pytest.raises(BadMessage):
        take(message)


def test_the_largest_messages_that_it_sends_are_taken() -> None:
    take(put(Extent((1 << 63) - 1, 7), Target(1, 1, (2,) * CHAIN_MAX), b"bytes"))
    take(messages.Get([HERE] * messages.GET_EXTENTS_MAX, messages.PUT_BYTES_MAX))
    take(messages.Share(HERE, THERE, Extent(2, 0), SIZE_MAX))
    for message in (Admit(), verbs.Attach(END, 0, "a/1", END.gid), verbs.Detach(3)):
        take(message)


@given(st.binary(max_size=200))
def test_bytes_are_a_message_or_refused(body: bytes) -> None:
    for decode in (CODEC.decode, CODEC.decode_answer):
        try:
            decode(body)
        except BadMessage:
            pass


@given(st.integers(0, (1 << 32) - 1))
def test_a_number_is_the_same_at_both_ends(number: int) -> None:
    assert immediate(immediate(number)) == number


def test_the_hardware_gives_a_silent_peer_up_before_we_do() -> None:
    for patience_s in (1.0, 2.0, 5.0, 30.0):
        tries_s = 8 * 4.096e-6 * 2 ** timeout_exponent(patience_s)
        assert patience_s / 4 < tries_s < patience_s


async def test_growth_is_told_to_who_waits_and_stays_when_it_is_given_up() -> None:
    growth = Growth(10)
    seen: list[int] = []

    async def follow() -> None:
        while not seen or seen[-1] < 10:
            seen.append(await growth.more_than(seen[-1] if seen else 0))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow)
        for _ in range(3):
            await trio.testing.wait_all_tasks_blocked()
            growth.advance(4)
    assert seen == [4, 8, 10]
    growth.give_up(OSError(errno.EIO, "too late"))
    await growth.complete()
    other = Growth(10, 5)
    other.give_up(OSError(errno.EIO, "lost"))
    assert await other.more_than(4) == 5
    with pytest.raises(OSError, match="lost"):
        await other.complete()


def test_a_mount_that_requires_what_is_not_there_does_not_start(tmp_path: Path) -> None:
    with Cluster(Plan(nodes=1, mounts=0, replicas=1)) as cluster:
        (tmp_path / "mount").mkdir()
        done = run_irdmafs(
            cluster.admin, "mount", tmp_path / "mount", "--cluster", cluster.config,
            "--store", tmp_path / "cache", "--rdma", "require", "--rdma-device", "nothing",
        )  # fmt: skip
        assert done.returncode
        said = done.stdout + done.stderr
        assert "RDMA is required, but" in said
        assert len(said.splitlines()) == 1
