"""The replica hub: one watch over a cluster's keys feeds everything in this process that follows them.

Consumers (the namespace, members, groups, a store node's catalog) each keep their part of the keys
in memory. All of them have applied a transaction before the next one is processed and before `applied`
includes it; so together they show the cluster as it was at one revision.
"""

import errno
import heapq
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from itertools import count
from typing import Protocol

import trio

from ..etcd.engine import EtcdEngine
from ..kv import Change, Compacted, Compares, Conflict, Event, KeyValue, Operations, WentBack
from ..kv.faults import Faults
from ..namespace.inode import Unread
from ..namespace.reading import Reader
from ..pauses import Pauses
from .history import History

log = logging.getLogger(__name__)

# Every key: kinds are ASCII letters (see records).
_START, _END = b"", b"\xff"
_RETRY_FIRST_S = 0.1
_RETRY_MAX_S = 5.0
_QUIET_S = 1.0
# A resting process looks so often whether changes may pass, and whether they still may. After more than so
# many everything is read anew. If etcd does not answer in time, what was known has to do.
_LOOK_S = 1.0
_LOOK_AGAIN_S = 5.0
_MISSED_MAX = 500
_WAKE_S = 5.0


class Consumer(Protocol):
    """Keeps the records of some prefixes, which are kinds of keys (see records), or all records (b"").
    Called from inside the hub's loop: must not block and must not raise."""

    @property
    def prefixes(self) -> tuple[bytes, ...]: ...

    def load(self, records: Sequence[KeyValue], revision: int) -> None:
        """Take all records at a revision. Called once at the start, and again whenever events were lost:
        then differences have happened meanwhile."""

    def apply(self, revision: int, events: Sequence[Event]) -> None:
        """Apply the events of one transaction."""


class Replica:
    """The hub. `applied` is the revision up to which all consumers know everything; `barriers` counts the
    barriers of the engine. Waits end with OSError ETIMEDOUT after the engine's time-out.

    Keys of no known form do not come to consumers: `faults` are told of them. They forget what was wrong
    with a record when it changes. `history`, the first consumer, tells when to trust the data; `names`
    reads names for the consumer that has a tree of them. While nobody waits and `is_depended_on` returns
    False, changes come many at a time, a little later; if it is also `resting` none come, and `rests`
    counts how often they stopped.
    """

    def __init__(
        self,
        engine: EtcdEngine,
        consumers: Sequence[Consumer],
        *,
        faults: Faults | None = None,
        history: History | None = None,
        names: Reader | None = None,
        is_depended_on: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine = engine
        self._is_depended_on = is_depended_on
        self._waited_at = 0.0  # when somebody last waited for a revision, by time.monotonic()
        self._names = names
        # Held while names are read, and while what consumers know changes otherwise.
        self._changing = trio.Lock()
        self._faults = faults or Faults()
        self._history = history
        self._consumers = (*((history,) if history is not None else ()), *consumers)
        # The places in `_consumers` of those that follow a kind of keys, and of those that follow all.
        self._followers: dict[bytes, list[int]] = {}
        for place, consumer in enumerate(self._consumers):
            for prefix in consumer.prefixes:
                self._followers.setdefault(prefix, []).append(place)
        everything = self._followers.setdefault(b"", [])
        for places in self._followers.values():
            places[:] = sorted({*places, *everything})
        self.applied = 0
        self.barriers = 0
        self._ended = False
        self.rests = 0
        self._rested: trio.Event | None = None  # changes pass until it is set
        # Everything is to be read anew; who asked for it waits for the event.
        self._reloaded: trio.Event | None = None
        self._watching = trio.CancelScope()
        self._waiting: list[tuple[int, int, trio.Event]] = []
        self._order = count()
        # Barriers in the order of their calls; an answer serves the calls made before its request.
        self._asked = 0
        self._answered = 0
        self._answer: int | OSError = 0
        self._asking = trio.Lock()

    async def start(self, nursery: trio.Nursery) -> None:
        """Load all consumers and follow the engine from there on. Raises OSError, WentBack."""
        await self._load()
        self._engine.calls.client.moderation.allowed = self._may_lag
        nursery.start_soon(self._follow)

    async def wait_applied(self, revision: int) -> None:
        """Return when all consumers know everything up to this revision.

        Raises OSError ETIMEDOUT, WentBack, trio.ClosedResourceError when the engine is closed.
        """
        self._waited_at = time.monotonic()
        if self.applied >= revision:
            return
        self._check_open()
        self._engine.calls.client.moderation.hurry()
        self._end_rest()
        event, timeout_s = trio.Event(), self._engine.calls.timeout_s
        heapq.heappush(self._waiting, (revision, next(self._order), event))
        with trio.move_on_after(timeout_s):
            await event.wait()
        if self.applied < revision:
            self._check_open()
            self._engine.calls.check_trusted()
            raise OSError(
                errno.ETIMEDOUT,
                f"revision {revision} has not come from the watch for {timeout_s:g} s;"
                f" all is known up to {self.applied}",
            )

    async def transact(self, compares: Compares, operations: Operations) -> int:
        """Apply a transaction; return its revision when all consumers know it. Raises Conflict, OSError."""
        revision = await self._engine.transact(compares, operations)
        await self.wait_applied(revision)
        return revision

    async def attempt(self, compares: Compares, operations: Operations) -> bool:
        """Apply a transaction; return if its compares held, once all know the outcome. Raises OSError."""
        try:
            await self.transact(compares, operations)
        except Conflict:
            await self.barrier()
            return False
        return True

    async def barrier(self) -> None:
        """Return when all consumers know every change that was acknowledged before this call.

        One barrier of the engine serves all calls that are made before its request is sent; never a request
        that is under way: it may have been answered before the call. Raises OSError.
        """
        self._asked = ticket = self._asked + 1
        async with self._asking:
            if self._answered < ticket:
                covered = self._asked
                self.barriers += 1
                try:
                    self._answer = await self._engine.barrier()
                except OSError as error:
                    self._answer = error
                self._answered = covered
            answer = self._answer
        if isinstance(answer, OSError):
            raise OSError(answer.errno, answer.strerror) from answer
        await self.wait_applied(answer)

    async def reload(self) -> None:
        """Have all consumers, of which one knows less, loaded anew. Raises trio.ClosedResourceError."""
        self._check_open()
        if self._reloaded is None:
            self._reloaded = trio.Event()
            self._watching.cancel()
            self._end_rest()
        await self._reloaded.wait()
        self._check_open()

    async def learn(self, unread: Unread) -> None:
        """Have names known that somebody asked for. Raises OSError."""
        if self._names is None:
            raise unread
        async with self._changing:
            await self._names.learn(unread, self.applied)

    @asynccontextmanager
    async def resting(self) -> AsyncIterator[None]:
        """Have nobody look at what consumers know meanwhile. Then they know again all that was acknowledged
        before, if etcd answers."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._rest)
            yield
            nursery.cancel_scope.cancel()
        if self._rested is not None:
            revision = 0
            try:
                with trio.move_on_after(_WAKE_S):
                    revision = await self._engine.barrier()
                await self.wait_applied(revision)
            except OSError as error:
                log.warning("what changed while nobody looked is not known yet: %s", error)
            self._end_rest()

    async def rested(self) -> None:
        """Return unless changes pass: then, when they do not any more."""
        if self._rested is not None:
            await self._rested.wait()

    async def _rest(self) -> None:
        while True:
            await trio.sleep(_LOOK_S if self._rested is None else _LOOK_AGAIN_S)
            if not self._may_lag():
                self._end_rest()
            elif self._rested is None and not self._changing.locked():
                self._rested = trio.Event()
                self._watching.cancel()

    def _end_rest(self) -> None:
        if self._rested is not None:
            self._rested.set()

    async def _let_pass(self, rested: trio.Event) -> bool:
        """Let changes pass until the end of a rest. Return whether they are few. Raises OSError."""
        self.rests += 1
        await rested.wait()
        self._rested = None
        await self._engine.calls.check_continued()
        wanted = max((revision for revision, _, _ in self._waiting), default=self.applied)
        return self._reloaded is None and wanted - self.applied <= _MISSED_MAX

    def _may_lag(self) -> bool:
        """Return whether nobody waits for changes, here or elsewhere, and nobody did just now."""
        is_quiet = time.monotonic() - self._waited_at > _QUIET_S
        return is_quiet and not self._waiting and not self._is_depended_on()

    def _check_open(self) -> None:
        if self._ended:
            raise trio.ClosedResourceError("the engine is closed")

    async def _load(self) -> None:
        if self._history is not None:
            await self._history.check()
        revision, found = await (self._names or self._engine).snapshot(_START, _END)
        if revision < self.applied:
            raise WentBack(f"it is at revision {revision}, and {self.applied} was known here")
        self._faults.forget()
        records = self._faults.well_formed(found)
        for consumer in self._consumers:
            mine = [record for record in records if record.key.startswith(consumer.prefixes)]
            consumer.load(mine, revision)
        if self._names is not None:
            await self._names.settle(revision)
        self.applied = revision
        self._wake()

    async def _follow(self) -> None:
        pauses = Pauses(_RETRY_FIRST_S, _RETRY_MAX_S)
        try:
            while True:
                before = self.applied
                try:
                    with (
                        trio.CancelScope() as self._watching,
                        closing(self._engine.watch(_START, _END, before)) as watch,
                    ):
                        if self._reloaded is not None or self._rested is not None:
                            self._watching.cancel()
                        async for change in watch:
                            await self._follow_change(change)
                        return
                    if self._rested is not None and await self._let_pass(self._rested):
                        continue
                except Compacted as error:
                    log.info("%s: reading everything anew", error)
                except WentBack as error:
                    if await self._wait_resolved(error):
                        continue
                except OSError as error:
                    log.warning("the watch broke, reading everything anew: %s", error)
                if self.applied > before or self._reloaded is not None:
                    pauses.begin_anew()
                await self._load_again(pauses)
                if self._reloaded is not None:
                    self._reloaded.set()
                    self._reloaded = None
        except trio.ClosedResourceError:
            pass
        finally:
            self._ended = True
            if self._reloaded is not None:
                self._reloaded.set()
            self._end_waits()

    def _end_waits(self) -> None:
        for _, _, event in self._waiting:
            event.set()
        self._waiting.clear()

    async def _wait_resolved(self, error: WentBack) -> bool:
        if self._history is None:
            raise error
        self._engine.calls.doubt(error)
        self._end_waits()
        return await self._history.wait_resolved(error)

    async def _load_again(self, pauses: Pauses) -> None:
        """Load all consumers again, until that succeeds; until then the replica stays as it was."""
        while True:
            await pauses.wait()
            try:
                async with self._changing:
                    await self._load()
                return
            except WentBack as error:
                if await self._wait_resolved(error):
                    return
            except OSError as error:
                log.warning("the cluster's keys cannot be read now: %s", error)

    async def _follow_change(self, change: Change) -> None:
        if self._names is None or self._names.known.everything:
            self._apply(change.revision, self._faults.well_formed(change.events))
            return
        async with self._changing:
            events = self._faults.well_formed(change.events)
            await self._names.prepare(self.applied, events)
            self._apply(change.revision, events)
            await self._names.catch_up(change.revision)

    def _apply(self, revision: int, events: Sequence[Event]) -> None:
        if revision <= self.applied:
            return
        of_all = self._followers[b""]
        parts: dict[int, list[Event]] = {}
        for event in events:
            for place in self._followers.get(event.key[:1], of_all):
                parts.setdefault(place, []).append(event)
        for place in sorted(parts):
            self._consumers[place].apply(revision, parts[place])
        self.applied = revision
        if self._waiting:
            self._wake()

    def _wake(self) -> None:
        """Wake those who waited for revisions that are applied now."""
        while self._waiting and self._waiting[0][0] <= self.applied:
            heapq.heappop(self._waiting)[2].set()
