"""The room that a mount of a cluster reports."""

import errno
import os
from pathlib import Path

import pytest

MiB = 1 << 20


def free_bytes(directory: Path) -> int:
    room = os.statvfs(directory)
    return room.f_bavail * room.f_frsize


def test_overwriting_a_file_takes_no_room(pair: list[Path]) -> None:
    here, _ = pair
    (here / "file").write_bytes(bytes(8 * MiB))
    before = free_bytes(here)
    for _ in range(20):
        (here / "file").write_bytes(bytes(8 * MiB))
    assert free_bytes(here) > before - 40 * MiB
    os.unlink(here / "file")


def test_what_was_published_is_counted_before_the_nodes_say_so(pair: list[Path]) -> None:
    here, _ = pair
    before = free_bytes(here)
    (here / "file").write_bytes(bytes(range(256)) * (8 * MiB // 256))
    assert free_bytes(here) < before


def test_room_is_reserved_as_far_as_there_is_any(pair: list[Path]) -> None:
    here, _ = pair
    free = free_bytes(here)
    with (here / "one").open("wb") as one, (here / "other").open("wb") as other:
        with pytest.raises(OSError) as caught:
            os.posix_fallocate(one.fileno(), 0, free + MiB)
        assert caught.value.errno == errno.ENOSPC
        os.posix_fallocate(one.fileno(), 0, 16 * MiB)
        os.posix_fallocate(one.fileno(), 0, 16 * MiB)
        with pytest.raises(OSError) as caught:
            os.posix_fallocate(other.fileno(), 0, free - 8 * MiB)
        assert caught.value.errno == errno.ENOSPC
        os.posix_fallocate(other.fileno(), 0, 4 * MiB)
    for name, size in (("one", 16 * MiB), ("other", 4 * MiB)):
        assert (here / name).stat().st_size == size
        (here / name).unlink()
