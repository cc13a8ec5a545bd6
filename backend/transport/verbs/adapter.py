"""An opened device: what all its queue pairs share."""

import errno
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import trio

from .devices import Route
from .library import Library
from .queue import QueuePair
from .regions import Regions
from .staging import Staging

# Of all peers together; each takes kernel memory at both ends.
QUEUE_PAIRS_MAX = 4096
_SETBACK_S = 0.1
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
        # What may have to end when the port does.
        self.pairs: set[QueuePair] = set()
        # Why it is of no use until this process starts again.
        self.failure = ""
        self.context: Any
        self.context, self._events = library.open(route.device)
        try:
            with library.errors:
                limits = self.context.query_device()
                port = self.context.query_port(route.port)
                self.pd = library.PD(self.context)
        except BaseException:
            self.context.close()
            raise
        self._active = library.enum("PORT_ACTIVE")
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
        if self.failure:
            raise OSError(errno.ENODEV, self.failure)
        if len(self.pairs) >= QUEUE_PAIRS_MAX:
            raise OSError(errno.EUSERS, f"{QUEUE_PAIRS_MAX} queue pairs are in use")
        pair = QueuePair(self, gid_index, receives, **options)
        self.pairs.add(pair)
        return pair

    async def watch(self, changed: Callable[[], None]) -> None:
        """End what goes through the port as soon as the kernel says that it is down."""
        while True:
            await trio.lowlevel.wait_readable(self._events)
            try:
                with self.library.errors:
                    self.context.get_async_event().ack()
            except OSError:
                # Nothing to read after all; not to be found out again at once.
                await trio.sleep(_SETBACK_S)
            try:
                with self.library.errors:
                    state = int(self.context.query_port(self.port).state)
            except OSError as error:
                self.failure = f"device {self.name} is gone: {error.strerror}"
                self._fail_all(self.failure)
                return
            if state != self._active:
                self._fail_all(f"port {self.port} of {self.name} is down")
            changed()

    def _fail_all(self, why: str) -> None:
        for pair in list(self.pairs):
            pair.fail(why)
