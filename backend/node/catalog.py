"""The catalog of a store node: which extents should be on it, and which may go.

It is a consumer of the replica hub: inodes name contents, and a group's configuration tells which nodes
keep their extents. Changes come in the order of their revisions, so a decision is right at the moment it is
made: a session that is gone has published all it ever will, and a superseded content is never named again.
An extent on this node is

    named     an inode names its content. It stays while this node is in its group, and a while longer:
              an evicted node often comes back, and then need not fetch it again
    pending   sealed and not named yet: it stays as long as the session that writes it
    retired   no longer named, but pinned: it stays until the last pin goes

and is removed otherwise. It is freed if the change that took its name was seen here, in order. If it is
only found without a name, at the start or after a gap in the watch, or if that name may have been forged
(`is_published`), it is put into quarantine (directory.py), and taken back if it is named again.

A node that starts makes its former acknowledgements void (resync.py), so none of its extents is pending:
those without a name go into quarantine, where a publish that was faster finds them.
"""

import errno
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import trio

from ..cluster.group_configs import Groups
from ..cluster.membership import Members
from ..files.digest import by_stripe
from ..files.sparse import allocated_bytes
from ..kv import Event, KeyValue
from ..kv.faults import Faults
from ..model.records import GROUP_BUCKET_BITS, GroupConfig, session_of
from ..namespace import ROOT_INO, Inode
from ..namespace.numbers import subvolume_of
from ..observe.figures import count, gauge
from ..transport import Extent
from .files import Files, Incoming
from .incoming import SPARE_S
from .named import Named, NamedContents

log = logging.getLogger(__name__)

# How many contents that went are remembered: an extent of one of them that arrives late is refused.
_REMEMBERED_GONE = 1 << 16
_LEFT_KEPT_S = 600.0
_TIDY_S = 10.0


@dataclass(slots=True)
class CatalogFigures:
    """Extents that were freed, or may be."""

    freed_extents: int = count("Extents removed: superseded, deleted or never published")
    pending_extents: int = gauge("Extents kept that are not published yet")
    named_contents: int = gauge("Contents that an inode names, here or not")
    quarantined_extents: int = gauge("Extents kept for a while though nothing names them")
    quarantined_bytes: int = gauge("Bytes of them")


class Catalog:
    """`members` and `groups` come before it among the replica's consumers; `buckets` is the cluster's
    setting. Nothing is freed before `begin`. `kept_to(lease)` tells which subvolume a mount is kept to,
    0: none."""

    prefixes = (b"i", b"p", b"m")

    def __init__(
        self,
        files: Files,
        members: Members,
        groups: Groups,
        buckets: int,
        faults: Faults | None = None,
        kept_to: Callable[[int], int] = lambda lease: 0,
    ) -> None:
        self._kept_to = kept_to
        self._faults = faults or Faults()
        self.files = files
        self._members = members
        self._groups = groups
        self._buckets = buckets
        self._begun = False
        self._revision = 0
        self.freed_extents = 0
        self._by_ino: dict[int, Named] = {}
        self._named = NamedContents()
        self._pins: dict[int, set[int]] = {}  # content -> leases
        self._unnamed: dict[int, set[int]] = {}  # content -> stripes that are here
        # Contents found without a name whose loss of it was not seen here.
        self._found_unnamed: set[int] = set()
        # Contents that lost a name which may not have been their writers': they may yet be published.
        self._doubted: set[int] = set()
        self._gone: dict[int, None] = {}  # contents, the oldest first
        # Groups that this node has left, and may have extents of: since when, and if it saw itself leave.
        self._left: dict[int, tuple[float, bool]] = {}
        self._busy = trio.Event()
        groups.group_changed.append(self._group_changed)

    # -- questions -------------------------------------------------------------------------------

    def is_named(self, content: int) -> bool:
        return content in self._named

    def is_published(self, content: int) -> bool:
        """Return whether a content was published, or will be no more: its session is over. A mount that is
        kept to a subvolume can name there what is another's, and not published yet."""
        home = subvolume_of(self.ino_of(content))
        if home == ROOT_INO:
            return content in self._named
        session = session_of(content)
        leases = self._members.leases_of(session)
        return home in map(self._kept_to, leases) or (not leases and session <= self._revision)

    def figures(self) -> CatalogFigures:
        return CatalogFigures(
            freed_extents=self.freed_extents,
            # Extents of open sessions, and pinned ones.
            pending_extents=sum(map(len, self._unnamed.values())),
            named_contents=len(self._named),
            quarantined_extents=len(self.files.quarantine),
            quarantined_bytes=self.files.quarantine.bytes,
        )

    def extents_of(self, group: int) -> Iterator[tuple[Extent, int]]:
        """Return the named extents of a group, here or not, with their sizes in bytes."""
        for content in self._named.by_group.get(group, ()):
            named = self._named[content]
            for stripe in named.stripes_in(group):
                yield Extent(content, stripe), named.length(stripe)

    def has_names(self, group: int) -> bool:
        """Return whether an inode names an extent of the group."""
        return group in self._named.by_group

    def pools_in_use(self) -> set[int]:
        """Return the pools (see placement.pool_of) in which an extent is named."""
        return {group >> GROUP_BUCKET_BITS for group in self._named.by_group}

    def missing(self, group: int) -> list[tuple[Extent, int]]:
        """Return the named extents of a group that are not here, with their sizes in bytes."""
        return [found for found in self.extents_of(group) if found[0] not in self.files]

    def is_missing(self, extent: Extent) -> bool:
        """Return whether an extent is named, in a group of this node, and not here."""
        return extent not in self.files and self.is_member(self.home_of(extent))

    def digest_of(self, extent: Extent) -> bytes:
        """Return the digest that an extent was published with, b"" if none is known."""
        named = self._named.get(extent.content)
        digests = by_stripe(named.digests, named.stripes) if named is not None else []
        return digests[extent.stripe] if extent.stripe < len(digests) else b""

    def allocated(self, extent: Extent, length: int) -> int:
        """Return the most bytes of a named extent outside holes; its length if holes are too small."""
        named = self._named.get(extent.content)
        if named is None:
            return length
        return min(length, allocated_bytes(named.size, named.blocks))

    def ino_of(self, content: int) -> int:
        """Return the inode whose content it is, 0 if there is none."""
        named = self._named.get(content)
        return named.ino if named is not None else 0

    def inos_of(self, content: int) -> list[int]:
        """Return all inodes whose content it is: of a clone there are several."""
        also = self._named.also.get(content, ())
        return [self._named[content].ino, *also] if content in self._named else []

    def home_of(self, extent: Extent) -> int:
        """Return the group of an extent, 0 (which is none) if it is not named."""
        named = self._named.get(extent.content)
        return named.group(extent.stripe) if named is not None else 0

    def is_member(self, group: int) -> bool:
        return self.files.node in self._groups.get(group)[0].members

    def may_store(self, content: int) -> bool:
        """Return whether an extent of this content may still be needed: its session is open, or it is
        named. It is right as far as the replica is."""
        if content in self._named:
            return True
        return session_of(content) in self._members.sessions and content not in self._gone

    # -- consumer of the replica -----------------------------------------------------------------

    def load(self, records: Sequence[KeyValue], revision: int) -> None:
        """Take the whole content of our prefixes, at first or after a gap in the watch."""
        self._revision = revision
        before = {*filter(self.is_published, self._named)}
        for index in (self._by_ino, self._named, self._pins):
            index.clear()
        for record in records:
            self._take(record.key, record.value, record.mod_revision)
        for content in before - self._named.keys():
            self._remember_gone(content)
        if self._begun:
            self._look_over()

    def apply(self, revision: int, events: Sequence[Event]) -> None:
        self._revision = revision
        doubtful: set[int] = set()
        for event in events:
            doubtful.update(self._take(event.key, event.value, event.revision))
        # Not before: one transaction may move a content from one inode to another.
        for content in doubtful:
            self._reconsider(content)

    def _take(self, key: bytes, value: bytes | None, revision: int) -> Sequence[int]:
        """Apply a change of a key. Return the contents that may have to go."""
        kind, number = key[:1], int.from_bytes(key[1:9], "big")
        if kind == b"p":
            return self._take_pin(int.from_bytes(key[9:], "big"), number, value is not None)
        if kind == b"m":
            sessions = self._members.sessions
            return [content for content in self._unnamed if session_of(content) not in sessions]
        named = None
        if value is not None:
            try:
                inode = Inode.decode(number, value, revision)
            except msgspec.DecodeError as error:
                # Its content is not known, so the one it named before stays.
                self._faults.add(key, str(error), value)
                return ()
            if inode.extent and inode.layout.replicas:
                named = Named.by(inode, self._buckets)
        before = self._by_ino.get(number)
        if before is not None and named is not None and before.content == named.content:
            return ()
        if named is not None:
            self._by_ino[number] = named
            self._name(named)
        elif before is not None:
            del self._by_ino[number]
        if before is not None and self._unname(before):
            return (before.content,)
        return ()

    def _name(self, named: Named) -> None:
        self._named.name(named)
        self._found_unnamed.discard(named.content)
        self._doubted.discard(named.content)
        quarantine = self.files.quarantine
        kept = (Extent(named.content, n) for n in quarantine.stripes.get(named.content, ()))
        if self._begun and any(self._fits(one, quarantine.size(one), named) for one in kept):
            self._bring_back(named.content)
        stripes: Iterable[int] = self._unnamed.pop(named.content, ())
        if named.content in self._named.also:
            stripes = range(named.stripes)
        for stripe in stripes:
            self._settle(Extent(named.content, stripe))

    def _bring_back(self, content: int) -> int:
        """Take a content's extents, which belong here, out of quarantine. Return how many."""
        count, quarantine = 0, self.files.quarantine
        if content not in self._named:
            return 0
        for stripe in list(quarantine.stripes.get(content, ())):
            extent = Extent(content, stripe)
            named = self._named_as(extent, quarantine.size(extent))
            group = named.group(stripe)
            is_right = quarantine.size(extent) == named.length(stripe)
            if extent in self.files or not is_right or not self.is_member(group):
                continue
            try:
                self.files.bring_back(extent)
            except OSError as error:
                log.error("extent %x.%x stays in quarantine: %s", *extent, error)
                continue
            self._settle(extent)
            count += 1
        return count

    def _unname(self, named: Named) -> bool:
        """Note that an inode names a content no more. Return False if another inode names it."""
        content = named.content
        was_published = self.is_published(content)
        if not self._named.unname(named):
            return False
        here = {stripe for stripe in range(named.stripes) if Extent(content, stripe) in self.files}
        if here:
            self._unnamed[content] = here
        if was_published:
            self._remember_gone(content)
        elif here:
            self._doubted.add(content)
        return True

    def _take_pin(self, content: int, lease: int, held: bool) -> Sequence[int]:
        if held:
            self._pins.setdefault(content, set()).add(lease)
            return ()
        leases = self._pins.get(content, set())
        leases.discard(lease)
        if leases:
            return ()
        self._pins.pop(content, None)
        return (content,)

    def _group_changed(self, group: int, before: GroupConfig) -> None:
        if self.is_member(group):
            self._left.pop(group, None)
            if self._begun and len(self.files.quarantine):
                for content in self._named.by_group.get(group, ()):
                    self._bring_back(content)
        elif self.files.node in before.members:
            self._leave(group, seen=True)

    # -- what is here ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Look over what the last process left here. The replica and the groups must be loaded."""
        self._begun = True
        self._look_over(may_be_pending=False)

    def sealed(self, extent: Extent) -> None:
        """Note that an extent has just been sealed. Call it in the event loop."""
        if extent.content in self._named:
            self._settle(extent)
        elif extent in self.files:
            self._unnamed.setdefault(extent.content, set()).add(extent.stripe)
            self._reconsider(extent.content)

    def give_up(self, content: int) -> None:
        """Note that the content's writer will not publish it."""
        if content not in self._named:
            self._remember_gone(content)
            self._found_unnamed.discard(content)
            self._reconsider(content)

    def make_room(self, wanted_bytes: int = 0) -> None:
        """Free at once what is kept just in case, as the store is full; from quarantine only as much as is
        wanted. The next `Files.reap` gives the memory back."""
        for group in list(self._left):
            self._free_left(group, seen=True)
        self.files.incoming.give_up_spares()
        self.freed_extents += self.files.tidy_quarantine(wanted_bytes)

    async def make_file(
        self, length: int, allocated: int, learn: Callable[[], Awaitable[None]] | None = None
    ) -> Incoming:
        """Make a file of `length` bytes, of which so many are allocated, for an extent that comes. If the
        store is full, `learn` is awaited, and extents kept just in case are removed. Raises ENOSPC."""
        try:
            return await self.files.make(length, allocated)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        if learn is not None:
            await learn()
        self.make_room(allocated)
        await self.files.give_back()
        return await self.files.make(length, allocated)

    async def run(self) -> None:
        """Give back the memory of freed extents, and look now and then for extents that may go."""
        while True:
            with trio.move_on_after(_TIDY_S):
                await self._busy.wait()
            self._busy = trio.Event()
            self.files.incoming.give_up_spares(SPARE_S)
            await self.files.give_back()
            self.tidy(time.monotonic())

    def tidy(self, now: float) -> None:
        """Free extents of groups left for good or long ago, and working copies whose mount is gone."""
        for group, (since, seen) in list(self._left.items()):
            may_join = self._members.may_join(self.files.node, group)
            if now - since > _LEFT_KEPT_S or not may_join:
                self._free_left(group, seen)
        self.freed_extents += self.files.tidy_quarantine()
        for name, content in self.files.incoming.working_copies().items():
            session = session_of(content)
            # A session newer than the replica counts as open.
            if session <= self._revision and session not in self._members.sessions:
                self.files.incoming.remove(name)

    def _look_over(self, *, may_be_pending: bool = True) -> None:
        """Decide about every extent that is here."""
        self._unnamed.clear()
        self._found_unnamed.clear()
        if count := sum(map(self._bring_back, list(self.files.quarantine.stripes))):
            log.warning("%d extents are named again and taken out of quarantine", count)
        for extent in list(self.files):
            if extent.content not in self._named:
                self._found_unnamed.add(extent.content)
                self._unnamed.setdefault(extent.content, set()).add(extent.stripe)
                if extent.content in self._pins and not may_be_pending:
                    self._remember_gone(extent.content)  # it was published, and is superseded
            else:
                self._settle(extent)
        before = len(self.files.quarantine)
        for content in list(self._unnamed):
            self._reconsider(content, may_be_pending=may_be_pending)
        if (count := len(self.files.quarantine) - before) > 0:
            log.warning(
                "%d extents here have no name in etcd: they are kept in %s/quarantine for %g h, or until "
                "room is wanted",
                count,
                self.files.directory,
                self.files.quarantine.kept_s / 3600,
            )

    def _named_as(self, extent: Extent, size: int) -> Named:
        """Return the record that counts for an extent, which has so many bytes here."""
        return self._named.fitting(extent.content, partial(self._fits, extent, size))

    def _fits(self, extent: Extent, size: int, named: Named) -> bool:
        is_mine = self.is_member(named.group(extent.stripe))
        return is_mine and named.length(extent.stripe) == size

    def _settle(self, extent: Extent) -> None:
        """Check whether a named extent that is here is right and belongs here."""
        size, named = self.files.size(extent), self._named[extent.content]
        if size is None:
            return
        if extent.content in self._named.also:
            named = self._named_as(extent, size)
        expected = named.length(extent.stripe)
        if size != expected:
            log.error(
                "extent %x.%x has %d bytes and should have %d: it is put into quarantine",
                *extent,
                size,
                expected,
            )
            self.files.set_aside(extent)
            return
        group = named.group(extent.stripe)
        if not self.is_member(group):
            self._leave(group, seen=False)

    def _reconsider(self, content: int, *, may_be_pending: bool = True) -> None:
        if not self._begun or content not in self._unnamed or content in self._pins:
            return
        is_doubted = content in self._doubted
        if is_doubted or not (may_be_pending and self.may_store(content)):
            let_go = self._free
            if is_doubted or content in self._found_unnamed:
                self._found_unnamed.discard(content)
                self._doubted.discard(content)
                let_go = self.files.set_aside
            for stripe in self._unnamed.pop(content):
                let_go(Extent(content, stripe))

    def _leave(self, group: int, seen: bool) -> None:
        self._left.setdefault(group, (time.monotonic(), seen))

    def _free_left(self, group: int, seen: bool) -> None:
        del self._left[group]
        if not self.is_member(group):
            let_go = self._free if seen else self.files.set_aside
            for extent, _ in self.extents_of(group):
                let_go(extent)

    def _free(self, extent: Extent) -> None:
        if extent in self.files:
            self.files.free(extent)
            self.freed_extents += 1
            if self.files.incoming.has_condemned:
                self._busy.set()

    def _remember_gone(self, content: int) -> None:
        self._gone.pop(content, None)
        self._gone[content] = None
        if len(self._gone) > _REMEMBERED_GONE:
            del self._gone[next(iter(self._gone))]
