"""A store whose journal was damaged is not mounted as if nothing were missing; recovering it gives up
nothing that is there."""

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from harness.mountpoint import Mount, irdmafs
from harness.patterns import pattern

from irdmafs.backend.namespace import ROOT_INO, NewVersion
from irdmafs.backend.store.embedded import embedded_store

FILES = 12
FILE = stat.S_IFREG | 0o644


@pytest.fixture
def crashed() -> Iterator[Mount]:
    """A mount's store as a killed daemon leaves it: its last changes are in the journal alone."""
    mount = Mount("auto")
    try:
        trio.run(_fill_and_crash, mount.store)
        yield mount
    finally:
        mount.close()


async def _fill_and_crash(store: Path) -> None:
    async with embedded_store(str(store)) as node:
        for number in range(FILES):
            made = await node.namespace.create(ROOT_INO, b"file-%d" % number, FILE, 0, 0)
            extent, fd = node.allocate(made)
            os.write(fd, pattern(number, 5000))
            await node.publish(NewVersion.of_file(made.ino, extent, os.fstat(fd), 0))
            os.close(fd)
        left = store.parent / "left"
        shutil.copytree(store, left)
    shutil.rmtree(store)
    left.rename(store)


def redo(mount: Mount) -> Path:
    return mount.store / "kv.sqlite-redo"


def test_a_mount_of_a_damaged_journal_says_where_and_what_to_do_and_recovering_keeps_the_rest(
    crashed: Mount,
) -> None:
    data = bytearray(redo(crashed).read_bytes())
    place = len(data) // 2
    data[place] ^= 0x10
    redo(crashed).write_bytes(data)
    refused = crashed.try_mount()
    assert refused.returncode != 0
    assert f"{redo(crashed)} is damaged from byte " in refused.stderr
    assert f"irdmafs recover {crashed.store}" in refused.stderr
    assert redo(crashed).read_bytes() == data

    done = irdmafs("recover", crashed.store)
    assert done.returncode == 0, done.stderr
    assert (crashed.store / "kv.sqlite-redo-damaged-1").read_bytes() == data
    crashed.remount()
    named = {path.name: path.read_bytes() for path in crashed.path.iterdir() if path.is_file()}
    contents = set(named.values())
    if (crashed.path / "lost+found").exists():
        contents |= {path.read_bytes() for path in (crashed.path / "lost+found").iterdir()}
    assert contents >= {pattern(number, 5000) for number in range(FILES)}
    assert all(
        content in (b"", pattern(int(name.split("-")[1]), 5000)) for name, content in named.items()
    )
    (crashed.path / "new").write_bytes(b"goes on")
    crashed.unmount()
    crashed.remount()
    assert (crashed.path / "new").read_bytes() == b"goes on"


def test_recovering_a_sound_store_changes_nothing(crashed: Mount) -> None:
    before = redo(crashed).read_bytes()
    done = irdmafs("recover", crashed.store)
    assert done.returncode == 0
    assert "nothing was changed" in done.stdout
    assert redo(crashed).read_bytes() == before
    crashed.remount()
    assert len(list(crashed.path.iterdir())) >= FILES
    done = irdmafs("recover", crashed.store)
    assert done.returncode != 0
    assert "in use" in done.stderr
