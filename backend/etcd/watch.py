"""Watching a range of an etcd: every change once and in order, over lost connections."""

import errno
import logging
from collections import deque
from typing import Self

import trio

from ..kv import Change, Compacted, Event, KeyValue, WentBack
from ..pauses import Pauses
from . import etcd_pb2 as pb
from .calls import LAST_KEY, Calls
from .client import PAUSES_S, Answers, Unsent
from .rpc import WATCH, RpcError

log = logging.getLogger(__name__)


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
        """Split an answer into transactions; etcd never cuts one in two. Raises Unsent, RpcError, and
        Compacted."""
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
