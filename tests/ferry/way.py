"""The caller's end."""

import os
import secrets
from pathlib import Path

from irdmafs.backend.transport import Extent, FileRange, Landed, Memory
from irdmafs.backend.transport.device import NotThisWay, Sending, Transfer, Way
from irdmafs.backend.transport.link import Link
from irdmafs.backend.transport.messages import Done

from .messages import Bring, Fetch, Laid

# Fewer bytes are sent sooner than laid on the pier.
BYTES_MIN = 4096
SPEED_MBIT_S = 10


class FerryWay(Way):
    """By files in `pier`."""

    name = "ferry"
    shows_bytes = False

    def __init__(self, link: Link, pier: Path) -> None:
        self._link = link
        self._pier = pier

    def suits(self, transfer: Transfer) -> bool:
        return (
            transfer.memory is Memory.FILE
            and transfer.length >= BYTES_MIN
            and not transfer.is_sparse
        )

    async def reach(self) -> int | None:
        record = self._link.caller.resolve(self._link.node)
        return SPEED_MBIT_S if record is not None and self.name in record.transports else None

    async def read(self, extent: Extent, start: int, into: FileRange, landed: Landed) -> None:
        answer = await self._link.ask(Fetch(extent, start, into.length), Laid)
        path = self._pier / os.path.basename(answer.name)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise NotThisWay(f"the pier: {error.strerror}") from None
        path.unlink()
        os.pwrite(into.fd, data, into.offset)
        landed(0, len(data), memoryview(data))

    async def write(self, sending: Sending) -> None:
        extent, target, source, _, growth, _ = sending
        if growth is not None:
            await growth.complete()
        path = self._pier / secrets.token_hex(16)
        try:
            path.write_bytes(os.pread(source.fd, source.length, source.offset))
        except OSError as error:
            raise NotThisWay(f"the pier: {error.strerror}") from None
        try:
            await self._link.ask(Bring(extent, target, source.length, path.name), Done)
        finally:
            path.unlink(missing_ok=True)
