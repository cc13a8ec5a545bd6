"""What contents are checked by: digests of blocks, stripes and whole records."""

import itertools
import os
from collections.abc import Iterator
from random import Random

import msgspec
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64

from irdmafs.backend.files import digest
from irdmafs.backend.files.digest import Stripe, by_stripe, digest_of_bytes
from irdmafs.backend.model.records import Layout
from irdmafs.backend.namespace.inode import Inode

FILE = 0o100644


def test_a_forked_process_has_a_buffer_of_its_own() -> None:
    """The main thread's is made at import, so before a daemon goes into the background."""
    buffer = digest.of_thread.buffer
    buffer[0] = 1
    if not (child := os.fork()):
        buffer[0] = 2
        os._exit(0)
    os.waitpid(child, 0)
    assert buffer[0] == 1


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """So that little data has many blocks, read in many pieces, by several threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "BLOCK_BYTES", 64)
        patch.setattr(digest, "BUFFER_BYTES", 24)
        patch.setattr(digest, "_INLINE_BYTES", 100)
        yield


def in_file(data: bytes) -> int:
    fd = os.memfd_create("digest")
    os.pwrite(fd, data, 0)
    return fd


def as_defined(data: bytes) -> bytes:
    blocks = [data[at : at + 64] for at in range(0, len(data), 64)]
    return xxh3_64(b"".join(xxh3_64(block).digest() for block in blocks)).digest()


@settings(deadline=None)
@given(st.binary(max_size=1000), st.integers(1, 300), st.binary(max_size=100))
def test_bytes_have_the_same_digest_wherever_they_lie_and_however_they_are_split(
    data: bytes, threads: int, before: bytes
) -> None:
    fd = in_file(before + data + b"after")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "_THREADS_MAX", threads)
        patch.setattr(os, "cpu_count", lambda: threads)
        found = trio.run(Stripe(fd, len(before), len(data)).finish)
    os.close(fd)
    assert found == as_defined(data) == digest_of_bytes(data)


@settings(deadline=None)
@given(
    st.binary(min_size=1, max_size=1000), st.lists(st.integers(1, 300)), st.randoms(), st.booleans()
)
def test_the_pieces_in_which_a_stripe_comes_and_their_order_do_not_matter(
    data: bytes, lengths: list[int], random: Random, again: bool
) -> None:
    before = b"x" * random.randrange(10_000)
    fd = in_file(before + data)
    stripe = Stripe(fd, len(before), len(data))
    ends = [min(sum(lengths[:i]), len(data)) for i in range(len(lengths) + 1)]
    pieces = [*itertools.pairwise([*ends, len(data)])]
    random.shuffle(pieces)

    if again:
        # What came before, from a node that then failed, was something else.
        for start, end in pieces:
            stripe.landed(start, end - start, memoryview(bytes(end - start)))
    for start, end in pieces:
        is_at_hand = random.random() < 0.9
        stripe.landed(start, end - start, memoryview(data)[start:end] if is_at_hand else None)
    assert trio.run(stripe.finish) == as_defined(data)
    os.close(fd)


def test_digests_that_stripes_shared_are_not_used() -> None:
    """Contents that have more than 64 stripes, as they could have before, had 64 digests."""
    assert by_stripe(bytes(64 * 8), 100) == []
    assert by_stripe(bytes(range(16)), 2) == [bytes(range(8)), bytes(range(8, 16))]


def test_a_record_from_before_there_were_digests_is_read() -> None:
    inode = Inode(7, FILE, 0, 0, 1)
    inode.layout = Layout(2, 0, 5)
    before = msgspec.msgpack.decode(inode.encode())[:15]
    found = Inode.decode(7, msgspec.msgpack.encode(before), 3)
    assert (found.digests, found.birth_ns, found.maker, found.parent) == (b"", 0, 0, 0)
    assert found.layout == inode.layout
    inode.digests = bytes(range(8))
    assert Inode.decode(7, inode.encode(), 3).copy().digests == inode.digests
