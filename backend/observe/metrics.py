"""Prometheus metrics: figures (backend/observe/figures.py), collected for each scrape."""

# Functions that return dataclasses.field are called in the class bodies below.
# ruff: noqa: RUF009

import dataclasses
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import trio

from ..model.values import ConfigError
from .figures import counts, gauge

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["Collector", "MetricsServer", "MountCounters", "serve_metrics"]

# A scrape is short; a client that sends nothing must not keep a thread.
SCRAPE_TIMEOUT_S = 10.0
SCRAPES_AT_ONCE = 8


@dataclasses.dataclass(slots=True)
class MountCounters:
    """The figures of one mount, beside those of its store."""

    requests: Counter[str] = counts("Requests of the kernel, by kind", "kind")
    errors: Counter[str] = counts("Requests answered with an error, by errno name", "errno")
    open_handles: int = gauge("Open files and directories")


class Collector:
    """Makes metrics `irdmafs_NAME_...` of dataclasses of figures for each scrape.

    `figures` returns the dataclasses, in the event loop of `token`; without one, in any thread.
    """

    def __init__(
        self,
        name: str,
        figures: Callable[[], Iterable[Any]],
        labels: Mapping[str, str] | None = None,
        token: trio.lowlevel.TrioToken | None = None,
    ) -> None:
        self._name = name
        self._figures = figures
        self._labels = dict(labels or {})
        self._token = token

    def collect(self) -> Iterator["Metric"]:
        """Called from threads of the HTTP server."""
        figures = self._figures
        found = (
            figures()
            if self._token is None
            else trio.from_thread.run_sync(lambda: list(figures()), trio_token=self._token)
        )
        for each in found:
            yield from self._metrics_of(each)

    def _metrics_of(self, figures: Any) -> Iterator["Metric"]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        names, values = list(self._labels), list(self._labels.values())
        for field in dataclasses.fields(figures):
            family = (
                CounterMetricFamily if field.metadata["kind"] == "counter" else GaugeMetricFamily
            )
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


class MetricsServer:
    """Serves /metrics until it is closed."""

    def __init__(self, server: WSGIServer) -> None:
        self._server = server
        self._thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True, name="metrics"
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def serve_metrics(collector: Collector, host: str, port: int) -> MetricsServer:
    """Serve the collector's metrics and the process's own (memory, descriptors) over HTTP; port 0 chooses
    a free one. Raises ConfigError if the address cannot be used."""
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
    except ImportError:
        raise ConfigError(
            "--metrics-port needs the Python package prometheus_client: pip install prometheus_client"
        ) from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    ProcessCollector(registry=registry)
    server_class = _Server6 if ":" in host else _Server
    try:
        server = make_server(host, port, make_wsgi_app(registry), server_class, _Handler)
    except OSError as error:
        raise ConfigError(
            f"cannot serve metrics on {host} port {port}: {error.strerror}; choose another with "
            "--metrics-port or metrics_address"
        ) from error
    return MetricsServer(server)


class _Handler(WSGIRequestHandler):
    timeout = SCRAPE_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:
        pass

    def address_string(self) -> str:
        # The inherited method asks the name service.
        return str(self.client_address[0])


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    address_family = socket.AF_INET

    def __init__(self, *arguments: Any) -> None:
        self._free = threading.BoundedSemaphore(SCRAPES_AT_ONCE)
        super().__init__(*arguments)

    def server_bind(self) -> None:
        # WSGIServer's own asks the name service for the host's name.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.socket.getsockname()[:2]
        self.setup_environ()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self._free.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # The client closed the connection, or the event loop has ended.
        pass


class _Server6(_Server):
    address_family = socket.AF_INET6
