"""A mount on the host of a store node, which opens the node's very files and gives it its own."""

import contextlib
import errno
import os
import re
import shutil
from pathlib import Path

import pytest
from harness.claims import few_transactions
from harness.clusters import LONG_LEASE_S, MIB, Cluster, Plan
from harness.errors import fails_with
from harness.mountpoint import eventually
from harness.patterns import pattern
from harness.processes import Process, TakeProcess

from irdmafs.backend.files.extents import LENT_NS
from irdmafs.client import draft
from irdmafs.client._files import open_to_read

PLAN = Plan(nodes=1, mounts=1, replicas=1, beside={0: 0}, lease_ttl_s=LONG_LEASE_S)


@pytest.fixture
def beside(cluster: Cluster) -> Cluster:
    """A node, and a mount on its host, which a test may end; others that it adds go after it."""
    while len(cluster.mounts) > 1:
        cluster.remove_mount()
    if not cluster.mounts[0].alive:
        cluster.mounts[0].restart()
    return cluster


@pytest.fixture
def folder(beside: Cluster, request: pytest.FixtureRequest) -> Path:
    """A directory of the mount that no other test uses."""
    path = beside.mounts[0].path / re.sub(r"\W+", "_", request.node.name)
    path.mkdir()
    return path


def extents_of(store: Path) -> dict[str, bytes]:
    found = {}
    for path in (store / "extents").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has gone meanwhile
            found[path.name] = path.read_bytes()
    return found


def test_nothing_that_is_stored_is_ever_written(
    beside: Cluster, folder: Path, reader: Process, writer: Process
) -> None:
    """Through descriptors of any kind: readers of old versions, duplicates, maps."""
    (node,), file, size = beside.nodes, folder / "file", 3 * MIB
    stored: dict[str, bytes] = {}
    for number in range(1, 5):
        file.write_bytes(pattern(number, size))
        if number % 2:
            reader.do("f = open(file, 'rb'); f.read(10)", file=str(file))
        stored |= extents_of(node.store)
        writer.do(
            "f = open(file, 'r+b', buffering=0); f.write(b'edited'); g = os.dup(f.fileno())\n"
            "f.close(); os.pwrite(g, b'again', 100); os.close(g)",
            file=str(file),
        )
        for name, content in extents_of(node.store).items():
            assert stored.setdefault(name, content) == content, "a stored file changed"
        found = file.read_bytes()
        assert (found[:6], found[100:105]) == (b"edited", b"again")


def test_closing_publishes_once_where_the_node_takes_it(beside: Cluster, folder: Path) -> None:
    for size in (100, MIB):
        (folder / "file").write_bytes(pattern(1, size))
        version = os.getxattr(folder / "file", "user.irdmafs.version")
        (folder / "file").write_bytes(pattern(2, size))
        assert beside.mounts[0].status()  # the release is put off until somebody asks
        found = os.getxattr(folder / "file", "user.irdmafs.version")
        assert int(found) == int(version) + 1


WRITE_IN_PLACE = """
for turn in range(turns):
    fd = os.open(file, os.O_RDWR)
    os.pwrite(fd, turn.to_bytes(8, "big"), 8 * number)
    if turn % 5 == 1:
        os.fsync(fd)
    if turn % 5 == 2:
        duplicate = os.dup(fd)
        os.close(fd)
        fd = duplicate
    if turn % 5 == 3:
        reader = os.open(file, os.O_RDONLY)
        assert os.pread(reader, 8, 8 * number) == turn.to_bytes(8, "big"), turn
        os.close(reader)
    if turn % 5 == 4:
        os.pwrite(fd, bytes(100_000), 100 + number * 200_000)
    os.close(fd)
"""


def test_several_who_write_one_file_in_place_get_along(
    beside: Cluster, folder: Path, process: TakeProcess
) -> None:
    (node,), file, turns = beside.nodes, folder / "file", 30
    file.write_bytes(pattern(1, 3 * MIB))
    writers = [process() for _ in range(4)]
    for number, writer in enumerate(writers):
        writer.start(WRITE_IN_PLACE, file=str(file), number=number, turns=turns)
    stored: dict[str, bytes] = {}
    while not all(writer.finished(0.01) for writer in writers):
        for name, content in extents_of(node.store).items():
            assert stored.setdefault(name, content) == content, "a stored file changed"
    for writer in writers:
        writer.result()
    assert file.read_bytes()[:32] == 4 * (turns - 1).to_bytes(8, "big")
    assert os.listdir(folder) == ["file"], "writers of one host were in conflict"


def test_who_has_an_old_version_open_keeps_it_and_its_memory_goes_with_the_last_of_them(
    beside: Cluster, folder: Path, process: TakeProcess
) -> None:
    (mount,), (node,) = beside.mounts, beside.nodes
    file, reader = folder / "file", process()
    file.write_bytes(b"")
    os.truncate(file, 1)  # by now it is known who is to keep the file
    file.write_bytes(pattern(1, MIB))
    reader.do("f = open(file, 'rb', buffering=0)", file=str(file))
    for number in range(2, 5):
        file.write_bytes(pattern(number, MIB))
    assert reader.do("os.fstat(f.fileno()).st_size, f.read(100)") == (MIB, pattern(1, MIB)[:100])
    held = node.store / "held"
    assert any(list(owner.iterdir()) for owner in held.iterdir())
    reader.do("f.close()")
    assert file.read_bytes() == pattern(4, MIB)
    eventually(
        lambda: not any(list(owner.iterdir()) for owner in held.iterdir()), "it is let go of"
    )  # nobody waits for a release
    mount.terminate()
    assert not list(held.iterdir())


def test_what_a_node_took_over_before_it_died_can_be_opened(process: TakeProcess) -> None:
    with Cluster(Plan(nodes=2, mounts=1, replicas=2, beside={0: 0})) as made:
        (mount,), (node, other) = made.mounts, made.nodes
        file, writer = mount.path / "file", process()
        file.write_bytes(b"before")  # by now it is known who is to keep the file
        other.pause()
        writer.start("with open(file, 'wb') as f: f.write(b'after')", file=str(file))
        eventually(lambda: b"after" in extents_of(node.store).values(), "it is taken over")
        node.kill9()
        eventually(lambda: not made.live_nodes(), "both nodes are taken for dead")
        other.resume()
        writer.result()
        assert file.read_bytes() == b"after"


@pytest.fixture
def striped(folder: Path) -> Path:
    """A file of several stripes, which no node takes over."""
    os.setxattr(folder, "user.irdmafs.stripe_size", str(MIB).encode())
    (folder / "before").write_bytes(b"before")  # by now it is known who is to keep the next
    (folder / "file").write_bytes(pattern(1, 3 * MIB))
    return folder / "file"


def test_a_version_stays_after_a_write_that_a_node_refused(beside: Cluster, folder: Path) -> None:
    (node,), elsewhere = beside.nodes, beside.add_mount().path / folder.name
    file, other = folder / "file", folder / "other"
    by_writer = ("os.ftruncate(writer, 0)", "os.setxattr(writer, 'user.irdmafs.discard', b'')")
    for make_room in (*by_writer, "os.unlink(path)"):
        file.write_bytes(b"before")
        other.write_bytes(bytes(MIB))
        node.fill(8 * MIB)
        try:
            writer, refused = (os.open(path, os.O_WRONLY | os.O_TRUNC) for path in (other, file))
            os.write(writer, bytes(MIB))
            with fails_with(errno.ENOSPC):
                while True:
                    os.write(refused, bytes(MIB))
            eval(make_room, {"os": os}, {"writer": writer, "path": elsewhere / "other"})
            with contextlib.suppress(OSError):
                os.close(writer)
            eventually(lambda: shutil.disk_usage(node.store).free > 512 << 10, "there is room")
            with fails_with(errno.ENOSPC):
                os.close(refused)
        finally:
            node.unfill()
        assert file.read_bytes() == (elsewhere / "file").read_bytes() == b"before"


def test_a_file_of_several_stripes_stays_whole_when_it_is_written_in_place(striped: Path) -> None:
    with open(striped, "r+b") as file:
        file.write(b"edited")
    assert striped.read_bytes() == b"edited" + pattern(1, 3 * MIB)[6:]


def test_a_file_is_fetched_whose_working_copy_was_removed(beside: Cluster, striped: Path) -> None:
    """As it does some time after the mount was cut off."""
    left = (beside.nodes[0].store / "incoming").iterdir()
    max(left, key=lambda path: path.stat().st_mtime_ns).unlink()
    assert striped.read_bytes() == pattern(1, 3 * MIB)


def test_node_is_told_of_a_file_whose_pages_a_program_may_keep(beside: Cluster) -> None:
    mount, (node,) = beside.mounts[0], beside.nodes
    elsewhere = beside.add_mount()
    (elsewhere.path / "pages").write_bytes(pattern(7, 256 << 10))
    name = f"{mount.path}/pages"
    extents = (node.store / "extents").iterdir()
    (extent,) = (path for path in extents if path.read_bytes() == pattern(7, 256 << 10))

    def told() -> bool:
        return extent.stat().st_mtime_ns == LENT_NS

    with open_to_read(name, privately=True) as (fd, _):
        assert os.read(fd, 1) == pattern(7, 1) and not told()
        # The promise holds for one open.
        with open_to_read(name):
            assert told()


def test_a_descriptor_of_the_nodes_own_file_is_not_opened_anew_to_write(folder: Path) -> None:
    """The kernel passes all descriptors of one node through to one file; a name leads to another node."""
    file = folder / "file"
    file.write_bytes(b"first")
    with file.open("rb") as reader:
        with fails_with(errno.ESTALE):
            os.open(f"/proc/self/fd/{reader.fileno()}", os.O_RDWR)
        with file.open("r+b") as writer:
            writer.write(b"third")
        assert reader.read() == b"first"
    assert file.read_bytes() == b"third"


def test_a_draft_is_handed_over_in_few_transactions(beside: Cluster) -> None:
    mount = beside.mounts[0]
    made = {f"{number}": pattern(number, 1 + number * 3000) for number in range(100)}
    with few_transactions(mount, 25), draft(mount.path / "model") as directory:
        for name, data in made.items():
            Path(directory, name).write_bytes(data)
        with Path(directory, "7").open("r+b") as file:
            file.write(b"changed")
        made["7"] = b"changed" + made["7"][7:]
    for _ in range(2):
        assert {one.name: one.read_bytes() for one in (mount.path / "model").iterdir()} == made
        mount.restart()
