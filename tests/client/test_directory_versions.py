"""Versions of directories (`client.Versions`): whole, numbered once, and there as long as they are held."""

import errno
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from harness.beside import beside
from harness.claims import transactions
from harness.errors import fails_with
from harness.mountpoint import IRDMAFS, irdmafs, one_line
from harness.processes import Process, TakeProcess
from harness.seeds import seeded

from irdmafs import client
from irdmafs.client import _locks
from irdmafs.client._differences import differences
from irdmafs.client._files import RENAME_NOREPLACE, rename

KILLS = 5
FILES = 4
# Much longer than anything takes here.
LONG_S = 60.0


def fill(directory: str, step: int) -> None:
    for number in range(FILES):
        Path(directory, f"{number}").write_bytes(b"%d " % step * 1000)


def steps_in(directory: str) -> set[bytes]:
    return {word for file in Path(directory).iterdir() for word in file.read_bytes().split()}


def publish(versions: client.Versions, *steps: int, expected: int | None = None) -> None:
    for step in steps:
        with versions.draft(expected=expected) as directory:
            fill(directory, step)


def test_a_version_is_there_when_its_draft_ends(here: Path, there: Path) -> None:
    writer, reader = client.Versions(here), client.Versions(there)
    assert reader.newest() == 0
    with writer.draft() as directory:
        fill(directory, 1)
        assert reader.numbers() == []
    with reader.hold() as version:
        assert version[:2] == (1, os.fspath(there / "versions" / "1"))
        assert steps_in(version.path) == {b"1"}
    with pytest.raises(ZeroDivisionError), writer.draft() as directory:
        fill(directory, 2)
        raise ZeroDivisionError
    assert reader.newest() == 1
    assert not Path(directory).exists()
    assert os.listdir(here / ".drafts") == []


def test_a_version_takes_five_transactions(here: Path, there: Path) -> None:
    """One for its draft, one for its files and its name, and three for the lock that holds it. The mount
    may have others to do meanwhile, as for claims: the version that cost the fewest tells."""
    writer, reader = client.Versions(here, keep=9), client.Versions(there)
    publish(writer, 1, 2)
    costs = []
    for step in range(3, 8):
        before = transactions(here)
        publish(writer, step)
        costs.append(transactions(here) - before)
        with reader.hold(step) as version:
            assert steps_in(version.path) == {b"%d" % step}
    assert min(costs) <= 5, costs


def test_of_writers_who_began_with_one_version_one_publishes(here: Path, there: Path) -> None:
    first, second = client.Versions(here), client.Versions(there)
    publish(first, 1, expected=0)
    publish(second, 2, expected=1)
    with pytest.raises(FileExistsError, match="version 2 is the newest, not 1"):
        publish(first, 3, expected=1)
    assert first.numbers() == second.numbers() == [1, 2]
    # Without it each has a number of its own. The second may have looked into a draft of the first.
    with beside(lambda: publish(first, *range(5))):
        publish(second, *range(5))
    assert first.newest() == second.newest() == 12


def test_a_number_is_not_used_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = client.Versions(here), client.Versions(here, keep=1)
    lock = slow._locked

    def late(name: str, kind: int, held: str = "") -> AbstractContextManager[int]:
        if name == "1" and not fast.newest():
            publish(fast, 1, 2)
            assert fast.numbers() == [2]
        return lock(name, kind, held)

    monkeypatch.setattr(slow, "_locked", late)
    publish(slow, 3)
    assert fast.numbers() == [2, 3]


def test_a_draft_whose_lock_was_lost_is_not_published_in_part(here: Path, there: Path) -> None:
    with pytest.raises(FileNotFoundError), client.Versions(here).draft() as directory:
        fill(directory, 1)
        (there / ".held" / "1").unlink()
        client.Versions(there).tidy()
        assert os.listdir(there / ".drafts") == []
    assert client.Versions(there).newest() == 0
    assert os.listdir(there / ".drafts") == []


def test_a_held_version_stays_whole(here: Path, there: Path) -> None:
    writer, reader = client.Versions(here, keep=1), client.Versions(there)
    publish(writer, 1)
    with reader.hold() as version:
        publish(writer, *range(2, 6))
        assert writer.numbers() == [1, 5]
        assert writer.is_held(1) and not writer.is_held(5)
        assert steps_in(version.path) == {b"1"}
        with reader.hold(1) as again:
            assert again.path == version.path
    writer.tidy()
    assert writer.numbers() == [5]
    assert os.listdir(here / ".held") == ["5"]
    with pytest.raises(FileNotFoundError, match="no version 1"), reader.hold(1):
        pass


def test_who_may_only_read_holds_a_version_and_stops_nobody(folder: Path, nobody: Process) -> None:
    versions = client.Versions(folder, keep=1)
    publish(versions, 1)
    nobody.do("import fcntl, os, struct; fd = os.open(path, os.O_RDONLY)", path=f"{folder}/.held/1")
    locked = "fcntl.fcntl(fd, 37, struct.pack('hhqqi4x', kind, 0, 0, 0, 0))"
    with fails_with(errno.EBADF):
        nobody.do(locked, kind=_locks.WRITE)
    nobody.do(locked, kind=_locks.READ)
    with versions.hold(1):
        publish(versions, 2)
    assert versions.is_held(1)
    assert versions.numbers() == [1, 2]


LEAVE = """
import os
from irdmafs import client
versions = client.Versions(os.fsencode(place))
try:
    with versions.hold() as held, versions.draft() as one, client.draft(f"{place}/other") as other:
        if not (child := os.fork()):
            raise SystemExit
        os.waitpid(child, 0)
        found = versions.is_held(held.number), os.path.isdir(one), os.path.isdir(other)
except SystemExit:
    os._exit(0)
found
"""


def test_a_child_that_leaves_a_block_ends_nothing(folder: Path, process: TakeProcess) -> None:
    """As one that fails, or calls sys.exit(), after os.fork()."""
    publish(client.Versions(folder), 1)
    assert process().do(LEAVE, place=f"{folder}") == (True, True, True)


def test_an_object_is_sent_to_another_process(folder: Path, process: TakeProcess) -> None:
    versions = client.Versions(folder, keep=1)
    publish(versions, 1)
    assert process().do("sent.newest(), sent.keep", sent=versions) == (1, 1)


def test_a_directory_that_is_gone_is_not_one_without_versions(folder: Path) -> None:
    """A trainer whose mount is gone is not to begin with nothing."""
    for ask in (client.Versions.newest, client.Versions.numbers):
        with pytest.raises(FileNotFoundError, match=f"{folder}/run'"):
            ask(client.Versions(folder / "run"))
    for name in ("", "run"):
        with (
            pytest.raises(TimeoutError),
            client.Versions(folder / name).hold(newer_than=-1, timeout=0),
        ):
            pass


@pytest.mark.parametrize("inside", ["versions", ".held", ".drafts"])
def test_nothing_is_removed_where_a_link_leads(folder: Path, inside: str) -> None:
    precious = [folder / "precious" / name for name in "1234"]
    for path in precious:
        path.mkdir(parents=True)
        (path / "file").write_bytes(b"f")
    (folder / "files").mkdir()
    (folder / "files" / "file").write_bytes(b"f")
    made = folder / "made"
    made.mkdir()
    versions = client.Versions(made, keep=1)
    for step in range(3):
        publish(versions, step)
    versions.numbers()
    (made / inside).rename(made / "before")
    (made / inside).symlink_to("../files" if inside == ".held" else "../precious")
    versions.tidy()
    assert (folder / "files" / "file").exists()
    assert sorted(folder.glob("precious/*/file")) == [path / "file" for path in precious]


def test_a_file_in_the_place_of_a_draft_is_removed(folder: Path) -> None:
    versions = client.Versions(folder)
    with fails_with(errno.ENOTDIR), versions.draft() as directory:
        os.rmdir(directory)
        Path(directory).touch()
    versions.tidy()
    assert os.listdir(folder / ".drafts") == []


def test_a_file_that_is_still_written_is_not_published(folder: Path) -> None:
    """Others would see it later, and changed, in a version that is whole."""
    versions = client.Versions(folder)
    for drafted, published in (
        (client.draft(folder / "model"), folder / "model"),
        (versions.draft(), Path(versions.path(1))),
    ):
        with (
            ExitStack() as files,
            pytest.raises(OSError, match="sub/0 is still being written") as refused,
            drafted as directory,
        ):
            Path(directory, "sub").mkdir()
            fill(f"{directory}/sub", 1)
            files.enter_context(open(f"{directory}/sub/0", "wb"))
        assert refused.value.errno == errno.EBUSY
        assert not published.exists()
    with versions.draft() as directory, open(f"{directory}/log", "w") as log:
        print("It is synced", file=log, flush=True)
        os.fsync(log.fileno())
    assert Path(versions.path(1), "log").read_text() == "It is synced\n"


def test_what_is_old_goes_also_if_no_thread_can_be_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a program of Python 3.12 publishes while it ends."""
    versions = client.Versions(folder, keep=1)
    publish(versions, 1)
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError))
    publish(versions, 2)
    assert (os.listdir(folder / "versions"), os.listdir(folder / ".drafts")) == (["2"], [])


def test_a_reader_waits_for_a_newer_version(here: Path, there: Path) -> None:
    writer, reader = client.Versions(here), client.Versions(there)
    seen: list[int] = []
    with beside(lambda: publish(writer, *range(1, 11))):
        while seen[-1:] != [10]:
            newer_than = seen[-1] if seen else 0
            with reader.hold(newer_than=newer_than, timeout=LONG_S, local=True) as version:
                assert steps_in(version.path) == {b"%d" % version.number}
                seen.append(version.number)
    assert seen == sorted(set(seen))
    with pytest.raises(TimeoutError), reader.hold(newer_than=10, timeout=0.01):
        pass


def test_a_version_may_have_files_of_all_kinds(folder: Path) -> None:
    versions = client.Versions(folder)
    for kinds in ((stat.S_IFIFO, stat.S_IFSOCK), (stat.S_IFIFO, stat.S_IFSOCK), (0, stat.S_IFIFO)):
        with versions.draft() as directory:
            os.symlink("nowhere", f"{directory}/link")
            os.symlink("/dev" if kinds[0] else "/", f"{directory}/top")
            for number, kind in enumerate(kinds):
                os.mknod(f"{directory}/{number}", kind | 0o600)
    with versions.hold(2, local=True) as version:
        assert sorted(os.listdir(version.path)) == ["0", "1", "link", "top"]
    told = [irdmafs("diff", folder, "2", new).stdout for new in ("1", "3")]
    assert told == ["", "~ 0\n~ 1\n~ top\n"]


@pytest.fixture
def recursion_limit() -> Iterator[int]:
    """Let Python's calls go no deeper than this, which leaves room for what pytest and the client call."""
    before, limit = sys.getrecursionlimit(), 300
    sys.setrecursionlimit(limit)
    yield limit
    sys.setrecursionlimit(before)


def test_a_version_may_be_deeper_than_python_recurses(folder: Path, recursion_limit: int) -> None:
    versions, deep = client.Versions(folder, keep=1), "/".join("d" * recursion_limit)
    with versions.draft() as directory:
        subprocess.run(["mkdir", "-p", f"{directory}/{deep}"], check=True)
        Path(directory, deep, "file.npy").write_bytes(b"1")
    with versions.hold(1, local=True):
        assert client.clone(versions.path(1), folder / "made") == (1, 1, 0, 0)
        versions.publish(folder / "made")
        assert versions.roll_back(1) == 3
        assert list(differences(versions.path(1), versions.path(3))) == []
        assert list(client.open(versions.path(3))) == [f"{deep}/file"]
    versions.tidy()
    assert os.listdir(folder / ".drafts") == []
    assert versions.numbers() == [3]


PREFETCH = """
from click.testing import CliRunner
from irdmafs.cli.command import main
done = CliRunner().invoke(main, ["prefetch", place])
done.exit_code, done.stderr
"""


def test_a_directory_that_cannot_be_read_is_not_passed_over(folder: Path, nobody: Process) -> None:
    folder.chmod(0o755)
    (folder / "secret").mkdir(mode=0o700)
    code, told = nobody.do(PREFETCH, place=str(folder))
    assert code == 1 and f"{folder}/secret: Permission denied" in told


PUBLISH = """
import os
from irdmafs import client
from irdmafs.client import _locks
from irdmafs.client._differences import differences
from irdmafs.client._files import RENAME_NOREPLACE, rename
versions = client.Versions(place, keep=2)
while True:
    with versions.draft() as directory:
        step = versions.newest() + 1
        for number in range(files):
            with open(f"{directory}/{number}", "wb") as file:
                file.write(b"%d " % step * 1000)
    with open(told, "w") as file:
        file.write(str(step))
"""


def test_killed_writers_leave_whole_versions_and_nothing_else(
    here: Path, there: Path, tmp_path: Path, process: TakeProcess
) -> None:
    random, told = seeded(), tmp_path / "told"
    told.write_text("0")
    reader = client.Versions(there)
    for _ in range(KILLS):
        writer = process()
        writer.start(PUBLISH, place=str(here), files=FILES, told=str(told))
        for _ in range(random.randrange(1, 5)):
            with reader.hold(newer_than=reader.newest(), timeout=LONG_S) as version:
                assert steps_in(version.path) == {b"%d" % version.number}
        with beside(writer.kill), reader.hold() as version:
            assert steps_in(version.path) == {b"%d" % version.number}
        assert reader.newest() >= int(told.read_text() or 0)
    client.Versions(here, keep=1).tidy()
    assert reader.numbers() == [reader.newest()]
    assert os.listdir(here / ".held") == [str(reader.newest())]
    assert os.listdir(here / ".drafts") == []


def test_a_draft_that_another_host_saw_is_found_under_its_number(here: Path, there: Path) -> None:
    with client.Versions(here).draft() as directory:
        (there / ".drafts" / Path(directory).name).stat()
    (there / "made").mkdir()
    with fails_with(errno.EEXIST):
        rename(there / "made", there / "versions" / "1", RENAME_NOREPLACE)


def test_an_old_version_is_published_again_without_its_bytes(folder: Path) -> None:
    versions = client.Versions(folder)
    publish(versions, 1, 2)
    assert versions.roll_back(1, expected=2) == 3
    assert steps_in(versions.path(3)) == {b"1"}
    for name in os.listdir(versions.path(1)):
        assert os.path.samefile(f"{versions.path(1)}/{name}", f"{versions.path(3)}/{name}")
    with pytest.raises(FileNotFoundError, match="no version 7"):
        versions.roll_back(7)


def test_commands_publish_list_compare_hold_and_roll_back(folder: Path, tmp_path: Path) -> None:
    run, made, tensor = folder / "run", folder / "made", np.arange(4.0)
    assert one_line(irdmafs("publish", folder, run)) == f"{run}: No such file or directory"
    early = irdmafs("hold", run, "--timeout", "0.01", "true")
    assert f"waiting for {run}, which is not there yet" in early.stderr and early.returncode == 1
    assert one_line(irdmafs("hold", "", "true")) == "The directory has no name"
    run.mkdir()
    for step in (1, 2):
        (made / "below").mkdir(parents=True)
        (made / "below" / "config").write_text(f"{step}")
        (made / "damaged.safetensors").write_text("2" * (step - 1))
        client.open(made).publish_state_dict({"same": tensor, "other": tensor * step})
        done = irdmafs("publish", made, run, "--expected", f"{step - 1}")
        assert done.stdout == f"{run}/versions/{step}\n"
    made.touch()
    assert one_line(irdmafs("publish", made, run)) == f"{made}/: Not a directory"
    aside = tmp_path / "aside"
    assert one_line(irdmafs("publish", aside, run)) == f"{aside}: No such file or directory"
    aside.mkdir()
    other = irdmafs("publish", aside, run)
    assert one_line(other) == f"{aside}/: Not on the filesystem of {run}: copy it there"
    made.unlink()
    made.mkdir()
    refused = irdmafs("publish", made, run, "--expected", "1")
    assert "version 2 is the newest, not 1" in one_line(refused)
    for part in ("versions/1", "versions/2/below", "versions", ".held"):
        assert "It is a part of the versions" in one_line(irdmafs("publish", run / part, run))
    assert "It has the versions in it" in one_line(irdmafs("publish", made, made))
    assert os.listdir(made) == []
    assert irdmafs("diff", run, "2", "2").stdout == ""
    assert irdmafs("diff", run, "1", "2").stdout.splitlines() == [
        "~ below/config", "~ damaged.safetensors", "~ model.safetensors", "~ model.safetensors/other",
    ]  # fmt: skip
    told = json.loads(irdmafs("diff", "--json", run, "1", "2").stdout)["differences"]
    assert told[0] == {"change": "~", "name": "below/config"} and len(told) == 4
    assert irdmafs("rollback", run, "1").stdout == f"{run}/versions/3\n"
    listing = " ".join([*IRDMAFS, "versions", os.fspath(run)])
    command = f"test $IRDMAFS_PATH = {run}/versions/3 && {listing} && exit $IRDMAFS_VERSION"
    held = irdmafs("hold", run, "--", "sh", "-c", command).stdout.splitlines()
    assert [line.split()[:2] for line in held[2:]] == [["3", "held"], ["2", "kept"], ["1", "kept"]]
    listed = json.loads(irdmafs("versions", "--json", run).stdout)["versions"]
    assert [one["state"] for one in listed] == ["current", "kept", "kept"]
    unknown = irdmafs("hold", run, "no-such-command")
    assert one_line(unknown) == "no-such-command: No such file or directory"
    assert "hold [OPTIONS] DIR -- COMMAND..." in irdmafs("hold", run, "ls", "-l").stderr
    missing = irdmafs("hold", run, "--version", "7", "true")
    assert one_line(missing) == f"{run}/versions/7: There is no version 7"
    for seconds in ("0.01", "nan"):
        late = irdmafs("hold", run, "--newer-than", "3", "--timeout", seconds, "true")
        assert f"Nothing newer than version 3 in {seconds} s" in one_line(late)
    assert "`irdmafs publish` has made no version in it" in one_line(irdmafs("versions", folder))
