"""The names and attributes that the kernel of this host believes without asking, in a cluster.

In a directory that the mount follows (backend/store/remote/leases) an answer says for how long the kernel
may believe it. A host that changes something there waits for this mount, which first makes its kernel
forget what changed. Only the names and attributes that the kernel may still believe are remembered here.

Names are forgotten all at once, by a new epoch (Linux 6.16): a name has the epoch of the request that it
answered, and is looked up again when it is used in a later epoch. Dropping a single name would take its
directory's lock. The kernel holds that lock while a program here changes the directory and, perhaps, waits
for the other host. A thread that waits for the lock cannot be killed, and keeps the connection of a dead
daemon alive. So an older kernel may not believe.

Attributes are forgotten by inode. The kernel drops answers to requests that are older than that, but not
answers to its own changes (create, link, setattr): their attributes may not be believed, except those of a
new file, which no other host sees.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator

import trio

from ..backend.model.records import ContentId
from ..backend.namespace import ROOT_INO, Inode, Namespace
from ..backend.namespace.attributes import FOLLOW
from .kernel_cache import KernelCache, Name
from .nodes import NodeTable

# The kernel believes no answer that was given longer ago than this (seconds). It is longer than any answer
# allows: a caller may be kept from its processor before it takes the answer in.
_REMEMBERED_S = 7.0
# The kernel is made to forget all names rather than believe more of them.
_NAMES_MAX = 1 << 17
# The kernel keeps inodes that it looked up, and the daemon their nodes, until memory is short. It is
# made to drop removed inodes: at most so many at a time, collected for so many seconds.
_COLLECT_S = 1.0
_COLLECTED_MAX = 1 << 16


class _Said:
    """Names and attributes that the kernel was told, each until a time.monotonic()."""

    __slots__ = ("attributes", "names")

    def __init__(self) -> None:
        self.names: dict[Name, tuple[int, float]] = {}
        self.attributes: dict[int, float] = {}


class Beliefs:
    """Makes the kernel forget what the store tells that it changed (see StoreListener)."""

    def __init__(self, namespace: Namespace, nodes: NodeTable, kernel: KernelCache) -> None:
        self._namespace = namespace
        self._nodes = nodes
        self._kernel = kernel
        self._said, self._said_before = _Said(), _Said()
        self._turns_at = 0.0
        self._own: dict[Name, tuple[Name, ...]] = {}
        self._changed_names: list[tuple[Name, int]] = []
        self._changed_inodes: list[tuple[Inode | None, Inode | None]] = []
        self._left: set[int] = set()
        self._collecting = False
        self.epochs = self.told_inodes = 0

    def content_gone(self, extent: ContentId) -> None:
        """Have the kernel let go of a file that is not kept here any more."""
        for node in self._kernel.backed_by(extent):
            if not node.is_bound:
                self._kernel.drop_backing(node)

    def not_followed(self, directory: int) -> None:
        """Have the kernel forget all names, and the attributes of what lies below a directory."""
        _, inodes = self._below(directory)
        names = bool(self._said.names or self._said_before.names)
        self._forget(names=names, inodes=list(filter(self._take_attributes, inodes)))

    # -- what the kernel is told in answers --------------------------------------------------------

    def say(
        self, ino: int, seconds: float, name: Name | None = None, *, attributes: bool = True
    ) -> None:
        """Note an answer: for so many seconds an inode has its attributes (unless not `attributes`), and a
        name leads to it, if there is one."""
        now = time.monotonic()
        if now > self._turns_at:
            self._said_before, self._said = self._said, _Said()
            self._turns_at = now + _REMEMBERED_S
        said = self._said
        if name is not None:
            if len(said.names) >= _NAMES_MAX:
                self._forget(names=True, inodes=())
            said.names[name] = ino, now + seconds
        if attributes:
            said.attributes[ino] = now + seconds

    def holds(self, name: Name, ino: int, until: float) -> bool:
        """Return whether the kernel, if it still remembers them, believes a name and the attributes of its
        inode until then (time.monotonic())."""
        for said in (self._said, self._said_before):
            found = said.names.get(name)
            if found is not None:
                return (
                    found[0] == ino and found[1] > until and said.attributes.get(ino, 0.0) > until
                )
        return False

    # -- changes -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def changing(self, *names: Name) -> Iterator[None]:
        """Enclose a change of these names by a program of this host. The kernel notes it by itself if it
        succeeds, and believes the new name of a renamed file as long as the old one."""
        self._own.update(dict.fromkeys(names, names))
        try:
            yield
        except BaseException:
            # It may have happened all the same.
            if max(map(self._take_name, names)):
                self._forget(names=True, inodes=())
            raise
        else:
            left_s = max(map(self._take_name, names)) - time.monotonic()
            for parent, name in names if left_s > -_REMEMBERED_S else ():
                with contextlib.suppress(OSError):  # the directory is gone
                    if (inode := self._namespace.lookup(parent, name)) is not None:
                        self.say(inode.ino, left_s, (parent, name), attributes=False)
        finally:
            for key in names:
                self._own.pop(key, None)

    def name_changed(self, parent: int, name: bytes, old_ino: int) -> None:
        self._changed_names.append(((parent, name), old_ino))

    def inode_changed(self, old: Inode | None, new: Inode | None) -> None:
        self._changed_inodes.append((old, new))

    def transaction(self, *, ours: bool) -> None:
        """Forget what changed, at once, since the last call; `ours`: by a program on this mount."""
        names = False
        inodes: set[int] = set()
        for key, old_ino in self._changed_names:
            if ours and key in self._own:
                continue
            if max(map(self._take_name, self._own.get(key, (key,)))):
                names = True
            if old_ino:
                self._collect(old_ino)
        for old, new in self._changed_inodes:
            known = new or old
            assert known is not None
            if new is None or not new.nlink:
                self._let_go(known.ino)
            published = new is not None and old is not None and new.version != old.version
            if (published or not ours) and self._take_attributes(known.ino):
                inodes.add(known.ino)
            if old is None or new is None:
                continue
            if new.is_dir and _leases_of(new) != _leases_of(old):
                believed_names, believed_inodes = self._below(new.ino)
                inodes.update(filter(self._take_attributes, believed_inodes))
            elif published and not ours:
                # Another version is another node.
                believed_names = self._names_of(new)
            else:
                continue
            names = names or any(map(self._take_name, believed_names))
        self._changed_names.clear()
        self._changed_inodes.clear()
        if names or inodes:
            self._forget(names=names, inodes=inodes)

    def _let_go(self, ino: int) -> None:
        """Have the kernel let go of the files of an inode without a name, which it may know for long."""
        for node in self._nodes.of(ino):
            if node.backing_id and not node.is_bound:
                self._kernel.drop_backing(node)

    def _take_name(self, key: Name) -> float:
        """Return until when the kernel believes a name, 0.0 if it does not. It is about to forget it."""
        until = 0.0
        for said in (self._said, self._said_before):
            found = said.names.pop(key, None)
            if found is not None:
                until = max(until, found[1])
        return until

    def _take_attributes(self, ino: int) -> float:
        return max(self._said.attributes.pop(ino, 0.0), self._said_before.attributes.pop(ino, 0.0))

    def _names_of(self, inode: Inode) -> list[Name]:
        """Return the names of an inode that may be believed: of one with several, all names."""
        if inode.more:
            return [*self._said.names, *self._said_before.names]
        return [(inode.parent, inode.name)]

    def _below(self, directory: int) -> tuple[list[Name], list[int]]:
        """Return the names and inodes that are believed because of where the directory was."""
        inodes = self._namespace.inodes
        below: dict[int, bool] = {directory: True, ROOT_INO: False}

        def lies_below(ino: int) -> bool:
            way = []
            while ino not in below:
                way.append(ino)
                below[ino] = False
                inode = inodes.get(ino)
                ino = ROOT_INO if inode is None else inode.parent
            below.update(dict.fromkeys(way, below[ino]))
            return below[ino]

        names = {*self._said.names, *self._said_before.names}
        numbers = {*self._said.attributes, *self._said_before.attributes}
        parents_of = self._namespace.parents_of
        return (
            [key for key in names if lies_below(key[0])],
            [ino for ino in numbers if ino == directory or any(map(lies_below, parents_of(ino)))],
        )

    # -- telling the kernel ------------------------------------------------------------------------

    def _forget(self, *, names: bool, inodes: Iterable[int]) -> None:
        nodes = [one for ino in inodes for one in self._nodes.of(ino) if one.shown and one.lookups]
        self.told_inodes += len(nodes)
        if names:
            self.epochs += 1
            self._said.names.clear()
            self._said_before.names.clear()
        if names or nodes:
            self._kernel.forget(nodes, names=names)

    def _collect(self, ino: int) -> None:
        """Have the kernel drop an inode soon that a name does not lead to any more."""
        if len(self._left) < _COLLECTED_MAX and any(node.lookups for node in self._nodes.of(ino)):
            self._left.add(ino)
            if not self._collecting:
                self._collecting = self._kernel.start_soon(self._prune_collected)

    async def _prune_collected(self) -> None:
        try:
            while self._left:
                await trio.sleep(_COLLECT_S)
                left, self._left = self._left, set()
                self._kernel.prune([node.id for ino in left for node in self._nodes.of(ino)])
        finally:
            self._collecting = False

    def count(self) -> dict[str, int]:
        """Return figures for `irdmafs status`: how often the kernel was made to forget."""
        return {"epochs": self.epochs, "inodes_told": self.told_inodes}


def _leases_of(directory: Inode) -> tuple[int, bytes | None]:
    """Return what decides under which leases everything below a directory is believed."""
    return directory.parent, directory.xattrs.get(FOLLOW)
