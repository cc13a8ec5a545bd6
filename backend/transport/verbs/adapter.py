"""An opened port of a device with everything that its queue pairs share: protection domain, regions,
staging memory."""

import errno
from collections.abc import Callable

import trio

from .devices import Gid, Route
from .library import Library
from .opened import OpenedPort
from .queue import QueuePair
from .staging import Staging

# The limit for all peers together. Each queue pair takes kernel memory at both ends.
QUEUE_PAIRS_MAX = 4096
_SETBACK_S = 0.1


class Adapter(OpenedPort):
    """Use as a context manager; close queue pairs and windows before it. Raises OSError."""

    def __init__(self, library: Library, route: Route, limit_bytes: int) -> None:
        super().__init__(library, route, limit_bytes)
        # The queue pairs that fail when the port goes down.
        self.pairs: set[QueuePair] = set()
        # Why this port cannot be used until the process restarts; "" if it can.
        self.failure = ""
        self.staging = Staging(self.regions)

    def __exit__(self, *_: object) -> None:
        self.staging.close()
        super().__exit__()

    def queue_pair(self, gid: Gid, arrived: Callable[[int], None] | None = None) -> QueuePair:
        """Return a new queue pair at this GID; the caller has to start its `run`. Raises OSError."""
        if self.failure:
            raise OSError(errno.ENODEV, self.failure)
        if len(self.pairs) >= QUEUE_PAIRS_MAX:
            raise OSError(errno.EUSERS, f"{QUEUE_PAIRS_MAX} queue pairs are in use")
        pair = QueuePair(self, gid, self.pairs.discard, arrived)
        self.pairs.add(pair)
        return pair

    async def watch(self, changed: Callable[[], None]) -> None:
        """Fail all queue pairs of the port as soon as the kernel reports that it is down."""
        while True:
            await trio.lowlevel.wait_readable(self.events)
            try:
                with self.library.errors:
                    self.context.get_async_event().ack()
            except OSError:
                # There was no event to read. Wait, so that this loop does not spin.
                await trio.sleep(_SETBACK_S)
            try:
                with self.library.errors:
                    state = int(self.context.query_port(self.port).state)
            except OSError as error:
                self.failure = f"device {self.name} is gone: {error.strerror}"
                self._fail_all(self.failure)
                return
            if state != self.library.enum("PORT_ACTIVE"):
                self._fail_all(f"port {self.port} of {self.name} is down")
            changed()

    def _fail_all(self, why: str) -> None:
        for pair in list(self.pairs):
            pair.fail(why)
