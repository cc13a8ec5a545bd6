"""Store nodes as processes (`irdmafs serve`), a real etcd, and a mount's side of the conversation.

What is written goes through real connections, what is published through real transactions.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from harness.closing import descriptor
from harness.daemons import Daemon, paused, wait_until
from harness.etcd_server import EtcdServer
from harness.network import Host
from harness.parts import irdmafs_command, run_instead
from harness.programs import hasty_node
from harness.scratch import scratch_directory

from irdmafs.backend.cluster.group_configs import Groups
from irdmafs.backend.cluster.lease import Session
from irdmafs.backend.cluster.membership import Members
from irdmafs.backend.cluster.replica import Replica
from irdmafs.backend.etcd.engine import EtcdEngine
from irdmafs.backend.kv import Conflict, Put
from irdmafs.backend.model import records
from irdmafs.backend.model.placement import group_of
from irdmafs.backend.model.records import Layout, NodeRecord, Settings
from irdmafs.backend.namespace import ROOT_INO, Inode, Namespace, NewVersion, SharedCommitter, Tree
from irdmafs.backend.transport import Extent, Fenced, FileRange, Target, Unreachable
from irdmafs.backend.transport.messages import Parcel
from irdmafs.backend.transport.movers import all_movers
from irdmafs.backend.transport.peers import Peers, open_peers
from irdmafs.backend.transport.rights import make_session_key, session_digest

BUCKETS = 8
TTL_S = 60  # so that a busy machine loses no session
SHORT_TTL_S = 4
START_TIMEOUT_S = 30.0
LARGE = 3 << 20


class ServedNode(Daemon):
    """`irdmafs serve STORE` in the foreground."""

    def __init__(
        self, etcd: EtcdServer, cluster: str, store: Path, log: Path, *arguments: str
    ) -> None:
        self.store = store
        command = irdmafs_command(
            *("serve", store, "-f", "--name", cluster, "--etcd", ",".join(etcd.endpoints)),
            *arguments,
        )
        super().__init__(store.name, Host("here", "127.0.0.1"), command, log)

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.starts else ""

    def serve(self) -> None:
        """Returns when it says that it serves."""
        self.start()
        self.wait_served()

    def wait_served(self) -> None:
        self.wait_for_log("is served", self.starts)

    def wait_for_log(self, text: str, times: int = 1) -> None:
        what = f"it does not say {text!r}"
        wait_until(lambda: self.said.count(text) >= times, what, START_TIMEOUT_S, self)

    @property
    def id(self) -> int:
        return int(json.loads((self.store / "node.json").read_text())["id"], 16)

    def extents(self) -> set[Extent]:
        names = (path.name.split(".") for path in (self.store / "extents").iterdir())
        return {Extent(int(content, 16), int(stripe, 16)) for content, stripe in names}


class Place:
    """A cluster's name, directories, and the nodes that were made in it."""

    def __init__(self, etcd: EtcdServer) -> None:
        self.etcd = etcd
        self.directory = scratch_directory()
        self.name = self.directory.name
        self.settings = Settings(1, self.name, 2, BUCKETS, 0, TTL_S)
        self.nodes: list[ServedNode] = []

    @property
    def prefix(self) -> bytes:
        return f"/irdmafs/{self.name}/".encode()

    def add(self, *arguments: str, store: Path | None = None, start: bool = True) -> ServedNode:
        store = store or self.directory / f"store{len(self.nodes)}"
        log = self.directory / f"{len(self.nodes)}.log"
        node = ServedNode(self.etcd, self.name, store, log, *arguments)
        self.nodes.append(node)
        if start:
            node.serve()
        return node

    async def found(self) -> None:
        async with EtcdEngine(self.etcd.endpoints, self.prefix) as engine:
            await engine.transact((), [Put(records.SETTINGS_KEY, records.encode(self.settings))])

    def close(self) -> None:
        for node in self.nodes:
            node.kill9()
        shutil.rmtree(self.directory)


class Writer:
    """A mount without a mountpoint."""

    def __init__(self, place: Place, engine: EtcdEngine) -> None:
        self.place = place
        self.engine = engine
        self.session_key = make_session_key()
        digest = session_digest(self.session_key)
        record = records.MountRecord("test", "/mnt", os.getpid(), "0", key_digest=digest)
        self.session = Session(engine, record, place.settings.lease_ttl_s)
        self.members = Members(self.session)
        self.groups = Groups()
        tree = Tree()
        self.replica = Replica(engine, (self.members, self.groups, tree))
        self.namespace = Namespace(tree, SharedCommitter(tree, engine, self.replica))
        self.peers: Peers
        self._number = 0

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that the replica will tell."""
        with trio.fail_after(START_TIMEOUT_S):
            while not condition():
                with trio.move_on_after(0.1):  # disks and processes tell nobody
                    await self.members.changed()

    def content(self) -> int:
        self._number += 1
        return self.session.number << 24 | self._number

    def layout(self) -> Layout:
        return Layout(self.place.settings.replicas, 0, 1)

    def group(self, layout: Layout) -> int:
        return group_of(layout, 0, BUCKETS)

    def target(self, layout: Layout) -> tuple[int, Target]:
        """The first node to send to, and what to tell it."""
        group = self.group(layout)
        config, revision = self.groups.get(group)
        return config.members[0], Target(group, revision, config.members[1:])

    async def put(self, content: int, data: bytes, layout: Layout) -> None:
        first, target = self.target(layout)
        alone = Target(target.group, target.config, ())
        for node in (first, *target.chain):
            await self.peers.device(node).put(Parcel(Extent(content, 0), alone, data))

    async def write(self, content: int, data: bytes, layout: Layout) -> None:
        node, target = self.target(layout)
        with descriptor(os.memfd_create("data", os.MFD_CLOEXEC)) as fd:
            os.write(fd, data)
            await self.peers.device(node).write(
                Extent(content, 0), target, FileRange(fd, 0, len(data))
            )

    async def create(self, name: bytes, layout: Layout) -> Inode:
        mode = stat.S_IFREG | 0o644
        return await self.namespace.create(ROOT_INO, name, mode, 0, 0, layout=layout)

    async def commit(self, ino: int, content: int, size: int, layout: Layout) -> Inode:
        group = self.group(layout)
        guards = [(records.group_key(group), self.groups.get(group)[1]), self.session.compare()]
        return await self.namespace.publish(
            NewVersion(ino, records.ContentId(content), size, 8, time.time_ns(), layout=layout),
            guards,
        )

    async def publish(self, name: bytes, data: bytes) -> int:
        """The content number of a new version of a file in the root directory."""
        layout = self.layout()
        inode = self.namespace.lookup(ROOT_INO, name) or await self.create(name, layout)
        while True:
            content = self.content()
            try:
                await (self.put if len(data) <= 1 << 16 else self.write)(content, data, layout)
                await self.commit(inode.ino, content, len(data), layout)
                return content
            except (Fenced, Conflict, Unreachable):
                with trio.move_on_after(0.2):
                    await self.groups.changed()
                await self.replica.barrier()

    async def read(self, node: int, content: int, size: int) -> bytes:
        with descriptor(os.memfd_create("data", os.MFD_CLOEXEC)) as fd:
            os.ftruncate(fd, size)
            await self.peers.device(node).read(Extent(content, 0), 0, FileRange(fd, 0, size))
            return os.pread(fd, size, 0)

    def in_sync(self) -> tuple[int, ...]:
        return self.groups.get(self.group(self.layout()))[0].in_sync


@asynccontextmanager
async def writing(place: Place) -> AsyncIterator[Writer]:
    """A mount without a mountpoint, where the groups of the nodes that there are have been made."""
    async with (
        EtcdEngine(place.etcd.endpoints, place.prefix) as engine,
        trio.open_nursery() as nursery,
    ):
        writer = Writer(place, engine)
        await writer.replica.start(nursery)
        await nursery.start(writer.session.run)
        await writer.namespace.ensure_root()
        async with open_peers(
            writer.members.nodes.get,
            all_movers(),
            credentials=None,
            name="test",
            role="mount",
            session=lambda: writer.session.number,
            session_key=writer.session_key,
        ) as writer.peers:
            with trio.fail_after(90):
                placement = writer.members.placement()
                await writer.groups.ensure(writer.replica, place.settings.replicas, placement)
                yield writer
        await writer.session.release()
        nursery.cancel_scope.cancel()


@pytest.fixture
def place(etcd: EtcdServer) -> Iterator[Place]:
    made = Place(etcd)
    trio.run(made.found)
    yield made
    logs = [node.said for node in made.nodes]
    made.close()
    assert not [log for log in logs if "Traceback" in log]


async def test_a_node_refuses_what_is_not_its_to_store(place: Place) -> None:
    place.add()
    place.add()
    async with writing(place) as writer:
        layout = writer.layout()
        node, target = writer.target(layout)
        device = writer.peers.device(node)

        target = Target(target.group, target.config, ())

        async def refused(content: int, target: Target) -> OSError:
            with pytest.raises(OSError) as caught:
                await device.put(Parcel(Extent(content, 0), target, b"bytes"))
            return caught.value

        older = Target(target.group, target.config - 1, ())
        assert isinstance(await refused(writer.content(), older), Fenced)
        elsewhere = Target(5 << 16, target.config, ())
        assert (await refused(writer.content(), elsewhere)).errno == errno.EINVAL
        of_no_session = (writer.session.number - 1) << 24 | 1
        assert (await refused(of_no_session, target)).errno == errno.ECANCELED
        given_up = writer.content()
        await device.abort(given_up)
        assert (await refused(given_up, target)).errno == errno.ECANCELED
        assert all(not node.extents() for node in place.nodes)


async def test_a_node_tells_what_it_is_and_has(place: Place) -> None:
    node = place.add("--metrics-port", "0")
    place.add()
    async with writing(place) as writer:
        await writer.publish(b"name", b"x" * 1000)
        await writer.put(writer.content(), b"pending", writer.layout())
        async with open_peers(writer.members.nodes.get, (), name="admin", role="admin") as admin:
            with trio.fail_after(START_TIMEOUT_S):
                while (status := await admin.status(node.id))["pending_extents"] != 1:
                    await trio.sleep(0.1)  # until the node knows that the other one was published
        assert status["node"] == f"{node.id:016x}"
        assert (status["extents"], status["bytes"]) == (2, 1007)
        groups: Any = status["groups"]
        lease_valid_s: Any = status["lease_valid_seconds"]
        assert sum(groups.values()) == BUCKETS
        assert 0 < lease_valid_s <= TTL_S
        port = re.search(r"metrics are served on \S+ port (\d+)", node.said)
        assert port is not None
        with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/metrics") as answer:
            text = answer.read().decode()
        assert f'irdmafs_node_store_bytes{{node="{node.id:016x}"}} 1007.0' in text
        assert 'kind="put"' in text


@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on a disk"])
async def test_a_killed_node_keeps_what_it_had(place: Place, tmp_path: Path, on_disk: bool) -> None:
    place.settings = Settings(1, place.name, 1, BUCKETS, 0, TTL_S)
    node = place.add(store=tmp_path / "store" if on_disk else None)
    async with writing(place) as writer:
        layout = writer.layout()
        data = os.urandom(LARGE)
        content = await writer.publish(b"name", data)
        pending = writer.content()
        await writer.put(pending, b"not named yet", layout)
        deleted = await writer.publish(b"deleted", b"bytes")
        before = node.id
        node.kill9()
        await writer.namespace.unlink(ROOT_INO, b"deleted")
        (node.store / "incoming/_1").write_bytes(b"half of an extent")
        await trio.to_thread.run_sync(node.serve)
        assert node.id == before
        await writer.replica.barrier()  # where it is now
        assert await writer.read(before, content, LARGE) == data
        assert node.extents() == {Extent(content, 0)}
        assert {path.name for path in (node.store / "quarantine").iterdir()} == {
            f"{pending:x}.0", f"{deleted:x}.0",
        }  # fmt: skip
        assert not (node.store / "incoming/_1").exists()
        # What was stored before the kill can still be published, under the configuration of now.
        inode = await writer.create(b"late", layout)
        await writer.replica.barrier()
        await writer.put(pending, b"not named yet", layout)
        await writer.commit(inode.ino, pending, 13, layout)
        await writer.publish(b"name", b"and it takes part again")


async def test_a_stopped_node_is_gone_at_once_and_nobody_waits_for_it(place: Place) -> None:
    nodes = {node.id: node for node in (place.add(), place.add())}
    async with writing(place) as writer:
        await writer.publish(b"name", b"with two replicas")
        primary = writer.in_sync()[0]
        stopped = nodes.pop(primary)
        started = trio.current_time()
        assert await trio.to_thread.run_sync(stopped.terminate) == 0
        await writer.replica.barrier()
        assert primary not in writer.members.nodes, "its lease was given back"
        assert trio.current_time() - started < TTL_S, "it did not wait for the lease to expire"
        assert writer.in_sync() == tuple(nodes)
        await writer.publish(b"name", b"with one")
        assert "stopping" in stopped.said
        (last,) = nodes.values()
        assert await trio.to_thread.run_sync(last.terminate) == 0
        assert f"{BUCKETS} groups have no other replica" in last.said


async def test_the_second_signal_ends_a_node_that_waits_for_a_transfer(place: Place) -> None:
    # A transfer that has not begun when the other node stops waits for the end of that one's session.
    place.settings = Settings(1, place.name, 2, BUCKETS, 0, SHORT_TTL_S)
    await place.found()
    nodes = {node.id: node for node in (place.add(), place.add())}
    async with writing(place) as writer:
        layout = writer.layout()
        first, target = writer.target(layout)
        hung = nodes[target.chain[0]]
        hung.pause()

        ended = False

        async def write() -> None:
            nonlocal ended
            with contextlib.suppress(OSError):
                await writer.write(writer.content(), bytes(64 << 20), layout)
            ended = True

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            incoming = nodes[first].store / "incoming"
            await writer.until(lambda: ended or any(incoming.iterdir()))
            os.kill(nodes[first].pid, signal.SIGTERM)
            await writer.until(lambda: nodes[first].said.count("stopping") == 1)
            with contextlib.suppress(ProcessLookupError):  # it had nothing left to wait for
                os.kill(nodes[first].pid, signal.SIGTERM)
            # If it was ending already the signal does what signals do.
            assert await trio.to_thread.run_sync(nodes[first].wait, START_TIMEOUT_S) in (
                0,
                -signal.SIGTERM,
            )
            hung.resume()


async def test_a_signal_while_a_node_starts_ends_it(place: Place) -> None:
    with EtcdServer() as own:
        place.etcd = own
        await place.found()
        with paused(*own.members):
            node = place.add(start=False)
            node.start()
            wait_until((node.store / "node.json").exists, "no store is open", START_TIMEOUT_S, node)
            assert node.terminate() == 0


async def test_bytes_under_way_arrive_before_a_stopped_node_goes(place: Place) -> None:
    place.settings = Settings(1, place.name, 1, BUCKETS, 0, TTL_S)
    node = place.add()
    data = os.urandom(64 << 20)
    async with writing(place) as writer:
        layout, content = writer.layout(), writer.content()
        stored = False

        async def write() -> None:
            nonlocal stored
            with contextlib.suppress(Unreachable):
                await writer.write(content, data, layout)
                stored = True

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            incoming = node.store / "incoming"
            await writer.until(lambda: stored or any(incoming.iterdir()))
            assert await trio.to_thread.run_sync(node.terminate) == 0
        if stored:  # it was quicker than the signal, or was waited for
            assert node.extents() == {Extent(content, 0)}
            kept = (node.store / f"extents/{content:x}.0").read_bytes()
            assert kept == data


def test_a_node_without_a_cluster_says_what_to_do(place: Place) -> None:
    command = place.add("--name", "nonexistent", start=False).command
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S)
    assert done.returncode == 1
    assert "irdmafs cluster init" in done.stderr
    assert "Traceback" not in done.stderr


async def test_a_node_without_etcd_refuses_writes_after_its_lease_and_returns(place: Place) -> None:
    with EtcdServer() as own:
        place.etcd = own
        place.settings = Settings(1, place.name, 1, BUCKETS, 0, SHORT_TTL_S)
        await place.found()
        node = place.add()
        async with writing(place) as writer:
            content = await writer.publish(b"name", b"bytes")
            layout, late = writer.layout(), writer.content()
            await trio.to_thread.run_sync(own.kill9)
            with pytest.raises(OSError), trio.fail_after(START_TIMEOUT_S):
                while True:
                    await writer.put(late, b"late", layout)
                    await trio.sleep(0.1)
            got = await writer.peers.device(node.id).get([Extent(content, 0)], 100)
            assert got == [b"bytes"], "what is here can still be read"
            await trio.to_thread.run_sync(own.start)
            await writer.session.wait_valid()
            await writer.publish(b"name", b"again")
            assert node.extents() != {Extent(content, 0)}
        node.kill9()


async def test_nodes_that_start_while_etcd_is_away_say_so_and_wait(place: Place) -> None:
    with EtcdServer() as own:
        place.etcd = own
        await place.found()
        here, ended = place.add(), place.add()
        for node in (here, ended):
            assert node.terminate() == 0
            run_instead(node, hasty_node.__file__)
        own.kill9()
        for node in (here, ended):
            node.start()
        store = place.directory / "behind"
        command = [*(word for word in here.command if word != "-f"), "--size", "1G"]
        command[command.index(str(here.store))] = str(store)
        behind = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/"
        )
        with behind:
            assert behind.stdout is not None and behind.stderr is not None
            said = behind.stderr.readline()
            assert "This node waits for it" in said
            assert own.endpoints[0] in said
            for node in (here, ended):
                node.wait_for_log("This node waits for it")
            assert ended.terminate() == 0
            assert "Traceback" not in ended.said
            own.start()
            here.wait_served()
            assert "is served" in behind.stdout.readline()
            assert behind.wait(START_TIMEOUT_S) == 0
        assert here.said.count("This node waits for it") == 1
        os.kill(int((store / "lock").read_text()), signal.SIGTERM)
        here.kill9()


async def test_weight_and_labels_are_those_of_last_start_and_draining_stays(place: Place) -> None:
    node = place.add("--weight", "2", "--zone", "a", "--host", "here")
    async with EtcdEngine(place.etcd.endpoints, place.prefix) as engine:
        key = records.key_of(b"N", node.id)

        async def record() -> NodeRecord:
            found = await engine.get(key)
            assert found is not None
            return records.decode(found.value, NodeRecord)

        assert await record() == NodeRecord("up", 2.0, {"zone": "a", "host": "here"})
        draining = NodeRecord("draining", 2.0, {"zone": "a", "host": "here"})
        await engine.transact((), [Put(key, records.encode(draining))])
        node.terminate()
        again = place.add("--weight", "3", "--host", "there", store=node.store)
        assert again.id == node.id
        assert await record() == NodeRecord("draining", 3.0, {"host": "there"})
