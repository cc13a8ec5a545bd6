"""The operations of a store node: for each message of the core, the right to send it and its handler.

docs/contributing.md says how one is added.
"""

import errno
import os
from collections.abc import Awaitable, Callable, Iterable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import trio

from . import Extent, FileRange, Target
from .codec import Codec, MessageSet
from .counters import ServerFigures
from .messages import (
    GET_BYTES_MAX,
    Abort,
    Adopt,
    Answer,
    AskEtcd,
    Contents,
    Digest,
    Digested,
    Done,
    Doubt,
    EtcdSaid,
    Failed,
    Get,
    Map,
    Mapped,
    Ping,
    Put,
    Renewed,
    Report,
    Request,
    Scrub,
    Share,
    Status,
    Suspect,
    Verdict,
)
from .mover import Mover, Others
from .rights import ANY, NONE, OWN, Peer, Row
from .service import EtcdForReaders, Service, begin

__all__ = ["OPERATIONS", "Operation", "StoreNode", "codec_for"]

# Reading more small files than this is left to a thread.
_READ_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class StoreNode:
    """The parts of a store node that its operations use, and the peer that asks. `give_up(content)` ends
    transfers of a content."""

    service: Service[Any]
    others: Others
    counters: ServerFigures
    give_up: Callable[[int], None]
    etcd: EtcdForReaders | None
    peer: Peer


class Operation(NamedTuple):
    """One operation: the rights to it, in the order of ROLES; the kind of its answer; the handler, whose
    OSErrors reach the caller. One that `is_short` waits for nothing, so that a task of its own would cost
    more than the answer."""

    rights: Row
    answer: type[Answer]
    do: Callable[[StoreNode, Any], Awaitable[Answer]]
    is_short: Callable[[Any], bool] = lambda request: False


async def _ping(node: StoreNode, request: Ping) -> Done:
    return Done()


async def _abort(node: StoreNode, request: Abort) -> Done:
    node.give_up(request.content)
    node.service.abort(request.content)
    return Done()


async def _suspect(node: StoreNode, request: Suspect) -> Verdict:
    return Verdict(await node.service.suspect(request.group, request.node))


async def _doubt(node: StoreNode, request: Doubt) -> Done:
    node.service.doubt(request.extent)
    return Done()


async def _digest(node: StoreNode, request: Digest) -> Digested:
    return Digested(await node.service.digest(request.extent))


async def _map(node: StoreNode, request: Map) -> Mapped:
    return Mapped(await node.service.segments(request.extent))


async def _scrub(node: StoreNode, request: Scrub) -> Done:
    node.service.scrub()
    return Done()


async def _status(node: StoreNode, request: Status) -> Report:
    return Report(node.service.status())


async def _ask_etcd(node: StoreNode, request: AskEtcd) -> EtcdSaid:
    if node.etcd is None:
        raise OSError(errno.EOPNOTSUPP, "this node does not answer for etcd")
    return await node.etcd.ask(node.peer, request)


async def _put(node: StoreNode, request: Put) -> Done:
    extent, target, data = request.extent, request.target, request.data
    incoming = await begin(node.service, extent, target, len(data))

    async def store() -> None:
        if incoming is not None:
            _write(incoming.fd, data)
            await node.service.seal(extent, incoming)
            node.counters.received_bytes += len(data)

    async def forward(further: int, rest: Target) -> None:
        await node.others.device(further).put(extent, rest, data)
        node.counters.sent_bytes += len(data)

    with closing(incoming) if incoming is not None else nullcontext():
        await _here_and_further(target, store, forward)
    return Done()


async def _adopt(node: StoreNode, request: Adopt) -> Done:
    extent, target, service = request.extent, request.target, node.service
    await service.admit(extent, target)
    if service.size(extent) is not None:
        # A second try, after a node further down failed.
        fd = service.open(extent)
    else:
        with closing(await service.adopt(extent, request.name)) as incoming:
            fd = os.dup(incoming.fd)
            try:
                await service.seal(extent, incoming)
            except BaseException:
                os.close(fd)
                raise

    async def nothing() -> None:
        pass

    async def forward(further: int, rest: Target) -> None:
        size = os.fstat(fd).st_size
        await node.others.device(further).write(extent, rest, FileRange(fd, 0, size))
        node.counters.sent_bytes += size

    try:
        await _here_and_further(target, nothing, forward)
    finally:
        os.close(fd)
    return Done()


async def _share(node: StoreNode, request: Share) -> Done:
    extent, service = request.extent, node.service
    await service.admit(extent, request.target)
    if service.size(extent) is None:
        with closing(await service.share(request.source, request.length)) as incoming:
            await service.seal(extent, incoming)
    return Done()


async def _get(node: StoreNode, request: Get) -> Contents:
    extents, limit = request.extents, request.limit
    if _are_few(request):
        data = _read(node.service, extents, limit)
    else:
        data = await trio.to_thread.run_sync(_read, node.service, extents, limit)
    node.counters.sent_bytes += sum(len(one) for one in data if one is not None)
    return Contents(data)


def _are_few(request: Get) -> bool:
    return len(request.extents) <= _READ_AT_ONCE


async def _here_and_further(
    target: Target,
    here: Callable[[], Awaitable[None]],
    forward: Callable[[int, Target], Awaitable[None]],
) -> None:
    """Do something on this node and the rest of the chain at once. Raises the error of this node, or else
    of one further down."""
    if not target.chain:
        await here()
        return
    errors: dict[bool, OSError] = {}

    async def attempt(is_here: bool, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except OSError as error:
            errors[is_here] = error

    node, further = target.onward()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(attempt, True, here)
        nursery.start_soon(attempt, False, lambda: forward(node, further))
    for is_here in (True, False):
        if is_here in errors:
            raise errors[is_here]


def _write(fd: int, data: bytes) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], done)


def _read(service: Service[Any], extents: list[Extent], limit: int) -> list[bytes | None]:
    """Return the contents of as many extents as an answer holds, at least one."""
    found: list[bytes | None] = []
    room = GET_BYTES_MAX
    for extent in extents:
        data = _read_one(service, extent, limit)
        found.append(data)
        room -= len(data or b"")
        if room <= 0:
            break
    return found


def _read_one(service: Service[Any], extent: Extent, limit: int) -> bytes | None:
    try:
        fd = service.open(extent)
    except FileNotFoundError:
        return None
    try:
        size = service.size(extent)
        if size is None:
            size = os.fstat(fd).st_size  # freed a moment ago
        return os.pread(fd, size, 0) if size <= limit else None
    finally:
        os.close(fd)


def _always(request: Request) -> bool:
    return True


# A mount writes contents of its own session only. A node hands on contents of any session.
OPERATIONS: dict[type[Request], Operation] = {
    Ping: Operation((ANY, ANY, ANY, ANY), Done, _ping, _always),
    Status: Operation((ANY, NONE, NONE, ANY), Report, _status),
    Scrub: Operation((NONE, NONE, NONE, ANY), Done, _scrub),
    # Reading.
    Get: Operation((ANY, ANY, ANY, NONE), Contents, _get, _are_few),
    Map: Operation((ANY, ANY, ANY, NONE), Mapped, _map),
    # The node checks its own bytes, and believes nobody.
    Doubt: Operation((ANY, ANY, ANY, NONE), Done, _doubt, _always),
    # Only nodes: the node reads much for a short answer.
    Digest: Operation((ANY, NONE, NONE, NONE), Digested, _digest),
    # Writing.
    Put: Operation((ANY, OWN, NONE, NONE), Done, _put),
    Adopt: Operation((NONE, OWN, NONE, NONE), Done, _adopt),
    # Every mount may read every extent, so it may have one of its own with the same bytes.
    Share: Operation((NONE, OWN, NONE, NONE), Done, _share),
    Abort: Operation((NONE, OWN, NONE, NONE), Done, _abort),
    # The node checks by itself whether the other one can be reached.
    Suspect: Operation((NONE, ANY, NONE, NONE), Verdict, _suspect),
    # Only readers: the others reach etcd, which checks what they may do.
    AskEtcd: Operation((NONE, NONE, ANY, NONE), EtcdSaid, _ask_etcd),
}


def codec_for(movers: Iterable[Mover]) -> Codec:
    """Return the codec of the messages of all operations and of these movers."""
    core = MessageSet(
        {
            Renewed: (ANY, ANY, ANY, ANY),
            **{kind: operation.rights for kind, operation in OPERATIONS.items()},
        },
        (Failed, *{operation.answer for operation in OPERATIONS.values()}),
    )
    return Codec((core, *(mover.messages for mover in movers)))
