"""This process's use of RDMA: through which devices, or why not."""

import errno
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import trio

from ...observe.figures import count, gauge
from . import devices
from .library import Library, VerbsMissing, load
from .queue import QueuePair
from .rails import OwnRail, find_rails
from .regions import OpenedPort
from .staging import Staging

log = logging.getLogger(__name__)

Mode = Literal["auto", "off", "require"]
THRESHOLD_BYTES = 64 << 10
# How long the kernel's list of devices is cached: many peers may ask at once.
_FRESH_S = 1.0
# The limit for all peers together. Each queue pair takes kernel memory at both ends.
QUEUE_PAIRS_MAX = 4096
_SETBACK_S = 0.1


class RdmaUnavailable(OSError):
    """RDMA is required and not available; the text is one line with the reason."""


class Choice(NamedTuple):
    """The user's settings. `device` may be several names, with commas between. Transfers of fewer than
    `threshold_bytes` go over TCP. `limit_bytes` limits registered memory (None: half of the memory, or the
    limit of locked memory)."""

    mode: Mode = "auto"
    device: str | None = None
    threshold_bytes: int = THRESHOLD_BYTES
    limit_bytes: int | None = None


@dataclass(slots=True)
class RdmaFigures:
    """The memory of all adapters."""

    rdma_staged_bytes: int = count("Bytes that passed memory which stays registered")
    rdma_registrations: int = count("Registrations of memory for RDMA")
    rdma_registration_hits: int = count("Uses of memory that was registered already")
    rdma_registered_bytes: int = gauge("Bytes of memory registered for RDMA")


class Adapter(OpenedPort):
    """An opened port, a context manager; close queue pairs and windows before it. Raises OSError."""

    def __init__(self, library: Library, route: devices.Route, limit_bytes: int) -> None:
        super().__init__(library, route, limit_bytes)
        # The queue pairs that fail when the port goes down.
        self.pairs: set[QueuePair] = set()
        # Why this port cannot be used until the process restarts; "" if it can.
        self.failure = ""
        self.staging = Staging(self.regions)

    def __exit__(self, *_: object) -> None:
        self.staging.close()
        super().__exit__()

    def queue_pair(
        self, gid: devices.Gid, arrived: Callable[[int], None] | None = None
    ) -> QueuePair:
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


class Rdma:
    """The adapters of a process, shared by all its transports. Use as a context manager, around them.

    Entering it raises RdmaUnavailable if RDMA is required and not available. If it is not required,
    `why_not` is the reason in one line why parameters move over TCP, and "" if RDMA can be used.
    """

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.why_not = "RDMA was not looked for"
        self._adapters: dict[tuple[str, int], Adapter] = {}
        self._open = ExitStack()
        self._watching = trio.Lock()
        self._opened = trio.Event()
        # Set, and replaced by a new one, when a port goes down or comes back.
        self.changed = trio.Event()
        self._found: list[devices.Device] = []
        self._found_at = float("-inf")

    def __enter__(self) -> Self:
        choice = self.choice
        if choice.mode == "off":
            self.why_not = "RDMA is switched off"
            return self
        found = devices.find()
        self.why_not = str(devices.explain(found, choice.device))
        if not self.why_not:
            try:
                load()
            except VerbsMissing as error:
                self.why_not = str(error.strerror)
        if self.why_not:
            self._do_without()
        return self

    def check(self, local: str) -> None:
        """Check that this host's address `local` has a rail. If not, do as when entering. For a process
        that knows its address on the way to its peers before it has any."""
        if self.is_usable:
            try:
                self.open(self.rails(local)[0].route)
            except OSError as error:
                self.why_not = str(error.strerror)
                self._do_without()

    def _do_without(self) -> None:
        if self.choice.mode == "require":
            raise RdmaUnavailable(errno.ENODEV, f"RDMA is required, but {self.why_not}")
        log.info("parameters move over TCP: %s", self.why_not)

    def __exit__(self, *_: object) -> None:
        self._adapters.clear()
        self._open.close()

    @property
    def is_usable(self) -> bool:
        return not self.why_not

    @property
    def adapters(self) -> list[Adapter]:
        """Return the adapters that are open."""
        return list(self._adapters.values())

    # -- files that are registered ---------------------------------------------------------------

    def descriptors(self, file: tuple[int, int]) -> list[int]:
        """Return the descriptors by which a file (device, inode number) is mapped, and in use."""
        return [region.fd for adapter in self.adapters for region in adapter.regions.of_file(file)]

    def forget(self, fd: int) -> None:
        """Drop the registrations of a file that may be truncated: they would keep pages that are not the
        file's any more. A later transfer registers it anew."""
        status = os.fstat(fd)
        for adapter in self._adapters.values():
            adapter.regions.forget((status.st_dev, status.st_ino))

    def drop_orphans(self) -> None:
        """Drop registrations of files that lost their last name, which frees their memory."""
        for adapter in self.adapters:
            adapter.regions.drop_orphans()

    def figures(self) -> RdmaFigures:
        """Return the figures of all adapters together."""
        every = self.adapters
        return RdmaFigures(
            rdma_staged_bytes=sum(each.staging.staged_bytes for each in every),
            rdma_registrations=sum(each.regions.registrations for each in every),
            rdma_registration_hits=sum(each.regions.hits for each in every),
            rdma_registered_bytes=sum(each.regions.pinned_bytes for each in every),
        )

    # -- devices ---------------------------------------------------------------------------------

    def rails(self, local: str) -> list[OwnRail]:
        """Return this host's rails to the peer, from the address `local`. Raises OSError for none."""
        if self.why_not:
            raise OSError(errno.ENODEV, self.why_not)
        if time.monotonic() > self._found_at + _FRESH_S:
            self._found = devices.find()
            self._found_at = time.monotonic()
        return find_rails(self._found, local, self.choice.device)

    def rail(self, local: str, name: str, gid: bytes) -> OwnRail:
        """Return the rail that was named to a peer. Raises OSError if it is gone."""
        for own in self.rails(local):
            if (own.rail.name, own.rail.gid) == (name, gid):
                return own
        raise OSError(errno.ENODEV, f"there is no rail {name[:64]} any more")

    def open(self, route: devices.Route) -> Adapter:
        """Return the adapter of a route's port. Raises OSError."""
        key = route.device.name, route.port.number
        adapter = self._adapters.get(key)
        if adapter is None:
            limit_bytes = self.choice.limit_bytes or _default_limit_bytes()
            adapter = self._open.enter_context(Adapter(load(), route, limit_bytes))
            self._adapters[key] = adapter
            self._opened.set()
            self._opened = trio.Event()
            log.info("parameters move by RDMA through %s port %d (%s)", *key, route.gid.kind)
        return adapter

    async def watch(self) -> None:
        """Watch for ports that go down and come back. One task does; others wait to take over."""
        async with self._watching, trio.open_nursery() as nursery:
            watched: set[Adapter] = set()
            while True:
                for adapter in self.adapters:
                    if adapter not in watched:
                        watched.add(adapter)
                        nursery.start_soon(adapter.watch, self._ports_changed)
                await self._opened.wait()

    def _ports_changed(self) -> None:
        self._found_at = float("-inf")
        self.changed.set()
        self.changed = trio.Event()


def _default_limit_bytes() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    limit = devices.memlock_limit()
    return memory if limit is None else min(memory, limit)
