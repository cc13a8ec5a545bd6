"""The node's end."""

import errno
import os
import secrets
from contextlib import closing
from pathlib import Path

import trio

from irdmafs.backend.transport import Extent, FileRange, Target
from irdmafs.backend.transport.device import Growth
from irdmafs.backend.transport.messages import Answer, Done, Request
from irdmafs.backend.transport.mover import Connection, Host, Lasting, Serving
from irdmafs.backend.transport.rights import Peer
from irdmafs.backend.transport.service import begin

from .messages import Bring, Fetch, Laid


class FerryServing(Serving):
    """The end of one node, with files in `pier`."""

    def __init__(self, host: Host, pier: Path) -> None:
        self._host = host
        self._pier = pier

    def connected(self, peer: Peer, local: str, nursery: trio.Nursery) -> Connection:
        return _Ferryman(self._host, self._pier)


class _Ferryman(Connection):
    def __init__(self, host: Host, pier: Path) -> None:
        self._host = host
        self._pier = pier

    async def answer(self, request: Request) -> Answer | Lasting:
        if isinstance(request, Fetch):
            return self._lay(request)
        assert isinstance(request, Bring)
        await self._take(request.extent, request.target, request.length, request.name)
        return Done()

    def close(self, why: str) -> None:
        """Nothing was given."""

    def _lay(self, request: Fetch) -> Laid:
        held = self._host.service.hold(request.extent)
        try:
            data = os.pread(held.fd, request.length, request.start)
        finally:
            held.close()
        if len(data) < request.length:
            raise OSError(errno.EINVAL, "the extent is shorter than what is asked for")
        name = secrets.token_hex(16)
        (self._pier / name).write_bytes(data)
        self._host.counters.sent_bytes += len(data)
        return Laid(name)

    async def _take(self, extent: Extent, target: Target, length: int, name: str) -> None:
        service = self._host.service
        data = (self._pier / name).read_bytes()
        if len(data) != length:
            raise OSError(errno.EINVAL, "the extent is not as long as was said")
        incoming = await begin(service, extent, target, length)
        if incoming is not None:
            with closing(incoming):
                os.pwrite(incoming.fd, data, 0)
                await service.seal(extent, incoming)
        if target.chain:
            await self._hand_on(extent, target, length)

    async def _hand_on(self, extent: Extent, target: Target, length: int) -> None:
        node, further = target.onward()
        held = self._host.service.hold(extent)
        try:
            growth = Growth(length, length, held.lend)
            whole = FileRange(held.fd, 0, length)
            await self._host.device(node).write(extent, further, whole, growth=growth)
        finally:
            held.close()
