"""Certificates that are replaced while the processes that show them run."""

import os
import signal
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from harness.clusters import LONG_LEASE_S, Cluster, Plan
from harness.daemons import Daemon
from harness.mountpoint import eventually
from harness.transport_place import Place, in_cluster, mounted, until
from test_certificates import directory

from irdmafs.backend.trust.authority import begin_ca_change, finish_ca_change, issue, make_ca
from irdmafs.backend.trust.security import Credentials, Identity, Renewable, Renewal, identity_in

__all__ = ["directory"]

SECOND = 1 / 86400


def replace(old: Credentials, directory: str, days: float = 1.0, owner: int = -1) -> Identity:
    """Put another certificate into the place of one, of the same user unless there is another `owner`."""
    before = identity_in(old.cert)
    assert before is not None
    fresh = os.path.join(directory, f"fresh-{before.serial}")
    os.mkdir(fresh)
    new = issue(
        fresh, before.name, before.role, days=days, ca_directory=directory,
        owner=before.owner if owner < 0 else owner,
    )  # fmt: skip
    os.replace(new.key, old.key)
    os.replace(new.cert, old.cert)
    now = identity_in(old.cert)
    assert now is not None
    return now


@asynccontextmanager
async def connected(memory: Path, node: Credentials, mount: Credentials) -> AsyncIterator[Place]:
    """A node, and a mount that has asked it."""
    async with in_cluster(memory, 1, credentials=node, mount={"credentials": mount}) as place:
        await place.peers.ping(1)
        yield place


def shown_to(place: Place) -> list[str]:
    """The numbers of the certificates that the node's peers have shown."""
    return [who for who, _ in place.nodes[1].listener.host.door.members._taken.values()]


# -- in one process ------------------------------------------------------------------------------


async def test_new_connections_show_the_new_open_ones_go_on(memory: Path, directory: str) -> None:
    node, mount = issue(directory, "n1", "node"), issue(directory, "w1", "mount")
    first = mount.identity

    async with connected(memory, node, mount) as place, trio.open_nursery() as nursery:
        renewal = Renewal([mount.renewable])
        nursery.start_soon(renewal.run)
        second = replace(mount, directory)
        renewal.ask()
        await until(lambda: mount.identity == second)
        await place.peers.ping(1)
        assert shown_to(place) == [first.serial], "it was there before"
        async with mounted(memory, credentials=mount) as others:
            await others.ping(1)
            assert shown_to(place) == [first.serial, second.serial]
        assert renewal.problems() == []
        nursery.cancel_scope.cancel()


async def test_files_are_read_again_without_being_told(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("irdmafs.backend.trust.security.LOOK_S", 0.01)
    mount = issue(directory, "w1", "mount")
    first = mount.identity

    async with trio.open_nursery() as nursery:
        nursery.start_soon(Renewal([mount.renewable]).run)
        second = replace(mount, directory)
        await until(lambda: mount.identity != first)
        assert mount.identity == second
        nursery.cancel_scope.cancel()


async def test_a_new_ca_is_accepted_beside_the_old_then_alone(memory: Path, directory: str) -> None:
    node, mount = issue(directory, "n1", "node"), issue(directory, "w1", "mount")

    async def asks(credentials: Credentials) -> None:
        async with mounted(memory, credentials=credentials) as peers:
            await peers.ping(1)

    async with connected(memory, node, mount) as place:
        begin_ca_change(directory, "test")
        node.renewable.renew(at_once=True)
        await asks(mount)  # who has not heard of the new one
        replace(mount, directory)
        mount.renewable.renew(at_once=True)
        await asks(mount)
        replace(node, directory)
        finish_ca_change(directory)
        for each in (node, mount):
            each.renewable.renew(at_once=True)
        await asks(mount)
        await place.peers.ping(1)


def damage(mount: Credentials, directory: str) -> str:
    Path(mount.cert).write_text("nonsense")
    return "no usable certificate"


def lose_key(mount: Credentials, directory: str) -> str:
    os.unlink(mount.key)
    return "cannot read"


def mix_up(mount: Credentials, directory: str) -> str:
    os.replace(issue(directory, "w2", "mount").key, mount.key)
    return "is not the key of the certificate"


def come_too_late(mount: Credentials, directory: str) -> str:
    replace(mount, directory, -SECOND)
    return "expired"


def open_to_all(mount: Credentials, directory: str) -> str:
    os.chmod(mount.key, 0o644)
    return "can be read by others"


def take_another_ca(mount: Credentials, directory: str) -> str:
    os.mkdir(f"{directory}/elsewhere")
    os.replace(make_ca(f"{directory}/elsewhere", "test"), mount.ca)
    return "was not issued by the CA"


@pytest.mark.parametrize(
    "spoil", [damage, lose_key, mix_up, come_too_late, open_to_all, take_another_ca]
)
async def test_files_that_cannot_be_used_are_told_of_and_the_former_ones_stay_in_use(
    memory: Path,
    directory: str,
    spoil: Callable[[Credentials, str], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    node, mount = issue(directory, "n1", "node"), issue(directory, "w1", "mount")
    first = mount.identity

    async with connected(memory, node, mount) as place:
        said = spoil(mount, directory)
        renewable = mount.renewable
        renewable.renew()
        assert renewable.problem == "", "the other file may be on its way"
        for _ in range(2):
            renewable.renew()
            assert said in renewable.problem
            assert caplog.text.count("what was read before stays in use") == 1
        assert mount.identity == first
        async with mounted(memory, credentials=mount) as peers:
            await peers.ping(1)
            assert shown_to(place) == [first.serial] * 2


def test_a_certificate_of_another_user_is_not_taken_while_the_process_runs(directory: str) -> None:
    """It would be refused by etcd what is its own."""
    mount = issue(directory, "w1", "mount")
    first = mount.identity
    replace(mount, directory, owner=0)
    mount.renewable.renew(at_once=True)
    assert mount.identity == first
    assert "is of another user" in mount.renewable.problem
    assert "irdmafs cluster cert w1 --role mount --renew" in mount.renewable.problem


async def test_a_connection_ends_with_the_certificate_that_it_was_opened_with(
    memory: Path, directory: str, caplog: pytest.LogCaptureFixture
) -> None:
    node = issue(directory, "n1", "node")
    mount = issue(directory, "w1", "mount", days=4 * SECOND)

    async with connected(memory, node, mount) as place:
        renewed = replace(mount, directory)
        mount.renewable.renew(at_once=True)
        await until(lambda: "its certificate has expired" in caplog.text)
        with trio.fail_after(30):
            while shown_to(place) != [renewed.serial]:
                try:
                    await place.peers.ping(1)
                except OSError:
                    await trio.sleep(0.01)


def test_what_cannot_be_loaded_at_first_is_an_error() -> None:
    def load(before: int | None) -> int:
        raise ssl.SSLError("no")

    with pytest.raises(ssl.SSLError):
        Renewable(["/nowhere"], load)


# -- a whole cluster -----------------------------------------------------------------------------

PLAN = Plan(nodes=1, mounts=0, replicas=1, tls=True, namespaces=False, lease_ttl_s=LONG_LEASE_S)


def renew(cluster: Cluster, name: str, role: str) -> None:
    cluster.administer("cert", name, "--role", role, "--renew")


def hang_up(daemon: Daemon, said: str) -> None:
    """Have a process read its certificates again."""
    os.kill(daemon.pid, signal.SIGHUP)
    eventually(lambda: said in daemon.log_tail(), f"it says {said!r}")


def sessions(cluster: Cluster) -> list[int]:
    return [mount["session"] for mount in cluster.status()["mounts"]]


async def test_a_cluster_goes_on_in_its_sessions_when_certificates_renew(cluster: Cluster) -> None:
    cluster.administer("cert", "w1", "--role", "mount")
    mount = cluster.add_mount(certificate="mount-w1")
    (mount.path / "before").write_bytes(b"b" * 300_000)
    held = sessions(cluster)
    [node] = cluster.nodes
    section = cluster.section_of("mount-w1")
    before = section.credentials("mount")

    renew(cluster, "w1", "mount")
    made = cluster.directory / "made"
    cluster.administer("cert", "node", "--role", "node", "--renew", "--out", str(made))
    for path in made.iterdir():
        path.replace(cluster.config_directory / path.name)
    for daemon in (mount, node):
        hang_up(daemon, "read again")

    # Whatever is opened from now on shows the new ones.
    cluster.etcd.kill9()
    cluster.etcd.start()
    (mount.path / "after").write_bytes(b"a" * 300_000)
    assert (mount.path / "before").read_bytes() == b"b" * 300_000
    assert sessions(cluster) == held
    credentials = section.credentials("mount")
    assert credentials is not None
    assert before is not None
    assert credentials.identity.user == before.identity.user
    assert credentials.identity.serial != before.identity.serial

    async with cluster.peers("mount-w1") as peers:
        await peers.ping(node.node_id)


def test_a_file_that_is_damaged_is_told_of_in_status(cluster: Cluster) -> None:
    cluster.administer("cert", "w2", "--role", "mount")
    mount = cluster.add_mount(certificate="mount-w2")
    [node] = cluster.nodes
    for daemon, stem in ((mount, "mount-w2"), (node, "node")):
        path = cluster.config_directory / f"{stem}.pem"
        sound = path.read_bytes()
        path.write_text("nonsense")
        hang_up(daemon, "stays in use")
        if daemon is mount:
            assert any("no usable certificate" in line for line in mount.status()["warnings"])
        else:
            [problem] = cluster.status()["problems"]
            assert "goes on with its former credentials" in problem
        (mount.path / stem).write_bytes(b"a" * 300_000)
        path.write_bytes(sound)
        hang_up(daemon, "read again")
    eventually(lambda: cluster.status()["problems"] == [], "all is well again")
    eventually(lambda: mount.status()["warnings"] == [], "all is well again")


def test_only_who_is_let_in_can_have_a_certificate_renewed(cluster: Cluster) -> None:
    cluster.administer("cert", "w3", "--role", "mount")
    cluster.refused("cert", "w3", "--role", "reader", "--renew")
    cluster.administer("revoke", "w3")
    before = (cluster.config_directory / "mount-w3.pem").read_bytes()
    cluster.refused("cert", "w3", "--role", "mount", "--renew")
    assert (cluster.config_directory / "mount-w3.pem").read_bytes() == before
