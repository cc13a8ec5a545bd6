"""An opened device: what all its queue pairs share."""

import errno
import os
from types import TracebackType
from typing import Any, Self

from .devices import Route
from .library import Library
from .queue import QueuePair
from .regions import Regions
from .staging import Staging

_MTUS = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}


class Adapter:
    """One port of a device. Use as a context manager; queue pairs and windows are closed before it.

    Raises OSError. Files are registered within `limit_bytes`.
    """

    def __init__(self, library: Library, route: Route, limit_bytes: int) -> None:
        self.library = library
        self.name = route.device
        self.port = route.port
        self.lid = route.lid
        self._gids: dict[int, bytes] = {}
        self.context: Any = library.open(route.device)
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
        self.bytes_max = int(limits.max_mr_size)
        kinds = library.enum("DEVICE_MEM_WINDOW_TYPE_2B")
        self.has_windows = bool(int(limits.device_cap_flags) & kinds)
        self.regions = Regions(library, self.pd, min(limit_bytes, self.bytes_max))
        self.staging = Staging(library, self.pd, self.regions)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.staging.close()
        self.regions.close()
        with self.library.errors:
            self.pd.close()
            self.context.close()

    def add_gid(self, index: int, value: bytes) -> None:
        """One that routes lead to."""
        self._gids[index] = value

    def gid(self, index: int) -> bytes:
        """Raises OSError for an index that no route leads to."""
        if index not in self._gids:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return self._gids[index]

    def queue_pair(self, gid_index: int, receives: bool = False, **options: Any) -> QueuePair:
        """`run` has to be started. Raises OSError."""
        return QueuePair(self, gid_index, receives, **options)
