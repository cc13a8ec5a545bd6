"""The parts of transactions on keys and values, and their errors.

The model is etcd's, cut down to what a namespace needs. One counter, the revision, grows by one
with every transaction that changes something; a key remembers the revision that last put it
(`mod_revision`). On an engine that others change, too, a transaction can compare that, or ask that
a key exists, or that a range is empty.
"""

import errno
import os
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias


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


class Unchanged(NamedTuple):
    """A compare: no key with start <= key < end was put after a revision. Some may have been deleted."""

    start: bytes
    end: bytes
    revision: int


# Each begins with its key. (key, mod_revision): the key was last put by that revision; 0: there is none.
Compare: TypeAlias = tuple[bytes, int] | Exists | Empty | Unchanged
# The two parts of a transaction.
Compares: TypeAlias = Sequence[Compare]
Operations: TypeAlias = Sequence[Put | Delete]


def end_of(prefix: bytes) -> bytes:
    """Return the first key after all keys that begin with a prefix."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


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
