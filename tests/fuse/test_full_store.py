"""A store without room left."""

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.errors import fails_with
from harness.mountpoint import Mount


def fill(directory: Path) -> None:
    """Take all room, also that of names."""
    with contextlib.suppress(OSError), (directory / "large").open("wb") as large:
        while True:
            large.write(bytes(1 << 20))
    for number in range(100_000):
        try:
            (directory / f"{number:0200}").mkdir()
        except OSError as error:
            assert error.errno == errno.ENOSPC
            return
    raise AssertionError("it is not full")


def test_a_full_store_is_unmounted_in_order(new_mount: Callable[..., Mount]) -> None:
    mount = new_mount(store_size="24m")
    small = [mount.path / f"small{number}" for number in range(50)]
    for path in small:
        path.write_text("a")
        os.utime(path, (0, 0))
    fill(mount.path)
    for path in small:
        assert path.read_text() == "a"
    mount.unmount()
    assert "Traceback" not in mount.log_tail()
    assert "unmounted" in mount.log_tail()


@pytest.mark.kernel_session("pyfuse3 does not hand fallocate on")
def test_room_that_is_not_there_is_not_reserved(new_mount: Callable[..., Mount]) -> None:
    mount = new_mount(store_size="24m")
    with (mount.path / "file").open("wb") as file:
        with fails_with(errno.ENOSPC):
            os.posix_fallocate(file.fileno(), 0, 32 << 20)
        os.posix_fallocate(file.fileno(), 0, 4 << 20)
    assert (mount.path / "file").stat().st_size == 4 << 20
