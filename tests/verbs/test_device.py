"""What verbs promise to the store where there is an RDMA device, be it soft-RoCE in a guest."""

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import make_mount
from harness import rdma
from harness.clusters import MIB
from harness.patterns import pattern, version_of
from harness.processes import Process

pytestmark = pytest.mark.verbs
SIZE_BYTES = 12 * MIB
MEMLOCK_BYTES = 64 << 10


@pytest.fixture
def port() -> rdma.Port:
    return rdma.need_ports()[0]


@pytest.fixture
def ends(port: rdma.Port) -> Iterator[tuple[rdma.End, rdma.End]]:
    """Two ends of one connection, each a file in memory of its own."""
    files = [Path(f"/dev/shm/test-irdmafs-{os.getpid()}-{name}") for name in ("one", "other")]
    try:
        with (
            rdma.End(port, files[0], SIZE_BYTES) as one,
            rdma.End(port, files[1], SIZE_BYTES) as other,
        ):
            one.connect(other.address)
            other.connect(one.address)
            yield one, other
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def test_every_active_port_opens(port: rdma.Port) -> None:
    from pyverbs.device import Context

    for each in rdma.ports():
        with Context(name=each.device) as context:
            assert context.query_device().max_mr_size > 0
            assert context.query_port(each.number).state == rdma.constant("IBV_PORT_ACTIVE")


def test_write_puts_a_mapped_file_into_the_peers(ends: tuple[rdma.End, rdma.End]) -> None:
    one, other = ends
    one.memory[:] = os.urandom(SIZE_BYTES)
    one.write(other.address)
    assert other.memory[:] == one.memory[:]


def test_read_gets_the_peers_mapped_file(ends: tuple[rdma.End, rdma.End]) -> None:
    one, other = ends
    other.memory[:] = os.urandom(SIZE_BYTES)
    one.read(other.address)
    assert one.memory[:] == other.memory[:]


REGISTER = """
import mmap, pyverbs.mr, pyverbs.pd, pyverbs.device
from pyverbs.pyverbs_error import PyverbsRDMAError
from harness.rdma import constant
with pyverbs.device.Context(name=device) as context, pyverbs.pd.PD(context) as domain:
    try:
        pyverbs.mr.MR(domain, size, constant("IBV_ACCESS_LOCAL_WRITE")).close()
        outcome = 0
    except PyverbsRDMAError as error:
        outcome = error.error_code
outcome
"""


def test_registering_more_than_may_be_locked_fails_with_enomem(port: rdma.Port) -> None:
    launcher = ["prlimit", f"--memlock={MEMLOCK_BYTES}"]
    if os.geteuid() == 0:
        # The capability stands above the limit.
        launcher += ["setpriv", "--inh-caps=-ipc_lock", "--bounding-set=-ipc_lock"]
    with Process(tuple(launcher)) as limited:
        register = {"device": port.device}
        assert limited.do(REGISTER, size=MEMLOCK_BYTES // 4, **register) == 0
        assert limited.do(REGISTER, size=MEMLOCK_BYTES * 4, **register) == errno.ENOMEM


def test_this_process_may_lock_what_it_registers(port: rdma.Port) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert limit == resource.RLIM_INFINITY or limit >= SIZE_BYTES


def test_mount_beside_the_device_passes_reads_and_writes_through(port: rdma.Port) -> None:
    with make_mount("kernel") as mount:
        file = mount.path / "weights"
        with mount.requests() as requests:
            file.write_bytes(pattern(1, MIB))
            assert version_of(file.read_bytes()) == 1
        assert not {"READ", "WRITE"} & set(requests), requests
