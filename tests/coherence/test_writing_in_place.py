"""Files that are written in place, and what other hosts of a cluster see of them."""

import errno
import fcntl
import os
import subprocess
from pathlib import Path

import pytest
from harness.clusters import MIB, Cluster
from harness.errors import fails_with
from harness.mountpoint import eventually
from harness.patterns import pattern
from harness.processes import Process, TakeProcess


@pytest.mark.parametrize("mode", ["r+b", "ab"])
def test_of_two_hosts_that_write_in_place_the_second_is_told_and_loses_nothing(
    pair: list[Path], process: TakeProcess, mode: str
) -> None:
    here, there = pair[0] / "file", pair[1] / "file"
    here.write_bytes(b"0123456789")
    first, second = process(), process()
    for one, file in ((first, here), (second, there)):
        one.do("f = open(file, mode, buffering=0)", file=str(file), mode=mode)
    first.do("f.write(b'here')")
    second.do("f.write(b'there')")
    first.do("f.close()")
    with fails_with(errno.ESTALE):
        second.do("f.close()")
    published = b"here456789" if mode == "r+b" else b"0123456789here"
    kept = b"there56789" if mode == "r+b" else b"0123456789there"
    for directory in pair:
        assert (directory / "file").read_bytes() == published
        (aside,) = (name for name in os.listdir(directory) if "conflict" in name)
        assert (directory / aside).read_bytes() == kept
    there.write_bytes(b"another version")
    assert here.read_bytes() == b"another version"


def test_what_is_written_is_published_also_if_the_times_are_set_to_those_before(
    pair: list[Path], process: TakeProcess
) -> None:
    """As programs do that copy a file with its times. It was opened while another program wrote it."""
    here, there = pair[0] / "file", pair[1] / "file"
    here.write_bytes(b"0123456789")
    first, second = process(), process()
    for one in (first, second):
        one.do("fd = os.open(file, os.O_WRONLY); os.utime(fd, (1, 2))", file=str(here))
    first.do("os.close(fd)")
    second.do("os.write(fd, b'new'); os.utime(fd, (1, 2)); os.close(fd)")
    assert [path.read_bytes() for path in (here, there)] == [b"new3456789"] * 2


@pytest.mark.parametrize(("flags", "sync"), [("O_RDWR", False), ("O_WRONLY", True)])
def test_another_host_never_reads_an_empty_file_that_was_renamed_before_it_was_closed(
    pair: list[Path], reader: Process, writer: Process, flags: str, sync: bool
) -> None:
    here, there = pair[0] / "model", pair[1] / "model"
    here.write_bytes(pattern(1, 300_000))
    reader.start(
        "seen = set()\nwhile 20 not in seen: seen.add(version_of(open(file, 'rb').read()))\nseen",
        file=str(there),
    )
    writer.do(
        "for version in range(2, 21):\n"
        f"    fd = os.open(file + '.tmp', os.{flags} | os.O_CREAT | os.O_EXCL, 0o600)\n"
        "    os.write(fd, pattern(version, 300_000))\n"
        "    if sync: os.fsync(fd)\n"
        "    os.rename(file + '.tmp', file)\n"
        "    os.close(fd)\n",
        file=str(here),
        sync=sync,
    )
    assert reader.result() <= set(range(1, 21))


def test_stores_through_a_lasting_map_reach_other_hosts(pair: list[Path], writer: Process) -> None:
    here, there = pair[0] / "file", pair[1] / "file"
    here.write_bytes(bytes(100_000))
    writer.do("fd = os.open(file, os.O_RDWR); m = mmap.mmap(fd, 100_000)", file=str(here))
    for number in range(1, 4):
        writer.do("m[5] = number; os.fsync(fd)", number=number)
        assert there.read_bytes()[5] == number
    writer.do("m[5] = 9; os.close(fd)")
    assert there.read_bytes()[5] == 9


def test_stores_through_a_mapping_that_was_read_first_reach_other_hosts(
    pair: list[Path], writer: Process
) -> None:
    """In a tmpfs they change no time of the file."""
    here, there = pair[0] / "file", pair[1] / "file"
    here.write_bytes(bytes(100_000))
    for number in (1, 2):
        writer.do(
            "with open(file, 'r+b') as f, mmap.mmap(f.fileno(), 0) as m: m[5] += 1", file=str(here)
        )
        assert [path.read_bytes()[5] for path in (here, there)] == [number, number]


@pytest.fixture
def kept(pair: list[Path], process: TakeProcess) -> Process:
    """A process with a file open for writing, `f`, and mapped, `m`, of which the kernel keeps pages."""
    file = pair[0] / "file"
    file.touch()  # it does not pass through what was empty when it was opened first
    process().do("f = open(file, 'rb')", file=str(file))
    writer = process()
    writer.do(
        "f = open(file, 'r+b', buffering=0); f.write(bytes(9000)); os.fsync(f.fileno())\n"
        "m = mmap.mmap(f.fileno(), 0)",
        file=str(file),
    )
    return writer


def test_stores_that_the_kernel_keeps_do_not_stop_an_open_of_a_newer_version(
    pair: list[Path], kept: Process, reader: Process
) -> None:
    """The open sees the stores, and not the version that another host published."""
    kept.do("m[5] = 1")
    (pair[1] / "file").write_bytes(bytes(9000))
    assert reader.do("open(file, 'rb').read(6)", file=str(pair[0] / "file"))[5] == 1
    with fails_with(errno.ESTALE):
        kept.do("os.fsync(f.fileno())")
    assert len([name for name in os.listdir(pair[1]) if "conflict" in name]) == 1


def test_stores_that_the_kernel_keeps_do_not_stop_a_truncation(
    pair: list[Path], kept: Process, reader: Process
) -> None:
    """The kernel sends them when the truncation is done."""
    kept.do("m[5] = 1")
    (pair[1] / "file").write_bytes(b"new" * 3000)
    reader.do("os.truncate(file, 3)", file=str(pair[0] / "file"))
    assert (pair[1] / "file").read_bytes() == b"new"


def test_stores_that_the_kernel_keeps_are_seen_by_the_next_owner_of_a_lock(
    pair: list[Path], kept: Process, reader: Process
) -> None:
    kept.do("fcntl.lockf(f, fcntl.LOCK_EX); m[5] = 1; fcntl.lockf(f, fcntl.LOCK_UN)")
    seen = reader.do(
        "f = open(file, 'r+b', buffering=0); fcntl.lockf(f, fcntl.LOCK_EX); f.read(6)",
        file=str(pair[1] / "file"),
    )
    assert seen == b"\0\0\0\0\0\1"


def test_a_file_that_others_replace_all_the_time_is_shown_in_place(
    pair: list[Path], reader: Process, writer: Process, process: TakeProcess
) -> None:
    """A version is superseded while it is copied into what programs here have open."""
    here, there = pair[0] / "file", pair[1] / "file"
    here.write_bytes(pattern(1, 300_000))
    holder = process()
    holder.do("f = open(file, 'r+b')", file=str(here))
    reader.start(
        "seen = 0\nwhile seen < 80: seen = version_of(open(file, 'rb').read())", file=str(here)
    )
    writer.do(
        "for version in range(2, 81): open(file, 'wb').write(pattern(version, 300_000))",
        file=str(there),
    )
    reader.result()


# During some of these the kernel locks the file.
PUBLISHING = {
    "close": "f = open(file, 'ab', 0); f.write(b'x'); f.close()",
    "fsync": "f = open(file, 'ab', 0); f.write(b'x'); os.fsync(f.fileno()); f.close()",
    "truncate": "os.truncate(file, number)",
}


@pytest.mark.parametrize("publish", PUBLISHING.values(), ids=PUBLISHING)
def test_publishing_a_file_does_not_wait_for_changes_of_its_names(
    pair: list[Path], process: TakeProcess, publish: str
) -> None:
    """Below a mount that has another one below it, the kernel forgets names one by one, for which it locks
    their directories. A rename locks them, too, and waits for the file whose name it takes."""
    directory = pair[0] / "directory"
    below, file = directory / "below", directory / "file"
    below.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", below], check=True)
    try:
        file.touch()
        (directory / "other").hardlink_to(file)
        writer, renamer = process(), process()
        writer.start(f"for number in range(1, 101): {publish}", file=str(file))
        renamer.do(
            "for _ in range(100):\n    os.link(file, file + '2'); open(file + '3', 'xb').close()\n"
            "    os.rename(file + '3', file + '2'); os.unlink(file + '2')\n",
            file=str(file),
        )
        writer.result()
    finally:
        subprocess.run(["umount", below], check=True)
    for name in ("file", "other"):
        assert (pair[1] / "directory" / name).stat().st_size == 100


def test_a_file_that_another_host_wrote_can_be_cut_without_being_opened(pair: list[Path]) -> None:
    here, there = pair[0] / "file", pair[1] / "file"
    here.write_bytes(pattern(1, 50_000))
    os.truncate(there, 60_000)
    assert here.read_bytes() == pattern(1, 50_000) + bytes(10_000)
    os.truncate(here, 40_000)
    assert there.read_bytes() == pattern(1, 50_000)[:40_000]
    os.truncate(there, 0)
    assert here.read_bytes() == b""


@pytest.mark.parametrize("how", ["write", "truncate"])
def test_who_has_an_empty_file_open_sees_it_grow(
    pair: list[Path], reader: Process, writer: Process, how: str
) -> None:
    here, there = pair[0] / "log", pair[1] / "log"
    here.touch()
    reader.do("f = open(file, 'rb', buffering=0)", file=str(here))
    step = "f.write(b'x')" if how == "write" else "f.truncate(1)"
    writer.do(f"f = open(file, 'r+b', buffering=0); {step}", file=str(here))
    assert reader.do("os.fstat(f.fileno()).st_size, len(f.read())") == (1, 1)
    writer.do("f.close()")
    assert len(there.read_bytes()) == 1


def test_a_file_that_is_replaced_right_after_a_close_stays_whole_for_its_readers(
    pair: list[Path], process: TakeProcess
) -> None:
    """Nobody waits for a release, and this one reads the file for what was stored through a mapping."""
    (pair[0] / "file").write_bytes(bytes(30_000_000))
    assert process().do(
        "fd = os.open(file, os.O_RDWR)\n"
        "os.write(fd, b'new')\n"
        "os.close(fd)\n"
        "reader = os.open(file, os.O_RDONLY)\n"
        "fd = os.open(file, os.O_WRONLY | os.O_TRUNC)\n"
        "os.fstat(reader).st_size, os.pread(reader, 3, 0)",
        file=str(pair[0] / "file"),
    ) == (30_000_000, b"new")


def test_what_came_back_after_it_had_left_the_cache_is_written_in_place(
    cluster: Cluster, pair: list[Path]
) -> None:
    """The kernel held the file that left; the one that came back has the same number."""
    (pair[0] / "file").write_bytes(pattern(1, MIB))
    for number in range(24):
        (pair[0] / f"other{number}").write_bytes(bytes(MIB))
    small = cluster.add_mount("--cache-size", "16M")
    directory = small.path / pair[0].name
    try:
        assert (directory / "file").read_bytes() == pattern(1, MIB)
        for number in range(24):
            (directory / f"other{number}").read_bytes()
        assert (directory / "file").read_bytes() == pattern(1, MIB)
        with open(directory / "file", "r+b") as file:
            file.write(b"new")
        os.truncate(directory / "file", 10)
        expected = b"new" + pattern(1, MIB)[3:10]
        assert [(place / "file").read_bytes() for place in (directory, *pair)] == 3 * [expected]
    finally:
        small.terminate()


def test_what_left_the_cache_of_its_writer_is_opened_without_a_change(
    cluster: Cluster, pair: list[Path]
) -> None:
    mount = cluster.add_mount("--cache-size", "16M")
    own, large = (mount.path / pair[0].name / name for name in ("own", "large"))
    try:
        own.write_bytes(bytes(MIB))
        large.write_bytes(bytes(20 * MIB))
        (own.parent / "other").write_bytes(bytes(MIB))
        before = own.stat().st_mtime_ns
        with own.open("r+b"), fails_with(errno.EFBIG):
            large.open("r+b").close()
        assert own.stat().st_mtime_ns == before
        with own.open("r+b"):
            (pair[0] / "own").write_bytes(pattern(2, 20 * MIB))
            assert own.read_bytes() == pattern(2, 20 * MIB)
            with fails_with(errno.EFBIG):
                own.open("r+b").close()
            own.open("wb").close()
        with own.open("r+b") as file:
            (pair[0] / "own").write_bytes(bytes(20 * MIB))
            with fails_with(errno.EFBIG):
                fcntl.flock(file, fcntl.LOCK_EX)
        (pair[0] / "own").write_bytes(b"")
        eventually(lambda: not cluster.pins(), "nothing is kept for who could not see it")
    finally:
        mount.terminate()


def test_truncating_by_name_beside_a_close_leaves_one_length_everywhere(
    pair: list[Path], writer: Process
) -> None:
    here, there = pair[0] / "file", pair[1] / "file"
    for size in range(100, 200):
        writer.do("fd = os.open(file, os.O_WRONLY | os.O_CREAT)", file=str(here))
        writer.start("os.write(fd, bytes(5000)); os.close(fd)")
        os.truncate(here, size)
        writer.result()
        length = here.stat().st_size
        assert length in (size, 5000)
        assert (len(here.read_bytes()), len(there.read_bytes())) == (length, length)
