"""Contents on this host: fetched ones, working copies, and those that a store node here shares with us.

The directory is a cache: it starts and ends empty, and unpinned contents may be evicted, least recently
used first. A content that lies in the directory of a store node on this host is used there; while it is
pinned, a second name keeps its file (places.py).
"""

import errno
import logging
import os
from collections import OrderedDict
from contextlib import suppress

from ...etcd.leases import LeaseEnded
from ...files.extents import OPEN_FLAGS, ExtentStore, Pinned, look_for_room
from ...kv import Conflict, Delete, Put
from ...model.records import CONTENT_NUMBER_BITS, ContentId, pin_key
from ...namespace import Inode, fail
from ...observe.logs import log_failure
from .figures import CacheFigures
from .member import Member
from .places import Holds, Place

log = logging.getLogger(__name__)

_NUMBERS = 1 << CONTENT_NUMBER_BITS
# The share of the filesystem for published contents, if the configuration has no limit. The rest is for
# working copies, which the kernel fills without asking us.
_KEPT_SHARE = 0.75


class Contents(ExtentStore, Pinned):
    """The contents on a mount's host. One that is read from its store nodes is pinned there, too, by a key
    in etcd that ends with the session."""

    def __init__(self, member: Member, directory: str) -> None:
        Pinned.__init__(self)
        ExtentStore.__init__(self, directory)
        self._empty()
        self._member = member
        # The newest number given, in the session with the number `_last_of`.
        self._last = self._last_of = 0
        # Where contents lie that are in the directory of a store node.
        self._places: dict[ContentId, Place] = {}
        self._holds: dict[str, Holds] = {}  # by store directory
        self._kept: OrderedDict[ContentId, int] = OrderedDict()
        # Versions whose files were written here, and have not been fetched since.
        self.written_here: set[ContentId] = set()
        # Working copies that are being published, which count as published contents here: other hosts may
        # know them as versions before we do.
        self.publishing: set[ContentId] = set()
        # Numbers under which store nodes were sent something: they must not be used for other bytes.
        self.sent: set[ContentId] = set()
        # Contents that were fetched for an open that `count_open` has not counted yet.
        self.uncounted: set[ContentId] = set()
        # Contents that are pinned on their nodes, with the revisions of their pins, 0: not known yet.
        self.on_nodes: dict[ContentId, int] = {}
        self.kept_bytes = 0
        self.evictions = 0
        below = self.statvfs()
        room = below.f_blocks * below.f_frsize
        cache_size = member.config.mount.cache_size
        self._limit_bytes = int(room * _KEPT_SHARE) if cache_size is None else cache_size
        # The room for working copies.
        self.working_bytes = room - self._limit_bytes
        member.changes.content_listeners.append(self._lost_by)

    def close(self) -> None:
        for holds in self._holds.values():
            holds.close()
        self._empty()
        super().close()

    def _empty(self) -> None:
        for name in os.listdir(self._dir_fd):
            os.unlink(name, dir_fd=self._dir_fd)

    def figures(self) -> CacheFigures:
        return CacheFigures(self.kept_bytes, self._limit_bytes, self.evictions)

    # -- files -----------------------------------------------------------------------------------

    def path(self, extent: ContentId) -> str:
        place = self._places.get(extent)
        return place.path if place is not None else super().path(extent)

    def _new_number(self) -> ContentId:
        """Return a number for a working copy: the session that writes it, and a counter. Raises OSError
        ENOSPC if the session has none left."""
        session = self._member.session.number
        if session != self._last_of:
            self._last_of, self._last = session, 0
        self._last += 1
        if self._last >= _NUMBERS:
            raise fail(errno.ENOSPC, "this session has no content numbers left; mount again")
        return ContentId(session << CONTENT_NUMBER_BITS | self._last)

    def allocate(self) -> tuple[ContentId, int]:
        self._next = self._new_number()
        return super().allocate()

    def allocate_in(self, store: str) -> tuple[ContentId, int]:
        """Make a working copy in a place where the store node with the directory `store` can adopt it.

        Raises OSError (ENOSPC, EMFILE, EACCES)."""
        extent = self._new_number()
        place = Place(store, extent, is_incoming=True)
        fd = os.open(place.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._places[extent] = place
        return extent, fd

    def hands_over(self, extent: ContentId) -> bool:
        """Return whether a store node here can take a working copy's very file over."""
        place = self._places.get(extent)
        return place is not None and place.is_incoming

    def not_published(self, extent: ContentId) -> None:
        """Have what was `publishing`, and is pinned, be a working copy again, even if a node has adopted
        its file."""
        self.publishing.discard(extent)
        place = self._places.get(extent)
        if place is not None and place.is_incoming and not os.path.exists(place.path):
            os.link(place.held, place.path)

    def published(self, extent: ContentId, size: int, *, stripes: int) -> None:
        """Note that the working copy, of so many stripes, is a version now."""
        self.publishing.discard(extent)
        self._retired.discard(extent)
        place = self._places.get(extent)
        # A node that has adopted the file may have ended since.
        if (
            place is not None
            and place.is_incoming
            and stripes == 1
            and self.borrow(extent, place.store)
        ):
            place.free()  # of an earlier attempt that failed
        self.written_here.add(extent)
        self.keep(extent, size)

    def renumber(self, extent: ContentId) -> ContentId:
        """Give a new number, of the present session, to a working copy here, or to a version that was
        written in place. Return it."""
        renamed = self._new_number()
        place = self._places.get(extent)
        if place is None:
            os.link(super().path(extent), super().path(renamed))
        else:
            renamed_place = Place(place.store, renamed, is_incoming=True)
            os.link(place.held or place.path, renamed_place.path)
            self._places[renamed] = renamed_place
        return renamed

    def is_lent(self, extent: ContentId) -> bool:
        """Return whether the published content's file is in the directory of a store node here, and must
        not be written."""
        place = self._places.get(extent)
        return place is not None and (not place.is_incoming or extent in self._kept)

    def take_out(self, extent: ContentId) -> ContentId:
        """Make a working copy of a published content that is kept here, without copying a byte: the content
        is not here any more. Raises OSError ENOENT if it was not."""
        number = self._new_number()
        os.rename(super().path(extent), super().path(number))
        self.kept_bytes -= self._kept.pop(extent, 0)
        return number

    def put_back(self, number: ContentId, extent: ContentId) -> bool:
        """Undo `take_out`. Return False if the content has come here again meanwhile, is a working copy
        that is being published, or lies elsewhere."""
        if extent in self._kept or extent in self.publishing:
            return False
        if extent in self._places or number in self._places:
            return False
        os.rename(super().path(number), super().path(extent))
        self.written_here.add(extent)
        self.keep(extent, self.stat(extent).st_blocks * 512)
        return True

    def open(self, extent: ContentId, flags: int = os.O_RDONLY) -> int:
        place = self._places.get(extent)
        return super().open(extent, flags) if place is None else place.open(flags)

    def stat(self, extent: ContentId) -> os.stat_result:
        place = self._places.get(extent)
        return super().stat(extent) if place is None else os.stat(place.held or place.path)

    def look_for_room(self, extent: ContentId, *, refused: bool = False) -> int:
        place = self._places.get(extent)
        if place is None:
            return super().look_for_room(extent, refused=refused)
        return look_for_room(place.store, refused=refused)

    def free(self, extent: ContentId) -> None:
        self.kept_bytes -= self._kept.pop(extent, 0)
        self.let_go_on_nodes(extent)  # an open that failed may have left a pin
        for notes in (self.sent, self.uncounted, self.written_here):
            notes.discard(extent)
        place = self._places.pop(extent, None)
        if place is None:
            super().free(extent)
        else:
            place.free()
        self._member.changes.content_gone(extent)

    def make(self, extent: ContentId, size: int, *, has_holes: bool = False) -> int:
        """Make a file of `size` bytes to fetch a content into, with room for all of them or as one hole.
        The content is here after `admit`.

        Raises OSError ENOSPC."""
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | OPEN_FLAGS
        fd = os.open(self._path_of_fetched(extent), flags, 0o600)
        try:
            if has_holes:
                os.ftruncate(fd, size)
            else:
                os.posix_fallocate(fd, 0, size)
        except BaseException:
            os.close(fd)
            self.give_up(extent, refused=True)
            raise
        return fd

    def admit(self, extent: ContentId, size: int) -> None:
        """Accept the file from `make` as complete; `size` bytes of it are kept. If the content has come
        here in another way meanwhile, drop the file: the other one may be in use."""
        if extent in self._kept or extent in self._places or extent in self.publishing:
            self.give_up(extent)
            return
        os.rename(self._path_of_fetched(extent), super().path(extent))
        self.keep(extent, size)

    def give_up(self, extent: ContentId, *, refused: bool = False) -> None:
        super().look_for_room(extent, refused=refused)
        os.unlink(self._path_of_fetched(extent))

    def _path_of_fetched(self, extent: ContentId) -> str:
        return f"{self.directory}/fetch-{extent:x}"

    # -- what is kept ----------------------------------------------------------------------------

    def borrow(self, extent: ContentId, store: str) -> bool:
        """Use a content of one stripe in the directory `store` of the store node on this host. Return False
        if it is not there."""
        place, before = Place(store, extent, is_incoming=False), self._places.get(extent)
        try:
            os.close(os.open(place.path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return False
        if before is not None:
            place.held, before.held = before.held, ""
        self._places[extent] = place
        return True

    def has(self, extent: ContentId) -> bool:
        """Return whether the published content can be opened here, and count that as a use of it."""
        place = self._places.get(extent)
        if place is not None and not place.held and not os.path.exists(place.path):
            # The node has freed it, or removed what was left in incoming/ by a session that has ended.
            self.lose(extent)
            return False
        if extent in self._kept:
            self._kept.move_to_end(extent)
            return True
        is_published = place is not None and not place.is_incoming
        return is_published or extent in self.publishing

    def is_here(self, extent: ContentId) -> bool:
        """Return whether a content can be read without its nodes."""
        pinned = extent in self.counts and extent not in self.on_nodes
        return pinned or self.has(extent)

    def lose(self, extent: ContentId) -> None:
        """Note that a content is no longer in the store directory where it was."""
        self._places.pop(extent).let_go()
        self.written_here.discard(extent)
        self.kept_bytes -= self._kept.pop(extent, 0)

    def keep(self, extent: ContentId, size: int) -> None:
        """Note that a published content is here; `size` bytes of it are ours unless a store node has it."""
        if not self.is_lent(extent):
            self.kept_bytes += size - self._kept.get(extent, 0)
            self._kept[extent] = size

    def pin(self, extent: ContentId) -> None:
        """Keep a content although its file moves on to another version; a file that a store node has, or is
        about to adopt, by a second name. Raises OSError ESTALE if the node has freed it: the file has a
        newer version."""
        place = self._places.get(extent)
        if place is not None and not place.held:
            try:
                place.hold(self._holds.setdefault(place.store, Holds(place.store)))
            except FileNotFoundError:
                self.lose(extent)
                raise fail(errno.ESTALE) from None
        super().pin(extent)

    def lend(self, extent: ContentId) -> None:
        """Note that a program may keep references to pages of a pinned content, in a pipe or a socket: the
        store node that has its file never uses it for another content."""
        place = self._places.get(extent)
        if place is not None and place.held:
            place.lend()

    def unpin(self, extent: ContentId) -> None:
        super().unpin(extent)
        if extent not in self.counts:
            place = self._places.get(extent)
            if place is not None:
                place.let_go()
            self.let_go_on_nodes(extent)

    def make_room(self, size: int) -> bool:
        """Evict unpinned contents until `size` more bytes may be kept and have room beside the working
        copies. Return whether they have; nothing is evicted for more than this host ever has room for."""
        limit = self._limit_bytes
        if size:
            below = os.fstatvfs(self._dir_fd)
            # Evicting moves bytes from "kept" to "free", so this sum does not change.
            limit = min(limit, self.kept_bytes + below.f_bavail * below.f_frsize)
        while size <= limit < self.kept_bytes + size:
            extent = next((kept for kept in self._kept if kept not in self.counts), None)
            if extent is None:
                return False
            self.evictions += 1
            self.free(extent)
        return size <= limit

    # -- on store nodes --------------------------------------------------------------------------

    def _lost_by(self, old: Inode, new: Inode | None) -> None:
        """Retire the content of a version that is superseded, or whose file is gone."""
        if new is None or new.extent != old.extent:
            self.retire(old.extent)

    async def pin_on_nodes(self, inode: Inode) -> bool:
        """Keep a file's content on its nodes until `let_go_on_nodes`. Return False if it is not the current
        one any more. Raises OSError."""
        content = inode.extent
        self.on_nodes.setdefault(content, 0)
        self.on_nodes[content] = await self._put_pin(content)
        current = self._member.tree.inodes.get(inode.ino)
        return current is not None and current.extent == content

    async def pin_again(self) -> None:
        """Pin on their nodes what was pinned there in a session that is lost."""
        for content in [*self.on_nodes]:
            with log_failure(log.warning, "content %x is not pinned in the new session", content):
                await self._member.session.wait_valid()
                revision = await self._put_pin(content)
                if content in self.on_nodes:
                    self.on_nodes[content] = revision
                else:
                    await self._unpin_on_nodes(content, revision)

    async def _put_pin(self, content: ContentId) -> int:
        session, replica = self._member.session, self._member.replica
        while True:
            await session.wait_valid(self._member.timeout_s)
            put = Put(pin_key(content, session.lease), b"", session.lease)
            try:
                return await replica.transact([session.compare()], [put])
            except (Conflict, LeaseEnded):
                await replica.barrier()

    def let_go_on_nodes(self, content: ContentId) -> None:
        """Give a content's pin on the nodes up unless the content is open."""
        if content in self.on_nodes and content not in self.counts:
            revision = self.on_nodes.pop(content)
            self._member.nursery.start_soon(self._unpin_on_nodes, content, revision)

    async def _unpin_on_nodes(self, content: ContentId, revision: int) -> None:
        key = pin_key(content, self._member.session.lease)
        # Whoever opens the content meanwhile puts the pin anew, with another revision.
        conditions = [(key, revision)] if revision else []
        text = "content %x stays pinned until this session ends"
        with suppress(Conflict), log_failure(log.info, text, content):
            await self._member.engine.transact(conditions, [Delete(key)])
