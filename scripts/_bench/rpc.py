"""A server of gRPC, as a process that a bench starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from .workers import tell


def serve_rpc(
    address: str,
    handler: grpc.GenericRpcHandler,
    *,
    threads: int,
    options: Sequence[tuple[str, int]] = (),
) -> None:
    """Serve until standard input ends; tells the port."""
    server = grpc.server(ThreadPoolExecutor(threads), options=options)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port(f"{address}:0")
    server.start()
    tell(port)
    while os.read(0, 1):
        pass
    server.stop(None).wait()
