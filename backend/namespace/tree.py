"""The directory tree in memory, which answers every read: data and its invariants, without an engine.

It is changed in two ways: by the commits of an engine that only this process uses (`enact`), or by the
events of a shared engine's watch (`load` and `apply`, as a consumer of the replica hub). Both end in the
same few steps, in this order: times, inodes, names, and last removed inodes, so that each step finds the
data from which it derives parents and link counts.
"""

import contextlib
import errno
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..clock import now_ns
from ..cluster.faults import Faults
from ..cluster.records import NEXT_INO_KEY
from ..kv import Event, KeyValue
from .changes import Commit
from .events import Listener, changes_of, time_of
from .inode import (
    DAMAGED_INO,
    FIRST_VIRTUAL_INO,
    ROOT_INO,
    Dentry,
    Inode,
    fail,
    inode_key,
    name_key,
    time_key,
)
from .names import Names
from .quotas import Quotas
from .watches import Watches

__all__ = ["Listener", "Tree"]

# Numbers from here on are given to inodes only if others were used up: nobody made so many.
_LAST_INOS = FIRST_VIRTUAL_INO // 2


class Tree(Names):
    """The names and inodes that an engine has, and their changes.

    An inode that a holder has open stays without a name when another host removes its last one (a *local
    orphan*: nlink 0, revision 0, known to this process alone). `strict`: an invalid record raises OSError
    EIO, and names without an inode are collected in `dangling` to be removed. Otherwise `faults` are told
    of both. A name whose record is damaged, or whose inode has a damaged record or none, leads to an inode
    that is `damaged`. `maker` and `is_mounted` as for Names."""

    prefixes: tuple[bytes, ...] = (b"d", b"i", b"t", NEXT_INO_KEY)

    def __init__(
        self,
        *,
        listener: Listener | None = None,
        strict: bool = False,
        faults: Faults | None = None,
        maker: int = 0,
        is_mounted: Callable[[int], bool] = lambda maker: True,
    ) -> None:
        super().__init__(maker, is_mounted)
        self._faults = faults or Faults()
        self.dangling: list[tuple[int, bytes]] = []
        # Asked by the number of an inode whether they have it open.
        self.holders: list[Callable[[int], bool]] = []
        # The next inode number that is not reserved, and the revision of that record.
        self.next_block = (ROOT_INO + 1, 0)
        self._listener = listener
        self._strict = strict
        self._is_loaded = False
        # For each directory: when its names last changed, and the ctime of the inode record.
        self._times: dict[int, int] = {}
        self._ctimes: dict[int, int] = {}
        # Inodes that callers of mutations under way want to keep, and those that they remove.
        self._keeping: list[int] = []
        self._removing: list[int] = []
        self.quotas = Quotas(self.inodes, self._children, self.parents_of, self.directories.path_of)
        self.watches = Watches(self.inodes, self.ino_behind, self.parents_of)

    # -- consumer of the replica hub ---------------------------------------------------------------

    def load(self, records: Iterable[KeyValue], revision: int) -> None:
        """Replace the tree by these records. Differences count as events that come now."""
        events: list[Event] = []
        present: set[bytes] = set()
        known, self._is_loaded = self._is_loaded, True
        for record in records:
            if known:
                present.add(record.key)
            if not known or self._differs(record):
                events.append(Event(record.mod_revision, record.key, record.value))
        if known:
            events += [Event(revision, key, None) for key in self._keys() if key not in present]
            self.apply(revision, events)
        else:
            self.take(events)

    def _differs(self, record: KeyValue) -> bool:
        kind, ino = record.key[:1], int.from_bytes(record.key[1:9], "big")
        if kind == b"i":
            inode = self.inodes.get(ino)
            return inode is None or inode.revision != record.mod_revision or ino in self.damaged
        if kind == b"d":
            dentry = self._children.get(ino, {}).get(record.key[9:])
            return (
                dentry is None
                or dentry.revision != record.mod_revision
                or dentry.ino == DAMAGED_INO
            )
        if kind == b"t":
            return self._times.get(ino) != time_of(record.value)
        return True

    def _keys(self) -> Iterable[bytes]:
        for parent, children in self._children.items():
            for name in children:
                yield name_key(parent, name)
        for ino, inode in self.inodes.items():
            if inode.revision:
                yield inode_key(ino)
        for ino in self._times:
            yield time_key(ino)

    def apply(self, revision: int, events: Sequence[Event]) -> None:
        listener = self._listener
        if listener is None:
            self.take(events)
            return
        touched = {int.from_bytes(event.key[1:9], "big") for event in events}
        inodes = {ino: self.inodes.get(ino) for ino in touched}
        names = [
            (parent, name, self.ino_behind(parent, name))
            for parent, name in (
                (int.from_bytes(event.key[1:9], "big"), event.key[9:])
                for event in events
                if event.key.startswith(b"d")
            )
        ]
        self.take(events)
        for ino, old in inodes.items():
            new = self.inodes.get(ino)
            if new is not old:
                listener.inode_changed(old, new)
        for parent, name, old_ino in names:
            new_ino = self.ino_behind(parent, name)
            if new_ino != old_ino:
                listener.name_changed(parent, name, old_ino, new_ino)

    def take(self, events: Iterable[Event]) -> None:
        """Apply the events of one transaction, or of several at once."""
        times, damaged, inodes, names, gone, next_ino = changes_of(events, self._complain)
        for ino, time_ns in times:
            self._set_time(ino, time_ns)
        touched = self.watches.touched(names, inodes) if self.watches.in_use else ()
        self.directories.watch()
        for inode in inodes:
            self._take_inode(inode)
        for ino, revision in damaged:
            self._put_damaged(ino, revision)
        if next_ino is not None:
            self._set_next_ino(*next_ino)
        now = now_ns()
        for ino in gone:
            self.damaged.pop(ino, None)
            known = self.inodes.get(ino)
            if known is not None:
                orphan = known.copy()
                orphan.nlink, orphan.revision, orphan.ctime_ns = 0, 0, now
                orphan.maker = 0 if ino in self._removing else known.maker
                self.inodes[ino] = orphan
        for parent, name, target, revision in names:
            self._set_name(parent, name, target, revision)
        for ino in gone:
            self._take_names_from(ino)
            self._let_go(ino, keep=ino in self._keeping)
        for ino, (parent, name) in self.directories.misplaced():
            self._complain(name_key(parent, name), f"it leads to {ino}, which lies elsewhere")
            self._set_name(parent, name, 0, 0)
        if self.quotas.in_use:
            self.quotas.update(
                (*(inode.ino for inode in inodes), *gone, *(name[2] for name in names))
            )
        if touched:
            self.watches.changed(touched)

    def _take_inode(self, inode: Inode) -> None:
        ino = inode.ino
        known = self.inodes.get(ino)
        if not inode.nlink and not self._strict:  # it would be dropped while names lead to it
            self._complain(inode_key(ino), "it has no links")
            self._put_damaged(ino, inode.revision)
        elif known.kind == inode.kind if known else inode.is_dir or ino != ROOT_INO:
            self._put(inode)
        elif self.damaged.get(ino):
            self._put_otherwise(inode)
        else:
            self._complain(inode_key(ino), f"it cannot become one of mode {inode.mode:o}")
            self._put_damaged(ino, inode.revision)

    def _put_damaged(self, ino: int, revision: int) -> None:
        """Have a damaged inode in the tree: the one that is known, or an empty file. The root stays as it
        is, or begins as usual."""
        known, is_guess = self.inodes.get(ino), self.damaged.get(ino, False)
        if known is not None:
            inode = known.copy()
        else:
            is_root = ino == ROOT_INO
            inode = Inode(ino, stat.S_IFDIR | 0o755 if is_root else stat.S_IFREG, 0, 0, 0)
        inode.revision = revision
        self._put(inode)
        if ino != ROOT_INO:
            self.damaged[ino] = is_guess or known is None

    def _put_otherwise(self, inode: Inode) -> None:
        """Put an inode in the place of a damaged one of another kind, which was a guess."""
        ino = inode.ino
        names = [(*name, self.name_revision(*name)) for name in self.names_of(ino)]
        below = [(ino, name) for name in self._children.get(ino, ())]
        for parent, name in [*below, *(name[:2] for name in names)]:
            self._set_name(parent, name, 0, 0)
        self._let_go(ino, keep=False)
        self.inodes.pop(ino, None)
        self._put(inode)
        for parent, name, revision in names:
            self._set_name(parent, name, ino, revision)

    def _make_directory(self, ino: int) -> dict[bytes, Dentry]:
        """Have a damaged inode be a directory, as there are names in it. Return these."""
        directory = Inode(ino, stat.S_IFDIR, 0, 0, 0)
        directory.revision = self.inodes[ino].revision
        self._put_otherwise(directory)
        self.damaged[ino] = True
        return self._children[ino]

    def _set_next_ino(self, told: int, revision: int) -> None:
        former = self.next_block[0]
        if not former <= told < _LAST_INOS:
            self._complain(NEXT_INO_KEY, f"{told} is not the number of the next inode")
            told = max(former, 1 + max(ino for ino in self.inodes if ino < _LAST_INOS))
        self.next_block = told, revision

    def _complain(self, key: bytes, why: str, value: bytes = b"") -> None:
        """Report a record that makes no sense. In a cluster it harms only what it names."""
        if self._strict:
            raise fail(errno.EIO, f"the record {key!r} is damaged: {why}")
        self._faults.add(key, why, value)

    # -- own changes -----------------------------------------------------------------------------

    def enact(self, commit: Commit, revision: int) -> None:
        """Apply a commit that the engine has applied."""
        touched = self.watches.touched(commit.names, commit.inodes) if self.watches.in_use else ()
        for ino, time_ns in commit.times:
            self._set_time(ino, time_ns)
        for inode in commit.inodes:
            inode.revision = revision
            if inode.is_dir:
                self._put(inode)
            else:
                self.inodes[inode.ino] = inode
        for inode in commit.gone:
            inode.revision = 0
            self.inodes[inode.ino] = inode
        for parent, name, ino in commit.names:
            self._set_name(parent, name, ino, revision)
        for inode in commit.gone:
            self._let_go(inode.ino, keep=commit.keep)
        if self.quotas.in_use:
            self.quotas.update(inode.ino for inode in (*commit.inodes, *commit.gone))
        if touched:
            self.watches.changed(touched)

    def enact_locally(self, commit: Commit) -> None:
        """Apply changes of local orphans, which are not stored."""
        for inode in commit.inodes:
            self.inodes[inode.ino] = inode

    @contextlib.contextmanager
    def keeping(self, commit: Commit) -> Iterator[None]:
        """While a commit is under way, keep the inodes that its caller needs afterwards, even if the watch
        yields their removal; and charge the commit to quotas."""
        removed = [inode.ino for inode in commit.gone]
        inos = list(removed) if commit.keep else []
        if commit.new is not None:
            inos.append(commit.new.ino)
        self._keeping += inos
        self._removing += removed
        charged = commit.inode if commit.charge is not None else None
        if charged is not None and commit.charge is not None:
            self.quotas.expect(charged.ino, commit.charge)
        try:
            yield
        finally:
            for ino in inos:
                self._keeping.remove(ino)
            for ino in removed:
                self._removing.remove(ino)
            if charged is not None:
                self.quotas.update((charged.ino,))

    def drop(self, ino: int) -> None:
        """Forget an inode without a name."""
        inode = self.inodes.get(ino)
        if ino in self.damaged:
            return  # names lead to it
        if inode is not None and (inode.nlink == 0 or ino >= FIRST_VIRTUAL_INO):
            del self.inodes[ino]
            self._children.pop(ino, None)

    # -- the steps of a change -------------------------------------------------------------------

    def _set_time(self, ino: int, time_ns: int | None) -> None:
        """Set the time when the names of a directory changed; None: its inode record has the times from
        now on."""
        if time_ns is None:
            self._times.pop(ino, None)
            return
        self._times[ino] = time_ns
        if ino in self._ctimes:
            directory = self._changing(ino)
            directory.mtime_ns = time_ns
            # Hosts' clocks differ: the last change need not have the latest time.
            directory.ctime_ns = max(self._ctimes[ino], time_ns)

    def _changing(self, ino: int) -> Inode:
        """Return an inode whose derived fields can be changed: the same one if there is no listener, else
        a copy."""
        inode = self.inodes[ino]
        if self._listener is not None:
            inode = self.inodes[ino] = inode.copy()
        return inode

    def _put(self, inode: Inode) -> None:
        ino = inode.ino
        known = self.inodes.get(ino)
        if known is not None:
            inode.parent = known.parent
        if inode.is_dir:
            inode.nlink = known.nlink if known is not None else 2
            self._ctimes[ino] = inode.ctime_ns
            touched = self._times.get(ino)
            if touched is not None:
                inode.mtime_ns = touched
                inode.ctime_ns = max(inode.ctime_ns, touched)
            if known is None:
                self._children[ino] = {}
            if inode.xattrs or self.quotas.in_use:
                self.quotas.take_limits(inode)
        elif inode.maker or self._unseen:
            self.unseen.note(inode)
        self.inodes[ino] = inode
        self.damaged.pop(ino, None)

    def _set_name(self, parent: int, name: bytes, ino: int, revision: int) -> None:
        """Set the inode of a name; 0: remove the name."""
        children = self._children.get(parent)
        if children is None and ino and self.damaged.get(parent) and self.inodes[parent].revision:
            children = self._make_directory(parent)
        if children is None:
            if ino:
                self._complain(name_key(parent, name), "its directory is missing")
            return
        subdirectories = 0
        known = children.get(name)
        if known is not None:
            if ino != known.ino:
                subdirectories -= self._unlinked(known.ino, parent)
            if not ino:
                del children[name]
        if ino:
            if ino not in self.inodes and self._strict:
                children.pop(name, None)
                self.dangling.append((parent, name))
            else:
                if ino not in self.inodes:
                    if ino != DAMAGED_INO:
                        self._complain(inode_key(ino), f"{name!r} in {parent} leads to it")
                    self._put_damaged(ino, 0)
                if known is None or ino != known.ino:
                    subdirectories += self._linked(ino, parent, name)
                children[name] = Dentry(ino, revision)
        if subdirectories:
            self._changing(parent).nlink += subdirectories

    def _linked(self, ino: int, parent: int, name: bytes) -> bool:
        """Count a new name of an inode, and return whether that is a directory."""
        inode = self.inodes[ino]
        if inode.is_dir:
            self.directories.link(ino, parent, name)
            return True
        if not inode.parent and ino not in self._parents:
            inode.parent = parent
        else:
            self._parents.setdefault(ino, [inode.parent]).append(parent)
            inode.parent = 0
        return False

    def _unlinked(self, ino: int, parent: int) -> bool:
        """Count a removed name of an inode, and return whether that was a directory."""
        inode = self.inodes.get(ino)
        if inode is None:
            return False
        if inode.is_dir:
            return True
        parents = self._parents.get(ino)
        if parents is None:
            inode.parent = 0
            if ino in self.damaged and not inode.revision:
                self._let_go(ino, keep=False)
                self._faults.mended(inode_key(ino))
        else:
            parents.remove(parent)
            if len(parents) == 1:
                inode.parent = parents[0]
                del self._parents[ino]
        return False

    def _take_names_from(self, ino: int) -> None:
        """Remove the names that an inode should not have any more, as its record is gone, nor in it."""
        inode = self.inodes.get(ino)
        if inode is None:
            return
        left: list[tuple[int, bytes]] = []
        if inode.is_dir:
            left += ((ino, name) for name in self._children[ino])
            left += self.directories.places_of(ino)
        elif self.parents_of(ino):
            left += self.names_of(ino)
        for parent, name in left:
            self._complain(name_key(parent, name), "it has lost its inode")
            self._set_name(parent, name, 0, 0)

    def _let_go(self, ino: int, *, keep: bool) -> None:
        """Remove an inode whose record is gone; it stays as a local orphan if it is open here."""
        self.unseen.forget(ino)
        is_dir = self._ctimes.pop(ino, None) is not None
        self.damaged.pop(ino, None)
        if is_dir:
            self._times.pop(ino, None)
            self.directories.forget(ino)
            self.quotas.forget(ino)
        if not (keep or any(holds(ino) for holds in self.holders)):
            self.inodes.pop(ino, None)
            if is_dir:
                self._children.pop(ino, None)
            elif self._parents:
                self._parents.pop(ino, None)
