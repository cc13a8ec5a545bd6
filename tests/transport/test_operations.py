"""An operation of store nodes is added by a message and a line with its handler.

The one that is added here tells how long an extent is.
"""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import trio
from harness.transport_nodes import serving
from harness.transport_place import mounted

from irdmafs.backend.transport import Extent
from irdmafs.backend.transport.messages import AboutExtent, Answer, Request
from irdmafs.backend.transport.mover import Host
from irdmafs.backend.transport.operations import OPERATIONS, Operation
from irdmafs.backend.transport.rights import ANY, NONE, Peer

KNOWN = Extent(7, 0)


class Measure(AboutExtent, tag=80):
    """Asks for the length of an extent."""


class Measured(Answer, tag=81):
    length: int | None


async def measure(host: Host, peer: Peer, request: Measure) -> Measured:
    return Measured(host.service.size(request.extent))


# The line of the table. Rights are those of nodes, mounts, readers and administrators.
LINE: dict[type[Request], Operation] = {
    Measure: Operation((ANY, ANY, NONE, NONE), Measured, measure)
}


@pytest.fixture(autouse=True)
def added() -> Iterator[None]:
    with patch.dict(OPERATIONS, LINE):
        yield


def asked(memory: Path, extent: Extent, role: str = "mount") -> int | None:
    """Return the answer of node 1."""

    async def main() -> int | None:
        async with serving(memory, 1) as node, mounted(memory, role=role) as peers:
            Path(node.service.path(KNOWN)).write_bytes(b"weights")
            return (await peers.device(1).link.ask(Measure(extent), Measured)).length

    return trio.run(main)


def test_a_handler_answers_the_message_that_it_is_for(memory: Path) -> None:
    assert asked(memory, KNOWN) == len(b"weights")
    assert asked(memory, Extent(8, 0)) is None


def test_an_operation_is_refused_to_roles_that_have_no_right_to_it(memory: Path) -> None:
    with pytest.raises(PermissionError, match="a reader may not send measure"):
        asked(memory, KNOWN, role="reader")
