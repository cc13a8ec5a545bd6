"""The commands of a cluster, against a real etcd: what they print, write and refuse; exit codes."""

import itertools
import json
import math
import os
import re
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import trio
from click.testing import CliRunner
from harness.closing import descriptor
from harness.etcd_server import EtcdServer
from harness.mountpoint import INTERRUPTED, IRDMAFS, eventually, irdmafs, one_line, succeeded
from harness.processes import Program, has_ended
from harness.scratch import mounted_on
from harness.transport_nodes import serving

from irdmafs.backend.cluster import overview
from irdmafs.backend.cluster.config import ClusterConfig
from irdmafs.backend.cluster.group_configs import Groups
from irdmafs.backend.cluster.membership import Members
from irdmafs.backend.etcd.admin import roles_hold
from irdmafs.backend.etcd.engine import EtcdEngine
from irdmafs.backend.kv import Delete, Event, Put
from irdmafs.backend.model.placement import place_all
from irdmafs.backend.model.policy import Candidate
from irdmafs.backend.model.records import (
    SETTINGS_KEY,
    GroupConfig,
    MountRecord,
    NodeAddress,
    NodeRecord,
    decode,
    encode,
    group_key,
    key_of,
    policy_key,
)
from irdmafs.backend.model.values import ConfigError
from irdmafs.cli.command import main

GIB = 1 << 30
REPLICAS = 2


class Cluster:
    """A cluster that `irdmafs cluster init` made; its nodes are records that tests put."""

    def __init__(self, etcd: EtcdServer, directory: Path, name: str) -> None:
        self.etcd, self.directory, self.name = etcd, directory, name
        self.file = directory / "cluster.toml"

    def init(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        where = ("--etcd", ",".join(self.etcd.endpoints), "--out", self.directory)
        return irdmafs("cluster", "init", *where, "--name", self.name, *arguments)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return irdmafs(*arguments, "--cluster", self.file)

    def begin(self, *arguments: str) -> Program:
        """Start a command that takes its time."""
        return Program(*IRDMAFS, *arguments, "--cluster", self.file, stderr=subprocess.PIPE)

    def status(self, code: int) -> dict[str, Any]:
        done = self.run("cluster", "status", "--json")
        assert done.returncode == code, done
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def do(self, task: Callable[[EtcdEngine], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            async with ClusterConfig.load(str(self.file)).cluster.engine("admin") as engine:
                return await task(engine)

        return trio.run(run)

    def put(self, *records: tuple[bytes, msgspec.Struct]) -> None:
        puts = [Put(key, encode(record)) for key, record in records]
        self.do(lambda engine: engine.transact([], puts))

    def delete(self, *keys: bytes) -> None:
        self.do(lambda engine: engine.transact([], [Delete(key) for key in keys]))

    def admit(self, *nodes: int, used: int = GIB) -> None:
        """Nodes that are up, as far as etcd knows."""
        for node in nodes:
            record = NodeRecord("up", 1.0, {"host": f"h{node:x}"})
            port = nobodys_port(node)
            address = NodeAddress(
                "127.0.0.1", port, port, ["tcp"], "h", "/s", 4 * GIB, 4 * GIB - used, "0"
            )
            self.put((key_of(b"N", node), record), (key_of(b"n", node), address))

    def config(self, index: int) -> GroupConfig:
        """Of the group that `keep` made."""
        found = self.do(lambda engine: engine.get(group_key(REPLICAS << 16 | index)))
        return decode(found.value, GroupConfig)

    def keep(self, *configs: GroupConfig) -> None:
        """Groups 0, 1, ... of two replicas."""
        self.put(*((group_key(REPLICAS << 16 | i), config) for i, config in enumerate(configs)))


@pytest.fixture
def cluster(etcd: EtcdServer, tmp_path: Path, request: pytest.FixtureRequest) -> Cluster:
    name = re.sub(r"\W+", "-", request.node.name)[:50].strip("-")
    made = Cluster(etcd, tmp_path / "made", name)
    succeeded(made.init("--no-tls", "--buckets", "4"))
    return made


def nobodys_port(node: int) -> int:
    """Of the system's, and not in use: whoever asks there is refused at once."""
    return 900 + node % 100


A, B, C, D = 0xA1 << 56, 0xB2 << 56, 0xC3 << 56, 0xD4


ODD = {"scrub_age_s": math.nan, "more": b"no text"}
LIES: list[dict[str, Any]] = [
    ODD, {"bytes": "many"}, {"scrub_age_s": 1e300}, {"wrong_files": [1]}, {"pools_in_use": [[1]]},
    {"damaged_records": ""}, {"quarantined_bytes": -1}, {"credential_problems": [1]},
    {"resync_bytes_per_s": -1},
]  # fmt: skip


async def test_a_report_that_makes_no_sense_is_told_of(cluster: Cluster, memory: Path) -> None:
    async with serving(memory, 7) as node:
        port = node.listener.control_port
        address = NodeAddress("127.0.0.1", port, port, ["tcp"], "h", "/s", GIB, GIB, "0")
        await trio.to_thread.run_sync(cluster.put, (key_of(b"n", 7), address))
        for lie, flags in itertools.product(LIES, ([], ["--json"])):
            with patch.object(node.service, "status", return_value=lie):
                command = partial(cluster.run, "cluster", "status", *flags)
                done = await trio.to_thread.run_sync(command)
            is_told = "does not answer: its report makes no sense" in done.stdout
            assert (done.stderr, is_told) == ("", lie is not ODD), lie


# -- cluster init ---------------------------------------------------------------------------------


def test_init_makes_a_cluster_that_status_finds(etcd: EtcdServer, tmp_path: Path) -> None:
    made = Cluster(etcd, tmp_path / "deep" / "made", "first")
    shape = ("--replicas", "3", "--stripe", "8M", "--lease-ttl", "7", "--buckets", "99")
    done = succeeded(made.init("--etcd-plain", *shape))
    assert "WARNING: etcd (" in done.stderr
    assert "is spoken to in clear" in done.stderr
    assert "is spoken to in clear" in made.status(2)["warnings"][0]
    settings = made.status(2)["settings"]
    assert settings.pop("cluster_id")
    assert settings == {
        "format": 1,
        "replicas": 3,
        "stripe_bytes": 8 << 20,
        "lease_ttl_s": 7,
        "buckets": 99,
    }
    config = ClusterConfig.load(str(made.file)).cluster
    for role in ("node", "mount", "reader", "admin"):
        credentials = config.credentials(role)
        assert credentials is not None
        assert credentials.check().role == role
    keys = list(made.directory.glob("*.key"))
    assert len(keys) == 5
    assert {path.stat().st_mode & 0o777 for path in keys} == {0o600}


def test_init_refuses_a_cluster_or_files_that_exist_and_leaves_them(cluster: Cluster) -> None:
    files = {path.name: path.read_bytes() for path in cluster.directory.iterdir()}
    before = cluster.status(2)["settings"]
    line = one_line(cluster.init("--no-tls", "--replicas", "3"))
    assert f"has a cluster named '{cluster.name}' already; choose another --name" in line
    elsewhere = Cluster(cluster.etcd, cluster.directory / "other", cluster.name)
    assert "already; choose another --name" in one_line(elsewhere.init("--etcd-plain"))
    assert list(elsewhere.directory.iterdir()) == []
    other = Cluster(cluster.etcd, cluster.directory, cluster.name + "-other")
    line = one_line(other.init("--etcd-plain"))
    assert "describes a cluster already; choose another directory" in line
    assert cluster.status(2)["settings"] == before
    assert {p.name: p.read_bytes() for p in cluster.directory.iterdir() if p.is_file()} == files


def test_of_two_inits_at_once_one_makes_the_cluster(etcd: EtcdServer, tmp_path: Path) -> None:
    new = Cluster(etcd, tmp_path / "made", "twice")
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(new.init, ["--etcd-plain"] * 2)
    done, refused = sorted((first, second), key=lambda one: one.returncode)
    assert done.returncode == 0, done
    assert re.search(
        "another command changes|has a cluster named 'twice' already", one_line(refused)
    )
    assert new.status(2)["cluster"] == "twice"
    assert len(os.listdir(tmp_path / "made")) == 12


PORT_OF_NOBODY = "127.0.0.1:1"


@pytest.fixture
def init_in_vain(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run `init` with an etcd that cannot be reached, and return what it says."""
    monkeypatch.setattr("irdmafs.cli.cluster._ETCD_TIMEOUT_S", 0.2)

    def run(made: Path, *more: str) -> str:
        words = ["cluster", "init", "--etcd", PORT_OF_NOBODY, "--out", str(made), *more]
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 1
        return done.stderr

    return run


def test_init_leaves_nothing_when_etcd_cannot_be_reached(
    tmp_path: Path, init_in_vain: Callable[..., str]
) -> None:
    assert PORT_OF_NOBODY in init_in_vain(tmp_path / "made", "--etcd-plain")
    assert os.listdir(tmp_path / "made") == []


def test_init_makes_certificates_with_which_etcd_itself_runs(
    tmp_path: Path, init_in_vain: Callable[..., str]
) -> None:
    made = tmp_path / "made"
    arguments = ("cluster", "init", "--out", made)
    line = init_in_vain(made)
    assert "--prepare says how etcd is started with its certificate" in line
    done = succeeded(irdmafs(*arguments, "--etcd", PORT_OF_NOBODY, "--prepare"))
    assert f"--cert-file={made}/etcd.pem" in done.stdout
    # Only etcd's port is not known before it starts.
    with EtcdServer(credentials=made) as server:
        file = made / "cluster.toml"
        file.write_text(file.read_text().replace(PORT_OF_NOBODY, server.endpoint))
        succeeded(irdmafs(*arguments, "--etcd", server.endpoint))
        done = irdmafs("cluster", "status", "--json", "--cluster", file)
        assert done.returncode == 2, done
        found = json.loads(done.stdout)
        assert found["settings"]["replicas"] == 2
        [room] = found["etcd_room"]["members"].values()
        too_old = [] if roles_hold(room["version"]) else ["whose roles do not hold"]
        assert [line[line.index("whose") :][:23] for line in found["warnings"]] == too_old
        (made / "ca.pem").write_bytes((made / "etcd.pem").read_bytes())
        line = one_line(irdmafs("cluster", "drain", "n", "--cluster", file))
        assert line.count(server.endpoint) == 1 and "certificate is not accepted" in line


def test_init_refuses_what_makes_no_sense(etcd: EtcdServer, tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        done = irdmafs(
            "cluster", "init", "--etcd", etcd.endpoint, "--out", tmp_path / "x", *arguments
        )
        return one_line(done)

    assert "--stripe: '1Q' is not a size" in refused("--stripe", "1Q")
    assert "--stripe: '5K' is too little; give 1.0 MiB or more" in refused("--stripe", "5K")
    assert "'a/b' is not a cluster's name" in refused("--name", "a/b")
    assert irdmafs("cluster", "init").returncode == 2
    done = irdmafs("cluster", "init", "--etcd", "h", "--no-tls", "--etcd-host", "h")
    assert done.returncode == 2
    assert not list(tmp_path.glob("x/*"))


def test_cert_makes_one_more_certificate(etcd: EtcdServer, tmp_path: Path) -> None:
    made = Cluster(etcd, tmp_path, "certificates")
    assert made.init("--etcd-plain").returncode == 0
    assert made.run("cluster", "cert", "w7", "--role", "mount").returncode == 0
    assert (tmp_path / "mount-w7.pem").exists()
    assert "mount-w7.key exists" in one_line(made.run("cluster", "cert", "w7", "--role", "mount"))
    (tmp_path / "ca.key").unlink()
    assert "ca.key" in one_line(made.run("cluster", "cert", "w8", "--role", "node"))


def test_cert_needs_a_ca(cluster: Cluster) -> None:
    line = one_line(cluster.run("cluster", "cert", "w7", "--role", "mount"))
    assert "has no CA; it was made with --no-tls" in line


# -- cluster status -------------------------------------------------------------------------------


def test_status_without_nodes_is_unavailable_and_says_what_to_do(cluster: Cluster) -> None:
    found = cluster.status(2)
    assert found["health"] == "unavailable"
    assert found["problems"] == ["no store node is up; start one with: irdmafs serve STORE"]
    text = cluster.run("cluster", "status")
    assert text.returncode == 2
    assert text.stderr == ""
    assert "no store nodes" in text.stdout


def test_nothing_is_said_of_output_that_nobody_reads(cluster: Cluster) -> None:
    cluster.admit(A)
    reader, writer = os.pipe()
    os.close(reader)
    with descriptor(writer):
        for words in (("cluster", "status"), ("rebalance",)):
            command = (*IRDMAFS, *words, "--cluster", cluster.file)
            done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE)
            assert (done.returncode, done.stderr) == (1, b"")


def test_status_of_a_cluster_that_does_not_exist(cluster: Cluster) -> None:
    cluster.file.write_text(cluster.file.read_text().replace(cluster.name, "nobody"))
    line = one_line(cluster.run("cluster", "status"), 2)
    assert "knows no cluster named 'nobody'; make it with: irdmafs cluster init" in line


def test_mount_of_a_cluster_with_damaged_settings_says_so(cluster: Cluster, tmp_path: Path) -> None:
    puts = [Put(SETTINGS_KEY, b"damaged")]
    cluster.do(lambda engine: engine.transact([], puts))
    (tmp_path / "mount").mkdir()
    line = one_line(
        cluster.run("mount", "--store", str(tmp_path / "store"), str(tmp_path / "mount"))
    )
    assert f"the settings of cluster {cluster.name!r} in etcd are damaged" in line


def test_status_when_all_is_well(cluster: Cluster) -> None:
    cluster.admit(A, B)
    cluster.keep(GroupConfig(1, (A, B)), GroupConfig(1, (B, A)))
    cluster.put((key_of(b"m", 7), MountRecord("worker", "/params", 42, "1.0")))
    found = cluster.status(0)
    assert found["health"] == "ok"
    assert found["problems"] == []
    assert found["groups"] == {"total": 2, "unavailable": 0, "degraded": 0, "missing_replicas": {}}
    assert [node["groups_primary"] for node in found["nodes"]] == [1, 1]
    assert found["mounts"][0]["mountpoint"] == "/params"
    # From here the nodes cannot be asked; what counts is their leases.
    assert all("does not answer" in note for note in found["notes"])
    assert len(found["notes"]) == 2
    text = cluster.run("cluster", "status").stdout
    shown = (f"{A:016x}", f"127.0.0.1:{nobodys_port(A)}", "/params", "2, all in sync", "nothing")
    assert all(expected in text for expected in shown), text


def test_status_with_a_dead_node_is_degraded_without_replica_unavailable(cluster: Cluster) -> None:
    cluster.admit(A, B, C)
    cluster.keep(GroupConfig(1, (A, B)), GroupConfig(2, (A,), (C,)))
    cluster.delete(key_of(b"n", B))
    found = cluster.status(1)
    assert found["groups"]["missing_replicas"] == {"1": 2}
    assert any(f"node {B:016x} is down" in problem for problem in found["problems"])
    assert {node["id"]: node["state"] for node in found["nodes"]} == {
        f"{A:016x}": "up",
        f"{B:016x}": "down",
        f"{C:016x}": "up",
    }
    cluster.delete(key_of(b"n", A))
    assert cluster.status(2)["groups"]["unavailable"] == 2


def test_status_says_how_many_nodes_to_add_for_which_replicas(cluster: Cluster) -> None:
    """Of nodes that cannot be asked it is not known where nothing is kept."""
    cluster.admit(A, B)
    rule = f"host=h{A:x}|hmissing"
    cluster.do(lambda engine: engine.transact([], [Put(policy_key(1), rule.encode())]))
    for pool in (4, 1 << 8 | 2):
        cluster.put((group_key(pool << 16), GroupConfig(1, (A,))))
    assert cluster.status(1)["problems"] == [
        "2 nodes cannot keep 4 replicas; add 2, or make the files anew that were created where "
        "user.irdmafs.replicas was 4",
        f"1 node within the placement {rule!r} cannot keep 2 replicas; add 1",
        "1 group without 1 of the replicas",
        "1 group without 3 of the replicas",
    ]


def test_status_says_what_is_being_moved_and_how_long_it_takes(cluster: Cluster) -> None:
    cluster.admit(A, B, used=2 * GIB)
    cluster.admit(C, used=0)
    cluster.keep(GroupConfig(1, (A, B), (C,)), GroupConfig(1, (B, A)))
    found = cluster.status(0)
    # 4 GiB in 4 replicas: one of 1 GiB is joining, at 256 MiB/s.
    assert found["moving"] == {"replicas": 1, "bytes_about": GIB, "seconds_about": 4.0}
    assert "1 replicas of groups, about 1.0 GiB, 4 s" in cluster.run("cluster", "status").stdout


# -- drain, remove --------------------------------------------------------------------------------


def test_drain_waits_until_the_node_is_empty(cluster: Cluster) -> None:
    cluster.admit(A, B, C)
    cluster.keep(GroupConfig(1, (A, B)), GroupConfig(1, (B, A)))
    with cluster.begin("cluster", "drain", "a1") as drain:
        assert drain.stdout.readline() == f"draining {A:016x}: 0 of 2 groups\n"
        states = {node["id"]: node["state"] for node in cluster.status(0)["nodes"]}
        assert states[f"{A:016x}"] == "draining"
        cluster.keep(GroupConfig(2, (C, B)), GroupConfig(2, (B, C)))
        rest = drain.stdout.read()
    assert drain.returncode == 0
    assert f"node {A:016x} is empty" in rest
    line = one_line(cluster.run("cluster", "remove", "a1"))
    assert "is up and keeps 0 groups; stop it first" in line
    cluster.delete(key_of(b"n", A))
    assert cluster.run("cluster", "remove", "a1").returncode == 0
    assert len(cluster.status(0)["nodes"]) == 2


def test_drain_can_be_interrupted_and_cancelled_and_leaves_one_node(cluster: Cluster) -> None:
    cluster.admit(A, B)
    cluster.keep(GroupConfig(1, (A, B)))
    with cluster.begin("cluster", "drain", f"127.0.0.1:{nobodys_port(A)}") as drain:
        drain.stdout.readline()
        drain.send_signal(signal.SIGINT)
        assert "the draining goes on" in drain.stderr.read()
    assert drain.returncode in INTERRUPTED
    assert "draining" in cluster.run("cluster", "status").stdout
    assert cluster.run("cluster", "drain", "a1", "--cancel").returncode == 0
    assert "draining" not in cluster.run("cluster", "status").stdout
    assert cluster.run("cluster", "drain", "a1", "--no-wait").returncode == 0
    assert "draining" in cluster.run("cluster", "status").stdout
    assert "no other node is up" in one_line(cluster.run("cluster", "drain", "b2"))


def test_a_node_that_keeps_data_is_not_removed(cluster: Cluster) -> None:
    cluster.admit(A, B)
    cluster.keep(GroupConfig(1, (A, B)), GroupConfig(2, (A,)))
    line = one_line(cluster.run("cluster", "remove", "a1"))
    assert "is up and keeps 2 groups; drain it first" in line
    cluster.delete(key_of(b"n", A), key_of(b"n", B))
    line = one_line(cluster.run("cluster", "remove", "a1"))
    assert "1 group with 0 files (0 B) have their only copy on node" in line
    assert "still counts in 1 groups" in one_line(cluster.run("cluster", "remove", "b2"))
    assert len(cluster.status(2)["nodes"]) == 2
    assert cluster.run("cluster", "remove", "b2", "--force").returncode == 0


def test_a_group_is_given_up_when_nobody_who_was_in_sync_may_come_back(cluster: Cluster) -> None:
    cluster.admit(A, B, C)
    cluster.keep(GroupConfig(1, (A, B)), GroupConfig(2, (C,)))
    cluster.delete(key_of(b"n", A), key_of(b"n", B))
    done = succeeded(cluster.run("cluster", "remove", "a1", "--force"))
    assert done.stderr == ""
    assert "1 group with 0 files" in one_line(cluster.run("cluster", "remove", "b2"))
    assert cluster.config(0).epoch == 1
    # No store node is really there that could begin it anew.
    cluster.delete(key_of(b"n", C))
    done = succeeded(cluster.run("cluster", "remove", "b2", "--force"))
    assert "1 group wait for a store node: irdmafs serve STORE" in done.stderr
    assert cluster.config(0) == GroupConfig(
        2, (A, B)
    )  # what was acknowledged before counts no more
    assert cluster.config(1).epoch == 2


def test_nodes_are_named_as_the_status_shows_them() -> None:
    members = Members()
    where = {A: "10.0.0.1", B: "10.0.0.2", C: "10.0.0.2", D: "fd00::1"}
    for number, (node, address) in enumerate(where.items()):
        labels = {"zone": "z", "host": f"h{number}"}
        at = NodeAddress(address, 9000 + number, 1, ["tcp"], "h", "/s", 1, 1, "0")
        records: list[tuple[bytes, msgspec.Struct]] = [
            (key_of(b"N", node), NodeRecord("up", 1.0, labels)),
            (key_of(b"n", node), at),
        ]
        members.apply(1, [Event(1, key, encode(record)) for key, record in records])
    members.apply(1, [Event(1, key_of(b"n", A), None)])
    found = overview.Cluster(members, Groups(), 1)
    for name in (f"{A:016x}", f"0x{A:X}", "a1", "h0", "z/h0"):
        assert found.find_node(name) == A  # it is down
    assert found.find_node("10.0.0.2:9002") == C
    for name in ("fd00::1", "fd00::1:9003", "[fd00::1]:9003", "h3", "00"):
        assert found.find_node(name) == D
    both = (
        f"'10.0.0.2' means several nodes: {B:016x} (10.0.0.2, 10.0.0.2:9001, h1, z/h1), "
        f"{C:016x} (10.0.0.2, 10.0.0.2:9002, h2, z/h2); give one of their ids"
    )
    with pytest.raises(ConfigError, match=re.escape(both)):
        found.find_node("10.0.0.2")
    for name in ("", "h9", "10.0.0.1", "0x"):
        with pytest.raises(ConfigError, match="there is no store node"):
            found.find_node(name)


# -- rebalance ------------------------------------------------------------------------------------


def test_rebalance_waits_until_everything_is_in_its_place(cluster: Cluster) -> None:
    assert "no store node is up" in one_line(cluster.run("rebalance"))
    cluster.admit(A, B, C)
    cluster.keep(*[GroupConfig(1, (A, B))] * 4)
    nodes = [Candidate(node, 1.0, {"host": f"h{node:x}"}) for node in (A, B, C)]
    wanted = place_all(REPLICAS, nodes, 4)
    moves = sum(C in target for target in wanted)
    assert 2 <= moves <= 3  # C's share of 8 replicas
    with cluster.begin("rebalance") as wait:
        assert wait.stdout.readline() == f"rebalancing: 0 of {moves} replicas\n"
        cluster.keep(*(GroupConfig(2, target) for target in wanted))
        assert "everything is where it should be" in wait.stdout.read()
    assert wait.returncode == 0


# -- serve ----------------------------------------------------------------------------------------


def test_serve_refuses_what_cannot_work(cluster: Cluster, tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        return one_line(irdmafs("serve", tmp_path / "s", *arguments))

    assert "which cluster? give --cluster FILE" in refused()
    file = ("--cluster", str(cluster.file))
    assert "will not listen on 0.0.0.0 without credentials" in refused(*file, "--listen", "0.0.0.0")
    assert "weight must be more than 0" in refused(*file, "--weight", "0")
    assert "node.size: '3Q' is not a size" in refused(*file, "--size", "3Q")
    (tmp_path / "s").mkdir()
    (tmp_path / "s").chmod(0o755)
    (tmp_path / "s" / "theirs").write_text("")
    assert "holds other files already (theirs)" in refused(*file)
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o755
    (tmp_path / "s").rename(tmp_path / "directory")
    (tmp_path / "s").write_text("")
    assert "is not a directory" in refused(*file)


def test_a_store_that_another_user_prepared_is_not_served(cluster: Cluster, tmp_path: Path) -> None:
    file, planted = tmp_path / "of root" / "file", tmp_path / "store" / "incoming"
    for made in (file, planted):
        made.parent.mkdir()
    file.touch()
    planted.symlink_to(file.parent)
    os.chown(planted, 65534, 65534, follow_symlinks=False)
    assert "belongs to user 65534" in one_line(cluster.run("serve", str(planted.parent)))
    assert file.exists()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """A directory for a store, for root with more room than any machine has memory."""
    path = tmp_path / "store"
    path.mkdir()
    with mounted_on(path, "size=512T") if os.geteuid() == 0 else nullcontext():
        yield path


def test_a_served_store_is_a_node_until_it_is_told_to_end(cluster: Cluster, store: Path) -> None:
    arguments = ("--zone", "z", "--log-format", "json", "--metrics-port", "0")
    done = cluster.run("serve", str(store), *arguments)
    try:
        assert done.returncode == 0, done
        assert ("512 TiB is more than this machine has" in done.stderr) == os.path.ismount(store)
        [line] = done.stdout.splitlines()
        assert (
            found := re.fullmatch(rf"irdmafs: {store} is served \(node (\w{{16}}) at .*\)", line)
        )
        [node] = cluster.status(1)["nodes"]
        assert node["id"] == found[1]
        assert node["labels"]["zone"] == "z"
        assert node["bytes"] == 0
        assert node["uptime_s"] > 0
        assert cluster.status(1)["notes"] == []
        lines = [json.loads(line) for line in (store / "irdmafs.log").read_text().splitlines()]
        assert {"node"} == {line["component"] for line in lines}
        pid = lines[0]["pid"]
        small = ("--size", "1G")
        again = one_line(irdmafs("serve", store, "--cluster", cluster.file, *small))
        assert f"{store}: store is in use by another process" in again
    finally:
        log = (store / "irdmafs.log").read_text()
        if match := re.search(r'"pid": (\d+)', log):
            os.kill(int(match[1]), signal.SIGTERM)
    eventually(lambda: has_ended(pid), "the node ended", within_s=30)
    assert cluster.status(2)["nodes"][0]["state"] == "down"
    assert cluster.run("cluster", "remove", found[1]).returncode == 0
    assert cluster.status(2)["nodes"] == []
    removed = one_line(cluster.run("serve", str(store), *small))
    assert f"node {found[1]} was removed from the cluster" in removed
    assert removed.endswith(f"irdmafs cluster admit {found[1]}")
    assert cluster.status(2)["nodes"] == []
    assert cluster.run("cluster", "admit", found[1]).returncode == 0
    assert cluster.status(2)["nodes"][0]["id"] == found[1]
    assert "was not removed" in one_line(cluster.run("cluster", "admit", found[1]))
    assert "not the id of a node" in one_line(cluster.run("cluster", "admit", "a1g"))
