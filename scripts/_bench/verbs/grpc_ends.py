"""The alternative: gRPC, with a version in one message or in a stream of them.

Messages are the bytes themselves, not protobuf's encoding of them, which would cost a copy more. Both ends
keep versions as ours do: read from a file in a tmpfs, and received into one, whose pages are there already.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from ..rpc import serve_rpc
from ..workers import serve_jobs
from .jobs import Kept

_OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
_SERVICE = "bench"
_THREADS = 4
_READY_S = 20.0


def _chunks(fd: int, size: int, chunk: int) -> Iterator[bytes]:
    for offset in range(0, size, chunk):
        yield os.pread(fd, min(chunk, size - offset), offset)


class _Server(grpc.GenericRpcHandler):
    """write, read: a version in one message; write_stream, read_stream: in chunks. The size travels as
    metadata of writes, and as the request of reads."""

    def __init__(self, place: Path, chunk: int) -> None:
        self._chunk = chunk
        self._files = Kept(place)
        self._handlers = {
            f"/{_SERVICE}/write": grpc.unary_unary_rpc_method_handler(self._write),
            f"/{_SERVICE}/read": grpc.unary_unary_rpc_method_handler(self._read),
            f"/{_SERVICE}/write_stream": grpc.stream_unary_rpc_method_handler(self._write_stream),
            f"/{_SERVICE}/read_stream": grpc.unary_stream_rpc_method_handler(self._read_stream),
            f"/{_SERVICE}/release": grpc.unary_unary_rpc_method_handler(self._release),
        }

    def service(self, details: Any) -> Any:
        return self._handlers.get(details.method)

    def _fd(self, size: int) -> int:
        return self._files.fd("kept", size)

    def _write(self, data: bytes, _context: Any) -> bytes:
        os.pwrite(self._fd(len(data)), data, 0)
        return b""

    def _read(self, request: bytes, _context: Any) -> bytes:
        size = int(request)
        return os.pread(self._fd(size), size, 0)

    def _write_stream(self, chunks: Iterator[bytes], context: Any) -> bytes:
        fd, offset = self._fd(int(dict(context.invocation_metadata())["size"])), 0
        for chunk in chunks:
            offset += os.pwrite(fd, chunk, offset)
        return b""

    def _read_stream(self, request: bytes, _context: Any) -> Iterator[bytes]:
        size = int(request)
        return _chunks(self._fd(size), size, self._chunk)

    def _release(self, request: bytes, _context: Any) -> bytes:
        self._files.release(int(request))
        return b""


def serve(address: str, place: str, chunk: int) -> None:
    """Serve until standard input ends; tells the port."""
    serve_rpc(address, _Server(Path(place), chunk), threads=_THREADS, options=_OPTIONS)


async def work(address: str, port: int, place: str, chunk: int) -> None:
    """Ask that server."""
    with grpc.insecure_channel(f"{address}:{port}", options=_OPTIONS) as channel:
        grpc.channel_ready_future(channel).result(_READY_S)
        await serve_jobs(GrpcJobs(channel, Path(place), chunk))


class GrpcJobs:
    """The client's jobs, by the names and with the answers of those of the device."""

    def __init__(self, channel: grpc.Channel, place: Path, chunk: int) -> None:
        self._chunk = chunk
        self._files = Kept(place)
        self._write = channel.unary_unary(f"/{_SERVICE}/write")
        self._read = channel.unary_unary(f"/{_SERVICE}/read")
        self._write_stream = channel.stream_unary(f"/{_SERVICE}/write_stream")
        self._read_stream = channel.unary_stream(f"/{_SERVICE}/read_stream")
        self._release = channel.unary_unary(f"/{_SERVICE}/release")

    async def write(self, size: int) -> float:
        source = self._files.fd("source", size)
        began = time.perf_counter()
        self._write(os.pread(source, size, 0))
        return time.perf_counter() - began

    async def write_stream(self, size: int) -> float:
        source = self._files.fd("source", size)
        began = time.perf_counter()
        self._write_stream(_chunks(source, size, self._chunk), metadata=(("size", str(size)),))
        return time.perf_counter() - began

    async def read(self, size: int) -> float:
        sink = self._files.fd("sink", size)
        began = time.perf_counter()
        os.pwrite(sink, self._read(str(size).encode()), 0)
        return time.perf_counter() - began

    async def read_stream(self, size: int) -> float:
        sink, offset = self._files.fd("sink", size), 0
        began = time.perf_counter()
        for chunk in self._read_stream(str(size).encode()):
            offset += os.pwrite(sink, chunk, offset)
        return time.perf_counter() - began

    async def release(self, size: int) -> float:
        self._release(str(size).encode())
        self._files.release(size)
        return 0.0
