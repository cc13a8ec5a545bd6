"""What the bytes of a content are checked by, from the mount that publishes to the mount that reads.

A stripe is hashed in blocks of 4 MiB counted from its beginning, by several threads and in any order; its
digest is the hash of its blocks' digests (XXH3, 64 bits: against accidents, not against an enemy). The
version's record has eight bytes for each stripe, so that a fetch knows whose bytes were wrong. With more
stripes than PARTS_MAX, runs of them share eight bytes, the hash of their digests: a record stays small.

Bytes are read into a small buffer of each thread, not mapped: whoever still writes the file may cut it
off, and a mapping would then end the process. *Measured*, that is as fast as mapping it anew. Reading
and hashing both release Python's lock.
"""

import os
import threading
from collections.abc import Sequence
from functools import partial

import trio
from xxhash import xxh3_64

from .unwrap import first_error

__all__ = ["DIGEST_BYTES", "PARTS_MAX", "Digests", "digest_of", "digest_of_bytes", "fold"]

BLOCK_BYTES = 4 << 20
DIGEST_BYTES = 8
PARTS_MAX = 64
# Half of what a core's own cache has, so that what was read is still there when it is hashed.
_BUFFER_BYTES = 256 << 10
# Less is hashed at once: to hand it to a thread takes longer.
_INLINE_BYTES = 256 << 10
_THREADS_MAX = 4

_threads = threading.local()


class Digests:
    """A record's digests of a content of so many stripes. `parts` is in how many pieces it is checked."""

    def __init__(self, record: bytes, stripes: int) -> None:
        self._record = record
        self._stripes = stripes
        self._run = _run(stripes)
        self.parts = -(-stripes // self._run)

    @property
    def are_there(self) -> bool:
        """Whether the content can be checked: older versions have none."""
        return len(self._record) == self.parts * DIGEST_BYTES

    def stripes_of(self, part: int) -> range:
        return range(part * self._run, min((part + 1) * self._run, self._stripes))

    def match(self, part: int, stripes: Sequence[bytes]) -> bool:
        """Whether a part's stripes have these digests."""
        expected = self._record[part * DIGEST_BYTES : (part + 1) * DIGEST_BYTES]
        return _joined(stripes) == expected


def fold(stripes: Sequence[bytes]) -> bytes:
    """What a version's record has, of the digests of all stripes."""
    run = _run(len(stripes))
    return b"".join(_joined(stripes[i : i + run]) for i in range(0, len(stripes), run))


def _run(stripes: int) -> int:
    return max(1, -(-stripes // PARTS_MAX))


def _joined(stripes: Sequence[bytes]) -> bytes:
    return stripes[0] if len(stripes) == 1 else xxh3_64(b"".join(stripes)).digest()


def digest_of_bytes(data: bytes) -> bytes:
    """The digest of a stripe."""
    view = memoryview(data)
    blocks = (view[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES))
    return xxh3_64(b"".join(xxh3_64(block).digest() for block in blocks)).digest()


async def digest_of(fd: int, offset: int, length: int) -> bytes:
    """The digest of the stripe that lies at `offset` of a file. Raises OSError.

    A file that is cut off meanwhile has a digest that nothing else has."""
    count = -(-length // BLOCK_BYTES)
    blocks = [b""] * count

    def hash_some(first: int, step: int) -> None:
        for block in range(first, count, step):
            at = block * BLOCK_BYTES
            blocks[block] = _hash(fd, offset + at, min(BLOCK_BYTES, length - at))

    if length <= _INLINE_BYTES:
        hash_some(0, 1)
    else:
        threads = min(_THREADS_MAX, count, os.cpu_count() or 1)
        try:
            async with trio.open_nursery() as nursery:
                for first in range(threads):
                    nursery.start_soon(trio.to_thread.run_sync, partial(hash_some, first, threads))
        except BaseExceptionGroup as group:
            raise first_error(group) from group
    return xxh3_64(b"".join(blocks)).digest()


def _hash(fd: int, offset: int, length: int) -> bytes:
    buffer = getattr(_threads, "buffer", None)
    if buffer is None:
        buffer = _threads.buffer = memoryview(bytearray(_BUFFER_BYTES))
    state = xxh3_64()
    end = offset + length
    while offset < end:
        count = os.preadv(fd, [buffer[: min(_BUFFER_BYTES, end - offset)]], offset)
        if not count:
            break
        state.update(buffer[:count])
        offset += count
    return state.digest()
