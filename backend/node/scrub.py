"""Finding extents whose bytes have changed since they were published, and mending them.

Disks and memory lose bits without an error. So each node reads everything that it keeps, slowly, once in a
period, and at once what another process got wrong bytes of. Only its own reading counts: nobody can make a
node believe that a right copy is wrong. A wrong copy is replaced by a right one of any node that still has
it. While there is none the wrong copy stays: it may be all that is left of a file. A right one is looked
for again when nodes come.

On a disk a round reads past the page cache, which would hide damage on the disk.

STORE/scrub.json    {"finished": when the last round ended, "began": when the present one did (0: none),
                    "at": the last extent it came to, "wrong": those that are not mended yet}
"""

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import trio

from ..files.digest import digest_at_rest
from ..observe.figures import count, gauge
from ..observe.logs import log_failure
from ..pauses import Throttle
from ..transport import Extent
from .catalog import Catalog
from .checks import Verdict, verdict_on
from .copier import Copier
from .state import ClusterState

log = logging.getLogger(__name__)

_NAME = "scrub.json"
_SAVE_PERIOD_S = 30.0
_LOOK_PERIOD_S = 60.0
# The limit of waiting doubts. More are dropped, as the next round reads those extents anyway.
_DOUBTS_MAX = 4096
# How many times faster than a round doubted extents are read.
_DOUBTS_HASTE = 8
_RETRY_FIRST_S = 1.0
_RETRY_MAX_S = 300.0
# How many files the status names at most.
_NAMED_MAX = 100


class _State(msgspec.Struct):
    finished: float = 0.0
    began: float = 0.0
    at: tuple[int, int] = (0, -1)
    wrong: list[Extent] = []


@dataclass(slots=True)
class ScrubFigures:
    """Comparing what is kept with what was published."""

    scrubbed_bytes: int = count("Bytes kept here that were read again and compared")
    scrub_finished_seconds: float = gauge(
        "When all extents had last been read again, in seconds since 1970; 0: never"
    )
    wrong_found: int = count("Extents found not to be what was published any more")
    wrong_mended: int = count("Of them, replaced by a right copy")
    wrong_extents: int = gauge("Extents here that are not what was published")
    broken_extents: int = gauge("Of them, those that no node has right")


class Scrub:
    """The scrub of one store node. Reads at most `bytes_per_s` (0: unlimited). Reads everything once in
    `period_s` (0: only on request). Doubted extents are read at once."""

    def __init__(
        self,
        cluster: ClusterState,
        catalog: Catalog,
        copier: Copier,
        *,
        bytes_per_s: float,
        period_s: float,
    ) -> None:
        self._cluster = cluster
        self._files = catalog.files
        self._catalog = catalog
        self._copier = copier
        self._throttle = Throttle(bytes_per_s)
        self._doubts_throttle = Throttle(_DOUBTS_HASTE * bytes_per_s)
        self._period_s = period_s
        self._state = self._load()
        self._saved_at = 0.0
        self._round_bytes = 0
        self._checked_bytes = 0
        self._wrong = copier.wrong
        self._doubts: OrderedDict[Extent, None] = OrderedDict()
        self._doubted = trio.Event()
        self._news = trio.Event()
        self._told = trio.Event()
        for extent in self._state.wrong:
            self.doubt(extent)
        cluster.members.node_changed.append(self._node_changed)

    # -- what others say -------------------------------------------------------------------------

    def doubt(self, extent: Extent) -> None:
        """Note that another process says it got wrong bytes of an extent."""
        if extent in self._files and extent not in self._wrong and len(self._doubts) < _DOUBTS_MAX:
            self._doubts[extent] = None
            self._doubted.set()

    def begin(self) -> None:
        """Begin a round now, if none is under way."""
        if not self._state.began:
            self._begin()
        self._told.set()

    def figures(self) -> ScrubFigures:
        self._wrong.drop_unneeded()
        return ScrubFigures(
            scrubbed_bytes=self._checked_bytes,
            scrub_finished_seconds=self._state.finished,
            wrong_found=self._wrong.found,
            wrong_mended=self._wrong.mended,
            wrong_extents=len(self._wrong),
            broken_extents=sum(not may_be_mended for may_be_mended in self._wrong.values()),
        )

    def status(self) -> dict[str, Any]:
        """Return the scrub's part of a node's report."""
        now, state = time.time(), self._state
        self._wrong.drop_unneeded()
        return {
            "scrub_age_s": round(max(0.0, now - state.finished), 1) if state.finished else None,
            "scrub_running_s": round(max(0.0, now - state.began), 1) if state.began else None,
            "scrub_share": self._share() if state.began else None,
            "wrong_files": [list(one) for one in self._wrong.inodes().items()][:_NAMED_MAX],
        }

    # -- the work --------------------------------------------------------------------------------

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._answer_doubts)
            nursery.start_soon(self._mend_again)
            await self._rounds()

    async def _rounds(self) -> None:
        if not self._state.finished and not len(self._files):
            # Nothing was here yet that could have been lost.
            self._state.finished = time.time()
            self._save()
        while True:
            self._told = trio.Event()
            # A round that ended in the future was dated by a wrong clock.
            is_due = not 0 <= time.time() - self._state.finished < self._period_s
            if self._state.began or (is_due and self._period_s > 0):
                await self._round()
            with trio.move_on_after(_LOOK_PERIOD_S):
                await self._told.wait()

    async def _round(self) -> None:
        if not self._state.began:
            self._begin()
        log.info("looking over %d extents", len(self._files))
        found_before = self._wrong.found
        left = sorted(extent for extent in self._files if extent > self._state.at)
        for extent in left:
            await trio.lowlevel.checkpoint()
            if extent in self._files:
                await self._look_at(extent, self._throttle.take, direct=self._files.power_safe)
            self._state.at = extent
            if time.monotonic() - self._saved_at > _SAVE_PERIOD_S:
                self._save()
        self._state = _State(finished=time.time())
        self._save()
        log.info(
            "%d extents (%d MiB) were looked over, %d were found to be wrong",
            len(left),
            self._round_bytes >> 20,
            self._wrong.found - found_before,
        )

    def _begin(self) -> None:
        self._state = _State(finished=self._state.finished, began=time.time())
        self._round_bytes = 0
        self._save()

    async def _answer_doubts(self) -> None:
        while True:
            await self._doubted.wait()
            self._doubted = trio.Event()
            while self._doubts:
                extent, _ = self._doubts.popitem(last=False)
                await self._look_at(extent, self._doubts_throttle.take, direct=False)

    async def _look_at(self, extent: Extent, take: Callable[[int], Any], *, direct: bool) -> None:
        """Read an extent that can be checked, and mend it if it is wrong."""
        if not self._catalog.digest_of(extent):
            return
        try:
            held = self._files.hold(extent, damaged=True)
        except OSError:
            return  # its next reader reports that
        fd = -1
        try:
            size = self._files.size(extent) or 0
            fd = _past_the_cache(held.fd) if direct else -1
            digest = await digest_at_rest(held.fd if fd < 0 else fd, size, take)
            self._checked_bytes += size
            self._round_bytes += size
            verdict = verdict_on(digest, self._catalog.digest_of(extent))
        except OSError as error:
            log.error("extent %x.%x cannot be read: %s", *extent, error)
            verdict = Verdict.WRONG
        finally:
            held.close()
            if fd >= 0:
                os.close(fd)
        if verdict is Verdict.WRONG:
            await self._found_wrong(extent)
        elif verdict is Verdict.RIGHT:
            self._wrong.pop(extent, None)

    async def _found_wrong(self, extent: Extent) -> None:
        if extent not in self._files or not self._catalog.is_named(extent.content):
            return
        self._wrong.find(extent)
        await self._mend(extent)
        if extent in self._wrong:
            self._wrong.wait()
            self._save()

    async def _mend(self, extent: Extent) -> None:
        config, _ = self._cluster.groups.get(self._catalog.home_of(extent))
        size = self._files.size(extent)
        if not config.members or size is None:
            self._wrong.pop(extent, None)
            return
        try:
            done = await self._copier.mend(config, extent, size)
        except OSError as error:
            log.warning("extent %x.%x is not mended yet: %s", *extent, error)
            done = None
        if done:
            self._wrong.mend(extent)
        elif done is False and self._wrong.get(extent):
            self._wrong.keep(extent)

    async def _mend_again(self) -> None:
        """Look for right copies again, when nodes come and from time to time."""
        while True:
            await self._wrong.wait_for_one()
            delay_s = _RETRY_FIRST_S
            while self._wrong:
                with trio.move_on_after(delay_s) as waiting:
                    await self._news.wait()
                came = not waiting.cancelled_caught
                delay_s = _RETRY_FIRST_S if came else min(2 * delay_s, _RETRY_MAX_S)
                self._news = trio.Event()
                for extent in list(self._wrong):
                    await self._mend(extent)
                self._wrong.drop_unneeded()
                self._save()

    def _node_changed(self, node: int) -> None:
        if self._wrong and node in self._cluster.members.nodes:
            self._news.set()

    # -- what is remembered ----------------------------------------------------------------------

    def _share(self) -> float:
        """Return how much of the round is done, from 0 to 1."""
        total = len(self._files)
        done = sum(extent <= self._state.at for extent in self._files)
        return round(done / total, 3) if total else 1.0

    def _load(self) -> _State:
        try:
            text = self._files.place.read(_NAME)
            return _State() if text is None else msgspec.json.decode(text, type=_State)
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s: %s: everything is looked over anew", _NAME, error)
            return _State()

    def _save(self) -> None:
        self._saved_at = time.monotonic()
        self._state.wrong = list(self._wrong)[:_DOUBTS_MAX]
        with log_failure(log.info, "%s", _NAME):
            self._files.place.write(_NAME, msgspec.json.encode(self._state), hardened=False)


def _past_the_cache(fd: int) -> int:
    """Return a descriptor of the same file that bypasses the page cache, -1 if there is none."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return -1
