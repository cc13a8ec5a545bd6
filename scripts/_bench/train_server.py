"""A parameter server in one process: workers send gradients over gRPC, and it returns their sum.

Arrays are fp32 and travel as their bytes, in messages of 4 MiB, the most that gRPC takes by default.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from .rpc import serve_rpc
from .workers import tell

_METHOD = "/bench/step"
_CHUNK = 1 << 20
_TIMEOUT_S = 120.0


def _messages(array: NDArray[np.float32]) -> Iterator[bytes]:
    for first in range(0, len(array), _CHUNK):
        yield array[first : first + _CHUNK].tobytes()


class _Server(grpc.GenericRpcHandler):
    """One method, a step: gradients are added as they come; the sum is sent when all are there.

    A worker may begin the next step while others still receive the sum of this one.
    """

    def __init__(self, world: int, elements: int) -> None:
        self._handler = grpc.stream_stream_rpc_method_handler(self._step)
        self._lock = threading.Lock()
        self._all_sent = threading.Barrier(world, self._take_sum, _TIMEOUT_S)
        self._growing, self._sum = np.zeros((2, elements), np.float32)

    def service(self, details: Any) -> Any:
        return self._handler if details.method == _METHOD else None

    def _take_sum(self) -> None:
        """Begin the next sum where that of the step before was: all workers have received it."""
        self._growing, self._sum = self._sum, self._growing
        self._growing.fill(0)

    def _step(self, gradients: Iterator[bytes], _context: Any) -> Iterator[bytes]:
        first = 0
        for message in gradients:
            part = np.frombuffer(message, np.float32)
            with self._lock:
                self._growing[first : first + len(part)] += part
            first += len(part)
        self._all_sent.wait()
        yield from _messages(self._sum)


def serve(address: str, world: int, elements: int) -> None:
    """Serve until standard input ends; tells the port."""
    serve_rpc(address, _Server(world, elements), threads=world)


def work(address: str, port: int, elements: int) -> None:
    """A worker: for each line it sends gradients and receives the sum, and tells the seconds."""
    gradients, out = np.full(elements, 0.001, np.float32), np.empty(elements, np.float32)
    with grpc.insecure_channel(f"{address}:{port}") as channel:
        call = channel.stream_stream(_METHOD)
        grpc.channel_ready_future(channel).result(_TIMEOUT_S)
        tell(None)
        for _ in sys.stdin:
            start, first = time.perf_counter(), 0
            for message in call(_messages(gradients), timeout=_TIMEOUT_S):
                part = np.frombuffer(message, np.float32)
                out[first : first + len(part)] = part
                first += len(part)
            tell([time.perf_counter() - start])
