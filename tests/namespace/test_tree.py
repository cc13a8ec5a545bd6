"""The directory tree on a real file: against a model, over crashes, full stores and damage."""

import errno
import itertools
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from harness.errors import error_of
from harness.models.invariants import check, walk
from harness.models.namespace import DIRECTORY, FILE, SYMLINK, NamespaceAgainstModel, load_own, tree
from harness.open_inodes import while_open
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant, rule

from irdmafs.backend.kv.map import Map
from irdmafs.backend.model.records import ContentId
from irdmafs.backend.namespace import (
    RENAME_EXCHANGE,
    ROOT_INO,
    XATTR_SIZE_MAX,
    Inode,
    Namespace,
    NewVersion,
)
from irdmafs.inline import run

Result = TypeVar("Result")


# -- against the model, with restarts and crashes ----------------------------------------------------


def opened(directory: Path) -> tuple[Map, Namespace]:
    records = Map(str(directory / "names"))
    try:
        namespace = run(load_own(records))
    except BaseException:
        records.close()
        raise
    return records, namespace


def crashed(directory: Path, copy: Path) -> Path:
    """What a daemon that is killed now leaves behind."""
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    shutil.copyfile(directory / "names", copy / "names")
    return copy


class NamespaceOnMap(NamespaceAgainstModel):
    """A crash changes nothing, either, but for what is not kept."""

    records: Map
    filled = 0

    def __init__(self) -> None:
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="irdmafs-namespace-"))
        self.directory = self.base / "store"
        self.directory.mkdir()
        self.records, self.namespace = opened(self.directory)

    def teardown(self) -> None:
        self.records.close()
        shutil.rmtree(self.base)

    def run(self, doing: Coroutine[Any, Any, Result]) -> Result:
        return run(doing)

    def stored(self) -> object:
        return list(self.records.range(b"", b"\xff"))

    def fill(self, patch: pytest.MonkeyPatch, refuse: Callable[[], None]) -> None:
        """Fail at the beginning of a change, at one of its records, or when it is committed."""
        self.filled += 1
        left, begin, put, commit = (
            self.filled % 6,
            *(getattr(self.records, name) for name in ("begin", "put", "commit")),
        )

        def failing(call: Callable[..., None], *args: Any, **options: Any) -> None:
            nonlocal left
            left -= 1
            if left == -1:
                refuse()
            call(*args, **options)

        patch.setattr(self.records, "begin", partial(failing, begin))
        patch.setattr(self.records, "put", partial(failing, put))
        patch.setattr(self.records, "commit", partial(failing, commit))

    @invariant()
    def is_as_the_model_says(self) -> None:
        self.expect_as_the_model_says()

    @rule()
    def restart(self) -> None:
        """Close the store in good order and open it again: everything is as it was, to the ns."""
        self.run(self.namespace.flush())
        before = tree(self.namespace)
        self.records.close()
        self.records, self.namespace = opened(self.directory)
        self.model.restart()
        self.gone.clear()
        expected = self.model.tree()
        assert tree(self.namespace) == {
            path: (*expected[path], *shown[-3:])
            for path, shown in before.items()
            if path in expected
        }

    @rule()
    def crash(self) -> None:
        """Go on from what a killed daemon leaves."""
        left = crashed(self.directory, self.base / "left")
        self.records.close()
        shutil.rmtree(self.directory)
        left.rename(self.directory)
        self.records, self.namespace = opened(self.directory)
        self.model.restart()
        self.gone.clear()

    @rule()
    def load_a_crashed_copy(self) -> None:
        records, namespace = opened(crashed(self.directory, self.base / "copy"))
        try:
            check(namespace)
            unpublished = {
                path for path, inode in walk(self.namespace) if inode.is_file and not inode.version
            }
            shown = self.model.tree()
            assert tree(namespace, times=False) == {
                path: shown[path] for path in shown if path not in unpublished
            }
        finally:
            records.close()


NamespaceOnMap.TestCase.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestNamespaceOnMap = NamespaceOnMap.TestCase


# -- one promise each ------------------------------------------------------------------------------


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Map]:
    records = Map(str(tmp_path / "names"))
    yield records
    records.close()


@pytest.fixture
def namespace(records: Map) -> Namespace:
    return reloaded(records)


def reloaded(records: Map) -> Namespace:
    return run(load_own(records))


def make(namespace: Namespace, parent: int, name: bytes, mode: int, version: int = 1) -> Inode:
    return run(namespace.create(parent, name, mode, 0, 0, version=version))


def test_dotdot_of_removed_directory_in_a_removed_directory_is_stale(namespace: Namespace) -> None:
    outer = make(namespace, ROOT_INO, b"outer", DIRECTORY)
    inner = make(namespace, outer.ino, b"inner", DIRECTORY)
    make(namespace, ROOT_INO, b"other", DIRECTORY)
    run(while_open(namespace, namespace.rmdir(outer.ino, b"inner")))
    run(namespace.rmdir(ROOT_INO, b"outer"))
    assert error_of(lambda: namespace.lookup(inner.ino, b"..")) == "ESTALE"
    move = lambda: run(  # noqa: E731
        namespace.rename(ROOT_INO, b"other", inner.ino, b"x", 0)
    )
    assert error_of(move) == "ENOENT"


def test_a_directory_cannot_be_moved_below_itself_nor_exchanged_with_what_holds_it(
    namespace: Namespace,
) -> None:
    outer = make(namespace, ROOT_INO, b"outer", DIRECTORY)
    inner = make(namespace, outer.ino, b"inner", DIRECTORY)
    before = tree(namespace)

    def rename(parent: int, name: bytes, to: int, new_name: bytes, flags: int) -> str:
        return error_of(lambda: run(namespace.rename(parent, name, to, new_name, flags)))

    assert rename(ROOT_INO, b"outer", inner.ino, b"x", 0) == "EINVAL"
    assert rename(ROOT_INO, b"outer", outer.ino, b"inner", RENAME_EXCHANGE) == "EINVAL"
    assert rename(outer.ino, b"inner", ROOT_INO, b"outer", RENAME_EXCHANGE) == "EINVAL"
    assert rename(outer.ino, b"inner", ROOT_INO, b"outer", 0) == "ENOTEMPTY"
    assert tree(namespace) == before


def test_a_change_of_the_mode_never_changes_the_type(namespace: Namespace) -> None:
    inode = make(namespace, ROOT_INO, b"file", FILE | 0o644)
    changed = run(namespace.set_attributes(inode.ino, mode=DIRECTORY | 0o4711))
    assert changed.mode == FILE | 0o4711


@pytest.mark.parametrize("years", [-100_000, -400, 300, 1000, 100_000])
def test_times_beyond_what_is_kept_become_the_nearest_that_is(
    records: Map, namespace: Namespace, years: int
) -> None:
    """As Linux does for a filesystem whose times do not reach so far."""
    time_ns = years * 365 * 86400 * 10**9
    inode = make(namespace, ROOT_INO, b"file", FILE)
    run(namespace.set_attributes(inode.ino, atime_ns=time_ns, mtime_ns=time_ns))
    loaded = reloaded(records).inode(inode.ino)
    nearest = max(-(2**63), min(time_ns, 2**63 - 1))
    assert (loaded.atime_ns, loaded.mtime_ns) == (nearest, nearest)
    run(namespace.publish(NewVersion(inode.ino, ContentId(1), 1, 1, time_ns)))
    assert reloaded(records).inode(inode.ino).mtime_ns == nearest


def test_xattrs_of_one_inode_have_a_limit_together(namespace: Namespace) -> None:
    ino = make(namespace, ROOT_INO, b"file", FILE).ino
    value = bytes(XATTR_SIZE_MAX)
    for number in range(15):
        run(namespace.set_xattr(ino, b"user.%d" % number, value))
    before = dict(namespace.inode(ino).xattrs)
    assert error_of(lambda: run(namespace.set_xattr(ino, b"user.15", value))) == "ENOSPC"
    assert namespace.inode(ino).xattrs == before
    run(namespace.set_xattr(ino, b"user.14", value))


def test_a_change_takes_one_commit_and_few_records(records: Map, namespace: Namespace) -> None:
    """A new file that nobody has closed yet waits for the commit of its first version."""
    counted: Counter[str] = Counter()
    calls = {name: getattr(records, name) for name in ("get", "put", "commit")}

    def count(name: str, *args: Any) -> Any:
        counted[name] += 1
        return calls[name](*args)

    def costs(doing: Coroutine[Any, Any, object]) -> Counter[str]:
        counted.clear()
        run(doing)
        return +counted

    make(namespace, ROOT_INO, b"before", FILE)
    with pytest.MonkeyPatch.context() as patch:
        for name in calls:
            patch.setattr(records, name, partial(count, name))
        made = namespace.create(ROOT_INO, b"file", FILE, 0, 0, durable=False)
        assert costs(made) == {"get": 2, "put": 3}
        file = namespace.lookup(ROOT_INO, b"file")
        assert file is not None
        version = namespace.publish(NewVersion(file.ino, ContentId(1), 1, 1, 1))
        assert costs(version) == {"put": 1, "commit": 1}
        moved = namespace.rename(ROOT_INO, b"file", ROOT_INO, b"moved", 0)
        assert costs(moved) == {"get": 4, "put": 4, "commit": 1}
        gone = namespace.unlink(ROOT_INO, b"moved")
        assert costs(gone) == {"get": 2, "put": 3, "commit": 1}


def test_a_link_to_a_file_reads_few_of_its_names(
    records: Map, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where changes below its directories are waited for, and where they have a quota."""
    read = 0

    def counted(start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        nonlocal read
        for found in scan(start, end):
            read += 1
            yield found

    scan = records.range
    places = [make(namespace, ROOT_INO, b"%d" % number, DIRECTORY).ino for number in range(3)]
    run(namespace.set_xattr(places[1], b"user.irdmafs.quota_inodes", b"9"))
    file = make(namespace, places[1], b"file", FILE)
    before = namespace.watches.count(places[0])
    for number in range(100):
        run(namespace.link(file.ino, places[number % 2], b"name%d" % number))
    monkeypatch.setattr(records, "range", counted)
    run(namespace.link(file.ino, places[1], b"one more"))
    assert namespace.watches.count(places[0]) > before
    assert set(namespace.parents_of(file.ino)) == set(places[:2])
    assert read < 20


def test_files_without_a_record_let_others_stay_decoded(namespace: Namespace) -> None:
    for _ in range(9):
        run(namespace.orphan(FILE, 0, 0))
    namespace.inodes._kept_max = 4
    file = make(namespace, ROOT_INO, b"file", FILE)
    known = namespace.inodes[file.ino]
    make(namespace, ROOT_INO, b"other", FILE)
    assert namespace.inodes[file.ino] is known


def test_large_attributes_of_many_files_leave_the_memory(namespace: Namespace) -> None:
    files = [make(namespace, ROOT_INO, b"%d" % number, FILE).ino for number in range(40)]
    for ino, number in itertools.product(files, range(8)):
        run(namespace.set_xattr(ino, b"user.%d" % number, bytes(65_000)))
    for ino in files:
        assert len(namespace.inodes[ino].xattrs) == 8
    assert sum(namespace.inodes.at_hand(ino) is not None for ino in files) < 35


# -- what a crash or damage leaves -------------------------------------------------------------------


def test_what_had_no_name_at_a_crash_is_gone_after_it(records: Map, namespace: Namespace) -> None:
    for name, mode in ((b"file", FILE), (b"link", SYMLINK), (b"directory", DIRECTORY)):
        make(namespace, ROOT_INO, name, mode)
        if mode == DIRECTORY:
            run(while_open(namespace, namespace.rmdir(ROOT_INO, name)))
        else:
            run(while_open(namespace, namespace.unlink(ROOT_INO, name)))
    assert len(namespace.inodes) == 4
    assert set(reloaded(records).inodes) == {ROOT_INO}
    root = bytes(7) + b"\1"
    assert [key for key, _ in records.range(b"a", b"\xff")] == [b"i" + root, b"t" + root]


def test_numbers_of_inodes_that_a_crash_took_are_given_to_no_other_at_once(
    records: Map, namespace: Namespace
) -> None:
    lost = make(namespace, ROOT_INO, b"lost", FILE, version=0)
    assert make(reloaded(records), ROOT_INO, b"new", FILE).ino > lost.ino


@pytest.mark.parametrize("record", [b"garbage", b"", None])
def test_a_damaged_record_is_an_error_that_names_it_and_harms_nothing_else(
    records: Map, namespace: Namespace, record: bytes | None
) -> None:
    damaged = make(namespace, ROOT_INO, b"file", FILE)
    make(namespace, ROOT_INO, b"other", FILE)
    key = b"i" + damaged.ino.to_bytes(8, "big")
    records.put(key, record)
    namespace.inodes.clear()
    with pytest.raises(OSError, match=rf"inode {damaged.ino} is (damaged|missing)") as caught:
        namespace.lookup(ROOT_INO, b"file")
    assert caught.value.errno == errno.EIO
    assert namespace.lookup(ROOT_INO, b"other") is not None
    assert len(namespace.children(ROOT_INO)) == 2
