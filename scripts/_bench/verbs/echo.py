"""What a round trip between two processes costs without us: blocking sockets, and trio's."""

from __future__ import annotations

import socket
import time
from statistics import median

import trio

from ..workers import Worker, tell

_MESSAGE = bytes(100)


def serve(kind: str, address: str) -> None:
    """Echo one connection, then end; tells the port."""
    if kind == "trio":
        trio.run(_serve_trio, address)
        return
    with socket.create_server((address, 0)) as listener:
        tell(listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := connection.recv(1 << 16):
                connection.sendall(data)


async def _serve_trio(address: str) -> None:
    (listener,) = await trio.open_tcp_listeners(0, host=address)
    tell(listener.socket.getsockname()[1])
    async with listener, await listener.accept() as stream:
        async for data in stream:
            await stream.send_all(data)


def round_trip_us(kind: str, address: str, count: int) -> float:
    """The median; `kind` is "blocking" or "trio", for both ends."""
    plan = {"kind": kind, "address": address}
    with Worker("echo", "_bench.verbs.echo:serve", plan) as server:
        if kind == "trio":
            times = trio.run(_ask_trio, address, server.ready, count)
        else:
            times = _ask(address, server.ready, count)
    return median(times) * 1e6


def _ask(address: str, port: int, count: int) -> list[float]:
    times = []
    with socket.create_connection((address, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            began = time.perf_counter()
            connection.sendall(_MESSAGE)
            connection.recv(1 << 16)
            times.append(time.perf_counter() - began)
    return times


async def _ask_trio(address: str, port: int, count: int) -> list[float]:
    times = []
    async with await trio.open_tcp_stream(address, port) as stream:
        for _ in range(count):
            began = time.perf_counter()
            await stream.send_all(_MESSAGE)
            await stream.receive_some(1 << 16)
            times.append(time.perf_counter() - began)
    return times
