"""Prometheus metrics. What is counted are plain numbers in plain objects, which cost nothing to keep;
they become metrics only when somebody asks.

`NodeCounters` and `MountCounters` say what there is. Their fields are the metrics: a number is a
metric, a dict one metric with a label. Fields that must be looked up rather than counted are set by a
`refresh` function, which runs in the event loop when a scrape comes.
"""

# Functions that return dataclasses.field are called in the class bodies below.
# ruff: noqa: RUF009

import dataclasses
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Literal
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import trio

from .config_values import ConfigError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["Collector", "MetricsServer", "MountCounters", "NodeCounters", "serve_metrics"]

# A scrape is short; who connects and says nothing must not keep a thread.
SCRAPE_TIMEOUT_S = 10.0
SCRAPES_AT_ONCE = 8

Kind = Literal["counter", "gauge"]


def _count(help: str) -> Any:
    return dataclasses.field(default=0, metadata={"kind": "counter", "help": help})


def _counts(help: str, label: str) -> Any:
    metadata = {"kind": "counter", "help": help, "label": label}
    return dataclasses.field(default_factory=Counter, metadata=metadata)


def _gauge(help: str) -> Any:
    return dataclasses.field(default=0, metadata={"kind": "gauge", "help": help})


def _gauges(help: str, label: str) -> Any:
    metadata = {"kind": "gauge", "help": help, "label": label}
    return dataclasses.field(default_factory=dict, metadata=metadata)


@dataclasses.dataclass(slots=True)
class NodeCounters:
    """Of one store node."""

    requests: Counter[str] = _counts("Requests served, by kind", "kind")
    errors: Counter[str] = _counts("Requests that failed, by errno name", "errno")
    received_bytes: int = _count("Bytes of extents received")
    sent_bytes: int = _count("Bytes of extents sent, also down the chain")
    rejected_peers: int = _count("Connections refused: not authenticated, or not understood")
    resync_bytes: int = _count("Bytes copied to fill groups that this node joined")
    freed_extents: int = _count("Extents removed: superseded, deleted or never published")
    created_files: int = _count("Files made for extents")
    reused_files: int = _count("Files of superseded extents that were used for new ones")
    rdma_registrations: int = _count("Ranges of files registered for RDMA")
    rdma_registered_bytes: int = _gauge("Bytes registered for RDMA")
    store_bytes: int = _gauge("Bytes of extents kept")
    store_free_bytes: int = _gauge("Bytes free in the store directory")
    extents: int = _gauge("Extents kept")
    pending_extents: int = _gauge("Extents kept that are not published yet")
    groups: dict[str, int] = _gauges("Placement groups, by this node's state in them", "state")
    resync_groups_left: int = _gauge("Groups still to be filled")
    resync_bytes_left: int = _gauge("Bytes still to be copied to fill them")
    scrubbed_bytes: int = _count("Bytes kept here that were read again and compared")
    scrub_finished_seconds: float = _gauge(
        "When all extents had last been read again, in seconds since 1970; 0: never"
    )
    wrong_found: int = _count("Extents found not to be what was published any more")
    wrong_mended: int = _count("Of them, replaced by a right copy")
    wrong_extents: int = _gauge("Extents here that are not what was published")
    broken_extents: int = _gauge("Of them, those that no node has right")
    lease_valid_seconds: float = _gauge("How long this node may still serve without etcd")
    connections: int = _gauge("Connections of peers")


@dataclasses.dataclass(slots=True)
class MountCounters:
    """Of one mount."""

    requests: Counter[str] = _counts("Requests of the kernel, by kind", "kind")
    errors: Counter[str] = _counts("Requests answered with an error, by errno name", "errno")
    cache_hits: int = _count("Opens of a version that was in the cache")
    cache_misses: int = _count("Opens of a version that had to be fetched")
    cache_evictions: int = _count("Versions removed from the cache to make room")
    fetched_bytes: int = _count("Bytes fetched from store nodes")
    checked_bytes: int = _count("Bytes of them that were found to be what was published")
    lent_bytes: int = _count("Bytes read into memory that programs lent, past the cache")
    wrong_fetches: int = _count("Fetches that were dropped: not the bytes that were published")
    published_bytes: int = _count("Bytes of published versions sent to store nodes")
    prefetched_bytes: int = _count("Bytes fetched before anybody opened the file")
    barriers: int = _count("Times that etcd was asked whether the replica is up to date")
    round_trips: int = _count("Round trips to store nodes that a caller waited for")
    message_bytes: int = _count("Bytes of small files that came or went inside messages")
    rdma_bytes: int = _count("Bytes moved by RDMA")
    rdma_fallbacks: int = _count("Transfers that began by RDMA and were moved over TCP")
    rdma_staged_bytes: int = _count("Bytes that passed memory which stays registered")
    rdma_registrations: int = _count("Registrations of memory for RDMA")
    rdma_registered_bytes: int = _gauge("Bytes of memory registered for RDMA")
    cache_bytes: int = _gauge("Bytes of versions in the cache")
    cache_limit_bytes: int = _gauge("What the cache may hold")
    followed_directories: int = _gauge("Directories that are read without asking etcd")
    session_valid_seconds: float = _gauge("How long this mount's session lasts without etcd")
    open_handles: int = _gauge("Open files and directories")


class Collector:
    """Makes metrics `irdmafs_NAME_...` of a dataclass of counters when it is asked for them."""

    def __init__(
        self,
        name: str,
        counters: NodeCounters | MountCounters,
        refresh: Callable[[], None] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._name = name
        self._counters = counters
        self._refresh = refresh
        self._labels = dict(labels or {})
        self._token = None if refresh is None else trio.lowlevel.current_trio_token()

    def collect(self) -> Iterator["Metric"]:
        """Called from threads of the HTTP server."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if self._refresh is not None:
            trio.from_thread.run_sync(self._refresh, trio_token=self._token)
        names, values = list(self._labels), list(self._labels.values())
        for field in dataclasses.fields(self._counters):
            family = (
                CounterMetricFamily if field.metadata["kind"] == "counter" else GaugeMetricFamily
            )
            metric_name = f"irdmafs_{self._name}_{field.name}"
            value = getattr(self._counters, field.name)
            label = field.metadata.get("label")
            if label is None:
                metric = family(metric_name, field.metadata["help"], labels=names)
                metric.add_metric(values, value)
            else:
                metric = family(metric_name, field.metadata["help"], labels=[*names, label])
                # A copy: the event loop may add a key while we look.
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
    """Serve the collector's metrics and the process's own (memory, descriptors) over HTTP; port 0 takes
    a free one. Raises ConfigError where that cannot be."""
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
        # The inherited one asks the name service.
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
        # Somebody who hung up, or a scrape while the event loop ends.
        pass


class _Server6(_Server):
    address_family = socket.AF_INET6
