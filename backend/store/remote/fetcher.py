"""Getting published contents to this host.

A large content is streamed into a file, stripe by stripe, from a member of each stripe's group. Small ones
travel inside control messages: those asked for while an answer is on its way are asked together in the next
message, and a directory whose files are opened one after the other is read ahead.

Contents that are read into lent memory never get a file here.

Before a content may be opened its bytes are compared with the digests in its version's record; a replica
with wrong bytes is skipped. Ranges of files that are too large to be kept here are not checked: a digest is
that of a whole stripe.
"""

import errno
import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection, Container, Iterable, Iterator, Sequence
from functools import partial
from operator import itemgetter

import trio

from ...files.digest import Stripe, by_stripe, digest_of_bytes
from ...files.sparse import allocated_bytes, is_sparse
from ...model.placement import group_of
from ...model.records import NO_CONTENT, ContentId, GroupConfig
from ...namespace import Inode, fail
from ...transport import Distrusted, Extent, FileRange, Landed, Memory, nothing_landed
from ...unwrap import first_alone, for_each
from .cluster import STRIPES_AT_ONCE, Cluster
from .figures import FetchFigures
from .lent import Declined, Lent

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.5
# Errors of this host, or of a node, that waiting does not end.
_FINAL = (errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EOPNOTSUPP)
# Files up to this size are made without a thread.
_MADE_INLINE_BYTES = 1 << 20
_BATCH_EXTENTS = 256
_BATCH_BYTES = 4 << 20


class Gone(Exception):
    """No member of the group keeps the content any more: a newer version is current."""


class Wrong(OSError):
    """Every replica of a content has other bytes than were published."""


class _Batch:
    """Small contents that are requested from one node in one message."""

    def __init__(self) -> None:
        self.wanted: dict[Extent, Inode] = {}
        self.wrong: set[Extent] = set()
        self.data: dict[Extent, bytes | None] = {}
        self.error: OSError | None = None
        self.asked = False
        self.size = 0

    @property
    def is_full(self) -> bool:
        return len(self.wanted) >= _BATCH_EXTENTS or self.size >= _BATCH_BYTES

    def add(self, inode: Inode) -> None:
        extent = Extent(inode.extent, 0)
        if extent not in self.wanted:
            self.wanted[extent] = inode
            self.size += inode.size


class Fetcher:
    """Fetches contents from store nodes."""

    def __init__(self, cluster: Cluster) -> None:
        self._contents = cluster.contents
        self._cluster = cluster
        # Mounts read from the members of a group in different orders.
        self._salt = cluster.session.number
        self._running: dict[ContentId, trio.Event] = {}
        self._next_batch: dict[int, _Batch] = {}
        self._asking: dict[int, trio.Lock] = {}
        self.figures = FetchFigures()

    async def fetch(
        self, inode: Inode, ahead: Callable[[Inode], Iterable[Inode]] | None = None
    ) -> bool:
        """Bring the inode's current content to this host, once for all who ask for it at the same time.
        Return False if there is no room to keep it here.

        `ahead` gives inodes that will be wanted soon after one. Raises Gone, Wrong, or OSError (ETIMEDOUT:
        no member answers).
        """
        content = inode.extent
        room = allocated_bytes(inode.size, inode.blocks)
        has_holes = room < inode.size
        while (running := self._running.get(content)) is not None:
            await running.wait()
            if self._contents.has(content):
                return True
        done = self._running[content] = trio.Event()
        try:
            if self._cluster.store_here and self._borrow(inode):
                return True
            if not self._contents.make_room(room):
                return False
            if inode.size <= self._cluster.small_bytes:
                await self._fetch_small(inode, ahead)
                if not self._contents.has(content):
                    return False
            else:
                make = partial(self._contents.make, content, inode.size, has_holes=has_holes)
                # Where pages are small, allocating a large file takes long.
                is_quick = inode.size <= _MADE_INLINE_BYTES
                fd = make() if is_quick else await trio.to_thread.run_sync(make)
                try:
                    memory = Memory.HOLES if has_holes else Memory.FILE
                    await self._read_all(inode, FileRange(fd, 0, inode.size, memory))
                except BaseException:
                    self._contents.give_up(content)
                    raise
                finally:
                    os.close(fd)
                self._contents.admit(content, room)
            self.figures.fetched_files += 1
            self.figures.fetched_bytes += room
            return True
        except OSError as error:
            # The kernel may not have freed the evicted files yet.
            if error.errno != errno.ENOSPC:
                raise
            log.info("content %x is not kept here: %s", content, error.strerror)
            return False
        finally:
            del self._running[content]
            done.set()

    async def read_into(self, inode: Inode, lent: Lent) -> None:
        """Read the inode's current content to the start of memory that a program lends.

        Raises Gone, Wrong, or OSError: EOPNOTSUPP if the program should open the file instead (Declined, or
        a device that cannot be reached), EFBIG, ETIMEDOUT."""
        content, size = inode.extent, inode.size
        if size > lent.size:
            raise OSError(errno.EFBIG, f"{size} bytes do not fit into {lent.size} that are lent")
        if self._contents.has(content) or content in self._running:
            raise Declined("it is on this host")
        if self._cluster.store_here and self._borrow(inode):
            raise Declined("a store node on this host has it")
        if size <= self._cluster.small_bytes:
            raise Declined("it is small")
        if is_sparse(size, inode.blocks):
            raise Declined("it has holes")
        is_checked = self._cluster.verify and bool(inode.digests)
        if is_checked and lent.memory is Memory.DEVICE:
            raise Declined("it is to be checked (see --no-verify)")
        await self._read_all(inode, FileRange(lent.fd, 0, size, lent.memory))
        self.figures.lent_files += 1
        self.figures.lent_bytes += size

    async def read(self, inode: Inode, content: ContentId, offset: int, size: int) -> bytes:
        """Return bytes of a content that is not kept here (`inode` gives its layout)."""
        buffer = os.memfd_create("irdmafs-range", os.MFD_CLOEXEC)
        try:
            os.ftruncate(buffer, size)
            layout = inode.layout
            step = layout.stripe_bytes or (offset + size)
            done = 0
            while done < size:
                stripe = (offset + done) // step
                start = (offset + done) - stripe * step
                length = min(size - done, step - start)
                into = FileRange(buffer, done, length)
                read = partial(self._read_from, Extent(content, stripe), start, into)
                await self._from_any(inode, stripe, (), read, content)
                done += length
            return os.pread(buffer, size, 0)
        except Gone:
            raise fail(
                errno.ESTALE, f"content {content:x} is no longer kept by any store node"
            ) from None
        finally:
            os.close(buffer)

    # -- where it is -----------------------------------------------------------------------------

    def _sources(self, config: GroupConfig, content: ContentId, wrong: Container[int]) -> list[int]:
        """Return live members to read from, except `wrong` ones: one on this host first, the others in an
        order that differs between contents and between mounts, to share the load."""
        nodes, here, salt = self._cluster.members.nodes, self._cluster.here, self._salt
        ranks = [
            # The hash of a tuple mixes its last item little.
            (node != here, hash((node, content, salt, node)), node)
            for node in config.in_sync
            if node in nodes and node not in wrong
        ]
        return [*map(itemgetter(2), sorted(ranks))]

    def _borrow(self, inode: Inode) -> bool:
        """Use the file of the store node on this host, if it has the whole content."""
        if inode.layout.stripes(inode.size) > 1:
            return False
        borrowed = self._contents.borrow(inode.extent, self._cluster.store_here)
        self.figures.borrowed += borrowed
        return borrowed

    async def _from_any(
        self,
        inode: Inode,
        stripe: int,
        wrong: Collection[int],
        read: Callable[[int], Awaitable[None]],
        content: ContentId = NO_CONTENT,
    ) -> int:
        """`read` from one member after another of a stripe's group until it succeeds, and return that one.
        Members whose bytes were `wrong` are skipped. `content`: if it is not the inode's present one."""
        content = content or inode.extent
        group = group_of(inode.layout, stripe, self._cluster.buckets)
        deadline = 0.0
        told: set[int] = set()
        while True:
            absent = 0
            refusals: list[OSError] = []
            config, _ = self._cluster.groups.get(group)
            sources = self._sources(config, content, wrong)
            for node in sources:
                try:
                    await read(node)
                    return node
                except FileNotFoundError:
                    absent += 1
                except OSError as error:
                    if isinstance(error, Distrusted) or error.errno in _FINAL:
                        refusals.append(error)
                    if node not in told:
                        told.add(node)
                        log.info("content %x: %s; trying another replica", content, error)
            wanted = self._cluster.groups.get(group)[0].in_sync
            now, nobody_has_it = time.monotonic(), sources and absent == len(sources)
            deadline = deadline or now + self._cluster.timeout_s
            if refusals and (len(refusals) == len(sources) or now > deadline):
                raise refusals[0]
            if wrong and (nobody_has_it or now > deadline or set(wanted).issubset(wrong)):
                raise Wrong(
                    errno.EIO,
                    f"{self._cluster.tree.describe(inode.ino)} cannot be read: no replica has the bytes "
                    "that were published, store nodes "
                    f"{', '.join(f'{node:x}' for node in sorted(wrong))} have others; publish it again",
                )
            if nobody_has_it:
                raise Gone
            if now > deadline:
                raise OSError(
                    errno.ETIMEDOUT,
                    f"no replica could be read for {self._cluster.timeout_s:g} s: store nodes "
                    f"{', '.join(f'{node:x}' for node in wanted)} of placement group {group:#x} "
                    "are wanted; see `irdmafs cluster status`",
                )
            with trio.move_on_after(_LOOK_AGAIN_S):
                await self._cluster.members.changed()

    def _report_wrong(self, inode: Inode, node: int, stripe: int, where: str = "") -> None:
        """Tell a node that its copy is wrong, so that it checks it."""
        self.figures.wrong_fetches += 1
        doubt = self._cluster.peers.device(node).doubt
        self._cluster.nursery.start_soon(doubt, Extent(inode.extent, stripe))
        log.warning(
            "%s: store node %x sent other bytes%s than were published as version %d: they are dropped",
            self._cluster.tree.describe(inode.ino),
            node,
            where,
            inode.version,
        )

    # -- large -----------------------------------------------------------------------------------

    async def _read_all(self, inode: Inode, into: FileRange) -> None:
        """Read all stripes concurrently. Raises Gone, Wrong, OSError."""
        stripes = inode.layout.stripes(inode.size)
        digests = by_stripe(inode.digests, stripes) if self._cluster.verify else []
        read = partial(self._read_stripe, inode, into, digests)
        with first_alone(Gone, OSError):
            await for_each(range(stripes), read, at_once=STRIPES_AT_ONCE)

    async def _read_stripe(
        self, inode: Inode, into: FileRange, digests: Sequence[bytes], stripe: int
    ) -> None:
        """Read a stripe, until it has its digest if there are any. Raises Wrong."""
        offset, length = inode.layout.span(inode.size, stripe)
        there, extent = into.part(offset, length), Extent(inode.extent, stripe)
        wrong: set[int] = set()
        while True:
            hashed = Stripe(there.fd, there.offset, length)
            landed = hashed.landed if digests else nothing_landed
            read = partial(self._read_from, extent, 0, there, landed=landed)
            node = await self._from_any(inode, stripe, wrong, read)
            if not digests:
                return
            if await hashed.finish() == digests[stripe]:
                self.figures.checked_bytes += length
                return
            self._report_wrong(inode, node, stripe, f" at {offset} to {offset + length}")
            wrong.add(node)

    def _read_from(
        self,
        extent: Extent,
        start: int,
        into: FileRange,
        node: int,
        landed: Landed = nothing_landed,
    ) -> Awaitable[None]:
        return self._cluster.peers.device(node).read(extent, start, into, landed)

    # -- small -----------------------------------------------------------------------------------

    async def _fetch_small(
        self, inode: Inode, ahead: Callable[[Inode], Iterable[Inode]] | None
    ) -> None:
        extent = Extent(inode.extent, 0)
        wrong: set[int] = set()

        async def take(node: int) -> None:
            batch = self._next_batch.get(node)
            if batch is None or batch.is_full:
                batch = self._next_batch[node] = _Batch()
            batch.add(inode)
            if ahead is not None:
                for other in self._small_ones(ahead(inode), node):
                    if batch.is_full:
                        break
                    batch.add(other)
            await self._answered(node, batch)
            if batch.error is not None:
                raise batch.error
            if self._contents.has(inode.extent):
                return
            if extent in batch.wrong:
                wrong.add(node)
                raise fail(errno.EIO)
            if batch.data.get(extent) is None:
                raise fail(errno.ENOENT)

        await self._from_any(inode, 0, wrong, take)

    def _small_ones(self, inodes: Iterable[Inode], node: int) -> Iterator[Inode]:
        """Return those inodes whose small contents this node can send in the same answer."""
        for inode in inodes:
            if not 0 < inode.size <= self._cluster.small_bytes or self._contents.has(inode.extent):
                continue
            if inode.extent in self._running:
                continue
            group = group_of(inode.layout, 0, self._cluster.buckets)
            if node in self._cluster.groups.get(group)[0].in_sync:
                yield inode

    async def _answered(self, node: int, batch: _Batch) -> None:
        """Wait for a batch's answer. Only one request at a time is sent to a node; contents added meanwhile
        go out with the next one."""
        async with self._asking.setdefault(node, trio.Lock()):
            if not batch.asked:
                if self._next_batch.get(node) is batch:
                    del self._next_batch[node]
                await self._ask(node, batch)
                batch.asked = True

    async def _ask(self, node: int, batch: _Batch) -> None:
        wanted = list(batch.wanted)
        try:
            answers = await self._cluster.peers.device(node).get(wanted, self._cluster.small_bytes)
        except OSError as error:
            batch.error = error
            return
        for extent, data in zip(wanted, answers, strict=True):
            batch.data[extent] = data
            inode = batch.wanted[extent]
            if data is None or self._contents.has(inode.extent):
                continue
            if self._is_right(inode, data):
                self._store_small(inode.extent, data)
            else:
                batch.wrong.add(extent)
                self._report_wrong(inode, node, 0)

    def _is_right(self, inode: Inode, data: bytes) -> bool:
        if not (self._cluster.verify and by_stripe(inode.digests, 1)):
            return True
        if digest_of_bytes(data) != inode.digests:
            return False
        self.figures.checked_bytes += len(data)
        return True

    def _store_small(self, content: ContentId, data: bytes) -> None:
        if not self._contents.make_room(len(data)):
            return
        fd = self._contents.make(content, len(data))
        try:
            os.pwrite(fd, data, 0)
        finally:
            os.close(fd)
        self._contents.admit(content, len(data))
