"""Dropping a live member of a group only if those that stay have all that it has.

A dropped member (its node is drained, or it is surplus) frees its copies, or its node is switched off.
Other members in sync have everything, but a copy of theirs may have changed unnoticed. So before the leader
drops the member, it asks the staying ones for the digests of all extents in the group. A member that was
filled a short while ago was checked then. If all staying ones have an extent wrong that the member has
right, they are told, mend it, and are asked again. While it is unknown who is right, because a node does
not answer, the member stays, unless a staying one has the same bytes.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import trio

from ..model.records import GroupConfig
from ..transport import Extent
from ..unwrap import for_each
from .catalog import Catalog
from .checks import Checks, Verdict

log = logging.getLogger(__name__)

_CHECKED_S = 3600.0
_RETRY_S = 1.0
_EXTENTS_AT_ONCE = 8


class _Copy(NamedTuple):
    verdict: Verdict
    digest: bytes


class Handover:
    """The handover in the groups that this node leads. `doubt` makes it check a copy of its own."""

    def __init__(self, catalog: Catalog, checks: Checks, doubt: Callable[[Extent], None]) -> None:
        self._catalog = catalog
        self._checks = checks
        self._doubt = doubt
        self._filled: dict[int, dict[int, float]] = {}  # group -> node -> when
        self._sound: dict[int, int] = {}  # group -> the epoch for which that is known
        self._asked: dict[int, tuple[GroupConfig, GroupConfig]] = {}
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
        self._asked[group] = config, step
        self._wake.set()
        return False

    async def run(self, ready: Callable[[], None]) -> None:
        """Carry out what `may_step` asked for. `ready` is called when a member may be dropped by now."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self._asked:
                for group, (config, step) in list(self._asked.items()):
                    is_sound = await self._is_sound(group, config, step)
                    if is_sound and self._asked.pop(group, None) is not None:
                        self._sound[group] = config.epoch
                        ready()
                if self._asked:
                    await trio.sleep(_RETRY_S)

    async def _is_sound(self, group: int, config: GroupConfig, step: GroupConfig) -> bool:
        leaving = [node for node in config.in_sync if node not in step.in_sync]
        bad: list[Extent] = []

        async def look_at(extent: Extent) -> None:
            if not await self._is_kept(extent, step.in_sync, leaving):
                bad.append(extent)

        extents = [extent for extent, _ in self._catalog.extents_of(group)]
        await for_each(extents, look_at, at_once=_EXTENTS_AT_ONCE)
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
        self, extent: Extent, staying: Iterable[int], leaving: Iterable[int]
    ) -> bool:
        """Return whether every copy of a leaving member that may be right is on a staying one, too."""
        found: dict[int, _Copy] = {}
        for node in itertools.chain(staying, leaving):
            digest = await self._checks.digest_of(node, extent)
            if digest is None:
                return False
            verdict = await self._checks.verdict(extent, digest) if digest else Verdict.WRONG
            if verdict is Verdict.RIGHT and node in staying:
                return True
            found[node] = _Copy(verdict, digest)
        wrong = [node for node in staying if found[node].verdict is Verdict.WRONG]
        kept = {found[node].digest for node in staying}
        for node in leaving:
            verdict, digest = found[node]
            if verdict is Verdict.RIGHT:
                for other in wrong:
                    if other == self._catalog.files.node:
                        self._doubt(extent)
                    else:
                        await self._checks.device(other).doubt(extent)
                return False
            if verdict is Verdict.UNKNOWN and digest not in kept:
                return self._catalog.check_of(extent) is None
        return True
