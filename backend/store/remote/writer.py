"""Sending a content to every member of the groups that it is spread over.

docs/replication.md has the rules. Sending does not publish: the namespace's transaction does, and it
compares the configurations of all groups, which `Transfer.complete` returns.
"""

import errno
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, NamedTuple

import trio

from ...files.digest import Stripe, by_stripe, digest_of_bytes
from ...kv import Compare
from ...model.groups import has_still
from ...model.placement import group_of
from ...model.records import GroupConfig, Layout, group_key
from ...namespace import Inode, NewVersion
from ...observe.logs import log_failure
from ...transport import Distrusted, Extent, Fenced, FileRange, Target, Unreachable, nothing_landed
from ...transport.device import Device
from ...transport.messages import PUTS_BYTES_MAX, PUTS_MAX, Parcel, in_batches
from ...unwrap import first_alone, for_each
from .cluster import STRIPES_AT_ONCE, Cluster

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.5
# How long a write waits because a node is full.
_FULL_S = 5.0


class _Place(NamedTuple):
    """A stripe, its group, and the configuration that the group has since a revision."""

    stripe: int
    group: int
    config: GroupConfig
    revision: int


class Transfer:
    """One version on its way, whose layout is decided.

    If it `is_adoptable`, its file is in the incoming directory of the store node on this host, which adopts
    it if it is of one stripe. Digests are computed while it is sent, if the mount verifies. `before`: the
    inode as it was; if that is the version's base, stripes that have stayed the same are not sent, as nodes
    have them (Device.share).
    """

    def __init__(
        self,
        cluster: Cluster,
        version: NewVersion,
        fd: int,
        is_adoptable: bool = False,
        before: Inode | None = None,
    ) -> None:
        assert version.layout is not None
        self._cluster = cluster
        self._content = version.extent
        self._layout = version.layout
        self._fd = fd
        self._size = version.size
        self.stripes = self._layout.stripes(self._size)
        self._is_adoptable = is_adoptable and self.stripes == 1
        # By stripe and node: the configuration under which the node acknowledged the stripe.
        self._acknowledged: dict[int, dict[int, GroupConfig]] = {}
        self._guards: dict[bytes, int] = {}
        # An adopted file is the very file that the program may still have mapped.
        self._wants_digests = cluster.verify and not (version.mapped and self._is_adoptable)
        self._mapped = version.mapped
        # The version before, if this one is a changed copy of it, whose stripes it may share.
        self._base = None
        if before is not None and version.base == before.version and before.digests:
            is_divided = before.layout.stripes(before.size) > 1
            self._base = before if is_divided and before.layout == version.layout else None
        # The stripes that the nodes have as stripes of the base.
        self._shared: set[int] = set()
        self._stamp: tuple[int, int] | None = None
        # The stripes that are hashed while their bytes pass through this process.
        self._passing: dict[int, Stripe] = {}
        # The digests for the version's record, once `complete` has returned.
        self.digests = b""
        # The nodes that may have received a part of it.
        self.asked: set[int] = set()
        # While it is sent ahead: the end of that.
        self._ahead: trio.Event | None = None

    async def send_ahead(self) -> None:
        """Send to nodes on other hosts, before anybody waits for it. Raises OSError, also if a node cannot
        be reached; `complete` sends the rest."""
        self._stamp = self._present_stamp()
        self._ahead = ended = trio.Event()
        try:
            await self.complete()
        finally:
            self._ahead = None
            ended.set()

    async def go_on(self, fd: int) -> bool:
        """Go on with another descriptor of the file, which nobody can write, after `send_ahead`. Return
        False if nodes may have other bytes than it has now."""
        if self._ahead is not None:
            await self._ahead.wait()
        self._fd = fd
        stamp = self._present_stamp()
        if stamp != self._stamp:
            # Maybe its times were set.
            if stamp[0] != self._size or not self.digests:
                return False
            self._stamp = stamp
            return await digests_of(fd, self._size, self._layout) == self.digests
        return True

    async def complete(self) -> list[Compare]:
        """Send what is missing under the present configurations, and return the compares of the
        transaction.

        Call again if a compare failed. Raises OSError: ENOSPC, or ETIMEDOUT if a group had no reachable
        members for too long.
        """
        self._guards.clear()
        hashing = self._wants_digests and not self.digests
        if hashing:
            self._stamp = self._present_stamp()
        # Digests tell which stripes nodes have already; a mapped file may change while it is sent.
        meanwhile = hashing and self._base is None and not self._mapped
        with first_alone():
            if meanwhile and self._bytes_pass():
                self._passing = {
                    stripe: Stripe(self._fd, *self._layout.span(self._size, stripe))
                    for stripe in range(self.stripes)
                }
                await self._bring_all()
                self.digests = b"".join([await each.finish() for each in self._passing.values()])
            elif meanwhile and self._size > self._cluster.small_bytes:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._hash)
                    nursery.start_soon(self._bring_all)
            else:
                if hashing and not self.fits_message:
                    await self._hash()
                    if self._base is not None:
                        self._shared = self._stripes_of_base(self._base)
                await self._bring_all()
        if self.digests and not await self._stayed():
            log.info(
                "content %x was written on while it was sent: it is not checked", self._content
            )
            self._wants_digests, self.digests = False, b""
        return list(self._guards.items())

    def _stripes_of_base(self, base: Inode) -> set[int]:
        """Return the stripes that have the same bytes in the base, which has the same layout."""
        layout = self._layout
        ours = by_stripe(self.digests, self.stripes)
        theirs = by_stripe(base.digests, layout.stripes(base.size))
        return {
            stripe
            for stripe, (mine, other) in enumerate(zip(ours, theirs, strict=False))
            if mine == other and layout.span(self._size, stripe) == layout.span(base.size, stripe)
        }

    @property
    def sent_bytes(self) -> int:
        """Return how many bytes of the content nodes did not have already."""
        if not self._shared:
            return self._size
        return self._size - sum(self._layout.span(self._size, each)[1] for each in self._shared)

    # -- many at a time --------------------------------------------------------------------------

    @property
    def fits_message(self) -> bool:
        is_small = self.stripes == 1 and self._size <= self._cluster.small_bytes
        return is_small and not self._is_adoptable

    def begin_small(self) -> tuple[GroupConfig, Parcel] | None:
        """Return the members that a small content has to be put on, and the parcel for each of them; None
        if it does not go into a message, or its group does not exist. Call `put_on` for each one that has
        it, and `complete` in any case."""
        if not self.fits_message:
            return None
        group = group_of(self._layout, 0, self._cluster.buckets)
        config, revision = self._cluster.groups.get(group)
        if not revision:
            return None
        self.asked.update(config.members)
        self._stamp = self._present_stamp()
        data = self._read(0, self._size)
        return config, Parcel(Extent(self._content, 0), Target(group, revision, ()), data)

    def _read(self, offset: int, length: int) -> bytes:
        """Return bytes for a message. If they are all, they are hashed as well."""
        data = os.pread(self._fd, length, offset)
        if self._wants_digests and not self.digests and length == self._size:
            self.digests = digest_of_bytes(data)
        return data

    def put_on(self, node: int, config: GroupConfig) -> None:
        """Note that a node has the content, which it took under this configuration."""
        self._acknowledged.setdefault(0, {})[node] = config

    # -- digests ---------------------------------------------------------------------------------

    def _present_stamp(self) -> tuple[int, int]:
        status = os.fstat(self._fd)
        return status.st_size, status.st_mtime_ns

    def _bytes_pass(self) -> bool:
        """Return whether the bytes will pass through this process's memory, and so be hashed there. Bytes
        that do not after all are read again."""
        cluster = self._cluster
        config, _ = cluster.groups.get(group_of(self._layout, 0, cluster.buckets))
        return (
            self._size > cluster.small_bytes
            and not self._is_adoptable
            and all(map(cluster.peers.shows_bytes, config.members))
        )

    async def _hash(self) -> None:
        self.digests = await digests_of(self._fd, self._size, self._layout)

    async def _stayed(self) -> bool:
        """Return whether the hashed bytes are those that were sent. If the file was written meanwhile, the
        nodes have a mixture of old and new bytes, which any digest would make unreadable: it gets none."""
        if self._present_stamp() != self._stamp:
            return False
        if not self._mapped:
            return True
        return await digests_of(self._fd, self._size, self._layout) == self.digests

    # -- sending ---------------------------------------------------------------------------------

    def _bring_all(self) -> Coroutine[Any, Any, None]:
        return for_each(range(self.stripes), self._bring, at_once=STRIPES_AT_ONCE)

    async def _bring(self, stripe: int) -> None:
        cluster = self._cluster
        group = group_of(self._layout, stripe, cluster.buckets)
        # The nodes that could not be reached, and until when that is tried; until when one may be full.
        lacking: list[int] = []
        deadline = full = 0.0
        waits = False
        while True:
            config, revision = cluster.groups.get(group)
            if not revision:
                raise OSError(errno.EIO, f"placement group {group:#x} does not exist")
            have = self._still_have(stripe, config)
            if self._ahead is not None and self._is_adoptable:
                have.add(cluster.here)
            missing = [node for node in config.members if node not in have]
            if not missing:
                break
            self.asked.update(missing)
            place = _Place(stripe, group, config, revision)
            try:
                await self._send(place, self._ordered(missing))
                break
            except (Fenced, Unreachable) as error:
                if isinstance(error, Fenced):
                    await cluster.replica.barrier()
                    if cluster.groups.get(group)[1] != revision:
                        continue
                    # An honest node has seen no newer configuration than etcd has.
                if self._ahead is not None:
                    raise
                if not waits:
                    log.info("content %x: %s; another way is looked for", self._content, error)
                waits = True
            except OSError as error:
                # A full node that is only joining is about to be dropped by its group.
                full = full or time.monotonic() + _FULL_S
                if error.errno != errno.ENOSPC or not config.joining or time.monotonic() > full:
                    raise
                with trio.move_on_after(_LOOK_AGAIN_S):
                    await cluster.groups.changed()
                continue
            if await self._send_around(place, missing):
                continue
            left = [node for node in missing if node not in self._acknowledged[stripe]]
            if left != lacking:
                lacking, deadline = left, time.monotonic() + cluster.timeout_s
            elif time.monotonic() > deadline:
                raise OSError(
                    errno.ETIMEDOUT,
                    f"store nodes {', '.join(f'{node:x}' for node in missing)} of placement group "
                    f"{group:#x} could not be reached for {cluster.timeout_s:g} s; "
                    "see `irdmafs cluster status`",
                )
            with trio.move_on_after(_LOOK_AGAIN_S * random.uniform(0.5, 1)):
                await cluster.groups.changed()
        self._guards[group_key(group)] = revision
        if waits:
            log.info("content %x: group %#x has it now", self._content, group)

    def _still_have(self, stripe: int, config: GroupConfig) -> set[int]:
        """Return the nodes whose acknowledgement counts under this configuration."""
        known = self._acknowledged.setdefault(stripe, {})
        for node, before in list(known.items()):
            if before is config or has_still(before, config, node):
                known[node] = config
            else:
                del known[node]
        return set(known)

    def _ordered(self, nodes: list[int]) -> list[int]:
        """Return the nodes in the order of the chain: the one on this host first, as sending to it costs
        nothing."""
        here = self._cluster.here
        return sorted(nodes, key=lambda node: node != here) if here in nodes else nodes

    async def _send(self, place: _Place, chain: list[int], *, at_once: bool = True) -> None:
        """Send to these nodes; unless to all `at_once`, by the first alone, which can reach the others."""
        cluster = self._cluster
        stripe, group, config, revision = place
        offset, length = self._layout.span(self._size, stripe)
        extent = Extent(self._content, stripe)
        target = Target(group, revision, tuple(chain[1:]))
        device = cluster.peers.device(chain[0])
        if at_once and stripe in self._shared and await self._share(extent, target, chain, length):
            pass
        elif chain[0] == cluster.here and self._is_adoptable:
            await device.adopt(extent, target, f"{self._content:x}")
        elif at_once and length <= cluster.small_bytes:
            # To all at once: for little data, a chain's extra hops cost more than this host's link.
            parcel = Parcel(extent, Target(group, revision, ()), self._read(offset, length))
            await self._tell_all(chain, lambda device: device.put(parcel))
        else:
            passing = self._passing.get(stripe)
            passed = passing.landed if passing is not None else nothing_landed
            await device.write(extent, target, FileRange(self._fd, offset, length), passed)
        self._acknowledged[stripe].update(dict.fromkeys(chain, config))

    async def _share(self, extent: Extent, target: Target, nodes: list[int], length: int) -> bool:
        """Have nodes use their bytes of the base. Return False if one of them does not have these."""
        assert self._base is not None
        source = Extent(self._base.extent, extent.stripe)
        target = Target(target.group, target.config, ())
        try:
            await self._tell_all(nodes, lambda device: device.share(extent, target, source, length))
        except FileNotFoundError:
            self._shared.discard(extent.stripe)
            return False
        return True

    async def _tell_all(self, nodes: list[int], tell: Callable[[Device], Awaitable[None]]) -> None:
        if len(nodes) == 1:
            await tell(self._cluster.peers.device(nodes[0]))
            return
        failed: list[OSError] = []

        async def tell_one(node: int) -> None:
            try:
                await tell(self._cluster.peers.device(node))
            except OSError as error:
                failed.append(error)

        async with trio.open_nursery() as nursery:
            for node in nodes[1:]:
                nursery.start_soon(tell_one, node)
            await tell_one(nodes[0])
        # An answer of a node counts for more than that another one could not be reached.
        if failed:
            raise min(failed, key=lambda error: isinstance(error, Unreachable))

    async def _send_around(self, place: _Place, missing: list[int]) -> bool:
        """Send to each node by itself after the chain broke, and let the others check the nodes that cannot
        be reached from here. Return whether all have it. Raises Distrusted if none of them will ever accept
        it."""
        cluster = self._cluster
        lost = []
        refusals = []
        for node in self._ordered(missing):
            if node not in cluster.members.nodes:
                lost.append(node)
                continue
            try:
                await self._send(place, [node])
            except Fenced:
                await cluster.replica.barrier()
                return False
            except Distrusted as error:
                lost.append(node)
                refusals.append(error)
            except Unreachable:
                lost.append(node)
        if len(refusals) == len(missing) and not self._acknowledged[place.stripe]:
            raise refusals[0]
        for node in lost:
            if not await self._send_through(place, node):
                return False
        return True

    async def _send_through(self, place: _Place, node: int) -> bool:
        """Send to a member by way of another one, or have it evicted if that cannot reach it either."""
        cluster = self._cluster
        if node not in cluster.members.nodes:
            return False  # its lease is over: the group's leader is about to drop it
        for other in sorted(self._acknowledged[place.stripe]):
            try:
                await self._send(place, [other, node], at_once=False)
                return True
            except Fenced:
                await cluster.replica.barrier()
                return False
            except Unreachable:
                pass
            with log_failure(log.debug, "content %x", self._content):
                await cluster.peers.suspect(other, place.group, node)
        return False


async def put_together(cluster: Cluster, transfers: Iterable[Transfer]) -> None:
    """Send small contents to their nodes, many in a message. What does not arrive is left to
    `Transfer.complete`."""
    by_node: dict[int, list[tuple[Transfer, GroupConfig, Parcel]]] = {}
    for transfer in transfers:
        begun = transfer.begin_small()
        if begun is not None:
            for node in begun[0].members:
                by_node.setdefault(node, []).append((transfer, *begun))

    async def send(node: int, begun: list[tuple[Transfer, GroupConfig, Parcel]]) -> None:
        for some in in_batches(begun, lambda one: len(one[2].data), PUTS_MAX, PUTS_BYTES_MAX):
            try:
                await cluster.peers.device(node).put(*(parcel for _, _, parcel in some))
            except OSError as error:
                log.info("%d contents did not come to node %x together: %s", len(some), node, error)
                return
            for transfer, config, _ in some:
                transfer.put_on(node, config)

    async with trio.open_nursery() as nursery:
        for node, several in by_node.items():
            nursery.start_soon(send, node, several)


async def digests_of(fd: int, size: int, layout: Layout) -> bytes:
    """Return the digests for a version's record, of a file that holds the version's bytes."""
    found = []
    for stripe in range(layout.stripes(size)):
        part = Stripe(fd, *layout.span(size, stripe))
        found.append(await part.finish())
    return b"".join(found)
