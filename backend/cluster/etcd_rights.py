"""The keys of a cluster in etcd that a process may write, by the role in its certificate.

Every member may read all keys under the cluster's prefix. Keys that many processes change, those of the
namespace for example, belong to a role; a process's own keys begin with the number of its certificate, the
*owner*, and belong to that certificate alone. A reader does not reach etcd: nodes change its own keys for
it. Admins may do everything. docs/security.md has the table with reasons.
"""

from typing import NamedTuple

from ..etcd.leases import LEASE_BITS, OWNER_BYTES
from ..model.policy import POLICIES_MAX
from ..model.records import NEXT_INO_KEY
from ..namespace.inode import FIRST_VIRTUAL_INO
from ..trust.security import Role

__all__ = ["Range", "own_ranges", "shared_ranges"]

# Keys that begin with the number of an inode, of a rule or of a pool (see records and namespace), and what
# these numbers may be. Other keys of their kinds mean nothing, and nobody needs to write them.
_NUMBERED: dict[bytes, tuple[int, int]] = {
    **dict.fromkeys((b"d", b"i", b"t", b"l", b"D", b"W"), (1, FIRST_VIRTUAL_INO)),
    b"P": (1, POLICIES_MAX + 1),
    b"w": (1, 1 << 16),
}
_SINGLE = (NEXT_INO_KEY, b"s")
# The kinds of keys that every certificate of a role may write.
_SHARED: dict[Role, bytes] = {"mount": b"ditusPwlDW", "node": b"nNgTsR"}
# Keys that begin with a lease, and so with its owner.
_LEASED: dict[Role, bytes] = {"mount": b"mpfaL", "node": b"", "reader": b"mpfa"}
_FENCE = b"x"


class Range(NamedTuple):
    """Keys with start <= key < end, within the cluster's prefix."""

    start: bytes
    end: bytes


def shared_ranges(role: Role) -> list[Range]:
    """Return the ranges of keys that every certificate of a role may write."""
    return [_shared(bytes([kind])) for kind in _SHARED[role]]


def _shared(kind: bytes) -> Range:
    if kind in _SINGLE:
        return Range(kind, kind + b"\0")
    if kind in _NUMBERED:
        first, last = (number.to_bytes(8, "big") for number in _NUMBERED[kind])
        return Range(kind + first, kind + last)
    return Range(kind, bytes([kind[0] + 1]))


def own_ranges(role: Role, owner: int) -> list[Range]:
    """Return the ranges of keys that only the certificate of this number may write."""
    first, last = (((owner + more) << LEASE_BITS).to_bytes(8, "big") for more in (0, 1))
    found = [Range(bytes([kind]) + first, bytes([kind]) + last) for kind in _LEASED[role]]
    first, last = (
        (owner + more).to_bytes(OWNER_BYTES + 1, "big")[-OWNER_BYTES:] for more in (0, 1)
    )
    # The last owner's range ends where the next kind begins.
    end = _FENCE + last if owner + 1 < 1 << 8 * OWNER_BYTES else bytes([_FENCE[0] + 1])
    return [*found, Range(_FENCE + first, end)]
