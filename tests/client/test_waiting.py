"""Programs wait for what comes, by `client.wait` and `irdmafs watch`, and miss nothing."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.beside import beside, repeating
from harness.mountpoint import eventually, irdmafs
from harness.processes import Process, TakeProcess, is_waiting

from irdmafs import client

STEPS = 20
# Much longer than anything takes here.
LONG_S = 60.0
# A waiter may look before the kernel has noted a rename that was answered (docs/mount.md).
FORGETS_NAMES = pytest.mark.kernel_session(
    "names that the kernel believes cannot be forgotten with pyfuse3"
)


def told(path: Path, seen: client.Seen | None, change: Callable[[], object]) -> client.Seen:
    """Return what `client.wait` returns when something is changed while it waits, or just before."""
    with beside(change):
        return client.wait(path, seen, timeout=LONG_S)


def test_whatever_leads_to_other_contents_ends_a_wait(folder: Path) -> None:
    path = folder / "model"
    seen = told(path, None, lambda: path.write_bytes(b"one"))
    assert client.wait(path) == seen == (path.stat().st_ino, 1)
    newer = told(path, seen, lambda: path.write_bytes(b"two"))
    assert newer == (seen.ino, 2)
    path.unlink()
    assert told(path, newer, lambda: path.write_bytes(b"three")) != newer


@FORGETS_NAMES
def test_a_name_that_leads_to_another_file_ends_a_wait(folder: Path) -> None:
    path = folder / "model"
    path.write_bytes(b"one")
    seen = client.wait(path)
    (folder / "next").write_bytes(b"two")
    assert told(path, seen, lambda: os.replace(folder / "next", path)).ino != seen.ino


@FORGETS_NAMES
def test_links_and_directories_on_the_way_are_waited_for(folder: Path) -> None:
    path = folder / "run" / "latest" / "model"
    for version in ("1", "2"):
        (folder / "versions" / version).mkdir(parents=True)
        (folder / "versions" / version / "model").write_text(version)

    def make() -> None:
        (folder / "run").mkdir()
        (folder / "run" / "latest").symlink_to(folder / "versions" / "1")

    seen = told(path, None, make)
    assert path.read_text() == "1"

    def flip() -> None:
        (folder / "run" / "new").symlink_to(folder / "versions" / "2")
        os.replace(folder / "run" / "new", folder / "run" / "latest")

    newer = told(path, seen, flip)
    assert newer.ino != seen.ino
    assert path.read_text() == "2"
    told(path, newer, lambda: (folder / "versions" / "2" / "model").write_text("3"))
    assert path.read_text() == "3"


@FORGETS_NAMES
def test_every_link_that_leads_to_a_file_is_waited_for(folder: Path, reader: Process) -> None:
    for name in ("run", "elsewhere"):
        (folder / name).mkdir()
    for version in ("1", "2"):
        (folder / "run" / version).write_text(version)
        (folder / "elsewhere" / version).symlink_to(f"../run/{version}")
    newest = folder / "elsewhere" / "newest"
    newest.symlink_to("1")
    (folder / "run" / "latest").symlink_to("../elsewhere/newest")
    wait = "from irdmafs import client; client.wait(path, seen)"
    seen = reader.do(wait, path=folder / "run" / "latest", seen=None)
    reader.start(wait, seen=seen)
    eventually(lambda: is_waiting(reader.pid), "it waits")
    newest.with_name("2").rename(newest)
    assert reader.result() == (os.stat(folder / "run" / "2").st_ino, 1)


def test_a_link_may_become_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").touch()
    (folder / "link").symlink_to("file")
    follow = lambda link: (folder / "file").rename(link) and Path(os.readlink(link))  # noqa: E731
    monkeypatch.setattr(Path, "readlink", follow)
    assert client.wait(folder / "link").ino == (folder / "link").lstat().st_ino


@FORGETS_NAMES
def test_who_is_told_of_a_change_sees_it(folder: Path, process: TakeProcess) -> None:
    """The kernel notes an answered change of a name only when the process that made it runs again."""
    busy, slow = process(), process()
    slow.do("os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))")
    for one in (busy, slow):
        one.do("os.sched_setaffinity(0, {0})")
    busy.start("while True: pass")
    (folder / "link").symlink_to("0")
    for number in range(1, 11):
        (folder / "new").symlink_to(str(number))
        before = client.wait(folder)
        assert os.readlink(folder / "link") == str(number - 1)
        slow.start("os.replace(new, link)", new=str(folder / "new"), link=str(folder / "link"))
        client.wait(folder, before)
        assert os.readlink(folder / "link") == str(number)
        slow.result()


def test_a_directory_is_something_new_when_anything_below_it_changes(folder: Path) -> None:
    (folder / "top" / "below").mkdir(parents=True)
    seen = client.wait(folder / "top")
    newer = told(folder / "top", seen, lambda: (folder / "top" / "below" / "file").touch())
    assert newer.ino == seen.ino and newer != seen
    with pytest.raises(TimeoutError, match="Nothing new"):
        client.wait(folder / "top", client.wait(folder / "top"), timeout=0.01)


def test_a_file_that_nobody_has_published_is_waited_for(folder: Path) -> None:
    with (folder / "model").open("wb") as writer:
        writer.write(b"one")
        with pytest.raises(TimeoutError):
            client.wait(folder / "model", timeout=0.01)
        told(folder / "model", None, writer.close)


def test_every_host_is_told_of_the_last_version(here: Path, there: Path) -> None:
    def publish() -> None:
        for step in range(1, STEPS + 1):
            (here / "model").write_text(f"{step}")

    with beside(publish):
        for seen in client.watch(there / "model", timeout=LONG_S):
            assert int((there / "model").read_text()) >= seen.version
            if seen.version == STEPS:
                break


def test_other_filesystems_are_told_apart(tmp_path: Path, folder: Path) -> None:
    for path in (tmp_path, tmp_path / "file", tmp_path / "link"):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(folder)
        with pytest.raises(OSError, match="Not on a mount of irdmafs") as caught:
            client.wait(path, timeout=LONG_S)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOTSUP, os.fspath(path))


def test_a_command_is_run_at_a_change(folder: Path) -> None:
    path = folder / "model"
    path.write_bytes(b"one")
    found = irdmafs("watch", path, "--timeout", "0.01", "--once")
    assert (found.returncode, found.stdout) == (1, "")
    assert "Nothing new in 0.01 s" in found.stderr
    assert "which is not there yet" in irdmafs("watch", folder / "no", "--timeout", "0.01").stderr
    assert irdmafs("watch", "/", "--timeout", f"{LONG_S}").returncode == 1

    # What is published while the command begins may be what it takes for the present.
    with repeating(lambda: path.write_bytes(b"two")):
        run = 'test "$IRDMAFS_VERSION" -gt 1 && cat "$IRDMAFS_PATH"; exit 7'
        found = irdmafs("watch", path, "--exec", run, "--once", "--timeout", "inf")
    assert found.returncode == 7, found
    version, line = found.stdout.split(" ", 1)
    assert int(version) > 1 and line == f"{path}\ntwo"
