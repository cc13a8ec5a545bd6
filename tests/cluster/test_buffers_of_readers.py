"""Files that are read into memory of the reader's own, past the cache of its host."""

import errno
import fcntl
import itertools
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trio
import trio.testing
from harness.beside import repeating
from harness.clusters import LONG_LEASE_S, MIB, Cluster, Plan, counters, run_irdmafs
from harness.daemons import paused
from harness.errors import fails_with
from harness.mountpoint import eventually
from harness.patterns import pattern, version_of
from harness.processes import AS_NOBODY, Process
from harness.striped import damage, new_content

from irdmafs import client
from irdmafs.backend.store.remote.lent import Lender

SIZES = [100_000, MIB, 3 * MIB + 4097]
XATTR = "user.irdmafs.read_into"
ROUNDS = 30
PLAN = Plan(nodes=2, mounts=2, lease_ttl_s=LONG_LEASE_S)
STRIPE_SIZE = b"1M"


def held(buffer: client.Buffer) -> bytes:
    found: bytes = buffer.memory[: buffer.filled].tobytes()
    return found


def opened(pid: int) -> list[str]:
    """Return names of what a process has open, but for connections, which come and go."""
    paths = map(os.path.realpath, Path(f"/proc/{pid}/fd").iterdir())
    return [os.path.basename(path) for path in paths if "/socket:" not in path]


# -- what a buffer holds


@pytest.mark.parametrize("size", SIZES)
def test_a_file_of_another_host_is_read_past_the_cache(here: Path, there: Path, size: int) -> None:
    before = counters(there)
    with client.Buffer(4 * MIB) as buffer:
        for version in (1, 2, 3):
            content = new_content(size)
            (here / "file").write_bytes(content)
            assert buffer.fill(there / "file") == size
            assert (buffer.filled_by, buffer.version) == ("mount", version)
            assert held(buffer) == content
    after = counters(there)
    assert after["lent_files"] == before["lent_files"] + 3
    assert after["lent_bytes"] == before["lent_bytes"] + 3 * size
    assert after["checked_bytes"] == before["checked_bytes"] + 3 * size
    for name in ("cache_bytes", "cache_misses", "fetched_files"):
        assert after[name] == before[name]


def test_what_is_on_this_host_or_small_is_copied(here: Path, there: Path) -> None:
    contents = {name: new_content(300_000) for name in ("own", "opened")}
    contents["small"] = new_content(1000)
    for name, content in contents.items():
        (here / name).write_bytes(content)
    (there / "opened").read_bytes()
    with client.Buffer(MIB) as buffer:
        for folder, name in ((here, "own"), (there, "opened"), (there, "small")):
            buffer.fill(folder / name)
            assert (buffer.filled_by, buffer.version) == ("copy", 1)
            assert held(buffer) == contents[name]


def test_beside_a_store_node_the_file_there_is_read(cluster: Cluster, here: Path) -> None:
    beside = cluster.add_mount(beside=cluster.nodes[0])
    content = new_content(300_000)
    os.setxattr(here, "user.irdmafs.replicas", b"2")
    (here / "file").write_bytes(content)
    with client.Buffer(MIB) as buffer:
        buffer.fill(f"{beside.path}/{here.name}/file")
        assert buffer.filled_by == "copy" and held(buffer) == content


def test_what_is_written_in_place_here_is_seen_as_an_open_sees_it(here: Path, there: Path) -> None:
    (here / "file").write_bytes(bytes(300_000))
    with client.Buffer(MIB) as buffer, (there / "file").open("r+b") as file:
        file.write(b"new")
        file.flush()
        buffer.fill(there / "file")
        assert held(buffer) == b"new" + bytes(299_997)


def test_it_holds_what_was_last_acknowledged(here: Path, there: Path) -> None:
    """Overwritten, replaced and moved, the reader's call right behind the publisher's return."""
    path, new = (here / name for name in ("file", "new"))
    path.write_bytes(new_content(100_000))
    with client.Buffer(MIB) as buffer:
        for number in range(ROUNDS):
            content = new_content(100_000 + number)
            if number % 3 == 0:
                path.write_bytes(content)
            else:
                new.write_bytes(content)
                os.replace(new, path)
            if number % 3 == 2:
                here.rename(f"{here}_moved").rename(here)
            buffer.fill(there / "file")
            assert held(buffer) == content


def test_each_version_is_whole_while_they_are_replaced(here: Path, there: Path) -> None:
    (here / "file").write_bytes(pattern(1, 2 * MIB))
    numbers = itertools.count(2)
    seen = []
    with (
        repeating(lambda: (here / "file").write_bytes(pattern(next(numbers), 2 * MIB))),
        client.Buffer(2 * MIB) as buffer,
    ):
        for _ in range(ROUNDS):
            buffer.fill(there / "file")
            seen.append(version_of(held(buffer)))
            assert buffer.version == seen[-1]
    assert seen == sorted(seen) and len(set(seen)) > 1


def test_several_buffers_are_read_into_at_once(here: Path, there: Path) -> None:
    contents = [new_content(MIB + number) for number in range(8)]
    for number, content in enumerate(contents):
        (here / f"file{number}").write_bytes(content)
    buffers = [client.Buffer(2 * MIB) for _ in contents]
    paths = [there / f"file{number}" for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        assert len([*threads.map(client.Buffer.fill, buffers, paths)]) == 8
    for buffer, content in zip(buffers, contents, strict=True):
        assert buffer.filled_by == "mount" and held(buffer) == content
        buffer.close()


def test_without_privilege_it_is_read_so_too(cluster: Cluster, here: Path) -> None:
    there = cluster.add_mount("--session", "pyfuse3").path / here.name
    with client.Buffer(MIB) as buffer:
        for version in (1, 2):
            content = new_content(300_000)
            (here / "file").write_bytes(content)
            buffer.fill(there / "file")
            assert (buffer.filled_by, buffer.version) == ("mount", version)
            assert held(buffer) == content


# -- what goes wrong


@pytest.mark.parametrize("period_s", [0.02, 0.0005])
def test_signals_only_delay_it(here: Path, there: Path, period_s: float) -> None:
    contents = {f"file{number}": new_content(2 * MIB) for number in range(10)}
    for name, content in contents.items():
        (here / name).write_bytes(content)
    came = []
    before = signal.signal(signal.SIGALRM, lambda *_: came.append(1))
    signal.setitimer(signal.ITIMER_REAL, period_s, period_s)
    try:
        with client.Buffer(2 * MIB) as buffer:
            for name, content in contents.items():
                buffer.fill(there / name)
                assert held(buffer) == content
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert came


def test_wrong_bytes_of_a_replica_do_not_stay(cluster: Cluster, here: Path, there: Path) -> None:
    contents = [new_content(MIB + 100_000) for _ in range(10)]
    for number, content in enumerate(contents):
        (here / f"file{number}").write_bytes(content)
        assert damage(cluster.nodes[0], content)
    before = counters(there)["wrong_fetches"]
    with client.Buffer(2 * MIB) as buffer:
        # Each read asks one of two nodes, at random.
        for number, content in [*enumerate(contents)] * 4:
            buffer.fill(there / f"file{number}")
            assert buffer.filled_by == "mount" and held(buffer) == content
        assert counters(there)["wrong_fetches"] > before
        for node in cluster.nodes[:2]:  # the first one may have been mended meanwhile
            damage(node, contents[0])
        with pytest.raises(OSError) as caught:
            buffer.fill(there / "file0")
        assert caught.value.errno == errno.EIO
        assert caught.value.filename == str(there / "file0")
        assert (buffer.filled, buffer.filled_by) == (0, "")


def test_what_does_not_fit_or_is_not_there_is_said(here: Path, there: Path) -> None:
    (here / "file").write_bytes(bytes(200_000))
    store = client.open(there)
    with client.Buffer(199_999) as buffer:
        with pytest.raises(ValueError, match="has 200000 bytes, too many for a buffer of 199999"):
            buffer.fill(there / "file")
        for name in ("nothing", "nothing.safetensors/tensor", "file"):
            with pytest.raises(KeyError):
                store.read_into(name, buffer)
        with pytest.raises(FileNotFoundError):
            buffer.fill(there)


def test_a_mount_lets_go_when_the_buffer_is_closed_or_its_process_ends(
    cluster: Cluster, here: Path, there: Path
) -> None:
    other = cluster.mounts[1]
    content = new_content(300_000)
    (here / "file").write_bytes(content)
    eventually(lambda: counters(there)["lent_buffers"] == 0, "earlier buffers are given back")
    before = len(opened(other.pid))
    with Process() as process:
        process.do(
            "from irdmafs import client\n"
            "buffers = [client.Buffer(1 << 20) for _ in range(5)]\n"
            "for buffer in buffers:\n"
            "    buffer.fill(path)\n"
            "assert all(buffer.filled_by == 'mount' for buffer in buffers)",
            path=str(there / "file"),
        )
        assert counters(there)["lent_buffers"] == 5
        process.do("buffers.pop().close(); del buffers[0], buffer")
        eventually(lambda: counters(there)["lent_buffers"] == 3, "two are given back")
        process.kill()
    eventually(lambda: counters(there)["lent_buffers"] == 0, "the others are given back")
    eventually(lambda: len(opened(other.pid)) <= before, "no descriptor is left")


def test_a_reader_that_is_killed_while_nodes_are_silent_leaves_nothing(
    cluster: Cluster, here: Path, there: Path
) -> None:
    (here / "file").write_bytes(new_content(3 * MIB))
    with Process() as process:
        process.do("from irdmafs import client\nbuffer = client.Buffer(4 << 20)")
        with paused(*cluster.nodes):
            process.start("buffer.fill(path)", path=str(there / "file"))
            eventually(lambda: counters(there)["lent_buffers"] == 1, "the mount has the buffer")
            process.kill()
            eventually(lambda: counters(there)["lent_buffers"] == 0, "it is given back")


def memfd(seals: int = 0x2, allocate: bool = True) -> int:
    """F_SEAL_SHRINK is 2."""
    fd = os.memfd_create("lent", os.MFD_ALLOW_SEALING)
    os.truncate(fd, MIB)
    if allocate:
        os.posix_fallocate(fd, 0, MIB)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_only_memory_that_stays_is_taken(
    cluster: Cluster, here: Path, there: Path, tmp_path: Path
) -> None:
    other = cluster.mounts[1]
    (here / "file").write_bytes(new_content(300_000))
    path = there / "file"
    pipe, other_end = os.pipe()
    plain = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(plain, 0, MIB)
    good = memfd()
    read_only = os.open(f"/proc/self/fd/{good}", os.O_RDONLY)
    bad = [memfd(seals=seals) for seals in (0, 0x2 | 0x8, 0x2 | 0x10)]
    bad += [memfd(allocate=False), plain, pipe, read_only]
    names = [f"{XATTR}.{fd}.{pipe}" for fd in bad]
    names += [f"{XATTR}.{good}.{plain}", f"{XATTR}.{good}", XATTR, f"{XATTR}.x.y", f"{XATTR}.-1.2"]
    for name in names:
        with fails_with(errno.EINVAL):
            os.getxattr(path, name)
    with fails_with(errno.EBADF):
        os.getxattr(path, f"{XATTR}.{good}.999999")
    names = [os.path.basename(os.path.realpath(f"/proc/self/fd/{fd}")) for fd in (*bad, good)]
    assert not {*names} & {*opened(other.pid)}
    assert b'"version": 1' in os.getxattr(path, f"{XATTR}.{good}.{pipe}")
    # Whoever may only look at memory that somebody else has lent cannot have it written.
    with fails_with(errno.EINVAL):
        os.getxattr(path, f"{XATTR}.{read_only}.{pipe}")
    # Written to, it has no meaning: the mount gives the memory back, and takes it again.
    os.write(other_end, b"x")
    eventually(lambda: counters(there)["lent_buffers"] == 0, "it is given back")
    assert b'"version": 1' in os.getxattr(path, f"{XATTR}.{good}.{pipe}")
    for fd in (*bad, good, other_end):
        os.close(fd)
    eventually(lambda: counters(there)["lent_buffers"] == 0, "it is given back")


async def test_memory_that_is_lent_again_while_it_is_given_back_stays_open() -> None:
    """A closed descriptor's number may be another file's the next moment."""
    memory, forgotten = memfd(), list[int]()

    async with trio.open_nursery() as nursery:
        lender = Lender(nursery, forgotten.append)
        lifeline, end = os.pipe()
        again, other_end = os.pipe()
        async with lender.using(os.dup(memory), lifeline):
            os.close(end)
            await trio.testing.wait_all_tasks_blocked()
        async with lender.using(os.dup(memory), again) as lent:
            await trio.testing.wait_all_tasks_blocked()
            assert os.path.sameopenfile(lent.fd, memory)
            assert not forgotten
        os.close(other_end)
    assert len(forgotten) == 1
    assert not len(lender)
    os.close(memory)


def test_who_may_not_read_a_file_cannot_have_it_read(cluster: Cluster, here: Path) -> None:
    other = cluster.add_mount("-o", "allow_other")
    there = other.path / here.name
    (here / "file").write_bytes(new_content(300_000))
    (here / "file").chmod(0o600)
    other.path.parent.parent.chmod(0o755)
    with Process(AS_NOBODY) as process:
        source = (
            "from irdmafs import client\n"
            "with client.Buffer(1 << 20) as buffer:\n"
            "    buffer.fill(path)\n"
            "    filled_by = buffer.filled_by\n"
            "filled_by"
        )
        with pytest.raises(PermissionError):
            process.do(source, path=str(there / "file"))
        (here / "file").chmod(0o644)
        # Modes of a directory that is not followed come to other hosts by the watch.
        eventually(
            lambda: (there / "file").stat().st_mode & 0o004 != 0, "the other host knows the mode"
        )
        assert process.do(source, path=str(there / "file")) == "mount"


def test_status_tells_what_was_read_into_buffers(cluster: Cluster, here: Path, there: Path) -> None:
    (here / "file").write_bytes(new_content(300_000))
    with client.Buffer(MIB) as buffer:
        buffer.fill(there / "file")
        done = run_irdmafs(cluster.admin, "status", cluster.mounts[1].path)
    assert done.returncode == 0, done.stderr
    (row,) = (line for line in done.stdout.splitlines() if "read into buffers" in line)
    assert "1 are lent" in row
    assert "not used: this host has no RDMA device" in done.stdout or "moved by" in done.stdout
