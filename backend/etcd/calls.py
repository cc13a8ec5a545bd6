"""Calls to etcd about the keys below one prefix: those that are repeated until etcd answers, and watches,
which yield every change of a range once and in order, over lost connections. Errors are put into words.

An etcd that was restored from a backup must not be taken for the one that was known before. It shows in an
answer whose revision is lower than one that was received before the request was sent (answers are
linearizable), and, whenever a watch begins again, in the key "s": at the newest known revision it must have
the known value. If it has not, only harmless calls are made from then on (`doubt`).
"""

import errno
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, Self, TypeVar
from weakref import WeakSet

import trio

from ..kv import Change, Compacted, Event, KeyValue, NoSpace, WentBack
from ..pauses import Pauses
from . import etcd_pb2 as pb
from .client import PAUSES_S, Answers, Client, Unsent
from .rpc import RANGE, TXN, WATCH, Message, Method, RpcError, Status

log = logging.getLogger(__name__)

A = TypeVar("A", bound="Answered")

# A key that every transaction puts: its revision is the newest transaction's, its value its id.
LAST_KEY = b"s"

# Frees etcd's room, and takes its alarms back.
REPAIR = "irdmafs cluster repair-etcd"
_DENIED = (Status.PERMISSION_DENIED, Status.UNAUTHENTICATED)
# An alarm that lasts is logged again after this time.
_ALARM_TOLD_S = 60.0


class Answered(Protocol):
    """Any answer of etcd."""

    @property
    def header(self) -> pb.ResponseHeader: ...


class Calls:
    """Calls of one process. `revision` is the newest one in any answer, `known` the newest transaction that
    came by a snapshot or a watch: the key "s" as it was then.

    After `doubt`, and until `trust`, calls whose answers would be acted on fail (see `check_trusted`).
    """

    def __init__(self, client: Client, prefix: bytes, timeout_s: float) -> None:
        self.client = client
        self.prefix = prefix
        self.timeout_s = timeout_s
        self.revision = 0
        self.known: KeyValue | None = None
        # They end together, and with an error when etcd is doubted.
        self.watches: WeakSet[Watch] = WeakSet()
        # Called by `trust`.
        self.trust_listeners: list[Callable[[], None]] = []
        self._went_back: WentBack | None = None
        # Further calls are refused. Calls under way go on until the client is closed.
        self.closed = False
        self._alarm_told = -_ALARM_TOLD_S

    async def ask(self, method: Method[A], request: Message, timeout_s: float | None = None) -> A:
        """Repeat a call until it has an answer. Raises RpcError and OSError."""
        self.check_open()
        before = self.revision
        try:
            answer = await self.client.call(
                method, request, timeout_s=self.timeout_s if timeout_s is None else timeout_s
            )
        except OSError:
            self.check_open()
            raise
        linearizable = method is RANGE or method is TXN
        self.heard(answer.header.revision, before if linearizable else 0)
        return answer

    async def call(self, method: Method[A], request: Message, timeout_s: float | None = None) -> A:
        """Repeat a call until it has an answer. Raises OSError."""
        try:
            return await self.ask(method, request, timeout_s)
        except RpcError as error:
            raise self.failure(error) from None

    async def tell(self, method: Method[A], request: Message, *, unless: Status) -> None:
        """Make a call for what it does, unless a status says that it is done. Raises OSError."""
        try:
            await self.ask(method, request)
        except RpcError as error:
            if error.code != unless:
                raise self.failure(error) from None

    def heard(self, revision: int, before: int = 0, last: KeyValue | None = None) -> None:
        """Note the revision of an answer, and its newest transaction (the key "s"). Doubt a linearizable
        answer that is older than `before`, known when the question was sent."""
        if revision < before:
            self.doubt(WentBack(f"it is at revision {revision}, and {before} was known here"))
        if revision > self.revision:
            self.revision = revision
        if last and (self.known is None or last.mod_revision > self.known.mod_revision):
            self.known = last

    def check_open(self) -> None:
        if self.closed:
            raise trio.ClosedResourceError("the engine is closed")

    def check_trusted(self) -> None:
        """Raise trio.ClosedResourceError after the end, and WentBack after `doubt`."""
        if self.closed or self._went_back is not None:
            self.check_open()
            assert self._went_back is not None
            raise WentBack(self._went_back.what)

    def doubt(self, error: WentBack) -> None:
        """Have every call except those that read raise this error from now on, if there is none yet."""
        if self._went_back is None:
            self._went_back = error
            for watch in list(self.watches):
                watch.fail(error)

    def trust(self) -> None:
        """Trust etcd again, as if nothing had been known before."""
        self._went_back = None
        self.revision = 0
        for listener in self.trust_listeners:
            listener()

    async def is_continued(self, timeout_s: float | None = None) -> bool:
        """Return whether etcd continues from `known`, as far as its history goes back."""
        if self.known is None:
            return True
        return await self.has_transaction(self.known.mod_revision, self.known.value, timeout_s)

    async def has_transaction(
        self, revision: int, last_id: bytes, timeout_s: float | None = None
    ) -> bool:
        """Return whether the key "s" was put with this value at that revision. True if the history does not
        go back so far, and there is a later revision. Revision 0 stands for an empty history."""
        if not revision:
            return True
        key = self.prefix + LAST_KEY
        try:
            answer = await self.ask(RANGE, pb.RangeRequest(key=key, revision=revision), timeout_s)
        except RpcError as error:
            if error.code != Status.OUT_OF_RANGE:
                raise self.failure(error) from None
            if "future" in error.text:
                return False
            answer = await self.call(RANGE, pb.RangeRequest(key=key))
            return answer.header.revision >= revision
        return any((found.mod_revision, found.value) == (revision, last_id) for found in answer.kvs)

    async def check_continued(self, timeout_s: float | None = None) -> None:
        """Doubt an etcd that does not continue from `known`. Raises WentBack, OSError."""
        if self._went_back is None and not await self.is_continued(timeout_s):
            assert self.known is not None
            missing = self.known.mod_revision
            self.doubt(WentBack(f"revision {missing}, which this process knew, is not there"))
        self.check_trusted()

    def given_up(self, error: Unsent) -> OSError:
        """Return the error of a call that was never sent."""
        self.check_open()
        if error.final:
            return self.client.refused(str(error))
        return self.client.timed_out(self.timeout_s)

    def failure(self, error: RpcError) -> OSError:
        """Return a refusal of etcd as an error that says what to do."""
        where = f"etcd at {self.client.address}"
        if error.code == Status.RESOURCE_EXHAUSTED and "space exceeded" in error.text:
            text = f"{where} refuses all writes: alarm NOSPACE. Free its room with: {REPAIR}"
            self._tell_alarm(text)
            return NoSpace(f"{where} (alarm NOSPACE: {REPAIR})")
        if "corrupt cluster" in error.text:
            text = f"{where} refuses all writes: alarm CORRUPT. Have its members compared with: {REPAIR}"
            self._tell_alarm(text)
            return OSError(errno.EIO, text)
        if error.code in _DENIED or "user name is" in error.text:
            return OSError(
                errno.EACCES,
                f"{where} does not let this process do this ({error.text}); `etcdctl user` and"
                f" `etcdctl role` show who may use the keys under {self.prefix!r}",
            )
        if "request is too large" in error.text or "larger than max" in error.text:
            return OSError(errno.EMSGSIZE, f"{where}: a transaction is too large ({error.text})")
        return OSError(errno.EIO, f"{where}: {error.text}")

    def _tell_alarm(self, text: str) -> None:
        """Log an alarm that stops all writes, once a minute as long as it lasts."""
        now = time.monotonic()
        if now >= self._alarm_told + _ALARM_TOLD_S:
            self._alarm_told = now
            log.error("%s", text)


class Watch:
    """The changes of keys with prefix + start <= key < prefix + end after a revision.

    Etcd's past is checked before the watch goes on after an interruption, which may end the iteration.
    Iterating may be cancelled and gone on with. Raises WentBack where etcd is doubted.
    """

    def __init__(self, calls: Calls, start: bytes, end: bytes, from_revision: int) -> None:
        calls.check_trusted()
        calls.watches.add(self)
        self._calls = calls
        self._client = calls.client
        self._skip = len(calls.prefix)
        self._key, self._range_end = calls.prefix + start, calls.prefix + end
        self._revision = from_revision
        self._error: OSError | None = None
        self._began = False
        self._changes: deque[Change] = deque()
        self._stream: Answers | None = None
        self._pauses = Pauses(*PAUSES_S)
        self._failing = False
        self._closed = trio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        while not self._changes:
            if self._closed.is_set():
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            try:
                if self._stream is None:
                    await self._begin()
                else:
                    self._take(await self._stream.receive())
            except trio.ClosedResourceError:
                raise StopAsyncIteration from None
            except WentBack:
                raise
            except (Unsent, OSError) as error:
                await self._interrupted(str(error))
            except RpcError as error:
                self._stream = None
                if not self._client.stream_failed(error):
                    raise OSError(errno.EIO, f"etcd refuses to be watched: {error.text}") from error
                await self._interrupted(error.text)
        return self._changes.popleft()

    def close(self) -> None:
        """End the iteration, after what is here already."""
        self._closed.set()
        self._close_stream()

    def fail(self, error: OSError) -> None:
        """End the iteration with an error, after what is here already."""
        self._error = error
        self._close_stream()

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    async def _begin(self) -> None:
        if self._began:
            await self._calls.check_continued()
        # The last revision is asked for again, and dropped. From revision C, to which etcd was compacted,
        # deletions are missing although it does not refuse to begin there.
        create = pb.WatchCreateRequest(
            key=self._key, range_end=self._range_end, start_revision=max(self._revision, 1)
        )
        stream = await self._client.stream(WATCH, pb.WatchRequest(create_request=create))
        if self._closed.is_set():
            stream.close()
            return
        self._stream = stream
        self._began = True

    def _take(self, message: bytes | None) -> None:
        """Split an answer into whole transactions. Raises Unsent, RpcError, and Compacted."""
        if message is None:
            self._stream = None
            raise Unsent("etcd ended the watch")
        response = WATCH.parse(message)
        if self._failing:
            log.info("etcd: the watch goes on after revision %d", self._revision)
            self._failing = False
            self._pauses.begin_anew()
        if response.canceled:
            self._calls.heard(response.header.revision)
            self._close_stream()
            if response.compact_revision:
                raise Compacted(response.compact_revision)
            raise RpcError(0, response.cancel_reason or "it gave no reason")
        skip, revision, last = self._skip, self._revision, None
        events: list[Event] = []
        for event in response.events:
            found = event.kv
            if found.mod_revision <= self._revision:
                continue
            if found.mod_revision != revision and events:
                self._changes.append(Change(revision, tuple(events)))
                events = []
            revision = found.mod_revision
            value = found.value if event.type == pb.Event.PUT else None
            key = found.key[skip:]
            events.append(Event(revision, key, value))
            if key == LAST_KEY and value is not None:
                last = KeyValue(key, value, revision)
        if events:
            self._changes.append(Change(revision, tuple(events)))
        self._calls.heard(response.header.revision, last=last)
        self._revision = revision

    async def _interrupted(self, reason: str) -> None:
        self._stream = None
        if self._closed.is_set():
            return
        if not self._failing:
            log.warning("etcd: the watch was interrupted (%s); trying again", reason)
            self._failing = True
        with trio.move_on_after(self._pauses.take_s()):
            await self._closed.wait()
