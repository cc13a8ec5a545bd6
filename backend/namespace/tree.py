"""The directory tree, which answers every read: an ordered map of records and what is derived from them.

It is changed in two ways: by the commits of a process that has its map in a file of its own (`enact`), or
by the events of a shared engine's watch (`load` and `apply`, as a consumer of the replica hub), whose
records the map then repeats. Both end in the same few steps, in this order: times, inodes, names, and last
removed inodes, so that each step finds the data from which it derives parents and link counts.

    key                                            value
    "t" + directory ino (8 bytes BE)               when its names last changed, ns (8 bytes BE)
    "q" + directory ino (8 bytes BE)               b"": the directory has a quota
    "d…", "i…", "l…"                               see lookup
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from stat import S_IFDIR, S_IFMT, S_IFREG

from ..kv import Event, KeyValue
from ..kv.faults import Faults
from ..kv.map import Map
from ..model.clock import now_ns
from ..model.records import NEXT_INO_KEY, NEXT_INO_OF
from .clones import Clones
from .commit import Commit
from .drafts import DRAFTS, is_named_draft
from .events import Listener, changes_of, differences, load_order, misplaced, removals_first
from .inode import DAMAGED_INO, FIRST_VIRTUAL_INO, ROOT_INO, Inode, inode_key, name_key, time_key
from .lookup import Names, link_key
from .numbers import last_ino, next_ino_key, numbers_of
from .quotas import QUOTA_NAMES, Quotas
from .watches import Watches

# So many records are taken at once when a tree is loaded.
_LOADED_AT_ONCE = 4096
# So many names that directories cannot have yet are remembered.
_WAITING_MAX = 100
# The revision of every record of a process that has its map alone.
_OWN_REVISION = 1


class Tree(Names):
    """The names and inodes that `records` have (None: a map in memory), and their changes.

    An inode that a holder has open stays without a name when another host removes its last one (a *local
    orphan*: nlink 0, revision 0). Invalid records of other hosts are told to `faults`: a name whose record
    is damaged, or whose inode has a damaged record or none, leads to an inode that is `damaged`. Names
    without a directory are passed over until all records are read anew; second ones of a directory, until
    it loses the first. `maker` and `is_mounted` as for Names."""

    prefixes: tuple[bytes, ...] = (b"d", b"i", b"t", NEXT_INO_KEY, NEXT_INO_OF)

    def __init__(
        self,
        records: Map | None = None,
        *,
        listener: Listener | None = None,
        faults: Faults | None = None,
        maker: int = 0,
        is_mounted: Callable[[int], bool] = lambda maker: True,
    ) -> None:
        super().__init__(records or Map(), maker, is_mounted)
        self._faults = faults or Faults()
        # Asked by the number of an inode whether they have it open.
        self.holders: list[Callable[[int], bool]] = []
        # Returns those of some events that show no earlier state than the tree has (see deferred).
        self.news: Callable[[Sequence[Event]], Sequence[Event]] = lambda events: events
        self._listener = listener
        self._is_loaded = False
        # Inodes that mutations under way make, which their callers need; and those without a version that
        # they remove: no other host takes their names from them.
        self._making: list[int] = []
        self.removing: list[int] = []
        # The directories that events have given a name, while these are applied.
        self._linked_directories: list[int] = []
        # Names that misplaced directories cannot have yet, with their inodes and revisions.
        self._waiting: dict[tuple[int, bytes], tuple[int, int]] = {}
        # The names that lead elsewhere by the newest change, with the inodes before and after it, 0: none.
        self._led: list[tuple[int, bytes, int, int]] = []
        require = self.known.require_all_below
        self.quotas = Quotas(self.inodes, self.below, self.parents_of, self.describe, require)
        self.watches = Watches(self.inodes, self.parents_of, require)
        self.clones = Clones(self.inodes)
        # A directory has, or had, the attribute or name of a draft; or a file waits for a rename.
        self.has_drafts = False

    # -- consumer of the replica hub ---------------------------------------------------------------

    def load(self, records: Iterable[KeyValue], revision: int) -> None:
        """Replace the tree by these records. Differences count as events that come now."""
        if self._is_loaded:
            self._is_loaded = False
            self._waiting.clear()  # the differences tell of names that still have to wait
            self.apply(revision, differences(self, records, revision))
            self._is_loaded = True
            return
        self._is_loaded = True
        ordered = load_order(records)
        while some := list(islice(ordered, _LOADED_AT_ONCE)):
            self.take(Event(record.mod_revision, record.key, record.value) for record in some)
        self.inodes.are_compared = self._listener is not None

    def apply(self, revision: int, events: Sequence[Event]) -> None:
        for _, key, _ in events if self._waiting else ():
            self._waiting.pop((int.from_bytes(key[1:9], "big"), key[9:]), None)
        before = self.take(self.news(self.known.concerning(events)))
        if self._listener is not None:
            self._tell(self._listener, before)

    def _tell(self, listener: Listener, before: dict[int, Inode | None]) -> None:
        """Tell of the newest change, by the inodes `before` it."""
        for ino, old in before.items():
            if (new := self.inodes.get(ino)) is not old:
                listener.inode_changed(old, new)
        for led in self._led:
            listener.name_changed(*led)

    def take(
        self, events: Iterable[Event], places: Iterable[tuple[int, int]] = ()
    ) -> dict[int, Inode | None]:
        """Apply the events of one transaction, or of several at once. Return the inodes that they changed,
        as they were before. `places`: inodes without a known name, and the directories that hold them."""
        self._led.clear()
        times, damaged, inodes, names, gone, blocks = changes_of(events, self._faults.add)
        size = 1024 * (len(names) + len(inodes))
        for _, record in inodes:
            size += len(record)
        self.records.begin(size, urgent=True)
        for ino, time_ns in times:
            self.inodes.touch(ino, time_ns)
        for inode, record in inodes:
            self._take_inode(inode, record)
        for ino, revision in damaged:
            self._put_damaged(ino, revision)
        for subvolume, block in blocks.items():
            self._set_next_ino(subvolume, *block)
        now = now_ns() if gone else 0  # system calls
        for ino in gone:
            self.damaged.pop(ino, None)
            known = self.inodes.get(ino)
            if known is not None and (known.revision or known.nlink):
                orphan = known.copy()
                orphan.nlink, orphan.revision, orphan.ctime_ns = 0, 0, now
                orphan.maker = 0 if ino in self.removing else known.maker
                self.inodes.store(orphan, None, known)
                if orphan.is_dir:
                    self.records.put(time_key(ino), None)
                    self.records.put(_quota_key(ino), None)
        for parent, name, target, revision in names if len(names) < 2 else removals_first(names):
            if (parent, name) not in self._waiting:
                self._set_name(parent, name, target, revision)
        for ino in gone:
            self._take_names_from(ino)
            if ino in self.inodes:
                self._let_go(self.inodes[ino])
        for ino, parent in places:
            if ino in self.inodes and not self.inodes[ino].name:
                self.inodes.changing(ino).parent = parent
                self.known.placed.add(ino)
        if self._linked_directories:
            self._refuse_misplaced()
        if self._waiting and self._concern_directories({inode.ino for inode, _ in inodes}):
            while self._takes_one_that_waits():
                self._refuse_misplaced()
        self.inodes.write()
        self.records.commit()
        before = self.inodes.settle()
        if self.quotas.in_use:
            self.quotas.update(before)
        if self.watches.in_use:
            self.watches.changed(self._led, before)
        if self.clones.in_use:
            self.clones.changed(before)
        return before

    def _refuse_misplaced(self) -> None:
        linked, self._linked_directories = self._linked_directories, []
        for ino, (parent, name) in misplaced(self, linked):
            self._faults.add(name_key(parent, name), f"it leads to {ino}, which lies elsewhere")
            if ino != ROOT_INO and len(self._waiting) < _WAITING_MAX:
                self._waiting[parent, name] = ino, self.name_revision(parent, name)
            self._set_name(parent, name, 0, 0)
            if ino in self.inodes and not self.inodes[ino].name:
                self.inodes.changing(ino).parent = 0

    def _concern_directories(self, changed: set[int]) -> bool:
        """Return whether the newest change of names, or of these inodes, is one of a directory or of an
        inode for which a name waits."""
        concerned = changed.union(*(led[2:] for led in self._led))
        known = filter(None, map(self.inodes.get, concerned))
        waits = any(ino in concerned for ino, _ in self._waiting.values())
        return waits or any(inode.is_dir for inode in known)

    def _takes_one_that_waits(self) -> bool:
        """Have a name that waits for it lead to its inode, if that is a directory without a name, or none
        at all, and the name is in a directory in its place. Return whether there was one."""
        elsewhere = set[int]()
        for (parent, name), (ino, revision) in sorted(self._waiting.items(), key=itemgetter(1)):
            inode = self.inodes.get(ino)
            if inode is None or not inode.revision or (inode.is_dir and inode.name):
                continue
            if self.is_in_place(parent, elsewhere):
                del self._waiting[parent, name]
                self._faults.mended(name_key(parent, name))
                self._set_name(parent, name, ino, revision)
                return True
        return False

    def _take_inode(self, inode: Inode, record: bytes) -> None:
        ino, known = inode.ino, self.inodes.get(inode.ino)
        if ino in self.damaged:
            self._faults.mended(inode_key(ino))
        if not inode.nlink:  # it would be dropped while names lead to it
            self._faults.add(inode_key(ino), "it has no links")
            self._put_damaged(ino, inode.revision)
        elif S_IFMT(known.mode) == S_IFMT(inode.mode) if known else inode.is_dir or ino != ROOT_INO:
            self._put(inode, record, known)
        elif self.damaged.get(ino):
            self._put_otherwise(inode, record)
        else:
            self._faults.add(inode_key(ino), f"it cannot become one of mode {inode.mode:o}")
            self._put_damaged(ino, inode.revision)

    def _put_damaged(self, ino: int, revision: int) -> None:
        """Have a damaged inode in the tree: the one that is known, or an empty file. The root stays as it
        is, or begins as usual."""
        known, is_guess = self.inodes.get(ino), self.damaged.get(ino, False)
        mode = S_IFDIR | 0o755 if ino == ROOT_INO else S_IFREG
        inode = known.copy() if known is not None else Inode(ino, mode, 0, 0, 0)
        inode.revision = revision
        self._put(inode, None, known)
        if ino != ROOT_INO:
            self.damaged[ino] = is_guess or known is None

    def _put_otherwise(self, inode: Inode, record: bytes) -> None:
        """Put an inode in the place of a damaged one of another kind, which was a guess."""
        ino = inode.ino
        names = [(*name, self.name_revision(*name)) for name in self.names_of(ino)]
        below = [(ino, name) for name, _ in self.below(ino)]
        for parent, name in [*below, *(name[:2] for name in names)]:
            self._set_name(parent, name, 0, 0)
        if ino in self.inodes:
            self._let_go(self.inodes.changing(ino))
            self.inodes.pop(ino, None)
        self._put(inode, record, None)
        for parent, name, revision in names:
            self._set_name(parent, name, ino, revision)

    def _make_directory(self, ino: int) -> None:
        """Have a damaged inode be a directory, as there are names in it."""
        directory = Inode(ino, S_IFDIR, 0, 0, 0)
        directory.revision = self.inodes[ino].revision
        self._put_otherwise(directory, directory.encode())
        self.damaged[ino] = True

    def _set_next_ino(self, subvolume: int, told: int, revision: int) -> None:
        former, _ = self.next_block(subvolume)
        if told < former or told not in numbers_of(subvolume):
            self._faults.add(next_ino_key(subvolume), f"{told} is not the number of the next inode")
            told = max(former, 1 + last_ino(self, subvolume))
        self._blocks[subvolume] = told, revision

    # -- own changes -----------------------------------------------------------------------------

    def keep(self, commit: Commit) -> None:
        """Apply a commit without storing it: its inodes and names are known here alone, without a revision,
        until a later commit stores them. Raises as `enact`."""
        for inode in commit.gone:
            inode.maker = 0  # no other host has taken its name
        before = self.enact(commit, revision=0)
        # Whoever is told here knows nothing of a new one yet.
        if commit.new is None and self._listener is not None:
            self._tell(self._listener, before)
            self._listener.kept()

    def enact(self, commit: Commit, *, revision: int = _OWN_REVISION) -> dict[int, Inode | None]:
        """Store a commit and apply it. Return the inodes that it changed, as they were before. Raises
        NoSpace, OSError; then nothing has changed."""
        records, inodes = self.records, self.inodes
        self._led.clear()
        size = 0
        for inode in commit.inodes:
            if inode.xattrs:
                size += sum(map(len, inode.xattrs.values()))
        records.begin(size, urgent=commit.urgent)
        try:
            for ino, time_ns in commit.times:
                inodes.touch(ino, time_ns)
            for inode in commit.inodes:
                inodes.replace(inode, revision)
                if (inode.xattrs or self.quotas.in_use) and inode.is_dir:
                    self._take_limits(inode)
            for inode in commit.gone:
                inodes.replace(inode, 0)
                if inode.is_dir:
                    records.put(time_key(inode.ino), None)
                    records.put(_quota_key(inode.ino), None)
            names = commit.names
            for parent, name, ino in names if len(names) < 2 else removals_first(names):
                self._rename(parent, name, ino, revision)
            inodes.write()
            if commit.durable:
                records.commit()
        except OSError:
            inodes.restore()
            records.undo()
            raise
        before = inodes.settle()
        self._linked_directories.clear()  # a planner gives a directory one name, and not below itself
        for inode in commit.gone:
            self._let_go(inode)
        if self.quotas.in_use:
            self.quotas.update(before)
        if self.watches.in_use:
            self.watches.changed(self._led, before)
        if self.clones.in_use:
            self.clones.changed(before)
        return before

    def enact_locally(self, commit: Commit) -> None:
        """Apply changes of local orphans, which are not stored."""
        for inode in commit.inodes:
            self.inodes[inode.ino] = inode

    @contextlib.contextmanager
    def keeping(self, commit: Commit) -> Iterator[None]:
        """While a commit is under way, keep the inode that it makes even if the watch yields its removal;
        and charge the commit to quotas."""
        made = [commit.new.ino] if commit.new is not None else []
        self._making += made
        charged = commit.inode if commit.charge is not None else None
        if charged is not None and commit.charge is not None:
            self.quotas.charge(charged.ino, commit.charge)
        try:
            yield
        finally:
            for ino in made:
                self._making.remove(ino)
            if charged is not None:
                self.quotas.update((charged.ino,))

    def drop(self, ino: int) -> bool:
        """Forget an inode that has no name and is not open any more. Return whether there was one."""
        inode = self.inodes.at_hand(ino)
        if inode is None or ino in self.damaged or (inode.nlink and ino < FIRST_VIRTUAL_INO):
            return False  # it is gone, or names lead to it
        return self.inodes.pop(ino, None) is inode

    # -- the steps of a change -------------------------------------------------------------------

    def _put(self, inode: Inode, record: bytes | None, known: Inode | None) -> None:
        """Have an inode instead of the one that was known, with another record, or (None) the same."""
        ino = inode.ino
        if known is not None:
            inode.parent, inode.name, inode.more = known.parent, known.name, known.more
        else:
            inode.parent = 0  # until a name is known
            if inode.is_dir and not (self._is_loaded and ino in self._making):
                self.known.found(ino)
        if inode.is_dir:
            inode.nlink = (known.nlink if known is not None else 0) or 2
            self.inodes.date(inode)
            if inode.xattrs or self.quotas.in_use:
                self._take_limits(inode)
        elif abs(inode.maker) not in (0, self.maker):
            self.unseen.add(ino)
        else:
            self.unseen.discard(ino)
        if inode.origin:
            self.clones.in_use = True
        self.inodes.store(inode, record, known)
        self.damaged.pop(ino, None)

    def _take_limits(self, directory: Inode) -> None:
        self.has_drafts |= DRAFTS in directory.xattrs
        key = _quota_key(directory.ino)
        if any(name in directory.xattrs for name in QUOTA_NAMES):
            self.records.put(key, b"")
        elif self.quotas.in_use:
            self.records.put(key, None)
        self.quotas.take_limits(directory)

    def _set_name(self, parent: int, name: bytes, ino: int, revision: int) -> None:
        """Set the inode of a name; 0: remove the name."""
        inodes = self.inodes
        if ino:
            if self.damaged.get(parent) and not inodes[parent].is_dir and inodes[parent].revision:
                self._make_directory(parent)
            directory = inodes.get(parent)
            if directory is None or not directory.is_dir or not directory.revision:
                self._faults.add(name_key(parent, name), "its directory is missing")
                return
            if ino not in inodes:
                if ino != DAMAGED_INO:
                    self._faults.add(inode_key(ino), f"{name!r} in {parent} leads to it")
                self._put_damaged(ino, 0)
        self._rename(parent, name, ino, revision)

    def _rename(self, parent: int, name: bytes, ino: int, revision: int) -> None:
        """Have a name lead to an inode, which there is; 0: to none."""
        records, inodes = self.records, self.inodes
        key = b"d" + parent.to_bytes(8, "big") + name
        value = records.get(key)
        known = int.from_bytes(value[:8], "big") if value is not None else 0
        subdirectories = 0
        if ino != known:
            self._led.append((parent, name, known, ino))
        if known and ino != known:
            subdirectories -= self._unlinked(known, parent, name)
        if ino:
            if ino != known and self._linked(ino, parent, name):
                subdirectories += 1
                self._linked_directories.append(ino)
            records.put(key, ino.to_bytes(8, "big") + revision.to_bytes(8, "big"))
        elif known:
            records.put(key, None)
        if subdirectories and parent in inodes and inodes[parent].nlink:  # else it is being removed
            inodes.changing(parent).nlink += subdirectories

    def _linked(self, ino: int, parent: int, name: bytes) -> bool:
        """Note a new name of an inode, and return whether that is a directory."""
        inode = self.inodes.changing(ino)
        if inode.name:
            self.records.put(link_key(ino, parent, name), b"")
            inode.more += 1
        else:
            inode.parent, inode.name = parent, name
        if not self.known.everything:
            self.known.linked(ino, parent)
        if inode.is_dir:
            self.has_drafts |= is_named_draft(name)
            is_nameless = parent != ROOT_INO and not self.inodes[parent].name
            if is_nameless and parent not in self.known.placed:
                self.inodes.changing(parent).parent = 0
        return inode.is_dir

    def _unlinked(self, ino: int, parent: int, name: bytes) -> bool:
        """Note a removed name of an inode, and return whether that was a directory."""
        try:
            inode = self.inodes.changing(ino)
        except KeyError:
            return False
        if (inode.parent, inode.name) != (parent, name):
            self.records.put(link_key(ino, parent, name), None)
            inode.more -= 1
        elif inode.more:
            key = self.records.first(link_key(ino, 0, b""), link_key(ino + 1, 0, b""))
            assert key is not None, "there are as many further names as are counted"
            self.records.put(key, None)
            inode.parent, inode.name = int.from_bytes(key[9:17], "big"), key[17:]
            inode.more -= 1
        else:
            inode.name = b""
            # A removed directory keeps its parent only while it is empty: parents are in no circle.
            if not (inode.is_dir and self.has_no_known_name(ino)):
                inode.parent = 0
            if not inode.is_dir:
                if ino in self.damaged and not inode.revision:
                    self._let_go(inode)
                    self._faults.mended(inode_key(ino))
                elif inode.maker and not inode.revision:
                    # It was known here alone, and its name was taken.
                    inode.nlink, inode.ctime_ns = 0, now_ns()
                    inode.maker = 0 if ino in self.removing else inode.maker
                    self._let_go(inode)
        return inode.is_dir

    def _take_names_from(self, ino: int) -> None:
        """Remove the names that an inode should not have any more, as its record is gone, nor in it."""
        inode = self.inodes.get(ino)
        if inode is None:
            return
        left = self.names_of(ino)
        if inode.is_dir:
            left += ((ino, name) for name, _ in self.below(ino))
        for parent, name in left:
            if self.name_revision(parent, name):
                self._faults.add(name_key(parent, name), "it has lost its inode")
            self._set_name(parent, name, 0, 0)

    def _let_go(self, inode: Inode) -> None:
        """Remove an inode whose record is gone; it stays as a local orphan if it is open here."""
        ino = inode.ino
        self.unseen.discard(ino)
        self.damaged.pop(ino, None)
        if not self.known.everything:
            self.known.forget(ino)
        if inode.is_dir:
            self.quotas.forget(ino)
        if ino in self._making:
            return
        for holds in self.holders:
            if holds(ino):
                return
        self.inodes.pop(ino, None)


def _quota_key(directory: int) -> bytes:
    return b"q" + directory.to_bytes(8, "big")
