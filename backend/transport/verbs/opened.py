"""An opened port of a device, and the regions registered in its protection domain."""

from typing import Any, Self

from .devices import Route
from .library import Library
from .messages import Mtu
from .regions import Regions

_MTUS: dict[int, Mtu] = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}


class OpenedPort:
    """Use as a context manager; close everything made from `context` and `pd` before it. At most
    `limit_bytes` are registered. `mtu` is in bytes; `events` is the descriptor of the device's asynchronous
    events. Raises OSError."""

    def __init__(self, library: Library, route: Route, limit_bytes: int) -> None:
        self.library = library
        self.name = route.device
        self.port = route.port
        self.lid = route.lid
        self.context: Any
        self.context, self.events = library.open(route.device)
        try:
            with library.errors:
                limits = self.context.query_device()
                port = self.context.query_port(route.port)
                self.pd = library.PD(self.context)
        except BaseException:
            self.context.close()
            raise
        self.mtu = _MTUS.get(int(port.active_mtu), 256)
        self.reads_answered = max(1, int(limits.max_qp_rd_atom))
        self.reads_asked = max(1, int(limits.max_qp_init_rd_atom))
        kinds = library.enum("DEVICE_MEM_WINDOW_TYPE_2B")
        self.has_windows = bool(int(limits.device_cap_flags) & kinds)
        self.regions = Regions(library, self.pd, min(limit_bytes, int(limits.max_mr_size)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.regions.close()
        with self.library.errors:
            self.pd.close()
            self.context.close()
