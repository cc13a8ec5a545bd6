"""Runs the `irdmafs` command. Its node answers mounts as the file beside its store says: with an error, by
its number, or never, or with an extent's data byte for byte."""

from pathlib import Path
from typing import Any

import trio

from irdmafs.backend.files.sparse import segments
from irdmafs.backend.transport import messages
from irdmafs.backend.transport.mover import Host
from irdmafs.backend.transport.operations import OPERATIONS
from irdmafs.backend.transport.rights import Peer
from irdmafs.backend.transport.tcp import data
from irdmafs.cli.command import main

LIE = "lie"
NEVER, BYTE_FOR_BYTE = "never", "byte for byte"


def _lie(store: Path) -> str:
    said = store.with_name(LIE)
    return said.read_text() if said.exists() else ""


def _segments(fd: int, offset: int, length: int) -> list[tuple[int, int]]:
    lie = _lie(Path(f"/proc/self/fd/{fd}").readlink().parents[1])
    if lie.isdecimal():
        raise OSError(int(lie), "a lie")
    return [(0, 1)] * 1_000_000 if lie == BYTE_FOR_BYTE else segments(fd, offset, length)


def _lie_to_mounts(kind: type[messages.Request]) -> None:
    honest = OPERATIONS[kind]

    async def answer(host: Host, peer: Peer, request: Any) -> messages.Answer:
        lie = _lie(Path(host.service.status()["store"])) if peer.identity.role == "mount" else ""
        if lie.isdecimal():
            raise OSError(int(lie), "a lie")
        if lie == NEVER:
            await trio.sleep_forever()
        return await honest.do(host, peer, request)

    OPERATIONS[kind] = honest._replace(do=answer, is_short=lambda _: False)


if __name__ == "__main__":
    vars(data)["segments"] = _segments
    for kind in (messages.Get, messages.Put):
        _lie_to_mounts(kind)
        kind.limit_s = 0.1
    main(prog_name="irdmafs")
