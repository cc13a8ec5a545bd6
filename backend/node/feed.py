"""The newest changes of etcd's keys, for readers that watch them through this node.

So their watches cost etcd nothing. While no reader asks, nothing is kept.
"""

import time
from collections import deque
from collections.abc import Sequence

import trio

from ..etcd import etcd_pb2 as pb
from ..kv import Change, Event, KeyValue

_KEPT_BYTES = 16 << 20
# An answer is longer than this by one transaction at most, which etcd limits to 1.5 MiB.
_ANSWER_BYTES = 512 << 10
_EVENT_COST_BYTES = 200
# Changes are kept for so long after a question; a watch asks again much sooner.
_ASKED_S = 120.0


class Feed:
    """A consumer of the replica. All changes after the revision `before`, up to `revision`, are here."""

    prefixes = (b"",)

    def __init__(self, prefix: bytes, kept_bytes: int = _KEPT_BYTES) -> None:
        self._prefix = prefix
        self._kept_bytes = kept_bytes
        self._changes: deque[Change] = deque()
        self._bytes = 0
        self._waiting = trio.lowlevel.ParkingLot()
        # The last question and its answer: readers that are up to date ask the same one.
        self._last: tuple[tuple[bytes, bytes, int], bytes] | None = None
        self.before = self.revision = 0
        self._asked_until = 0.0

    def is_asked(self) -> bool:
        """Return whether a reader asked lately."""
        return time.monotonic() <= self._asked_until

    def load(self, records: Sequence[KeyValue], revision: int) -> None:
        self._changes.clear()
        self._bytes = 0
        self.before = self.revision = revision
        self._tell()

    def apply(self, revision: int, events: Sequence[Event]) -> None:
        if not self.is_asked():
            self.before = self.revision = revision
            if self._changes:
                self._changes.clear()
                self._bytes = 0
                self._last = None
            return
        self._changes.append(Change(revision, tuple(events)))
        self._bytes += _size(events)
        self.revision = revision
        while self._bytes > self._kept_bytes and len(self._changes) > 1:
            oldest = self._changes.popleft()
            self._bytes -= _size(oldest.events)
            self.before = oldest.revision
        self._tell()

    def _tell(self) -> None:
        self._last = None
        self._waiting.unpark_all()

    async def wait(self, revision: int) -> None:
        """Return when all changes up to a revision have come."""
        self._asked_until = time.monotonic() + _ASKED_S
        while self.revision < revision:
            await self._waiting.park()

    async def after(self, key: bytes, range_end: bytes, revision: int) -> bytes:
        """Wait for changes of these keys after a revision, and return the first ones as etcd's answer to a
        watch; empty if they are not here any more."""
        self._asked_until = time.monotonic() + _ASKED_S
        while revision >= self.before:
            question = (key, range_end, revision)
            if self._last is None or self._last[0] != question:
                self._last = question, self._encoded(*question)
            if self._last[1]:
                return self._last[1]
            await self._waiting.park()
        return b""

    def _encoded(self, key: bytes, range_end: bytes, revision: int) -> bytes:
        """Return b"" if there are none."""
        newer: list[Change] = []
        for change in reversed(self._changes):
            if change.revision <= revision:
                break
            newer.append(change)
        answer = pb.WatchResponse(header=pb.ResponseHeader(revision=self.revision))
        size = 0
        for change in reversed(newer):
            if size > _ANSWER_BYTES:
                break
            size += _size(change.events)
            for event in change.events:
                whole = self._prefix + event.key
                if whole == key or key <= whole < range_end:
                    answer.events.append(_message(whole, event))
        return answer.SerializeToString() if answer.events else b""


def _message(key: bytes, event: Event) -> pb.Event:
    value = pb.KeyValue(key=key, value=event.value or b"", mod_revision=event.revision)
    return pb.Event(type=pb.Event.PUT if event.value is not None else pb.Event.DELETE, kv=value)


def _size(events: Sequence[Event]) -> int:
    return sum(_EVENT_COST_BYTES + len(event.key) + len(event.value or b"") for event in events)
