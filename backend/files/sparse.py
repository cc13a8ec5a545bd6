"""Files with holes: where their data is, and how much room they take.

Holes stay holes wherever a content goes: on store nodes, between them, and in caches. A file counts with
the bytes that are allocated for it, not with its length. The filesystem tells where data is (SEEK_DATA), so
zeros that a program wrote are data.
"""

import errno
import mmap
import os

from ..model.ranges import Range, fewer

# A file with fewer bytes of holes is not treated as sparse.
_HOLES_BYTES_MIN = 64 << 10
SEGMENTS_MAX = 1024
_BLOCK_BYTES = 512


def is_sparse(size: int, blocks: int) -> bool:
    """Return whether a file of so many bytes, for which so many blocks of 512 are allocated, has holes."""
    return size - blocks * _BLOCK_BYTES >= _HOLES_BYTES_MIN


def allocated_bytes(size: int, blocks: int) -> int:
    """Return how many bytes a file of this length and so many blocks takes if it is sparse, otherwise its
    length."""
    allocated = blocks * _BLOCK_BYTES
    return allocated if size - allocated >= _HOLES_BYTES_MIN else size


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of some bytes to a place in a file. Raises OSError."""
    done = 0
    with memoryview(data) as view:
        while done < len(view):
            with view[done:] as rest:
                done += os.pwrite(fd, rest, offset + done)


def next_data(fd: int, offset: int, end: int) -> int:
    """Return where data begins at or behind `offset`; at most `end`. Raises OSError."""
    try:
        return min(os.lseek(fd, offset, os.SEEK_DATA), end)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return end


def segments(fd: int, offset: int, length: int) -> list[tuple[int, int]]:
    """Return where the data of a part of a file is, as starts, counted from the beginning of the part, and
    lengths. If there would be more than SEGMENTS_MAX, the smallest holes count as data. Raises OSError."""
    end = offset + length
    found: list[Range] = []
    at = offset
    while (start := next_data(fd, at, end)) < end:
        at = min(os.lseek(fd, start, os.SEEK_HOLE), end)
        found.append((start - offset, at - offset))
    return [(start, stop - start) for start, stop in fewer(found, SEGMENTS_MAX)]


def empty(fd: int, offset: int, length: int) -> None:
    """Set a part of a file to zeros, if it has data. Raises OSError."""
    end = offset + length
    if next_data(fd, offset, end) >= end:
        return
    first = min(-(-offset // mmap.PAGESIZE) * mmap.PAGESIZE, end)
    last = max(end // mmap.PAGESIZE * mmap.PAGESIZE, first)
    if first < last:
        with mmap.mmap(fd, last - first, offset=first) as mapped:
            mapped.madvise(mmap.MADV_REMOVE)
    # The pages at both ends also hold bytes that others may be writing: zero only the range.
    for start, stop in ((offset, first), (last, end)):
        os.pwrite(fd, bytes(stop - start), start)
