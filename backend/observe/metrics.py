"""Prometheus metrics: figures (backend/observe/figures.py), collected for each scrape."""

import dataclasses
import logging
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import trio

from ..model.values import ConfigError
from .figures import counts, gauge

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

# A scrape is short; a client that sends nothing must not keep a thread.
_SCRAPE_TIMEOUT_S = 10.0
_END_S = 0.5
SCRAPES_AT_ONCE = 8

Figures = Callable[[], Iterable[Any]]


@dataclasses.dataclass(slots=True)
class MountCounters:
    """The figures of one mount, beside those of its store."""

    requests: Counter[str] = counts("Requests of the kernel, by kind", "kind")
    errors: Counter[str] = counts("Requests answered with an error, by errno name", "errno")
    open_handles: int = gauge("Open files and directories")


@asynccontextmanager
async def serve_metrics(
    name: str, figures: Figures, labels: Mapping[str, str], host: str, port: int | None
) -> AsyncIterator[int]:
    """Serve metrics `irdmafs_NAME_...` over HTTP, made of the dataclasses that `figures` returns in this
    event loop, and the process's own (memory, descriptors). Yield the port: 0 chooses a free one, None
    serves nothing. Raises ConfigError if the address cannot be used."""
    if port is None:
        yield 0
        return
    from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(name, figures, labels))
    ProcessCollector(registry=registry)
    try:
        server = make_server(host, port, make_wsgi_app(registry), _Server, _Handler)
    except OSError as error:
        raise ConfigError(
            f"cannot serve metrics on {host} port {port}: {error.strerror}; choose another with "
            "--metrics-port or metrics_address"
        ) from error
    log.info("metrics are served on %s port %d", host, server.server_port)
    threading.Thread(target=server.serve_forever, daemon=True, name="metrics").start()
    try:
        yield server.server_port
    finally:
        with trio.CancelScope(shield=True):
            # One of the server's threads may be waiting for this thread to collect figures.
            await trio.to_thread.run_sync(server.shutdown)
        server.server_close()


class _Handler(WSGIRequestHandler):
    timeout = _SCRAPE_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingMixIn, WSGIServer):
    """Closes the oldest connections above a limit, as each takes a thread and a descriptor."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self._free = threading.BoundedSemaphore(SCRAPES_AT_ONCE)
        self._serving: dict[socket.socket, None] = {}  # the oldest first
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # WSGIServer's own asks the name service for the host's name.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.socket.getsockname()[:2]
        self.setup_environ()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        for oldest in [*self._serving][: -SCRAPES_AT_ONCE + 1]:
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        # Its thread may still be at work.
        if is_free := self._free.acquire(timeout=_END_S):
            self._serving[request] = None
        return is_free

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._serving.pop(request)
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # The client closed the connection, or the event loop has ended.
        pass


class _Collector:
    """Makes metrics of figures, in the threads of the HTTP server."""

    def __init__(self, name: str, figures: Figures, labels: Mapping[str, str]) -> None:
        self._name = name
        self._figures = figures
        self._labels = dict(labels)
        self._token = trio.lowlevel.current_trio_token()

    def collect(self) -> Iterator["Metric"]:
        found = trio.from_thread.run_sync(lambda: list(self._figures()), trio_token=self._token)
        for each in found:
            yield from self._metrics_of(each)

    def _metrics_of(self, figures: Any) -> Iterator["Metric"]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        names, values = list(self._labels), list(self._labels.values())
        for field in dataclasses.fields(figures):
            is_counter = field.metadata["kind"] == "counter"
            family = CounterMetricFamily if is_counter else GaugeMetricFamily
            metric_name = f"irdmafs_{self._name}_{field.name}"
            value = getattr(figures, field.name)
            label = field.metadata.get("label")
            if label is None:
                metric = family(metric_name, field.metadata["help"], labels=names)
                metric.add_metric(values, value)
            else:
                metric = family(metric_name, field.metadata["help"], labels=[*names, label])
                # A copy: the event loop may add a key meanwhile.
                for key, number in sorted(dict(value).items()):
                    metric.add_metric([*values, str(key)], number)
            yield metric
