"""`irdmafs cluster status` and store nodes tell of etcd's alarms and room, and `repair-etcd` mends
them (real etcd)."""

import json
import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_cluster_commands
import trio
from click.testing import CliRunner
from harness.etcd_server import EtcdServer
from harness.mountpoint import succeeded

from irdmafs.backend.cluster.config import ClusterConfig
from irdmafs.backend.etcd import etcd_pb2 as pb
from irdmafs.backend.etcd.admin import EtcdAdmin, roles_hold
from irdmafs.backend.etcd.engine import EtcdEngine
from irdmafs.backend.etcd.rpc import ALARM
from irdmafs.backend.kv import NoSpace, Put
from irdmafs.backend.node.housekeeping import EtcdWatch
from irdmafs.cli.command import main

QUOTA_BYTES = 16 << 20


class Cluster(test_cluster_commands.Cluster):
    """A cluster without nodes, whose etcd has a small quota."""

    def __init__(self, etcd: EtcdServer, directory: Path) -> None:
        super().__init__(etcd, directory, "default")
        succeeded(self.init("--no-tls"))

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `irdmafs cluster` in this process, which tests give shorter times."""
        words = ["cluster", *arguments, "--cluster", str(self.file)]
        done = CliRunner().invoke(main, words)
        return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)

    def told(self) -> Any:
        return json.loads(self.run("status", "--json").stdout)

    def problem_of_etcd(self) -> str:
        """The problem with etcd that status names; "" for none."""
        return next((line for line in self.told()["problems"] if line.startswith("etcd")), "")

    def raise_alarm(self, alarm: pb.AlarmType) -> None:
        request = pb.AlarmRequest(action=pb.AlarmRequest.ACTIVATE, memberID=1, alarm=alarm)
        self.do(lambda engine: engine.admin._calls.call(ALARM, request))

    def fill(self, keys: int = 1, size: int = 1) -> None:
        async def put(engine: EtcdEngine) -> None:
            for number in range(keys):
                await engine.transact((), [Put(b"i%08d" % number, bytes(size))])

        self.do(put)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with EtcdServer(arguments=(f"--quota-backend-bytes={QUOTA_BYTES}",)) as server:
        yield Cluster(server, tmp_path)


def test_an_alarm_that_was_raised_without_need_is_told_and_taken_back(cluster: Cluster) -> None:
    """Without one, the room of etcd is told."""
    cluster.raise_alarm(pb.NOSPACE)
    with pytest.raises(NoSpace, match="repair-etcd"):
        cluster.fill()
    assert "NOSPACE" in cluster.problem_of_etcd()
    shown = cluster.run("status")
    assert (shown.returncode, "ALARM NOSPACE" in shown.stdout) == (2, True)
    assert "repair-etcd" in shown.stdout
    assert cluster.run("repair-etcd").returncode == 0
    cluster.fill()
    assert cluster.problem_of_etcd() == ""
    told = cluster.told()["etcd_room"]
    assert told["alarms"] == []
    [room] = told["members"].values()
    assert room["file_bytes"] >= room["used_bytes"] > 0
    assert "room in etcd" in cluster.run("status").stdout


def test_a_full_etcd_takes_writes_when_keys_were_removed_and_it_was_repaired(
    cluster: Cluster,
) -> None:
    with pytest.raises(NoSpace):
        cluster.fill(keys=100, size=500_000)
    assert "NOSPACE" in cluster.problem_of_etcd()
    cluster.etcd.ctl("del", "--prefix", "/irdmafs/default/i")
    succeeded(cluster.run("repair-etcd"))
    [room] = cluster.told()["etcd_room"]["members"].values()
    assert room["file_bytes"] < QUOTA_BYTES / 2
    cluster.fill()


def test_the_members_that_are_up_are_repaired_and_compared_only_if_all_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EtcdAdmin._ask, "__defaults__", (1.0,))
    with EtcdServer(members=3) as server:
        cluster = Cluster(server, tmp_path)
        server.kill9(2)
        cluster.raise_alarm(pb.NOSPACE)
        rooms = cluster.told()["etcd_room"]["members"]
        assert set(rooms) == set(server.endpoints)
        assert [where for where, room in rooms.items() if "error" in room] == [server.endpoints[2]]
        done = succeeded(cluster.run("repair-etcd"))
        assert f"{server.endpoints[2]} is left out" in done.stdout
        cluster.fill()

        cluster.raise_alarm(pb.CORRUPT)
        assert cluster.run("repair-etcd").returncode == 1
        assert "CORRUPT" in cluster.problem_of_etcd()
        server.start(2)
        done = cluster.run("repair-etcd")
        assert (done.returncode, "same data" in done.stdout) == (0, True), done
        cluster.fill()


@pytest.mark.parametrize(
    ("version", "holds"),
    [
        ("3.4.23", False), ("3.5.30", False), ("3.6.10", False), ("3.6.11", True),
        ("3.7.0-rc.1", True), ("4.0.0", True),
    ],
)  # fmt: skip
def test_an_etcd_whose_roles_can_be_got_around_is_known(version: str, holds: bool) -> None:
    assert roles_hold(version) is holds


async def test_a_node_has_etcd_s_room_in_its_figures_and_logs_an_alarm_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "irdmafs.backend.node.housekeeping")
    async with ClusterConfig.load(str(cluster.file)).cluster.engine("admin") as engine:
        watch = EtcdWatch(engine)
        await watch.look()
        found = watch.figures
        assert 0 < found.etcd_used_bytes <= found.etcd_file_bytes < found.etcd_quota_bytes
        assert found.etcd_alarms == {"CORRUPT": 0, "NOSPACE": 0}
        assert not caplog.records
        await trio.to_thread.run_sync(cluster.raise_alarm, pb.NOSPACE)
        await watch.look()
        await watch.look()
        assert watch.figures.etcd_alarms == {"CORRUPT": 0, "NOSPACE": 1}
        [told] = caplog.messages
        assert "NOSPACE" in told
        assert "irdmafs cluster repair-etcd" in told
        await engine.admin.repair(lambda line: None)
        await watch.look()
        assert caplog.messages[1:] == ["etcd has room, and no alarm"]
