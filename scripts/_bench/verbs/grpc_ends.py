"""The alternative: gRPC, with a version in one message.

Messages are the bytes themselves, not protobuf's encoding of them, which would cost a copy more. Both ends
keep versions as ours do: read from a file in a tmpfs, and received into one, whose pages are there already.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import grpc

from ..rpc import serve_rpc
from ..workers import serve_jobs
from .jobs import Kept

_OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
_WRITE, _READ = "/bench/write", "/bench/read"
_THREADS = 4
_READY_S = 20.0


class _Server(grpc.GenericRpcHandler):
    """The request of a read is the size."""

    def __init__(self, place: Path) -> None:
        self._files = Kept(place)
        self._handlers = {
            _WRITE: grpc.unary_unary_rpc_method_handler(self._write),
            _READ: grpc.unary_unary_rpc_method_handler(self._read),
        }

    def service(self, details: Any) -> Any:
        return self._handlers.get(details.method)

    def _write(self, data: bytes, _context: Any) -> bytes:
        os.pwrite(self._files.fd("kept", len(data)), data, 0)
        return b""

    def _read(self, request: bytes, _context: Any) -> bytes:
        size = int(request)
        return os.pread(self._files.fd("kept", size), size, 0)


def serve(address: str, place: str) -> None:
    """Serve until standard input ends; tells the port."""
    serve_rpc(address, _Server(Path(place)), threads=_THREADS, options=_OPTIONS)


async def work(address: str, port: int, place: str) -> None:
    """Ask that server."""
    with grpc.insecure_channel(f"{address}:{port}", options=_OPTIONS) as channel:
        grpc.channel_ready_future(channel).result(_READY_S)
        await serve_jobs(GrpcJobs(channel, Path(place)))


class GrpcJobs:
    """The client's jobs, by the names and with the answers of those of the device."""

    def __init__(self, channel: grpc.Channel, place: Path) -> None:
        self._files = Kept(place)
        self._write = channel.unary_unary(_WRITE)
        self._read = channel.unary_unary(_READ)

    async def write(self, size: int) -> float:
        source = self._files.fd("source", size)
        began = time.perf_counter()
        self._write(os.pread(source, size, 0))
        return time.perf_counter() - began

    async def read(self, size: int) -> float:
        sink = self._files.fd("sink", size)
        began = time.perf_counter()
        os.pwrite(sink, self._read(str(size).encode()), 0)
        return time.perf_counter() - began
