"""The keys of a cluster in etcd that a process may write, by the role in its certificate.

Every member may read all keys under the cluster's prefix. Keys that many processes change, those of the
namespace for example, belong to a role; a process's own keys begin with the number of its certificate, the
*owner*, and belong to that certificate alone. A reader does not reach etcd: nodes change its own keys for
it. Admins may do everything. docs/security.md has the table with reasons.
"""

from typing import NamedTuple

from ..etcd.leases import LEASE_BITS, OWNER_BYTES
from ..model.policy import POLICIES_MAX
from ..model.records import NEXT_INO_KEY, NEXT_INO_OF
from ..namespace.inode import FIRST_VIRTUAL_INO
from ..namespace.numbers import SUBVOLUMES, next_ino_key, numbers_of
from ..trust.security import Role

# Keys that begin with the number of an inode, of a rule or of a pool (see records and namespace), and what
# these numbers may be. Other keys of their kinds mean nothing, and nobody needs to write them.
_OF_INODES = (b"d", b"i", b"t", b"l", b"D", b"W")
_NUMBERED: dict[bytes, tuple[int, int]] = {
    **dict.fromkeys(_OF_INODES, (1, FIRST_VIRTUAL_INO)),
    NEXT_INO_OF: (SUBVOLUMES.start, SUBVOLUMES.stop),
    b"P": (1, POLICIES_MAX + 1),
    b"w": (1, 1 << 16),
}
_LAST_TRANSACTION = b"s"
_SINGLE = (NEXT_INO_KEY, _LAST_TRANSACTION)
# The kinds of keys that every certificate of a role may write.
_SHARED: dict[Role, bytes] = {"mount": b"dituUsPwlDW", "node": b"nNgTsR"}
# Keys that begin with a lease, and so with its owner.
_LEASED: dict[Role, bytes] = {"mount": b"mpfaL", "node": b"", "reader": b"mpfa"}
_FENCE = b"x"


class Range(NamedTuple):
    """Keys with start <= key < end, within the cluster's prefix."""

    start: bytes
    end: bytes


def shared_ranges(role: Role) -> list[Range]:
    """Return the keys that every certificate of a role may write, unless it is kept to a subvolume."""
    return [_shared(bytes([kind])) for kind in _SHARED[role]]


def _shared(kind: bytes) -> Range:
    if kind in _SINGLE:
        return _single(kind)
    if kind in _NUMBERED:
        return _numbered(kind, *_NUMBERED[kind])
    return Range(kind, bytes([kind[0] + 1]))


def _single(key: bytes) -> Range:
    return Range(key, key + b"\0")


def _numbered(kind: bytes, first: int, after: int) -> Range:
    return Range(kind + first.to_bytes(8, "big"), kind + after.to_bytes(8, "big"))


def subvolume_ranges(subvolume: int) -> list[Range]:
    """Return the ranges of keys that the certificates of mounts which are kept to a subvolume may write."""
    numbers = numbers_of(subvolume)
    found = [_numbered(kind, numbers.start, numbers.stop) for kind in _OF_INODES]
    return [*found, _single(next_ino_key(subvolume)), _single(_LAST_TRANSACTION)]


def own_ranges(role: Role, owner: int) -> list[Range]:
    """Return the ranges of keys that only the certificate of this number may write."""
    owners = owner, owner + 1
    first, last = ((one << LEASE_BITS).to_bytes(8, "big") for one in owners)
    found = [Range(bytes([kind]) + first, bytes([kind]) + last) for kind in _LEASED[role]]
    first, last = (one.to_bytes(OWNER_BYTES + 1, "big")[-OWNER_BYTES:] for one in owners)
    # The last owner's range ends where the next kind begins.
    end = _FENCE + last if owner + 1 < 1 << 8 * OWNER_BYTES else bytes([_FENCE[0] + 1])
    return [*found, Range(_FENCE + first, end)]
