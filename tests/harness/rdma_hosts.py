"""Run on each of two hosts: host 1 writes an extent on the store node of host 0 and reads it back by RDMA.

$IRDMAFS_GUEST_NODE is the host's number; host 0 has the address 10.9.0.1.
"""

import os
import sys
import tempfile
from pathlib import Path

import trio

# Run by its path: what `harness` is must be found beside this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.transport_nodes import serving
from harness.transport_place import MiB, Place, mounted
from irdmafs.backend.transport import Extent
from irdmafs.backend.transport.verbs.rdma import Choice, Rdma

ADDRESS, PORT = "10.9.0.1", 7471
SIZE_BYTES = 16 * MiB
CONNECT_WITHIN_S = 60.0


async def serve(memory: Path) -> None:
    """Be a store node until the other host has what it wants; tell it where the node is."""
    with Rdma(Choice("require")) as rdma:
        async with serving(memory, 1, ADDRESS, rdma=rdma):
            [listener] = await trio.open_tcp_listeners(PORT, host=ADDRESS)
            async with listener, await listener.accept() as peer:
                await peer.send_all((memory / "addresses/1").read_bytes())
                await peer.send_eof()
                await peer.receive_some()


async def move(memory: Path) -> None:
    with trio.fail_after(CONNECT_WITHIN_S):
        peer = await connected()
    async with peer:
        (memory / "addresses").mkdir()
        (memory / "addresses/1").write_bytes(b"".join([data async for data in peer]))
        with Rdma(Choice("require")) as rdma:
            async with mounted(memory, rdma=rdma) as peers:
                place, data = Place(memory, peers, {}), os.urandom(SIZE_BYTES)
                await place.write(Extent(1, 0), data)
                assert await place.read(1, Extent(1, 0), 0, SIZE_BYTES) == data
                assert peers.counters.moved_bytes == {"verbs": 2 * SIZE_BYTES}
    print("what was written was read", flush=True)


async def connected() -> trio.SocketStream:
    """Host 0 boots at the same time."""
    while True:
        try:
            return await trio.open_tcp_stream(ADDRESS, PORT)
        except OSError:
            await trio.sleep(0.1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        trio.run(serve if os.environ["IRDMAFS_GUEST_NODE"] == "0" else move, Path(directory))
