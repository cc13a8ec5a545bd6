"""Dropping a live member of a group only if those that stay have all that it has.

A dropped member (its node is drained, or it is surplus) frees its copies, or its node is switched off.
Other members in sync have everything, but a copy of theirs may have changed unnoticed. So before the leader
drops the member, it asks the staying ones for the digests of all extents in the group. A member that was
filled a short while ago was checked then. If all staying ones have an extent wrong that the member has
right, they are told, mend it, and are asked again. While it is unknown who is right, because a node does
not answer, the member stays, unless a staying one that was asked before has the right bytes.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import trio

from ..model.records import GroupConfig
from ..pauses import Pauses
from ..transport import Extent
from ..transport.device import Device
from ..unwrap import for_each
from .catalog import Catalog

log = logging.getLogger(__name__)

_CHECKED_S = 3600.0
_RETRY_FIRST_S, _RETRY_MAX_S = 1.0, 10.0
_EXTENTS_AT_ONCE = 8


class _Question(NamedTuple):
    """A change of a group's configuration that waits, and the extents that need not be looked at again."""

    config: GroupConfig
    step: GroupConfig
    kept: set[Extent]


class Handover:
    """The handover in the groups that this node leads. `device` returns the transport to another node,
    `doubt` makes this one check a copy of its own."""

    def __init__(
        self, catalog: Catalog, device: Callable[[int], Device], doubt: Callable[[Extent], None]
    ) -> None:
        self._catalog = catalog
        self._files = catalog.files
        self._device = device
        self._doubt = doubt
        self._filled: dict[int, dict[int, float]] = {}  # group -> node -> when
        self._sound: dict[int, int] = {}  # group -> the epoch for which that is known
        self._asked: dict[int, _Question] = {}  # by group
        self._told: set[int] = set()
        self._wake = trio.Event()

    def group_changed(self, group: int, before: GroupConfig, config: GroupConfig) -> None:
        """Note a group's new configuration, and the one before; call it for each one."""
        self._sound.pop(group, None)
        self._asked.pop(group, None)
        self._told.discard(group)
        if not config.members:
            self._filled.pop(group, None)
        for node in set(before.joining) & set(config.in_sync):
            self._filled.setdefault(group, {})[node] = time.monotonic()

    def may_step(self, group: int, config: GroupConfig, step: GroupConfig, live: set[int]) -> bool:
        """Return whether a group may go from one configuration to the other now. If not, start to check."""
        if not (set(config.in_sync) - set(step.in_sync)) & live:
            return True
        recently = time.monotonic() - _CHECKED_S
        filled = self._filled.get(group, {})
        if any(filled.get(node, recently) > recently for node in step.in_sync):
            return True
        if self._sound.get(group) == config.epoch:
            return True
        asked = self._asked.get(group)
        if asked is None or (asked.config, asked.step) != (config, step):
            self._asked[group] = _Question(config, step, set())
            self._wake.set()
        return False

    async def run(self, ready: Callable[[], None]) -> None:
        """Carry out what `may_step` asked for. `ready` is called when a member may be dropped by now."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            pauses = Pauses(_RETRY_FIRST_S, _RETRY_MAX_S)
            while self._asked:
                for group, asked in list(self._asked.items()):
                    is_sound = await self._is_sound(group, asked)
                    if is_sound and self._asked.get(group) is asked:
                        del self._asked[group]
                        self._sound[group] = asked.config.epoch
                        ready()
                if self._asked:
                    await pauses.wait()

    async def _is_sound(self, group: int, asked: _Question) -> bool:
        staying = asked.step.in_sync
        leaving = [node for node in asked.config.in_sync if node not in staying]
        bad: list[Extent] = []

        async def look_at(extent: Extent) -> None:
            if await self._is_kept(extent, staying, leaving):
                asked.kept.add(extent)
            else:
                bad.append(extent)

        extents = {extent for extent, _ in self._catalog.extents_of(group)}
        await for_each(extents - asked.kept, look_at, at_once=_EXTENTS_AT_ONCE)
        if bad and group not in self._told:
            self._told.add(group)
            log.warning(
                "group %#x: %d extents are not sound on those who stay in it; node %s stays until they are",
                group,
                len(bad),
                " and ".join(f"{node:x}" for node in leaving),
            )
        return not bad

    async def _is_kept(
        self, extent: Extent, staying: Sequence[int], leaving: Sequence[int]
    ) -> bool:
        """Return whether a staying member has the extent as it was published, or no leaving one has."""
        published = self._catalog.digest_of(extent)
        if not published:
            return True  # nobody can tell right bytes from wrong ones
        for node in (*staying, *leaving):
            digest = await self._digest_of(node, extent)
            if digest is None:
                return False
            if digest == published and node in staying:
                return True
            if digest == published:
                await self._tell_wrong(staying, extent)
                return False
        return True

    async def _digest_of(self, node: int, extent: Extent) -> bytes | None:
        """Return the digest of a node's copy; b"": it has none, None: it does not say."""
        try:
            if node == self._files.node:
                return await self._files.digest(extent)
            return await self._device(node).digest(extent)
        except FileNotFoundError:
            return b""
        except OSError as error:
            log.info("extent %x.%x of node %x: %s", *extent, node, error)
            return None

    async def _tell_wrong(self, nodes: Sequence[int], extent: Extent) -> None:
        for node in nodes:
            if node == self._files.node:
                self._doubt(extent)
            else:
                await self._device(node).doubt(extent)
