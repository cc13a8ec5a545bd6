"""A directory tells all that is below it in one answer, to who may see it."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from harness.cluster_mount import CLUSTER
from harness.errors import fails_with
from harness.mountpoint import eventually
from harness.processes import AS_NOBODY, NOBODY, Process, TakeProcess, is_waiting

SESSIONS = ("kernel", CLUSTER)

TREE = "user.irdmafs.tree"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes another user")


def tree_of(directory: Path, waiting: str = "") -> tuple[int, dict[str, Any]]:
    counter, entries = json.loads(os.getxattr(directory, TREE + waiting))
    return counter, entries


def entry(path: Path) -> list[int]:
    status = path.stat()
    version = int(os.getxattr(path, "user.irdmafs.version"))
    return [status.st_ino, status.st_ctime_ns, status.st_size, version, status.st_nlink]


def test_tree_has_files_directories_and_the_rest(folder: Path) -> None:
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "file").write_bytes(b"12")
    (folder / "link").symlink_to("a")
    os.mkfifo(folder / "fifo")
    counter, entries = tree_of(folder)
    assert counter == int(os.getxattr(folder, "user.irdmafs.changes"))
    assert entries == {
        "a": [
            (folder / "a").stat().st_ino,
            {"b": [(folder / "a/b").stat().st_ino, {}], "file": entry(folder / "a/file")},
        ],
        "link": [(folder / "link").lstat().st_ino],
        "fifo": [(folder / "fifo").stat().st_ino],
    }


def test_names_that_are_no_text_are_told(folder: Path) -> None:
    name = os.fsdecode(b"\xff\xfe")
    (folder / name).touch()
    assert list(tree_of(folder)[1]) == [name]


def test_a_file_is_told_as_it_was_published(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(b"old")
    before = entry(path)
    with path.open("wb", buffering=0) as file:
        file.write(b"longer")
        assert tree_of(folder)[1]["file"] == before
    assert tree_of(folder)[1]["file"] == entry(path) != before


def test_who_waits_gets_the_tree_that_woke_him(folder: Path, process: TakeProcess) -> None:
    waiter = process()
    count, _ = tree_of(folder)
    waiter.start(
        f"os.getxattr(directory, f'{TREE}.{{count}}').decode()", directory=str(folder), count=count
    )
    eventually(lambda: is_waiting(waiter.pid), "it waits", 30)
    (folder / "new").mkdir()
    counter, entries = json.loads(waiter.result())
    assert counter > count
    assert list(entries) == ["new"]


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o744, 0o750, 0o711])
def test_what_others_may_not_see_is_left_out(folder: Path, mode: int) -> None:
    private = folder / "private"
    private.mkdir()
    (private / "secret").write_bytes(b"x")
    private.chmod(mode)
    with Process(AS_NOBODY) as stranger:
        answer = stranger.do(f"os.getxattr(directory, '{TREE}')", directory=str(folder))
        assert json.loads(answer)[1] == {"private": [private.stat().st_ino, None]}
        with pytest.raises(PermissionError):
            stranger.do(f"os.getxattr(directory, '{TREE}')", directory=str(private))
    assert tree_of(folder)[1]["private"][1] == {"secret": entry(private / "secret")}


@needs_root
@pytest.mark.parametrize(("owner", "mode"), [(0, 0o750), (NOBODY, 0o077)])
def test_groups_and_owners_who_have_shut_themselves_out_see_nothing(
    folder: Path, owner: int, mode: int
) -> None:
    """Groups, as ACLs, are left to the kernel."""
    private = folder / "private"
    private.mkdir()
    os.chown(private, owner, NOBODY)
    private.chmod(mode)
    with Process(AS_NOBODY) as one, pytest.raises(PermissionError):
        one.do(f"os.getxattr(directory, '{TREE}')", directory=str(private))


def test_a_tree_that_is_too_large_or_too_deep_is_refused(folder: Path, writer: Process) -> None:
    (folder / "wide").mkdir()
    for number in range(300):
        (folder / "wide" / f"{number:0250}").touch()
    # From level to level: each path from the top would be looked up whole.
    writer.do("os.chdir(d)", d=str(folder))
    writer.do("for name in ['deep', *['a'] * 100]: os.mkdir(name); os.chdir(name)")
    for name in ("wide", "deep"):
        with fails_with(errno.E2BIG):
            tree_of(folder / name)
