"""Records in etcd that make no sense. Each is an error of what it names, and of nothing else.

Every member may put what it likes under the keys of its role. So a process checks each record by its type
where it decodes it, and notes here what is wrong. `irdmafs status` and `cluster status` tell of it, with
the writer where the record says who that is.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from ..model.records import decode, session_of
from . import Event, KeyValue

log = logging.getLogger(__name__)

# The length in bytes of the keys of each kind (see records and namespace).
_KEY_BYTES = {
    b"c": 1, b"s": 1, b"u": 1, b"E": 1,
    b"N": 9, b"n": 9, b"m": 9, b"P": 9, b"T": 9, b"w": 9, b"a": 9, b"l": 9, b"R": 9, b"U": 9,
    b"i": 9, b"t": 9, b"g": 5, b"D": 9, b"p": 17, b"f": 17, b"L": 17, b"W": 17,
}  # fmt: skip
_NAME = b"d"  # and the number of a directory, and a name of any length
_LEASED = (b"m", b"p", b"f", b"a", b"L")
_KEPT_MAX = 10_000
_TOLD_MAX = 20
_SHOWN_MAX = 3
_TEXT_MAX = 300
# The place of the content in the record of an inode.
_EXTENT = 11

T = TypeVar("T")
Change = TypeVar("Change", KeyValue, Event)


class Fault(NamedTuple):
    """A record, what is wrong with it, and the number of the inode if it is one's. `session` wrote it, or
    who has this `lease`; 0: that is not known."""

    what: str
    why: str
    ino: int = 0
    session: int = 0
    lease: int = 0


class FaultReport(NamedTuple):
    """`number` is how many faults a process knows of, and some of them."""

    number: int
    some: list[Fault]


class Faults:
    """The faulty records that a process knows of."""

    def __init__(self) -> None:
        self._found: dict[bytes, Fault] = {}  # by the beginning of the key, the rest may be long

    def add(self, key: bytes, why: str, value: bytes = b"") -> None:
        """Note that a record is passed over."""
        fault = _fault(key, why[:_TEXT_MAX], value)
        if len(self._found) < _KEPT_MAX:
            self._found[key[:_TEXT_MAX]] = fault
        log.warning("damaged in etcd: %s: %s", fault.what, fault.why)

    def sound(self, key: bytes, value: bytes | None, kind: type[T]) -> T | None:
        """Return a record, None if there is none or it is damaged."""
        if value is None:
            return None
        try:
            return decode(value, kind)
        except msgspec.DecodeError as error:
            self.add(key, str(error), value)
            return None

    def mended(self, key: bytes) -> None:
        """Note that nothing refers to a missing record any more."""
        self._found.pop(key[:_TEXT_MAX], None)

    def forget(self) -> None:
        """Forget all faults, as all records are about to be read."""
        self._found.clear()

    def well_formed(self, changes: Iterable[Change]) -> Sequence[Change]:
        """Return the changes with keys of a known form, and forget what was wrong with their values."""
        found = []
        for change in changes:
            key = change.key
            if self._found:
                self._found.pop(key[:_TEXT_MAX], None)
            kind, length = key[:1], len(key)
            if length > 9 if kind == _NAME else length == _KEY_BYTES.get(kind, length):
                found.append(change)
            elif change.value is not None:
                self.add(key, "no key of its kind is like this")
        return found

    def report(self) -> FaultReport:
        return FaultReport(len(self._found), [*self._found.values()][:_TOLD_MAX])

    def warnings(self) -> list[str]:
        """Return a line for people if there are any."""
        if not self._found:
            return []
        some = [f"{fault.what}: {fault.why}" for fault in [*self._found.values()][:_SHOWN_MAX]]
        return [summary(len(self._found), some)]


def summary(count: int, some: Sequence[str]) -> str:
    """Return a line about so many faults, of which some are described."""
    more = f", and {count - len(some):,} more" if count > len(some) else ""
    told = "record in etcd makes no sense" if count == 1 else "records in etcd make no sense"
    return f"{count:,} {told}, and what is named there is damaged: {'; '.join(some)}{more}"


def _fault(key: bytes, why: str, value: bytes) -> Fault:
    kind, number = key[:1], int.from_bytes(key[1:9], "big")
    if kind == _NAME and len(key) > 9:
        return Fault(f"name {key[9:][:_TEXT_MAX]!r} in directory {number}", why)
    if kind == b"i" and len(key) == 9:
        return Fault(f"inode {number}", why, ino=number, session=_writer(value))
    return Fault(f"key {key[:_TEXT_MAX]!r}", why, lease=number if kind in _LEASED else 0)


def _writer(value: bytes) -> int:
    """Return the session whose content an inode names, as far as that can be read; 0: it cannot."""
    try:
        return max(0, session_of(decode(value, list[Any])[_EXTENT]))
    except (msgspec.DecodeError, TypeError, LookupError):
        return 0
