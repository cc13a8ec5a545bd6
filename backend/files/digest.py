"""Digests of contents, which the mount that publishes computes and the mount that reads compares.

A stripe is hashed in blocks of 2 MiB counted from its beginning, by several threads and in any order; its
digest is the hash of its blocks' digests (XXH3, 64 bits: against accidents, not against an attacker). The
version's record has eight bytes for each stripe, so that a fetch knows which node sent wrong bytes.

A fetched block is hashed by the thread that has written it to the file, while it is in that processor's
cache. Files are read into a small buffer of each thread, not mapped: truncating a mapped file would end the
process with SIGBUS. Reading and hashing both release Python's global interpreter lock.
"""

import functools
import itertools
import mmap
import os
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import trio
from xxhash import xxh3_64

from ..unwrap import first_alone
from .extents import when_unlocked
from .sparse import allocated_bytes, is_sparse, next_data

# The size of a huge page, and the alignment of the streams of a transfer.
BLOCK_BYTES = 2 << 20
DIGEST_BYTES = 8
# Half of a core's own cache, so that bytes are still in it when they are hashed.
BUFFER_BYTES = 256 << 10
# digest_at_rest hashes pieces of this many blocks.
_PIECE_BLOCKS = 2
# The alignment that O_DIRECT needs on any disk.
_DIRECT_BYTES = 4096
# Up to this size bytes are hashed in the event loop: handing them to a thread takes longer.
_INLINE_BYTES = 256 << 10
_THREADS_MAX = min(4, os.cpu_count() or 1)


class _OfThread(threading.local):
    """A buffer that each thread has of its own, also in a forked process. It is in pages of its own, as
    O_DIRECT needs it."""

    def __init__(self) -> None:
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.buffer = memoryview(mmap.mmap(-1, BUFFER_BYTES, flags=private))


of_thread: Final = _OfThread()


def by_stripe(record: bytes, stripes: int) -> list[bytes]:
    """Return the digest of each stripe, from the record of a content with so many; none if it was published
    without."""
    if len(record) != stripes * DIGEST_BYTES:
        return []
    return [record[at : at + DIGEST_BYTES] for at in range(0, len(record), DIGEST_BYTES)]


def digest_of_bytes(data: bytes) -> bytes:
    """Return the digest of a stripe."""
    view = memoryview(data)
    starts = range(0, len(data), BLOCK_BYTES)
    blocks = [xxh3_64(view[at : at + BLOCK_BYTES]).digest() for at in starts]
    return xxh3_64(b"".join(blocks)).digest()


async def digest_at_rest(
    fd: int, length: int, take: Callable[[int], Awaitable[None]] | None = None
) -> bytes:
    """Return the digest of a stripe that is a whole file, read in pieces. Before each piece `take` is
    called with the bytes allocated for it, and may wait; holes cost nothing. A descriptor with O_DIRECT
    reads from the disk itself. Raises OSError."""
    blocks: list[bytes] = []
    status = os.fstat(fd)
    has_holes = is_sparse(status.st_size, status.st_blocks)
    untaken = allocated_bytes(status.st_size, status.st_blocks)
    start = 0
    while start < length:
        count = min(_PIECE_BLOCKS * BLOCK_BYTES, length - start)
        cost = min(count, untaken)
        if has_holes:
            data_at = await trio.to_thread.run_sync(next_data, fd, start, length)
            if data_at >= start + count:
                count = data_at - start - (data_at % BLOCK_BYTES if data_at < length else 0)
                cost = 0
        untaken -= cost
        if take is not None and cost:
            await take(cost)
        blocks += await trio.to_thread.run_sync(_hash, fd, start, count)
        start += count
    return xxh3_64(b"".join(blocks)).digest()


class Stripe:
    """The digest of a stripe whose bytes arrive at `offset` of a file in any order."""

    def __init__(self, fd: int, offset: int, length: int) -> None:
        self._fd = fd
        self._offset = offset
        self._length = length
        self._blocks = [b""] * -(-length // BLOCK_BYTES)
        # By block: how far it is hashed, and the hash so far.
        self._begun: dict[int, tuple[int, xxh3_64]] = {}

    def landed(self, start: int, length: int, data: memoryview | None) -> None:
        """Note that these bytes of the stripe have arrived, maybe again and different (see
        `transport.Landed`). Bytes that begin a block, or follow the hashed ones, are hashed at once, while
        they are in the cache."""
        end = start + length
        for block in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            self._blocks[block] = b""
            first = block * BLOCK_BYTES
            last = min(first + BLOCK_BYTES, self._length)
            at, state = self._begun.pop(block, (0, None))
            begin, stop = max(start, first), min(end, last)
            if begin == first:
                state = xxh3_64()
            elif at != begin:
                state = None
            if state is None or data is None:
                continue
            with data[begin - start : stop - start] as part:
                state.update(part)
            if stop == last:
                self._blocks[block] = state.digest()
            else:
                self._begun[block] = stop, state

    async def finish(self) -> bytes:
        """Return the digest; all bytes must have arrived. If the file is truncated meanwhile, the digest
        matches no content. Raises OSError."""
        first = 0
        for has_digest, run in itertools.groupby(list(self._blocks), bool):
            end = first + len(list(run))
            if has_digest:
                pass
            elif min(end * BLOCK_BYTES, self._length) - first * BLOCK_BYTES <= _INLINE_BYTES:
                self._hash_some(first, end)
            else:
                share = -(-(end - first) // _THREADS_MAX)
                with first_alone():
                    async with trio.open_nursery() as nursery:
                        for block in range(first, end, share):
                            work = partial(self._hash_some, block, min(block + share, end))
                            nursery.start_soon(when_unlocked, work)
            first = end
        return xxh3_64(b"".join(self._blocks)).digest()

    def _hash_some(self, first: int, end: int) -> None:
        start = first * BLOCK_BYTES
        length = min(end * BLOCK_BYTES, self._length) - start
        self._blocks[first:end] = _hash(self._fd, self._offset + start, length)


@functools.lru_cache(maxsize=4)
def _digest_of_zeros(length: int) -> bytes:
    return xxh3_64(bytes(length)).digest()


def _hash(fd: int, offset: int, length: int) -> list[bytes]:
    buffer, blocks = of_thread.buffer, []
    status = os.fstat(fd)
    # To look for holes waits for the file's lock, and a short part is hashed in the event loop.
    has_holes = length > _INLINE_BYTES and is_sparse(status.st_size, status.st_blocks)
    start, stop, data_at = offset, offset + length, offset
    while start < stop:
        end = min(start + BLOCK_BYTES, stop)
        if has_holes:
            if data_at <= start:
                data_at = next_data(fd, start, stop)
            hole_end = min(data_at, status.st_size)
            if hole_end >= end:
                count = max(1, (hole_end - start) // BLOCK_BYTES)
                blocks += [_digest_of_zeros(end - start)] * count
                start = min(start + count * BLOCK_BYTES, stop)
                continue
        state = xxh3_64()
        while start < end:
            wanted = min(BUFFER_BYTES, end - start)
            aligned = -(-wanted // _DIRECT_BYTES) * _DIRECT_BYTES
            count = min(wanted, os.preadv(fd, [buffer[:aligned]], start))
            if not count:
                break
            state.update(buffer[:count])
            start += count
        blocks.append(state.digest())
        start = end
    return blocks
