"""The operations of a store node: for each message of the core, the right to send it and its handler.

docs/contributing.md says how one is added.
"""

import errno
import os
from collections.abc import Awaitable, Callable, Iterable
from contextlib import closing
from typing import Any, NamedTuple

import trio

from ..files.sparse import write_at
from . import Extent, FileRange, messages
from .frames import Codec, MessageSet
from .mover import Host, Mover
from .rights import ANY, NONE, OWN, Peer, Row
from .service import Service, begin

# Reading more small files than this is left to a thread.
_READ_AT_ONCE = 16


class Operation(NamedTuple):
    """One operation: the rights to it, in the order of ROLES; the kind of its answer; the handler, whose
    OSErrors reach the caller. One that `is_short` waits for nothing: a task would cost more."""

    rights: Row
    answer: type[messages.Answer]
    do: Callable[[Host, Peer, Any], Awaitable[messages.Answer]]
    is_short: Callable[[Any], bool] = lambda request: False


async def _ping(host: Host, peer: Peer, request: messages.Ping) -> messages.Done:
    return messages.Done()


async def _abort(host: Host, peer: Peer, request: messages.Abort) -> messages.Done:
    for serving in host.servings.values():
        serving.give_up(request.content)
    host.service.abort(request.content)
    return messages.Done()


async def _suspect(host: Host, peer: Peer, request: messages.Suspect) -> messages.Verdict:
    return messages.Verdict(await host.service.suspect(request.group, request.node))


async def _doubt(host: Host, peer: Peer, request: messages.Doubt) -> messages.Done:
    host.service.doubt(request.extent)
    return messages.Done()


async def _digest(host: Host, peer: Peer, request: messages.Digest) -> messages.Digested:
    return messages.Digested(await host.service.digest(request.extent))


async def _scrub(host: Host, peer: Peer, request: messages.Scrub) -> messages.Done:
    host.service.scrub()
    return messages.Done()


async def _status(host: Host, peer: Peer, request: messages.Status) -> messages.Report:
    return messages.Report(host.service.status())


async def _ask_etcd(host: Host, peer: Peer, request: messages.AskEtcd) -> messages.EtcdSaid:
    if host.etcd is None:
        raise OSError(errno.EOPNOTSUPP, "this node does not answer for etcd")
    return await host.etcd(peer, request)


async def _put(host: Host, peer: Peer, request: messages.Put) -> messages.Done:
    for parcel in request.parcels:
        await _put_one(host, parcel)
    return messages.Done()


async def _put_one(host: Host, parcel: messages.Parcel) -> None:
    extent, target, data = parcel.extent, parcel.target, parcel.data
    if target.chain:
        raise OSError(errno.EINVAL, "what is in a message is not handed on")
    incoming = await begin(host.service, extent, target, len(data))
    if incoming is not None:
        with closing(incoming):
            write_at(incoming.fd, data, 0)
            await host.service.seal(extent, incoming)
        host.counters.received_bytes += len(data)


async def _adopt(host: Host, peer: Peer, request: messages.Adopt) -> messages.Done:
    extent, target, service = request.extent, request.target, host.service
    await service.admit(extent, target)
    # It is here at a second try, after a node further down failed.
    if service.size(extent) is None:
        with closing(await service.adopt(extent, request.name)) as incoming:
            await service.seal(extent, incoming)
    if target.chain:
        further, rest = target.onward()
        with closing(service.hold(extent)) as held:
            held.lend()
            size = os.fstat(held.fd).st_size
            await host.device(further).write(extent, rest, FileRange(held.fd, 0, size))
            host.counters.sent_bytes += size
    return messages.Done()


async def _share(host: Host, peer: Peer, request: messages.Share) -> messages.Done:
    extent, service = request.extent, host.service
    await service.admit(extent, request.target)
    if service.size(extent) is None:
        with closing(await service.share(request.source, request.length)) as incoming:
            await service.seal(extent, incoming)
    return messages.Done()


async def _get(host: Host, peer: Peer, request: messages.Get) -> messages.Contents:
    extents, limit = request.extents, request.limit
    if _are_few(request):
        data = _read(host.service, extents, limit)
    else:
        data = await trio.to_thread.run_sync(_read, host.service, extents, limit)
    host.counters.sent_bytes += sum(len(one) for one in data if one is not None)
    return messages.Contents(data)


def _are_few(request: messages.Get) -> bool:
    return len(request.extents) <= _READ_AT_ONCE


def _read(service: Service[Any], extents: list[Extent], limit: int) -> list[bytes | None]:
    """Return the contents of as many extents as an answer holds, at least one."""
    found: list[bytes | None] = []
    room = messages.GET_BYTES_MAX
    for extent in extents:
        data = _read_one(service, extent, limit)
        found.append(data)
        room -= len(data or b"")
        if room <= 0:
            break
    return found


def _read_one(service: Service[Any], extent: Extent, limit: int) -> bytes | None:
    try:
        opened = service.hold(extent)
    except FileNotFoundError:
        return None
    with closing(opened) as held:
        size = service.size(extent)
        if size is None:
            size = os.fstat(held.fd).st_size  # freed a moment ago
        return os.pread(held.fd, size, 0) if size <= limit else None


# A mount writes contents of its own session only. A node hands on contents of any session, by messages of
# the movers.
OPERATIONS: dict[type[messages.Request], Operation] = {
    messages.Ping: Operation((ANY, ANY, ANY, ANY), messages.Done, _ping, lambda request: True),
    messages.Status: Operation((ANY, NONE, NONE, ANY), messages.Report, _status),
    messages.Scrub: Operation((NONE, NONE, NONE, ANY), messages.Done, _scrub),
    # Reading.
    messages.Get: Operation((ANY, ANY, ANY, NONE), messages.Contents, _get, _are_few),
    # The node checks its own bytes, and believes nobody.
    messages.Doubt: Operation((ANY, ANY, ANY, NONE), messages.Done, _doubt, lambda request: True),
    # Only nodes: the node reads much for a short answer.
    messages.Digest: Operation((ANY, NONE, NONE, NONE), messages.Digested, _digest),
    # Writing.
    messages.Put: Operation((NONE, OWN, NONE, NONE), messages.Done, _put),
    messages.Adopt: Operation((NONE, OWN, NONE, NONE), messages.Done, _adopt),
    # Every mount may read every extent, so it may have one of its own with the same bytes.
    messages.Share: Operation((NONE, OWN, NONE, NONE), messages.Done, _share),
    messages.Abort: Operation((NONE, OWN, NONE, NONE), messages.Done, _abort),
    # The node checks by itself whether the other one can be reached.
    messages.Suspect: Operation((NONE, ANY, NONE, NONE), messages.Verdict, _suspect),
    # Only readers: the others reach etcd, which checks what they may do.
    messages.AskEtcd: Operation((NONE, NONE, ANY, NONE), messages.EtcdSaid, _ask_etcd),
}


def codec_for(movers: Iterable[Mover]) -> Codec:
    """Return the codec of the messages of all operations and of these movers."""
    core = MessageSet(
        {
            messages.Renewed: (ANY, ANY, ANY, ANY),
            **{kind: operation.rights for kind, operation in OPERATIONS.items()},
        },
        (messages.Failed, *{operation.answer for operation in OPERATIONS.values()}),
    )
    return Codec((core, *(mover.messages for mover in movers)))
