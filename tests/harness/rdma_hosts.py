"""Run on each of two hosts: host 1 writes into the memory of host 0 and reads it back by RDMA.

$IRDMAFS_GUEST_NODE is the host's number; host 0 has the address 10.9.0.1.
"""

import hashlib
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Run by its path: what `harness` is must be found beside this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.rdma import Address, End, ports

SERVER = ("10.9.0.1", 7471)
SIZE_BYTES = 16 << 20
CONNECT_WITHIN_S = 60.0


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        port, *_ = ports()
        with End(port, Path(directory) / "memory", SIZE_BYTES) as end:
            if os.environ["IRDMAFS_GUEST_NODE"] == "0":
                with socket.create_server(SERVER) as listener:
                    host0(end, listener.accept()[0])
            else:
                host1(end, connect())


def host0(end: End, peer: socket.socket) -> None:
    with peer, peer.makefile("rw") as lines:
        end.connect(Address(**ask(lines, end.address.as_dict())))
        written = ask(lines, "connected")
        if digest(end) != written:
            sys.exit("what is here is not what host 1 wrote")
        print("the bytes that host 1 wrote are here", flush=True)
        end.memory[:] = os.urandom(SIZE_BYTES)
        ask(lines, digest(end))


def host1(end: End, peer: socket.socket) -> None:
    with peer, peer.makefile("rw") as lines:
        address = Address(**ask(lines, end.address.as_dict()))
        end.connect(address)
        end.memory[:] = os.urandom(SIZE_BYTES)
        if receive(lines) != "connected":
            sys.exit("host 0 is not connected")
        end.write(address)
        there = ask(lines, digest(end))
        end.read(address)
        if digest(end) != there:
            sys.exit("what was read is not what host 0 has")
        print("the bytes that host 0 has were read", flush=True)
        send(lines, "done")


def connect() -> socket.socket:
    """Host 0 boots at the same time."""
    deadline = time.monotonic() + CONNECT_WITHIN_S
    while True:
        try:
            return socket.create_connection(SERVER, timeout=1)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def digest(end: End) -> str:
    return hashlib.sha256(end.memory).hexdigest()


def send(lines: Any, value: object) -> None:
    print(json.dumps(value), file=lines, flush=True)


def receive(lines: Any) -> Any:
    return json.loads(lines.readline())


def ask(lines: Any, value: object) -> Any:
    send(lines, value)
    return receive(lines)


if __name__ == "__main__":
    main()
