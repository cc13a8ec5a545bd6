"""The transactional key-value engine that the namespace is kept on: what every engine promises.

The model is etcd's, cut down to what a namespace needs. One counter, the revision, grows by one
with every transaction that changes something; a key remembers the revision that last put it
(`mod_revision`). On an engine that others change, too, a transaction can compare that, or ask that
a key exists, or that a range is empty.
"""

import errno
import os
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

__all__ = [
    "Change",
    "Compacted",
    "Compare",
    "Conflict",
    "Damaged",
    "Delete",
    "Empty",
    "Engine",
    "Event",
    "Exists",
    "KeyValue",
    "NoSpace",
    "Past",
    "Put",
    "SharedEngine",
    "WentBack",
]


class KeyValue(NamedTuple):
    key: bytes
    value: bytes
    mod_revision: int


class Put(NamedTuple):
    """`lease` (of an engine that has leases) takes the key away when it ends; 0 keeps it."""

    key: bytes
    value: bytes
    lease: int = 0


class Delete(NamedTuple):
    key: bytes


class Event(NamedTuple):
    """A change of a key by the transaction `revision`; value is None if it was deleted."""

    revision: int
    key: bytes
    value: bytes | None


class Change(NamedTuple):
    """All events of one transaction in a watched range."""

    revision: int
    events: tuple[Event, ...]


class Exists(NamedTuple):
    """A compare: the key exists, whatever its revision."""

    key: bytes


class Empty(NamedTuple):
    """A compare: there is no key with start <= key < end."""

    start: bytes
    end: bytes


# (key, mod_revision): the key was last put by that revision; 0: it does not exist.
Compare: TypeAlias = tuple[bytes, int] | Exists | Empty


class Conflict(Exception):
    """A compare of a transaction did not hold, on `key` (of Empty: its start); nothing was changed."""

    def __init__(self, key: bytes) -> None:
        super().__init__(f"key {key!r} has another revision than expected")
        self.key = key


class Compacted(Exception):
    """Events before `revision` are not kept: read the range again, and watch from `revision` or later."""

    def __init__(self, revision: int) -> None:
        super().__init__(f"only events after revision {revision} are kept")
        self.revision = revision


class Damaged(Exception):
    """The stored data cannot be trusted. The message names the file and what to do about it."""


class NoSpace(OSError):
    """ENOSPC: the transaction was not applied; the engine can still be used."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


class WentBack(OSError):
    """EIO: the stored state is older than the state that this process, or another one, knew: a backup was
    restored. Nothing may be changed or freed because of it."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(
            errno.EIO,
            f"etcd went back in time: {what}. Put its newest data back, or, if there are none, have this "
            "state accepted: irdmafs cluster accept-restore",
        )


class Engine(Protocol):
    """An ordered map from bytes to bytes, changed by transactions.

    Every method raises OSError when the storage fails, Damaged when its contents are invalid and
    trio.ClosedResourceError after `close`. A transaction applies all of its operations or none; a key
    may occur in one of them only (ValueError). It returns its revision, or the current one if nothing
    changed.
    """

    async def range(self, start: bytes, end: bytes) -> list[KeyValue]:
        """Return the keys with start <= key < end in order."""
        ...

    async def close(self) -> None:
        """Release the storage; changes made before are kept. Closing twice does nothing."""
        ...


class Past(Protocol):
    """Tells whether the stored state continues from the one that this process knew."""

    # The newest transaction that came by `snapshot` or `watch`: the key "s" as it was then.
    known: KeyValue | None

    async def is_continued(self) -> bool:
        """Return whether the stored state continues from `known`, as far as the history goes back."""
        ...

    async def has_transaction(self, revision: int, last_id: bytes) -> bool:
        """Return whether the key "s" was put with this value at that revision. True if the history does not
        go back so far, and there is a later revision. Revision 0 stands for an empty history."""
        ...

    def doubt(self, error: WentBack) -> None:
        """Have every call except `get` and `range` raise this error from now on."""
        ...

    def trust(self) -> None:
        """Accept the stored state from now on, whatever was known before."""
        ...


class SharedEngine(Engine, Protocol):
    """An engine whose keys others change, too. A watch gives all changes, also those of this process."""

    @property
    def past(self) -> Past: ...

    @property
    def revision(self) -> int:
        """Return the newest revision that is known here."""
        ...

    async def transact(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete]
    ) -> int:
        """Apply all operations if every compare holds. It is durable when this returns. Raises Conflict;
        then nothing has changed."""
        ...

    async def get(self, key: bytes) -> KeyValue | None: ...

    async def page(self, start: bytes, end: bytes, limit: int) -> list[KeyValue]:
        """Return the first `limit` keys with start <= key < end.

        The next page starts at the last key + b"\\0".
        """
        ...

    async def snapshot(self, start: bytes, end: bytes) -> tuple[int, list[KeyValue]]:
        """Return a range and the revision it is of, from which watching goes on without a gap."""
        ...

    async def barrier(self) -> int:
        """Return a revision that is not older than any transaction which was acknowledged before this
        call. A replica that has applied it is up to date."""
        ...

    def watch(self, start: bytes, end: bytes, from_revision: int) -> AsyncIterator[Change]:
        """Yield every transaction with events of start <= key < end after `from_revision`, exactly once and
        in order.

        Ends when the engine is closed. Raises Compacted when the events are too old to be kept.
        """
        ...
