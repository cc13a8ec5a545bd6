"""A mount where there is an RDMA device, be it soft-RoCE in a guest."""

import pytest
from conftest import make_mount
from harness.clusters import MIB
from harness.patterns import pattern, version_of
from harness.rdma import need_ports

pytestmark = pytest.mark.verbs


def test_mount_beside_the_device_passes_reads_and_writes_through() -> None:
    need_ports()
    with make_mount("kernel") as mount:
        file = mount.path / "weights"
        with mount.requests() as requests:
            file.write_bytes(pattern(1, MIB))
            assert version_of(file.read_bytes()) == 1
        assert not {"READ", "WRITE"} & set(requests), requests
