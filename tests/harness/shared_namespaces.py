"""Several hosts' namespaces on one etcd, for tests: starting, driving and comparing them."""

import errno
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import trio

from harness.etcd_server import EtcdKeys
from harness.models.invariants import check, walk
from harness.models.namespace import DIRECTORY, FILE
from irdmafs.backend.cluster.replica import Replica
from irdmafs.backend.etcd.engine import EtcdEngine
from irdmafs.backend.kv import Event
from irdmafs.backend.model.records import ContentId
from irdmafs.backend.namespace import (
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    ROOT_INO,
    Inode,
    Namespace,
    NewVersion,
    SharedCommitter,
    Tree,
)
from irdmafs.backend.namespace.events import Listener
from irdmafs.backend.namespace.others import Claims
from irdmafs.backend.namespace.reading import Reader
from irdmafs.backend.unwrap import background

Result = TypeVar("Result")


class Lagging(Replica):
    """Tells its consumers only of what somebody waits for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held_back: deque[tuple[int, Sequence[Event]]] = deque()
        self._wanted = 0

    def _apply(self, revision: int, events: Sequence[Event]) -> None:
        self._held_back.append((revision, events))
        self._tell()

    async def wait_applied(self, revision: int) -> None:
        self._wanted = max(self._wanted, revision)
        self._tell()
        await super().wait_applied(revision)

    def _tell(self) -> None:
        while self._held_back and self._held_back[0][0] <= self._wanted:
            super()._apply(*self._held_back.popleft())


class HostNamespace(Namespace):
    """One host's namespace. Tests may set what it is told, what it is to hold, and which mounts have a
    session, at any time. `maker` is the number of its mount; of more than `ahead` names it reads those
    that it uses."""

    def __init__(
        self,
        engine: EtcdEngine,
        hub: type[Replica] = Replica,
        *,
        maker: int = 0,
        claims: Claims | None = None,
        ahead: int | None = None,
    ) -> None:
        self.engine = engine
        self.ended: set[int] = set()
        self.held: Callable[[int], bool] = lambda ino: False
        self.listener: Listener | None = None
        self.after_commit: Callable[[tuple[int, ...], int], Awaitable[None]] | None = None
        tree = Tree(listener=self, maker=maker, is_mounted=lambda maker: maker not in self.ended)
        tree.holders.append(lambda ino: self.held(ino))
        # Directories that anybody follows.
        self.followed: set[int] = set()
        names = None if ahead is None else Reader(tree, engine, ahead, lambda: self.followed)
        self.hub = hub(engine, (tree,), names=names)
        self.committer = SharedCommitter(
            tree, engine, self.hub, claims=claims, after_commit=self._committed
        )
        super().__init__(tree, self.committer)

    async def start(self, nursery: trio.Nursery) -> None:
        await self.hub.start(nursery)
        await self.ensure_root()

    def inode_changed(self, old: Inode | None, new: Inode | None) -> None:
        if self.listener is not None:
            self.listener.inode_changed(old, new)

    def name_changed(self, parent: int, name: bytes, old_ino: int, new_ino: int) -> None:
        if self.listener is not None:
            self.listener.name_changed(parent, name, old_ino, new_ino)

    def kept(self) -> None:
        """Do nothing: `listener` was told of the inodes and names."""

    async def _committed(self, directories: tuple[int, ...], revision: int) -> None:
        if self.after_commit is not None:
            await self.after_commit(directories, revision)


@asynccontextmanager
async def host(
    keys: EtcdKeys,
    hub: type[Replica] = Replica,
    *,
    maker: int = 0,
    claims: Claims | None = None,
    ahead: int | None = None,
) -> AsyncIterator[HostNamespace]:
    async with EtcdEngine(keys.endpoints, keys.prefix) as engine, background() as nursery:
        namespace = HostNamespace(engine, hub, maker=maker, claims=claims, ahead=ahead)
        await namespace.start(nursery)
        yield namespace


@asynccontextmanager
async def hosts(
    keys: EtcdKeys, count: int, hub: type[Replica] = Replica
) -> AsyncIterator[list[HostNamespace]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(host(keys, hub)) for _ in range(count)]


def run(test: Callable[[], Awaitable[Result]]) -> Result:
    async def limited() -> Result:
        with trio.fail_after(100):
            return await test()

    return trio.run(limited)


def fields(inode: Inode) -> tuple[Any, ...]:
    """All that hosts agree on: of several names, each has another first one."""
    passed_over = ("parent", "name") if inode.more else ()
    return tuple(getattr(inode, name) for name in Inode.__slots__ if name not in passed_over)


def everything(namespace: Namespace) -> dict[Any, Any]:
    shown: dict[Any, Any] = {path: fields(inode) for path, inode in walk(namespace)}
    return shown | {ino: fields(inode) for ino, inode in namespace.inodes.items()}


async def expect_all_equal(keys: EtcdKeys, namespaces: Sequence[HostNamespace]) -> None:
    """All replicas are the same, sound, and what a host that starts now loads."""
    for namespace in namespaces:
        await namespace.hub.barrier()
        check(namespace)
    async with host(keys) as fresh:
        for namespace in namespaces:
            assert everything(namespace) == everything(fresh)


async def error_of(doing: Awaitable[object]) -> str:
    try:
        await doing
    except OSError as error:
        assert error.errno is not None
        return errno.errorcode[error.errno]
    return "ok"


async def all_at_once(*doing: Coroutine[Any, Any, object]) -> list[str]:
    """Run them concurrently; what each ended with."""
    ends = [""] * len(doing)

    async def one(number: int) -> None:
        ends[number] = await error_of(doing[number])

    async with trio.open_nursery() as nursery:
        for number in range(len(doing)):
            nursery.start_soon(one, number)
    return ends


def found(namespace: Namespace, parent: int, name: bytes) -> Inode:
    inode = namespace.lookup(parent, name)
    assert inode is not None
    return inode


class Worker:
    """Does random things in a few directories, with names that everybody uses."""

    def __init__(self, namespace: Namespace, random_: random.Random) -> None:
        self.namespace = namespace
        self.random = random_
        self.done: dict[str, int] = {}

    def directory(self) -> int:
        inodes = self.namespace.inodes
        return self.random.choice([ino for ino, inode in inodes.items() if inode.is_dir])

    def name(self) -> bytes:
        return self.random.choice([b"a", b"b", b"c", b"d"])

    def file(self) -> int:
        inodes = self.namespace.inodes
        return self.random.choice([ROOT_INO, *(i for i, inode in inodes.items() if inode.is_file)])

    def choose(self) -> tuple[str, Coroutine[Any, Any, object]]:
        n, parent, name = self.namespace, self.directory(), self.name()
        to, new = self.directory(), self.name()
        match self.random.randrange(10):
            case 0 | 1:
                return "create", self.make(parent, name, FILE)
            case 2:
                return "mkdir", self.make(parent, name, DIRECTORY)
            case 3:
                return "link", n.link(self.file(), parent, name)
            case 4:
                return "unlink", n.unlink(parent, name)
            case 5:
                return "rmdir", n.rmdir(parent, name)
            case 6 | 7:
                return "rename", n.rename(parent, name, to, new, 0)
            case 8:
                flags = self.random.choice([RENAME_EXCHANGE, RENAME_NOREPLACE])
                return "exchange", n.rename(parent, name, to, new, flags)
            case _:
                return "publish", n.publish(
                    NewVersion(self.file(), ContentId(self.random.getrandbits(40)), 1, 1, 1)
                )

    async def make(self, parent: int, name: bytes, mode: int) -> None:
        made = await self.namespace.create(parent, name, mode, 0, 0, version=1)
        inode = self.namespace.inodes.get(made.ino)
        if inode is not None and not inode.nlink:
            self.namespace.tree.drop(made.ino)  # another host was quick to remove it

    async def work(self, steps: int) -> None:
        for _ in range(steps):
            what, doing = self.choose()
            end = await error_of(doing)
            assert end in (
                "ok", "EEXIST", "ENOENT", "ENOTDIR", "EISDIR", "ENOTEMPTY", "EINVAL", "ESTALE",
                "EPERM",
            ), what  # fmt: skip
            if end == "ok":
                self.done[what] = self.done.get(what, 0) + 1


class Mirror:
    """A copy of a namespace, without local orphans, kept by what its listeners are told alone."""

    def __init__(self, namespace: HostNamespace) -> None:
        self.namespace = namespace
        self.inodes = {ino: fields(inode) for ino, inode in namespace.inodes.items()}
        self.names = _names_in(namespace)
        namespace.listener = self

    def inode_changed(self, old: Inode | None, new: Inode | None) -> None:
        known = new or old
        assert known is not None
        expected = fields(old) if old is not None and old.nlink else None
        assert self.inodes.pop(known.ino, None) == expected
        if new is not None and new.nlink:
            self.inodes[new.ino] = fields(new)

    def name_changed(self, parent: int, name: bytes, old_ino: int, new_ino: int) -> None:
        assert self.names.pop((parent, name), 0) == old_ino != new_ino
        if new_ino:
            self.names[parent, name] = new_ino

    def kept(self) -> None:
        """Do nothing: the changes were told."""

    def expect_equal(self) -> None:
        assert self.inodes == {
            ino: fields(inode) for ino, inode in self.namespace.inodes.items() if inode.nlink
        }
        assert self.names == _names_in(self.namespace)


def _names_in(namespace: Namespace) -> dict[tuple[int, bytes], int]:
    return {
        (ino, name): child
        for ino, inode in namespace.inodes.items()
        if inode.is_dir
        for name, child in namespace.children(ino)
    }
