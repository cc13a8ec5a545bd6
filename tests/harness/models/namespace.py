"""A model of the namespace, and a machine that does the same things to both (for any engine)."""

import errno
import os
import stat
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from harness.errors import error_of
from harness.models.invariants import check, walk
from harness.open_inodes import while_open
from irdmafs.backend.kv import NoSpace
from irdmafs.backend.kv.map import Map
from irdmafs.backend.model.records import ContentId
from irdmafs.backend.namespace import (
    NAME_MAX,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    ROOT_INO,
    XATTR_SIZE_MAX,
    Inode,
    LocalCommitter,
    Namespace,
    NewVersion,
    fail,
)
from irdmafs.backend.namespace import Tree as NamespaceTree

Result = TypeVar("Result")
Tree = dict[bytes, tuple[Any, ...]]

FILE, DIRECTORY, SYMLINK, FIFO = stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO


async def load_own(records: Map) -> Namespace:
    """The namespace of one host in a map, as a store opens it."""
    tree = NamespaceTree(records)
    committer = LocalCommitter(tree)
    await committer.load()
    return Namespace(tree, committer)


# -- looking at a namespace ------------------------------------------------------------------------


def fields(inode: Inode, *, times: bool = True) -> tuple[Any, ...]:
    shown = [
        inode.ino, inode.mode, inode.uid, inode.gid, inode.nlink, inode.rdev, inode.size,
        inode.blocks, inode.version, inode.extent, inode.parent if inode.is_dir else 0, inode.target,
        inode.xattrs,
    ]  # fmt: skip
    if times:
        shown += [inode.atime_ns, inode.mtime_ns, inode.ctime_ns]
    return tuple(shown)


def tree(namespace: Namespace, *, times: bool = True) -> Tree:
    return {path: fields(inode, times=times) for path, inode in walk(namespace)}


def everything(namespace: Namespace) -> tuple[Any, ...]:
    inodes = {ino: (*fields(inode), inode.revision) for ino, inode in namespace.inodes.items()}
    return tree(namespace), inodes


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
    """Every operation gives the model's result or errno; a full store changes nothing.

    An engine's machine sets `namespace` and `engine`, and runs coroutines with `run`.
    """

    namespace: Namespace
    engine: Any

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.gone: list[int] = []

    def run(self, doing: Coroutine[Any, Any, Result]) -> Result:
        raise NotImplementedError

    def choose_host(self, *things: Thing, in_use: bool = False) -> None:
        """Before each operation on `things`, where there are several hosts. Only one of them has
        files open (`in_use`): it alone knows what has no name."""

    def settle(self) -> None:
        """Let `namespace` know all that has happened."""

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
        if full:
            self.settle()
        known = set(self.namespace.inodes)
        result, error, found_full = self.attempt(real, full=full)
        if found_full:
            assert error == "ENOSPC"
            result, error, _ = self.attempt(real, full=False)
        assert error == error_of(expected)
        held = {thing.ino for thing in self.model.held}
        self.gone += known - set(self.namespace.inodes) - held
        return result

    def do(self, call: str, *args: Any, full: bool, in_use: bool | None = None) -> None:
        """Do a call to both. The namespace takes numbers of inodes. `in_use`: what is removed is open, or
        not; None: nothing is removed."""
        numbers = [one.ino if isinstance(one, Thing) else one for one in args]
        more = () if in_use is None else (in_use,)

        def real() -> Coroutine[Any, Any, object]:
            doing: Coroutine[Any, Any, object] = getattr(self.namespace, call)(*numbers)
            return doing if in_use is None else while_open(self.namespace, doing, is_open=in_use)

        self.both(real, lambda: getattr(self.model, call)(*args, *more), full=full)

    def stored(self) -> object:
        return self.run(self.engine.range(b"", b"\xff"))

    def fill(self, patch: pytest.MonkeyPatch, refuse: Callable[[], None]) -> None:
        """Have the next change of the store find it full."""

        async def transact(*args: object, **kwargs: object) -> None:
            refuse()

        patch.setattr(self.engine, "transact", transact)

    def attempt(
        self, call: Callable[[], Coroutine[Any, Any, Result]], *, full: bool
    ) -> tuple[Result | None, str, bool]:
        """Result, error, and whether the call found the store full: then it left no trace."""
        before = (everything(self.namespace), self.stored()) if full else ()
        asked = False

        def refuse() -> None:
            nonlocal asked
            asked = True
            raise NoSpace("full")

        with pytest.MonkeyPatch.context() as patch:
            if full:
                self.fill(patch, refuse)
            try:
                return self.run(call()), "ok", False
            except OSError as problem:
                error = errno.errorcode[problem.errno or 0]
        if asked:
            assert (everything(self.namespace), self.stored()) == before
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
        self.choose_host(place)
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
        self.choose_host(in_use=True)
        root = self.model.root
        thing = Thing(FILE | mode, 7, root.gid if root.mode & stat.S_ISGID else 8)
        thing.ino = self.run(self.namespace.orphan(FILE | mode, 7, 8)).ino
        self.model.held.append(thing)

    @rule(what=index, parent=index, name=names, full=st.booleans())
    def link(self, what: int, parent: int, name: bytes, full: bool) -> None:
        thing, place = self.pick(what, directory=False), self.pick(parent)
        self.choose_host(thing, place)
        self.do("link", thing, place, name, full=full)

    @rule(parent=index, name=names, in_use=st.booleans(), full=st.booleans())
    def unlink(self, parent: int, name: bytes, in_use: bool, full: bool) -> None:
        place = self.pick(parent)
        self.choose_host(place, in_use=in_use)
        self.do("unlink", place, name, full=full, in_use=in_use)

    @rule(parent=index, name=names, in_use=st.booleans(), full=st.booleans())
    def rmdir(self, parent: int, name: bytes, in_use: bool, full: bool) -> None:
        place = self.pick(parent)
        self.choose_host(place, in_use=in_use)
        self.do("rmdir", place, name, full=full, in_use=in_use)

    @rule(
        parent=index,
        name=names,
        to=index,
        new_name=names,
        flags=st.sampled_from([0, 0, 0, RENAME_NOREPLACE, RENAME_EXCHANGE, RENAME_EXCHANGE, 3, 8]),
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
        self.choose_host(source, target, in_use=in_use)
        self.do("rename", source, name, target, new_name, flags, full=full, in_use=in_use)

    @rule(
        what=index,
        changes=st.dictionaries(
            st.sampled_from(["mode", "uid", "gid", "atime_ns", "mtime_ns"]), st.integers(0, 0o7777)
        ),
        full=st.booleans(),
    )
    def set_attributes(self, what: int, changes: dict[str, int], full: bool) -> None:
        thing = self.pick(what, directory=False)
        self.choose_host(thing)
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
        self.choose_host(thing)
        self.do("set_xattr", thing, name, value, flags, full=full)

    @rule(what=index, name=st.sampled_from([b"user.a", b"user.b"]), full=st.booleans())
    def remove_xattr(self, what: int, name: bytes, full: bool) -> None:
        thing = self.pick(what, directory=False)
        self.choose_host(thing)
        self.do("remove_xattr", thing, name, full=full)

    @rule(
        what=index, extent=st.integers(1, 1 << 40), size=st.integers(1, 1 << 50), full=st.booleans()
    )
    def publish(self, what: int, extent: int, size: int, full: bool) -> None:
        files = [thing for thing in self.model.things() if stat.S_ISREG(thing.mode)]
        if not files:
            return
        thing = files[what % len(files)]
        self.choose_host(thing)

        def expected() -> None:
            thing.version += 1
            thing.content = (extent, size, size // 512)

        inode = self.both(
            lambda: self.namespace.publish(
                NewVersion(thing.ino, ContentId(extent), size, size // 512, 12345)
            ),
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
        self.choose_host(thing)

        async def drop() -> bool:
            return self.namespace.tree.drop(thing.ino)

        self.both(drop, lambda: self.model.held.remove(thing), full=full)

    @rule(what=index, name=names)
    def use_what_is_gone(self, what: int, name: bytes) -> None:
        if not self.gone:
            return
        self.choose_host()
        self.settle()
        ino = self.gone[what % len(self.gone)]
        namespace = self.namespace
        for call in (
            lambda: self.run(namespace.create(ino, name, FILE, 0, 0)),
            lambda: self.run(namespace.link(ino, ROOT_INO, b"not there")),
            lambda: self.run(namespace.unlink(ino, name)),
            lambda: self.run(namespace.rmdir(ino, name)),
            lambda: self.run(namespace.rename(ino, name, ROOT_INO, name, 0)),
            lambda: self.run(namespace.set_attributes(ino, mode=0)),
            lambda: self.run(namespace.publish(NewVersion(ino, ContentId(1), 1, 1, 1))),
            lambda: namespace.lookup(ino, name),
        ):
            assert error_of(call) == "ESTALE"

    def expect_as_the_model_says(self, *, holds: bool = True) -> None:
        """The whole tree; `holds`: this is the host that has files open."""
        namespace = self.namespace
        assert tree(namespace, times=False) == self.model.tree()
        check(namespace, frozenset(thing.ino for thing in self.model.held if holds))
        for thing in self.model.things():
            for name, child in thing.entries.items():
                found = namespace.lookup(thing.ino, name)
                assert found is not None and found.ino == child.ino
