"""Files with holes: where their data is, and how it is made nothing."""

import mmap
import os
from unittest.mock import AsyncMock

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from irdmafs.backend.files import sparse
from irdmafs.backend.files.digest import BLOCK_BYTES, Stripe, digest_at_rest, digest_of_bytes
from irdmafs.backend.files.sparse import allocated_bytes, empty, is_sparse, segments

PAGE = mmap.PAGESIZE


def file_of(pages: list[bool], tail: int) -> tuple[int, bytes]:
    """A file with data in some of its pages."""
    size = (len(pages) - 1) * PAGE + tail
    content = b"".join((b"x" if is_data else b"\0") * PAGE for is_data in pages)[:size]
    fd = os.memfd_create("sparse")
    os.ftruncate(fd, size)
    for number, is_data in enumerate(pages):
        if is_data:
            os.pwrite(fd, content[number * PAGE : (number + 1) * PAGE], number * PAGE)
    return fd, content


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, PAGE), st.data())
def test_the_segments_of_a_part_have_all_that_is_not_zero(
    pages: list[bool], tail: int, data: st.DataObject
) -> None:
    fd, content = file_of(pages, tail)
    offset = data.draw(st.integers(0, len(content) - 1))
    length = data.draw(st.integers(1, len(content) - offset))
    most = data.draw(st.integers(1, 10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "SEGMENTS_MAX", most)
        found = segments(fd, offset, length)
    os.close(fd)
    assert len(found) <= most
    rebuilt = bytearray(length)
    at = 0
    for start, count in found:
        assert at <= start < start + count <= length
        at = start + count
        rebuilt[start:at] = content[offset + start : offset + at]
    assert rebuilt == content[offset : offset + length]
    if most == 10 and sum(pages) < 10:
        assert sum(count for _, count in found) <= sum(pages) * PAGE


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=20), st.integers(1, PAGE), st.data())
def test_emptying_a_part_leaves_the_rest(pages: list[bool], tail: int, data: st.DataObject) -> None:
    fd, content = file_of(pages, tail)
    offset = data.draw(st.integers(0, len(content) - 1))
    length = data.draw(st.integers(1, len(content) - offset))
    empty(fd, offset, length)
    expected = content[:offset] + bytes(length) + content[offset + length :]
    assert os.pread(fd, len(content) + 1, 0) == expected
    os.close(fd)


def test_a_file_is_sparse_where_it_is_worth_it() -> None:
    assert not is_sparse(1 << 20, 2048)
    assert not is_sparse(PAGE, 0)
    assert is_sparse(1 << 30, 8)
    assert allocated_bytes(1 << 30, 8) == PAGE
    assert allocated_bytes(5000, 16) == 5000


def test_holes_have_the_digest_of_zeros() -> None:
    size = 3 * BLOCK_BYTES + 5000
    content = bytearray(size)
    content[BLOCK_BYTES + 70_000 : BLOCK_BYTES + 70_003] = b"abc"
    fd = os.memfd_create("sparse")
    os.ftruncate(fd, size)
    os.pwrite(fd, b"abc", BLOCK_BYTES + 70_000)
    expected = digest_of_bytes(bytes(content))

    assert trio.run(Stripe(fd, 0, size).finish) == expected
    assert trio.run(digest_at_rest, fd, size) == expected
    pay, longer = AsyncMock(), 1 << 40
    os.ftruncate(fd, longer)
    assert trio.run(digest_at_rest, fd, longer, pay) == trio.run(Stripe(fd, 0, longer).finish)
    assert sum(call.args[0] for call in pay.await_args_list) == os.fstat(fd).st_blocks * 512
    os.ftruncate(fd, size - 1)
    assert trio.run(Stripe(fd, 0, size).finish) != expected
    os.close(fd)
