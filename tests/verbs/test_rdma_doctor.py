"""The doctor on RDMA: whatever is in the way, it says what, and the command that mends it."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from harness.mountpoint import irdmafs
from harness.rdma import DEVICES, IN_GUEST, REMEDY, add_device, need_ports, set_links
from harness.roce import Way

from irdmafs.backend.transport.verbs import devices
from irdmafs.backend.transport.verbs.rdma import Choice
from irdmafs.cli.cluster import rdma_wanted
from irdmafs.doctor import Check
from irdmafs.doctor import rdma as rdma_checks


def doctor(*arguments: str | Path, prefix: Sequence[str] = (), expected: int = 0) -> dict[str, Any]:
    """The checks by name."""
    done = irdmafs("doctor", "--json", *arguments, launcher=tuple(prefix))
    assert done.returncode == expected, done.stderr
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def without(*capabilities: str) -> list[str]:
    """A command's prefix. Skips the test where it cannot be had."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("giving capabilities up takes root and setpriv (apt install util-linux)")
    return ["setpriv", "--bounding-set", ",".join(f"-{name}" for name in capabilities)]


def only_in_guest() -> None:
    if not IN_GUEST:
        pytest.skip(f"would disturb this machine's own devices; {REMEDY}")


# -- without devices -----------------------------------------------------------------------------


@pytest.fixture
def no_device() -> None:
    if DEVICES.exists() and any(DEVICES.iterdir()):
        pytest.skip("this machine has RDMA devices")


def test_a_machine_without_rdma_is_told_how_to_get_it_and_that_tcp_is_used(no_device: None) -> None:
    check = doctor()["RDMA"]
    assert check["verdict"] == "info"
    assert "TCP and shared memory are used" in check["found"]
    assert "CONFIG_INFINIBAND" in check["remedy"] or "modprobe rdma_rxe" in check["remedy"]


def test_what_is_required_and_not_there_is_a_failure(no_device: None) -> None:
    check = doctor("--rdma", "require", expected=1)["RDMA"]
    assert check["verdict"] == "fail"
    assert check["found"] == "required, but this host has no RDMA device"
    assert check["remedy"]


def test_rdma_that_is_switched_off_is_not_missed() -> None:
    check = doctor("--rdma", "off")["RDMA"]
    assert (check["verdict"], check["found"]) == ("info", "switched off; TCP is used")


def test_a_clusters_file_says_what_is_wanted(tmp_path: Path) -> None:
    config = tmp_path / "cluster.toml"
    config.write_text('[cluster]\netcd = ["127.0.0.1:1"]\nrdma = "off"\n')
    assert "switched off" in doctor("--cluster", config)["RDMA"]["found"]
    config.write_text("no TOML")
    assert irdmafs("doctor", "--cluster", str(config)).returncode == 1


def test_a_low_limit_of_locked_memory_comes_with_the_command_that_raises_it() -> None:
    prefix = [*without("ipc_lock"), "sh", "-c", 'ulimit -l 64 && exec "$@"', "sh"]
    check = doctor(prefix=prefix)["locked memory"]
    assert check["found"] == "soft 64.0 KiB, hard 64.0 KiB"
    assert "ulimit -l unlimited" in check["remedy"]


# -- a device as sysfs shows it ------------------------------------------------------------------


GIDS = {
    0: ("fe80::1", "RoCE v2"),
    1: ("::ffff:10.9.0.1", "IB/RoCE v1"),
    2: ("::ffff:10.9.0.1", "RoCE v2"),
}


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    find = devices.find
    monkeypatch.setattr(devices, "find", lambda: find(str(tmp_path)))
    monkeypatch.setattr(devices, "_access_obstacle", lambda name: devices.Obstacle())
    monkeypatch.setattr(devices, "memlock_limit", lambda: None)
    monkeypatch.setattr(rdma_checks, "_library", lambda: (None, devices.Obstacle()))
    return tmp_path


def checks(choice: Choice = Choice(), peer: str | None = None) -> dict[str, Check]:  # noqa: B008
    return {check.name: check for check in rdma_checks.check_rdma(choice, peer)}


def test_each_device_port_and_gid_has_a_line(sysfs: Path) -> None:
    add_device(sysfs, "card0", GIDS, netdev="eth7")
    found = checks()
    assert found["RDMA"].verdict == "ok"
    assert "ACTIVE, Ethernet on eth7" in found["card0 port 1"].found
    assert found["card0 GID 2"] == Check("card0 GID 2", "ok", "10.9.0.1, RoCE v2 on eth7")
    assert "link-local" in found["card0 GID 0"].found
    assert "RoCE v1" in found["card0 GID 1"].found


@pytest.mark.parametrize(
    ("link_layer", "remedy"), [("Ethernet", "ip link set eth7 up"), ("InfiniBand", "opensm")]
)
def test_a_port_that_is_down_comes_with_the_command_that_raises_it(
    sysfs: Path, link_layer: str, remedy: str
) -> None:
    add_device(sysfs, "card0", GIDS, state="1: DOWN", link_layer=link_layer, netdev="eth7")
    found = checks()
    for name in ("RDMA", "card0"):
        assert "port 1 is DOWN" in found[name].found
        assert remedy in found[name].remedy


# -- real devices --------------------------------------------------------------------------------


@pytest.fixture
def port() -> Way:
    return need_ports(1)[0]


def uverbs(device: str) -> Path:
    for entry in Path("/sys/class/infiniband_verbs").glob("uverbs*"):
        if (entry / "ibdev").read_text().strip() == device:
            return Path("/dev/infiniband", entry.name)
    raise AssertionError(f"{device} has no device file")


def bad(check: dict[str, str]) -> tuple[str, str]:
    """What is in the way, and the remedy."""
    assert check["verdict"] == "warn", check
    return check["found"], check["remedy"]


@pytest.mark.verbs
def test_a_device_that_works_is_told_with_its_limits(port: Way) -> None:
    found = checks(Choice(device=port.device))
    assert found["RDMA"].verdict == "ok"
    assert "max_mr_size" in found[port.device].found
    assert "NUMA node" in found[port.device].found
    assert "RDMA MTU" in found[f"{port.device} port {port.port}"].found
    assert found[f"{port.device} GID {port.gid_index}"].verdict == "ok"


@pytest.mark.verbs
def test_64_kib_of_locked_memory_are_too_little(port: Way) -> None:
    prefix = [*without("ipc_lock"), "sh", "-c", 'ulimit -l 64 && exec "$@"', "sh"]
    found, remedy = bad(doctor(prefix=prefix)["RDMA"])
    assert found.startswith("only 64 KiB of memory may be locked")
    assert "ulimit -l unlimited" in remedy


@pytest.mark.verbs
def test_a_link_that_is_down_is_to_be_set_up(port: Way) -> None:
    only_in_guest()
    device = need_ports(2)[1].device
    netdev = (DEVICES / device / "parent").read_text().strip()
    set_links(netdev, up=False)
    try:
        found = checks(Choice(device=device))
        for name in ("RDMA", device, f"{device} port 1"):
            assert found[name].verdict == "warn"
            assert f"ip link set {netdev} up" in found[name].remedy
        # Another device is still there for who does not insist.
        assert checks()["RDMA"].verdict == "ok"
    finally:
        set_links(netdev, up=True)


@pytest.mark.verbs
def test_missing_pyverbs_is_to_be_installed(port: Way, tmp_path: Path) -> None:
    (tmp_path / "pyverbs.py").write_text("raise ImportError('No module named pyverbs')\n")
    found, remedy = bad(doctor(prefix=("env", f"PYTHONPATH={tmp_path}"))["RDMA"])
    assert "pyverbs cannot be imported" in found
    assert "apt install python3-pyverbs" in remedy


@pytest.mark.verbs
def test_a_device_file_without_permission_is_to_be_opened_up(port: Way) -> None:
    only_in_guest()
    path = uverbs(port.device)
    mode = path.stat().st_mode & 0o777
    path.chmod(0)
    try:
        prefix = without("dac_override", "dac_read_search")
        found, remedy = bad(doctor("--rdma-device", port.device, prefix=prefix)["RDMA"])
    finally:
        path.chmod(mode)
    assert f"no permission to open {path}" in found
    assert f"chmod 666 {path}" in remedy


@pytest.mark.verbs
def test_a_cluster_not_on_the_devices_network_is_told_apart(port: Way, tmp_path: Path) -> None:
    config = tmp_path / "cluster.toml"
    config.write_text('[cluster]\netcd = ["127.0.0.1:1"]\n')
    check = checks(*rdma_wanted(str(config), {}))["RDMA"]
    assert (check.verdict, "127.0.0.1" in check.found) == ("warn", True)
    assert "--listen ADDRESS" in check.remedy
    config.write_text(f'[cluster]\netcd = ["{port.address}:1"]\nrdma = "require"\n')
    check = checks(*rdma_wanted(str(config), {}))["RDMA"]
    assert check.verdict == "ok"
    assert f"{port.device} port {port.port}, GID {port.gid_index}" in check.found
