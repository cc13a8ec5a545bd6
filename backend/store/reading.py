"""Reading a stripe from a store node and hashing it as it comes, for mounts and for nodes that copy."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from ..files.digest import Stripe
from ..transport import Extent, FileRange, Landed


class Source(Protocol):
    """The part of a transport.Device that is needed here."""

    async def read(self, extent: Extent, start: int, into: FileRange, landed: Landed) -> None: ...

    async def read_sparse(self, extent: Extent, into: FileRange, landed: Landed) -> None: ...


async def read_hashed(
    device: Source,
    extent: Extent,
    into: FileRange,
    *,
    is_sparse: bool,
    take: Callable[[int], Awaitable[None]] | None = None,
    piece_bytes: int = 0,
    came: Callable[[int], None] | None = None,
) -> Stripe:
    """Read a whole extent. The returned Stripe has its digest. With `is_sparse` its holes stay holes.
    Otherwise it is read in pieces of `piece_bytes` (0: in one): `take` is called with the length before
    each piece and may wait, and `came` after it. Raises OSError."""
    found = Stripe(into.fd, into.offset, into.length)
    if is_sparse:
        await device.read_sparse(extent, into, found.landed)
        return found
    piece = piece_bytes or into.length
    for start in range(0, into.length, piece):
        length = min(piece, into.length - start)
        if take is not None:
            await take(length)
        landed = partial(_landed_at, found, start) if start else found.landed
        await device.read(extent, start, into.part(start, length), landed)
        if came is not None:
            came(length)
    return found


def _landed_at(
    found: Stripe, offset: int, start: int, length: int, data: memoryview | None
) -> None:
    found.landed(offset + start, length, data)
