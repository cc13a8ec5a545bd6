"""What the bytes of a content are checked by, from the mount that publishes to the mount that reads.

A stripe is hashed in blocks of 2 MiB counted from its beginning, by several threads and in any order; its
digest is the hash of its blocks' digests (XXH3, 64 bits: against accidents, not against an enemy). The
version's record has eight bytes for each stripe, so that a fetch knows whose bytes were wrong. With more
stripes than PARTS_MAX, runs of them share eight bytes, the hash of their digests: a record stays small.

A fetched block is hashed by the thread that has put it into the file, as long as it is in its processor's
cache. Files are read into a small buffer of each thread, not mapped: whoever cuts one off would end the
process. Reading and hashing both release Python's lock.
"""

import functools
import itertools
import mmap
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import trio
from xxhash import xxh3_64

from ..unwrap import first_error
from .sparse import is_sparse, next_data

__all__ = [
    "BLOCK_BYTES",
    "DIGEST_BYTES",
    "PARTS_MAX",
    "Digests",
    "Stripe",
    "digest_at_rest",
    "digest_of",
    "digest_of_bytes",
    "fold",
]

# A huge page, and what the streams of a transfer are aligned to.
BLOCK_BYTES = 2 << 20
DIGEST_BYTES = 8
PARTS_MAX = 64
# Half of what a core's own cache has, so that what was read is still there when it is hashed.
_BUFFER_BYTES = 256 << 10
# Gently hashed data is hashed in pieces of this many blocks.
_PIECE_BLOCKS = 2
# The alignment that O_DIRECT needs, on any disk.
_DIRECT_BYTES = 4096
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

    def part_of(self, stripe: int) -> int:
        return stripe // self._run

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
    return await Stripe(fd, offset, length).finish()


async def digest_at_rest(fd: int, length: int, take: Callable[[int], Awaitable[None]]) -> bytes:
    """The digest of a stripe that is a whole file, read piece by piece; before each, `take` is given its
    length in bytes and may wait. A descriptor with O_DIRECT reads what is on the disk. Raises OSError."""
    blocks: list[bytes] = []
    step = _PIECE_BLOCKS * BLOCK_BYTES
    for start in range(0, length, step):
        count = min(step, length - start)
        await take(count)
        blocks += await trio.to_thread.run_sync(_hash, fd, start, count)
    return xxh3_64(b"".join(blocks)).digest()


class Stripe:
    """The digest of a stripe whose bytes come to `offset` of a file, in any order."""

    def __init__(self, fd: int, offset: int, length: int) -> None:
        self._fd = fd
        self._offset = offset
        self._length = length
        self._blocks = [b""] * -(-length // BLOCK_BYTES)
        # How far blocks are hashed.
        self._begun: dict[int, tuple[int, xxh3_64]] = {}

    def landed(self, start: int, length: int, data: memoryview | None) -> None:
        """These bytes of the stripe are there, maybe others than before: as `transport.Landed`. What begins
        with a block, and goes on where that ended, is hashed at once, as it is in the processor's cache."""
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
        """The digest, when all of it is there. Raises OSError."""
        start = 0
        for has_digest, run in itertools.groupby(list(self._blocks), bool):
            end = min(start + len(list(run)) * BLOCK_BYTES, self._length)
            if not has_digest:
                await self._add(start, end - start)
            start = end
        return xxh3_64(b"".join(self._blocks)).digest()

    async def _add(self, start: int, length: int) -> None:
        """Hash these bytes out of the file; `start` is a multiple of BLOCK_BYTES. Raises OSError."""
        first = start // BLOCK_BYTES
        end = -(-(start + length) // BLOCK_BYTES)
        if length <= _INLINE_BYTES:
            self._hash_some(first, end)
            return
        share = -(-(end - first) // min(_THREADS_MAX, os.cpu_count() or 1))
        try:
            async with trio.open_nursery() as nursery:
                for block in range(first, end, share):
                    work = partial(self._hash_some, block, min(block + share, end))
                    nursery.start_soon(trio.to_thread.run_sync, work)
        except BaseExceptionGroup as group:
            raise first_error(group) from group

    def _hash_some(self, first: int, end: int) -> None:
        start = first * BLOCK_BYTES
        length = min(end * BLOCK_BYTES, self._length) - start
        self._blocks[first:end] = _hash(self._fd, self._offset + start, length)


@functools.lru_cache(maxsize=4)
def _digest_of_zeros(length: int) -> bytes:
    return xxh3_64(bytes(length)).digest()


def _hash(fd: int, offset: int, length: int) -> list[bytes]:
    buffer = getattr(_threads, "buffer", None)
    if buffer is None:
        # Pages, as O_DIRECT wants them.
        buffer = _threads.buffer = memoryview(mmap.mmap(-1, _BUFFER_BYTES))
    blocks = []
    status = os.fstat(fd)
    has_holes = is_sparse(status.st_size, status.st_blocks)
    data_at = offset
    for start in range(offset, offset + length, BLOCK_BYTES):
        end = min(start + BLOCK_BYTES, offset + length)
        if has_holes:
            if data_at <= start:
                data_at = next_data(fd, start, offset + length)
            if data_at >= end and end <= status.st_size:
                blocks.append(_digest_of_zeros(end - start))
                continue
        state = xxh3_64()
        while start < end:
            wanted = min(_BUFFER_BYTES, end - start)
            aligned = -(-wanted // _DIRECT_BYTES) * _DIRECT_BYTES
            count = min(wanted, os.preadv(fd, [buffer[:aligned]], start))
            if not count:
                break
            state.update(buffer[:count])
            start += count
        blocks.append(state.digest())
    return blocks
