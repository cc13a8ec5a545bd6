"""One data connection: in what pieces bytes are moved, and how the two ends hear of each other."""

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import trio
import trio.testing
from harness.errors import fails_with

from irdmafs.backend.transport.frames import BadMessage
from irdmafs.backend.transport.tcp.authentication import Authentication
from irdmafs.backend.transport.tcp.channel import Channel
from irdmafs.backend.transport.tcp.streams import (
    piece_bytes,
    receive_ranges,
    send_range,
    wait_for_reply,
)
from irdmafs.backend.transport.tcp.threads import in_threads
from irdmafs.backend.transport.tcp.wire import Reply, ReplyKind, decode_reply

T = TypeVar("T")
MiB = 1 << 20
TIMEOUT_S = 20.0
# What a thread may look for while it sends, in a second.
LOOKS_PER_S = 50


class Counting(Channel):
    """A channel that counts what it is asked for."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, TIMEOUT_S, listens=False)
        self.looks = 0

    def next_message(self, decode: Callable[[bytes], T], *, wait: bool) -> T | None:
        self.looks += 1
        return super().next_message(decode, wait=wait)


@pytest.fixture
def ends() -> Iterator[tuple[Counting, Counting]]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = Counting(socket.create_connection(listening.getsockname()))
        other = Counting(listening.accept()[0])
    one.authentication = Authentication(bytes(32), listens=False)
    other.authentication = Authentication(bytes(32), listens=True)
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def files() -> Iterator[tuple[int, int]]:
    """A file of 64 MiB to send, and one of its size to receive into."""
    source, target = (os.memfd_create(name) for name in ("source", "target"))
    for fd in (source, target):
        os.ftruncate(fd, 64 * MiB)
    for offset in range(0, 64 * MiB, MiB):
        os.pwrite(source, b"%08d" % offset, offset)
    yield source, target
    os.close(source)
    os.close(target)


@pytest.mark.parametrize(
    ("length", "pieces"), [(1, 1), (MiB, 4), (4 * MiB, 16), (32 * MiB, 16), (1 << 30, 512)]
)
def test_short_stream_comes_in_small_pieces_and_a_long_one_in_few(length: int, pieces: int) -> None:
    assert -(-length // piece_bytes(length)) == pieces


def test_a_sender_looks_for_a_reply_now_and_then(
    ends: tuple[Counting, Counting], files: tuple[int, int]
) -> None:
    one, other = ends
    source, target = files
    arrived: list[tuple[int, int]] = []
    receiver = threading.Thread(
        target=receive_ranges,
        args=(other, target, ((0, 64 * MiB),), lambda *piece: arrived.append(piece[:2])),
    )
    receiver.start()
    began = time.monotonic()
    for offset in range(0, 64 * MiB, MiB):  # as a node hands on what it receives
        assert send_range(one, source, offset, MiB) is None
    took_s = time.monotonic() - began
    receiver.join()
    assert one.looks <= 1 + took_s * LOOKS_PER_S
    assert sum(count for _, count in arrived) == 64 * MiB
    for offset in range(0, 64 * MiB, MiB):
        assert os.pread(target, 8, offset) == b"%08d" % offset


def test_a_refusal_is_heard_while_bytes_are_being_sent(ends: tuple[Counting, Counting]) -> None:
    one, other = ends
    length = 1 << 40  # more than anybody would wait for
    source = os.memfd_create("endless")
    os.ftruncate(source, length)

    def refuse() -> None:
        other.say(Reply(ReplyKind.WORKING))
        other.say(Reply(ReplyKind.FAILED, errno.ENOSPC))
        with memoryview(bytearray(MiB)) as view:
            while not heard.is_set():
                try:
                    other.receive(view)
                except BlockingIOError:
                    pass

    heard = threading.Event()
    receiver = threading.Thread(target=refuse)
    receiver.start()
    reply = send_range(one, source, 0, length)
    heard.set()
    receiver.join()
    os.close(source)
    assert reply is not None
    assert (reply.kind, reply.code) == (ReplyKind.FAILED, errno.ENOSPC)


def test_what_is_said_during_the_last_bytes_is_heard_after_them(
    ends: tuple[Counting, Counting], files: tuple[int, int]
) -> None:
    one, other = ends
    for kind in (ReplyKind.WORKING, ReplyKind.OK):
        other.say(Reply(kind))
    assert one.next_message(decode_reply, wait=True) == Reply(ReplyKind.WORKING)
    early = send_range(one, files[0], 0, 100)
    assert (early or wait_for_reply(one)) == Reply(ReplyKind.OK)


def test_a_node_does_not_have_a_reader_wait(ends: tuple[Counting, Counting]) -> None:
    one, other = ends
    other.say(Reply(ReplyKind.WORKING))
    with pytest.raises(BadMessage):
        wait_for_reply(one, may_work=False)


def test_what_follows_the_last_bytes_is_no_reply_to_them(
    ends: tuple[Counting, Counting], files: tuple[int, int]
) -> None:
    """A reader that has all it asked for uses the connection again at once."""
    one, other = ends
    next_request = b"a header of the next request" * 10
    other.send_all(next_request)
    assert send_range(one, files[0], 0, 4096) is None
    assert one.receive_exactly(len(next_request)) == next_request


def until(stopped: threading.Event, ended: list[str], name: str) -> Callable[[], str]:
    """Return a work that ends when it is stopped."""

    def work() -> str:
        stopped.wait()
        ended.append(name)
        return name

    return work


def test_the_first_error_is_raised_when_all_were_stopped() -> None:
    stopped, ended = threading.Event(), list[str]()

    def fail() -> str:
        raise OSError("the first one")

    works = [until(stopped, ended, "one"), fail, until(stopped, ended, "other")]
    with pytest.raises(OSError, match="the first one"):
        trio.run(in_threads, works, stopped.set, None)
    assert sorted(ended) == ["one", "other"]


@pytest.mark.parametrize("places", [None, 1])
async def test_who_is_cancelled_stops_the_works_and_waits_for_them(places: int | None) -> None:
    stopped, ended = threading.Event(), list[str]()

    limit = trio.Semaphore(places) if places is not None else None
    works = [until(stopped, ended, name) for name in ("one", "other")]
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_threads, works, stopped.set, limit)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
    assert scope.cancelled_caught
    # The second one has no place before the first one has ended.
    assert sorted(ended) == ["one", "other"][: places or 2]
    assert limit is None or limit.value == places


async def test_thread_that_cannot_be_started_is_an_error_and_keeps_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped, ended, places = threading.Event(), list[str](), trio.Semaphore(2)
    begin, begun = trio.lowlevel.start_thread_soon, list[object]()

    def begin_one(*arguments: Any) -> None:
        if begun:
            raise RuntimeError("can't start new thread")
        begun.append(begin(*arguments))

    monkeypatch.setattr(trio.lowlevel, "start_thread_soon", begin_one)
    with fails_with(errno.EAGAIN):
        works = [until(stopped, ended, name) for name in ("one", "other")]
        await in_threads(works, stopped.set, places)
    assert (ended, places.value) == (["one"], 2)
