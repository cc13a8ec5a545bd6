"""The directory tree on a real engine: against a model, over crashes, full stores and damage."""

import errno
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from invariants import check, walk
from irdmafs.backend.kv import Delete, NoSpace, Put
from irdmafs.backend.kv.sqlite import SQLiteEngine
from irdmafs.backend.namespace import (
    NAME_MAX,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    ROOT_INO,
    XATTR_SIZE_MAX,
    Inode,
    Namespace,
    fail,
)

from irdmafs.inline import run

Result = TypeVar("Result")
Tree = dict[bytes, tuple[Any, ...]]

FILE, DIRECTORY, SYMLINK, FIFO = stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO


# -- looking at a namespace ------------------------------------------------------------------------


def opened(directory: Path) -> tuple[SQLiteEngine, Namespace]:
    engine = SQLiteEngine(str(directory / "kv.sqlite"), power_safe=False)
    namespace = Namespace(engine)
    try:
        run(namespace.load())
    except BaseException:
        run(engine.close())
        raise
    return engine, namespace


def crashed(directory: Path, copy: Path) -> Path:
    """What a daemon that is killed now leaves behind."""
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for path in directory.glob("kv.sqlite*"):
        shutil.copyfile(path, copy / path.name)
    return copy


def fields(inode: Inode, *, times: bool = True) -> tuple[Any, ...]:
    shown = [
        inode.ino, inode.mode, inode.uid, inode.gid, inode.nlink, inode.rdev, inode.size,
        inode.blocks, inode.version, inode.extent, inode.parent, inode.target, inode.xattrs,
    ]  # fmt: skip
    if times:
        shown += [inode.atime_ns, inode.mtime_ns, inode.ctime_ns]
    return tuple(shown)


def tree(namespace: Namespace, *, times: bool = True) -> Tree:
    return {path: fields(inode, times=times) for path, inode in walk(namespace)}


def everything(engine: SQLiteEngine, namespace: Namespace) -> tuple[Any, ...]:
    inodes = {ino: (*fields(inode), inode.revision) for ino, inode in namespace.inodes.items()}
    return tree(namespace), inodes, engine.revision, run(engine.range(b"", b"\xff"))


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except OSError as error:
        assert error.errno is not None
        return errno.errorcode[error.errno]
    return "ok"


# -- the model -------------------------------------------------------------------------------------


class Thing:
    """An inode of the model. `names` counts the names of what is not a directory."""

    def __init__(self, mode: int, uid: int, gid: int, version: int = 0) -> None:
        self.ino = 0
        self.mode = mode
        self.uid = uid
        self.gid = gid
        self.version = version
        self.content = (0, 0, 0)  # extent, size, blocks
        self.target = b""
        self.rdev = 0
        self.xattrs: dict[bytes, bytes] = {}
        self.times: dict[str, int] = {}
        self.names = 0
        self.entries: dict[bytes, Thing] = {}
        self.parent: Thing | None = None  # of a directory
        self.removed = False

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def nlink(self) -> int:
        if not self.is_dir:
            return self.names
        return 0 if self.removed else 2 + sum(child.is_dir for child in self.entries.values())


class Model:
    """A tree of dictionaries, and the errors of POSIX in the order in which Linux checks them."""

    def __init__(self) -> None:
        self.root = Thing(DIRECTORY | 0o755, os.getuid(), os.getgid())
        self.root.ino = ROOT_INO
        self.held: list[Thing] = []  # without a name, but something has them open

    def things(self) -> list[Thing]:
        found: dict[int, Thing] = {}

        def visit(thing: Thing) -> None:
            found[thing.ino] = thing
            for child in thing.entries.values():
                visit(child)

        visit(self.root)
        return [*found.values(), *self.held]

    def lookup(self, parent: Thing, name: bytes) -> Thing | None:
        if not parent.is_dir:
            raise fail(errno.ENOTDIR)
        if name == b".":
            return parent
        if name == b"..":
            return parent.parent or parent
        if len(name) > NAME_MAX:
            raise fail(errno.ENAMETOOLONG)
        return parent.entries.get(name)

    def _existing(self, parent: Thing, name: bytes) -> Thing:
        found = self.lookup(parent, name)
        if found is None or name in (b".", b".."):
            raise fail(errno.ENOENT)
        return found

    def create(self, parent: Thing, name: bytes, thing: Thing) -> None:
        if self.lookup(parent, name) is not None:
            raise fail(errno.EEXIST)
        if parent.removed:
            raise fail(errno.ENOENT)
        if parent.mode & stat.S_ISGID:
            thing.gid = parent.gid
            if thing.is_dir:
                thing.mode |= stat.S_ISGID
        self._enter(parent, name, thing)

    def _enter(self, parent: Thing, name: bytes, thing: Thing) -> None:
        parent.entries[name] = thing
        if thing.is_dir:
            thing.parent = parent
        else:
            thing.names += 1

    def _leave(self, parent: Thing, name: bytes, in_use: bool) -> None:
        thing = parent.entries.pop(name)
        if thing.is_dir:
            thing.removed = True
        else:
            thing.names -= 1
        if in_use and not thing.nlink:
            self.held.append(thing)

    def link(self, thing: Thing, parent: Thing, name: bytes) -> None:
        if self.lookup(parent, name) is not None:
            raise fail(errno.EEXIST)
        if thing.is_dir:
            raise fail(errno.EPERM)
        if parent.removed:
            raise fail(errno.ENOENT)
        if thing in self.held:
            self.held.remove(thing)
        self._enter(parent, name, thing)

    def unlink(self, parent: Thing, name: bytes, in_use: bool) -> None:
        if self._existing(parent, name).is_dir:
            raise fail(errno.EISDIR)
        self._leave(parent, name, in_use)

    def rmdir(self, parent: Thing, name: bytes, in_use: bool) -> None:
        found = self._existing(parent, name)
        if not found.is_dir:
            raise fail(errno.ENOTDIR)
        if found.entries:
            raise fail(errno.ENOTEMPTY)
        self._leave(parent, name, in_use)

    def rename(
        self, parent: Thing, name: bytes, to: Thing, new_name: bytes, flags: int, in_use: bool
    ) -> None:
        if flags not in (0, RENAME_NOREPLACE, RENAME_EXCHANGE):
            raise fail(errno.EINVAL)
        moved, replaced = self._existing(parent, name), self.lookup(to, new_name)
        if flags == RENAME_NOREPLACE and replaced is not None:
            raise fail(errno.EEXIST)
        if new_name in (b".", b".."):
            raise fail(errno.EBUSY)
        if flags == RENAME_EXCHANGE and replaced is None:
            raise fail(errno.ENOENT)
        if replaced is moved:
            return
        if to.removed:
            raise fail(errno.ENOENT)
        if self._contains(moved, to):
            raise fail(errno.EINVAL)
        if flags == RENAME_EXCHANGE:
            assert replaced is not None
            if self._contains(replaced, parent):
                raise fail(errno.EINVAL)
            parent.entries[name], to.entries[new_name] = replaced, moved
            moved.parent = to if moved.is_dir else None
            replaced.parent = parent if replaced.is_dir else None
            return
        if replaced is not None:
            if moved.is_dir and not replaced.is_dir:
                raise fail(errno.ENOTDIR)
            if replaced.is_dir and not moved.is_dir:
                raise fail(errno.EISDIR)
            if replaced.entries:
                raise fail(errno.ENOTEMPTY)
            self._leave(to, new_name, in_use)
        to.entries[new_name] = parent.entries.pop(name)
        if moved.is_dir:
            moved.parent = to

    @staticmethod
    def _contains(thing: Thing, place: Thing | None) -> bool:
        while place is not None and place is not thing:
            place = place.parent
        return place is thing

    def set_xattr(self, thing: Thing, name: bytes, value: bytes, flags: int) -> None:
        if flags == os.XATTR_CREATE and name in thing.xattrs:
            raise fail(errno.EEXIST)
        if flags == os.XATTR_REPLACE and name not in thing.xattrs:
            raise fail(errno.ENODATA)
        if len(name) > NAME_MAX:
            raise fail(errno.ERANGE)
        if len(value) > XATTR_SIZE_MAX:
            raise fail(errno.E2BIG)
        thing.xattrs[name] = value

    def remove_xattr(self, thing: Thing, name: bytes) -> None:
        if thing.xattrs.pop(name, None) is None:
            raise fail(errno.ENODATA)

    def restart(self) -> None:
        """A new daemon finds no open files, and drops what was never published."""
        self.held.clear()
        for thing in self.things():
            for name, child in list(thing.entries.items()):
                if stat.S_ISREG(child.mode) and child.version == 0:
                    del thing.entries[name]

    def tree(self) -> Tree:
        shown: Tree = {}

        def show(path: bytes, thing: Thing) -> None:
            extent, size, blocks = thing.content
            shown[path or b"/"] = (
                thing.ino, thing.mode, thing.uid, thing.gid, thing.nlink, thing.rdev,
                size or len(thing.target), blocks, thing.version, extent,
                thing.parent.ino if thing.parent else 0, thing.target, thing.xattrs,
            )  # fmt: skip
            for name, child in thing.entries.items():
                show(path + b"/" + name, child)

        show(b"", self.root)
        return shown


names = st.sampled_from(
    [b"a", b"b", b"c", b"\xff\xfe", b"n" * NAME_MAX, b"n" * (NAME_MAX + 1), b".", b".."]
)
# Which of the things there are is meant: taken modulo their number, so that small ones are old.
index = st.integers(0, 63)


class NamespaceAgainstModel(RuleBasedStateMachine):
    """Every operation gives the model's result or errno; a full store or a crash changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="irdmafs-namespace-"))
        self.directory = self.base / "store"
        self.directory.mkdir()
        self.engine, self.namespace = opened(self.directory)
        self.model = Model()
        self.gone: list[int] = []

    def teardown(self) -> None:
        run(self.engine.close())
        shutil.rmtree(self.base)

    def pick(self, number: int, *, directory: bool = True) -> Thing:
        """One of the inodes; rarely, when a directory is meant, something else."""
        things = self.model.things()
        if directory and number % 8:
            things = [thing for thing in things if thing.is_dir]
        return things[number % len(things)]

    def both(
        self,
        real: Callable[[], Coroutine[Any, Any, Result]],
        expected: Callable[[], None],
        *,
        full: bool,
    ) -> Result | None:
        """Do it to both; with `full`, first to a store that has no room for it."""
        known = set(self.namespace.inodes)
        result, error, found_full = self.attempt(real, full=full)
        if found_full:
            assert error == "ENOSPC"
            result, error, _ = self.attempt(real, full=False)
        assert error == error_of(expected)
        self.gone += known - set(self.namespace.inodes)
        return result

    def attempt(
        self, call: Callable[[], Coroutine[Any, Any, Result]], *, full: bool
    ) -> tuple[Result | None, str, bool]:
        """Result, error, and whether the call found the store full: then it left no trace."""
        before = everything(self.engine, self.namespace) if full else ()
        asked = False

        async def transact(*args: object, **kwargs: object) -> int:
            nonlocal asked
            asked = True
            raise NoSpace("full")

        with pytest.MonkeyPatch.context() as patch:
            if full:
                patch.setattr(self.engine, "transact", transact)
            try:
                return run(call()), "ok", False
            except OSError as problem:
                error = errno.errorcode[problem.errno or 0]
        if asked:
            assert everything(self.engine, self.namespace) == before
        return None, error, asked

    @rule(
        parent=index,
        name=names,
        kind=st.sampled_from([FILE, FILE, DIRECTORY, DIRECTORY, SYMLINK, FIFO]),
        mode=st.sampled_from([0o644, 0o4755, 0o2775, 0o1777]),
        version=st.integers(0, 1),
        full=st.booleans(),
    )
    def create(
        self, parent: int, name: bytes, kind: int, mode: int, version: int, full: bool
    ) -> None:
        place = self.pick(parent)
        thing = Thing(kind | mode, 7, 8, version)
        what: dict[str, Any] = {"version": version}
        if kind == SYMLINK:
            what["target"] = thing.target = b"../somewhere"
        elif kind == FIFO:
            what["rdev"] = thing.rdev = 5
        elif kind == FILE:
            what["durable"] = version > 0  # as for a file that is about to be written
        made = self.both(
            lambda: self.namespace.create(place.ino, name, kind | mode, 7, 8, **what),
            lambda: self.model.create(place, name, thing),
            full=full,
        )
        if made is not None:
            thing.ino = made.ino

    @rule(mode=st.sampled_from([0o600, 0o644]))
    def tmpfile(self, mode: int) -> None:
        thing = Thing(FILE | mode, 7, 8)
        thing.ino = self.namespace.orphan(FILE | mode, 7, 8).ino
        self.model.held.append(thing)

    @rule(what=index, parent=index, name=names, full=st.booleans())
    def link(self, what: int, parent: int, name: bytes, full: bool) -> None:
        thing, place = self.pick(what, directory=False), self.pick(parent)
        self.both(
            lambda: self.namespace.link(thing.ino, place.ino, name),
            lambda: self.model.link(thing, place, name),
            full=full,
        )

    @rule(parent=index, name=names, in_use=st.booleans(), full=st.booleans())
    def unlink(self, parent: int, name: bytes, in_use: bool, full: bool) -> None:
        place = self.pick(parent)
        self.both(
            lambda: self.namespace.unlink(place.ino, name, in_use=in_use),
            lambda: self.model.unlink(place, name, in_use),
            full=full,
        )

    @rule(parent=index, name=names, in_use=st.booleans(), full=st.booleans())
    def rmdir(self, parent: int, name: bytes, in_use: bool, full: bool) -> None:
        place = self.pick(parent)
        self.both(
            lambda: self.namespace.rmdir(place.ino, name, in_use=in_use),
            lambda: self.model.rmdir(place, name, in_use),
            full=full,
        )

    @rule(
        parent=index,
        name=names,
        to=index,
        new_name=names,
        flags=st.sampled_from([0, 0, 0, RENAME_NOREPLACE, RENAME_EXCHANGE, RENAME_EXCHANGE, 3, 4]),
        in_use=st.booleans(),
        full=st.booleans(),
    )
    def rename(
        self,
        parent: int,
        name: bytes,
        to: int,
        new_name: bytes,
        flags: int,
        in_use: bool,
        full: bool,
    ) -> None:
        source, target = self.pick(parent), self.pick(to)
        self.both(
            lambda: self.namespace.rename(
                source.ino, name, target.ino, new_name, flags, in_use=in_use
            ),
            lambda: self.model.rename(source, name, target, new_name, flags, in_use),
            full=full,
        )

    @rule(
        what=index,
        changes=st.dictionaries(
            st.sampled_from(["mode", "uid", "gid", "atime_ns", "mtime_ns"]), st.integers(0, 0o7777)
        ),
        full=st.booleans(),
    )
    def set_attributes(self, what: int, changes: dict[str, int], full: bool) -> None:
        thing = self.pick(what, directory=False)
        times = {key: value for key, value in changes.items() if key.endswith("_ns")}

        def expected() -> None:
            thing.uid = changes.get("uid", thing.uid)
            thing.gid = changes.get("gid", thing.gid)
            thing.mode = stat.S_IFMT(thing.mode) | changes.get("mode", stat.S_IMODE(thing.mode))

        inode = self.both(
            lambda: self.namespace.set_attributes(thing.ino, **changes), expected, full=full
        )
        assert inode is not None
        assert {key: getattr(inode, key) for key in times} == times

    @rule(
        what=index,
        name=st.sampled_from([b"user.a", b"user.b", b"user." + b"n" * NAME_MAX]),
        value=st.sampled_from([b"", b"value", bytes(XATTR_SIZE_MAX), bytes(XATTR_SIZE_MAX + 1)]),
        flags=st.sampled_from([0, os.XATTR_CREATE, os.XATTR_REPLACE]),
        full=st.booleans(),
    )
    def set_xattr(self, what: int, name: bytes, value: bytes, flags: int, full: bool) -> None:
        thing = self.pick(what, directory=False)
        self.both(
            lambda: self.namespace.set_xattr(thing.ino, name, value, flags),
            lambda: self.model.set_xattr(thing, name, value, flags),
            full=full,
        )

    @rule(what=index, name=st.sampled_from([b"user.a", b"user.b"]), full=st.booleans())
    def remove_xattr(self, what: int, name: bytes, full: bool) -> None:
        thing = self.pick(what, directory=False)
        self.both(
            lambda: self.namespace.remove_xattr(thing.ino, name),
            lambda: self.model.remove_xattr(thing, name),
            full=full,
        )

    @rule(
        what=index, extent=st.integers(1, 1 << 40), size=st.integers(1, 1 << 50), full=st.booleans()
    )
    def publish(self, what: int, extent: int, size: int, full: bool) -> None:
        files = [thing for thing in self.model.things() if stat.S_ISREG(thing.mode)]
        if not files:
            return
        thing = files[what % len(files)]

        def expected() -> None:
            thing.version += 1
            thing.content = (extent, size, size // 512)

        inode = self.both(
            lambda: self.namespace.publish(thing.ino, extent, size, size // 512, 12345),
            expected,
            full=full,
        )
        assert inode is not None and inode.mtime_ns == 12345 and inode.version == thing.version

    @rule(what=index, full=st.booleans())
    def drop(self, what: int, full: bool) -> None:
        """The last holder of something without a name goes."""
        if not self.model.held:
            return
        thing = self.model.held[what % len(self.model.held)]
        self.both(
            lambda: self.namespace.drop(thing.ino),
            lambda: self.model.held.remove(thing),
            full=full,
        )

    @rule(what=index, name=names)
    def use_what_is_gone(self, what: int, name: bytes) -> None:
        if not self.gone:
            return
        ino = self.gone[what % len(self.gone)]
        namespace = self.namespace
        for call in (
            lambda: run(namespace.create(ino, name, FILE, 0, 0)),
            lambda: run(namespace.link(ino, ROOT_INO, b"not there")),
            lambda: run(namespace.unlink(ino, name, in_use=False)),
            lambda: run(namespace.rmdir(ino, name, in_use=False)),
            lambda: run(namespace.rename(ino, name, ROOT_INO, name, 0, in_use=False)),
            lambda: run(namespace.set_attributes(ino, mode=0)),
            lambda: run(namespace.publish(ino, 1, 1, 1, 1)),
            lambda: namespace.lookup(ino, name),
        ):
            assert error_of(call) == "ESTALE"

    @rule()
    def restart(self) -> None:
        """Close the store in good order and open it again: everything is as it was, to the ns."""
        run(self.namespace.flush())
        before = tree(self.namespace)
        run(self.engine.close())
        self.engine, self.namespace = opened(self.directory)
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
        run(self.engine.close())
        shutil.rmtree(self.directory)
        left.rename(self.directory)
        self.engine, self.namespace = opened(self.directory)
        self.model.restart()
        self.gone.clear()

    @rule()
    def load_a_crashed_copy(self) -> None:
        engine, namespace = opened(crashed(self.directory, self.base / "copy"))
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
            run(engine.close())

    @invariant()
    def is_as_the_model_says(self) -> None:
        assert tree(self.namespace, times=False) == self.model.tree()

    @invariant()
    def link_counts_and_parents_hold(self) -> None:
        check(self.namespace, frozenset(thing.ino for thing in self.model.held))

    @invariant()
    def every_name_is_found_again(self) -> None:
        for thing in self.model.things():
            if thing.is_dir:
                for name, child in thing.entries.items():
                    found = self.namespace.lookup(thing.ino, name)
                    assert found is not None and found.ino == child.ino


NamespaceAgainstModel.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestNamespaceAgainstModel = NamespaceAgainstModel.TestCase


# -- one promise each ------------------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[SQLiteEngine]:
    engine = SQLiteEngine(str(tmp_path / "kv.sqlite"), power_safe=False)
    yield engine
    run(engine.close())


@pytest.fixture
def namespace(engine: SQLiteEngine) -> Namespace:
    return reloaded(engine)


def reloaded(engine: SQLiteEngine) -> Namespace:
    namespace = Namespace(engine)
    run(namespace.load())
    return namespace


def make(namespace: Namespace, parent: int, name: bytes, mode: int, version: int = 1) -> Inode:
    return run(namespace.create(parent, name, mode, 0, 0, version=version))


def test_a_new_store_has_a_root_directory_and_nothing_else(namespace: Namespace) -> None:
    assert [path for path, _ in walk(namespace)] == [b"/"]
    assert namespace.inode(ROOT_INO).mode == DIRECTORY | 0o755
    assert namespace.lookup(ROOT_INO, b"..") is namespace.inode(ROOT_INO)
    check(namespace)


def test_dot_and_dotdot_lead_to_the_directory_and_its_parent(namespace: Namespace) -> None:
    outer = make(namespace, ROOT_INO, b"outer", DIRECTORY)
    inner = make(namespace, outer.ino, b"inner", DIRECTORY)
    for name, found in ((b".", inner.ino), (b"..", outer.ino)):
        inode = namespace.lookup(inner.ino, name)
        assert inode is not None and inode.ino == found
    run(namespace.rename(outer.ino, b"inner", ROOT_INO, b"moved", 0, in_use=False))
    inode = namespace.lookup(inner.ino, b"..")
    assert inode is not None and inode.ino == ROOT_INO


def test_dotdot_of_a_removed_directory_in_a_removed_directory_is_stale(
    namespace: Namespace,
) -> None:
    outer = make(namespace, ROOT_INO, b"outer", DIRECTORY)
    inner = make(namespace, outer.ino, b"inner", DIRECTORY)
    make(namespace, ROOT_INO, b"other", DIRECTORY)
    run(namespace.rmdir(outer.ino, b"inner", in_use=True))
    run(namespace.rmdir(ROOT_INO, b"outer", in_use=False))
    assert error_of(lambda: namespace.lookup(inner.ino, b"..")) == "ESTALE"
    move = lambda: run(  # noqa: E731
        namespace.rename(ROOT_INO, b"other", inner.ino, b"x", 0, in_use=False)
    )
    assert error_of(move) == "ENOENT"


def test_names_of_255_bytes_are_kept_and_longer_ones_refused(namespace: Namespace) -> None:
    longest, longer = b"\xe4" * NAME_MAX, b"\xe4" * (NAME_MAX + 1)
    inode = make(namespace, ROOT_INO, longest, FILE)
    assert namespace.lookup(ROOT_INO, longest) is inode
    for call in (
        lambda: namespace.lookup(ROOT_INO, longer),
        lambda: make(namespace, ROOT_INO, longer, FILE),
        lambda: run(namespace.link(inode.ino, ROOT_INO, longer)),
        lambda: run(namespace.rename(ROOT_INO, longest, ROOT_INO, longer, 0, in_use=False)),
    ):
        assert error_of(call) == "ENAMETOOLONG"


def test_a_directory_cannot_be_moved_below_itself_nor_exchanged_with_what_holds_it(
    namespace: Namespace,
) -> None:
    outer = make(namespace, ROOT_INO, b"outer", DIRECTORY)
    inner = make(namespace, outer.ino, b"inner", DIRECTORY)
    before = tree(namespace)

    def rename(parent: int, name: bytes, to: int, new_name: bytes, flags: int) -> str:
        return error_of(
            lambda: run(namespace.rename(parent, name, to, new_name, flags, in_use=False))
        )

    assert rename(ROOT_INO, b"outer", inner.ino, b"x", 0) == "EINVAL"
    assert rename(ROOT_INO, b"outer", outer.ino, b"inner", RENAME_EXCHANGE) == "EINVAL"
    assert rename(outer.ino, b"inner", ROOT_INO, b"outer", RENAME_EXCHANGE) == "EINVAL"
    assert rename(outer.ino, b"inner", ROOT_INO, b"outer", 0) == "ENOTEMPTY"
    assert tree(namespace) == before


@pytest.mark.parametrize("flags", [0, RENAME_EXCHANGE])
@pytest.mark.parametrize("dots", [b".", b".."])
def test_dot_and_dotdot_are_never_replaced(namespace: Namespace, dots: bytes, flags: int) -> None:
    moved = make(namespace, ROOT_INO, b"moved", DIRECTORY)
    empty = make(namespace, ROOT_INO, b"empty", DIRECTORY)
    move = lambda: run(  # noqa: E731
        namespace.rename(ROOT_INO, b"moved", empty.ino, dots, flags, in_use=False)
    )
    assert error_of(move) == "EBUSY"
    assert {ino for _, ino in namespace.children(ROOT_INO)} == {moved.ino, empty.ino}
    assert namespace.children(empty.ino) == []


def test_a_directory_with_setgid_hands_its_group_down(namespace: Namespace) -> None:
    shared = make(namespace, ROOT_INO, b"shared", DIRECTORY | 0o2775)
    run(namespace.set_attributes(shared.ino, gid=4242))
    file = make(namespace, shared.ino, b"file", FILE | 0o644)
    below = make(namespace, shared.ino, b"below", DIRECTORY | 0o755)
    assert (file.gid, file.mode) == (4242, FILE | 0o644)
    assert (below.gid, below.mode) == (4242, DIRECTORY | 0o2755)


def test_a_change_of_the_mode_never_changes_the_type(namespace: Namespace) -> None:
    inode = make(namespace, ROOT_INO, b"file", FILE | 0o644)
    changed = run(namespace.set_attributes(inode.ino, mode=DIRECTORY | 0o4711))
    assert changed.mode == FILE | 0o4711


@pytest.mark.parametrize("years", [-100_000, -400, 300, 1000, 100_000])
def test_times_beyond_what_is_kept_become_the_nearest_that_is(
    engine: SQLiteEngine, namespace: Namespace, years: int
) -> None:
    """As Linux does for a filesystem whose times do not reach so far."""
    time_ns = years * 365 * 86400 * 10**9
    inode = make(namespace, ROOT_INO, b"file", FILE)
    run(namespace.set_attributes(inode.ino, atime_ns=time_ns, mtime_ns=time_ns))
    loaded = reloaded(engine).inode(inode.ino)
    nearest = max(-(2**63), min(time_ns, 2**63 - 1))
    assert (loaded.atime_ns, loaded.mtime_ns) == (nearest, nearest)
    run(namespace.publish(inode.ino, 1, 1, 1, time_ns))
    assert reloaded(engine).inode(inode.ino).mtime_ns == nearest


def test_changes_in_a_directory_move_its_times(namespace: Namespace) -> None:
    place = make(namespace, ROOT_INO, b"place", DIRECTORY)
    file = make(namespace, ROOT_INO, b"file", FILE)

    def moves_times(call: Callable[[], Coroutine[Any, Any, object]]) -> None:
        run(namespace.set_attributes(place.ino, mtime_ns=1))
        started = time.time_ns()
        run(call())
        inode = namespace.inode(place.ino)
        assert inode.mtime_ns >= started and inode.ctime_ns >= started

    moves_times(lambda: namespace.create(place.ino, b"new", FILE, 0, 0))
    moves_times(lambda: namespace.link(file.ino, place.ino, b"linked"))
    moves_times(lambda: namespace.rename(place.ino, b"new", place.ino, b"n", 0, in_use=False))
    moves_times(lambda: namespace.rename(place.ino, b"n", ROOT_INO, b"n", 0, in_use=False))
    moves_times(lambda: namespace.rename(ROOT_INO, b"n", place.ino, b"n", 0, in_use=False))
    moves_times(lambda: namespace.unlink(place.ino, b"linked", in_use=False))
    moves_times(lambda: namespace.create(place.ino, b"below", DIRECTORY, 0, 0))
    moves_times(lambda: namespace.rmdir(place.ino, b"below", in_use=False))


def test_xattrs_of_one_inode_have_a_limit_together(namespace: Namespace) -> None:
    ino = make(namespace, ROOT_INO, b"file", FILE).ino
    value = bytes(XATTR_SIZE_MAX)
    for number in range(15):
        run(namespace.set_xattr(ino, b"user.%d" % number, value))
    before = dict(namespace.inode(ino).xattrs)
    assert error_of(lambda: run(namespace.set_xattr(ino, b"user.15", value))) == "ENOSPC"
    assert namespace.inode(ino).xattrs == before
    run(namespace.set_xattr(ino, b"user.14", value))


def test_a_file_without_a_name_leaves_nothing_unless_it_is_linked(
    engine: SQLiteEngine, namespace: Namespace
) -> None:
    lost, kept = (namespace.orphan(FILE | 0o600, 0, 0) for _ in range(2))
    run(namespace.set_attributes(lost.ino, mode=0o640))
    run(namespace.set_attributes(kept.ino, mode=0o640))
    run(namespace.link(kept.ino, ROOT_INO, b"kept"))
    run(namespace.publish(kept.ino, 9, 9, 1, 1))
    run(namespace.drop(lost.ino))
    assert set(namespace.inodes) == {ROOT_INO, kept.ino}
    loaded = reloaded(engine)
    check(loaded)
    found = loaded.lookup(ROOT_INO, b"kept")
    assert found is not None and (found.mode, found.extent) == (FILE | 0o640, 9)


# -- what a crash or damage leaves -------------------------------------------------------------------


def test_what_had_no_name_at_a_crash_is_gone_after_it(
    engine: SQLiteEngine, namespace: Namespace
) -> None:
    for name, mode in ((b"file", FILE), (b"link", SYMLINK), (b"directory", DIRECTORY)):
        make(namespace, ROOT_INO, name, mode)
        if mode == DIRECTORY:
            run(namespace.rmdir(ROOT_INO, name, in_use=True))
        else:
            run(namespace.unlink(ROOT_INO, name, in_use=True))
    assert len(namespace.inodes) == 4
    assert set(reloaded(engine).inodes) == {ROOT_INO}
    assert [record.key for record in run(engine.range(b"", b"\xff"))] == [b"i" + bytes(7) + b"\1"]


def test_a_file_that_was_never_published_is_gone_after_a_crash_with_all_its_names(
    engine: SQLiteEngine, namespace: Namespace
) -> None:
    place = make(namespace, ROOT_INO, b"place", DIRECTORY)
    file = make(namespace, ROOT_INO, b"file", FILE, version=0)
    run(namespace.link(file.ino, place.ino, b"second"))
    run(namespace.set_xattr(file.ino, b"user.a", b"1"))
    loaded = reloaded(engine)
    assert [path for path, _ in walk(loaded)] == [b"/", b"/place"]
    check(loaded)


def test_numbers_of_inodes_that_a_crash_took_are_given_to_no_other_at_once(
    engine: SQLiteEngine, namespace: Namespace
) -> None:
    lost = make(namespace, ROOT_INO, b"lost", FILE, version=0)
    assert make(reloaded(engine), ROOT_INO, b"new", FILE).ino > lost.ino


def test_a_wrong_link_count_is_repaired_and_told(
    engine: SQLiteEngine, namespace: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    inode = make(namespace, ROOT_INO, b"file", FILE).copy()
    inode.nlink = 7
    run(engine.transact((), [Put(b"i" + inode.ino.to_bytes(8, "big"), inode.encode())]))
    with caplog.at_level(logging.WARNING):
        loaded = reloaded(engine)
    assert "nlink 7" in caplog.text
    check(loaded)
    check(reloaded(engine))


def test_a_name_without_an_inode_is_removed(engine: SQLiteEngine, namespace: Namespace) -> None:
    inode = make(namespace, ROOT_INO, b"file", FILE)
    run(engine.transact((), [Delete(b"i" + inode.ino.to_bytes(8, "big"))]))
    assert [path for path, _ in walk(reloaded(engine))] == [b"/"]


@pytest.mark.parametrize(
    "damage",
    [
        Put(b"i" + (2).to_bytes(8, "big"), b"garbage"),
        Put(b"i" + (2).to_bytes(8, "big"), b""),
        Put(b"d" + (99).to_bytes(8, "big") + b"name", (1).to_bytes(8, "big")),
    ],
)
def test_a_damaged_record_is_an_error_that_names_it(
    engine: SQLiteEngine, namespace: Namespace, damage: Put
) -> None:
    make(namespace, ROOT_INO, b"file", FILE)
    run(engine.transact((), [damage]))
    with pytest.raises(OSError, match=r"damaged|missing") as caught:
        reloaded(engine)
    assert caught.value.errno == errno.EIO


def test_a_full_store_still_lets_names_go(namespace: Namespace, engine: SQLiteEngine) -> None:
    """Removing asks the engine for its reserve; making does not."""
    asked: dict[str, bool] = {}
    transact = engine.transact
    current = ""

    async def spy(*args: Any, urgent: bool = False, **kwargs: Any) -> int:
        asked[current] = urgent
        return await transact(*args, urgent=urgent, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "transact", spy)
        current = "create"
        file = make(namespace, ROOT_INO, b"file", FILE)
        current = "mkdir"
        make(namespace, ROOT_INO, b"directory", DIRECTORY)
        current = "grow"
        run(namespace.publish(file.ino, 1, 1000, 8, 1))
        current = "shrink"
        run(namespace.publish(file.ino, 2, 10, 8, 1))
        current = "unlink"
        run(namespace.unlink(ROOT_INO, b"file", in_use=True))
        current = "rmdir"
        run(namespace.rmdir(ROOT_INO, b"directory", in_use=False))
    assert [name for name, urgent in asked.items() if urgent] == ["shrink", "unlink", "rmdir"]
