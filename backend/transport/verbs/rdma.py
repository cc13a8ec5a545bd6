"""This process's use of RDMA: whether, through which devices, and what was in the way."""

import errno
import logging
import os
from contextlib import ExitStack
from types import TracebackType
from typing import Literal, NamedTuple, Self

from . import devices
from .adapter import Adapter
from .library import VerbsMissing, load

log = logging.getLogger(__name__)

Mode = Literal["auto", "off", "require"]
THRESHOLD_BYTES = 64 << 10


class RdmaUnavailable(OSError):
    """It is required, and cannot be had; the text is one line that says why."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.ENODEV, f"RDMA is required, but {why}")


class Choice(NamedTuple):
    """What was asked for. Transfers of fewer than `threshold_bytes` go over TCP. `limit_bytes`: what may be
    registered at once (None: half of the memory, or what may be locked)."""

    mode: Mode = "auto"
    device: str | None = None
    gid_index: int | None = None
    threshold_bytes: int = THRESHOLD_BYTES
    limit_bytes: int | None = None


class RdmaFigures(NamedTuple):
    """`registrations` were made, `hits` found one that was there; `staged_bytes` were copied between a file
    and memory that stays registered."""

    registrations: int
    hits: int
    registered_bytes: int
    staged_bytes: int


class Rdma:
    """The adapters of a process, shared by all its transports. Use as a context manager, around them.

    Entering it raises RdmaUnavailable where RDMA is required and cannot be had; where it is not, `why_not`
    says in one line why parameters move over TCP, and is "" where they need not.
    """

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.why_not = ""
        self._adapters: dict[tuple[str, int], Adapter] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        choice = self.choice
        if choice.mode == "off":
            self.why_not = "RDMA is switched off"
            return self
        found = devices.find()
        self.why_not = devices.explain(found, choice.device, choice.gid_index)
        if not self.why_not:
            try:
                load()
            except VerbsMissing as error:
                self.why_not = str(error.strerror)
        if self.why_not:
            self._do_without()
        return self

    def check(self, local: str) -> None:
        """Whether it can be used at this host's address `local`; else as when entering. For whoever knows
        an address on the way to its peers before it has any."""
        if self.is_usable:
            try:
                self.adapter(local)
            except OSError as error:
                self.why_not = str(error.strerror)
                self._do_without()

    def _do_without(self) -> None:
        if self.choice.mode == "require":
            raise RdmaUnavailable(self.why_not)
        log.info("parameters move over TCP: %s", self.why_not)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._adapters.clear()
        self._open.close()

    @property
    def is_usable(self) -> bool:
        return not self.why_not

    @property
    def adapters(self) -> list[Adapter]:
        """Those that are open."""
        return list(self._adapters.values())

    def figures(self) -> RdmaFigures:
        """Of all adapters together."""
        regions = [adapter.regions.counters for adapter in self._adapters.values()]
        return RdmaFigures(
            registrations=sum(each.registrations for each in regions),
            hits=sum(each.hits for each in regions),
            registered_bytes=sum(each.pinned_bytes for each in regions),
            staged_bytes=sum(each.staging.staged_bytes for each in self._adapters.values()),
        )

    def adapter(self, local: str) -> tuple[Adapter, int]:
        """The one on whose way this host's address `local` is, and the index of its GID. Raises OSError."""
        choice = self.choice
        if self.why_not:
            raise OSError(errno.ENODEV, self.why_not)
        route = devices.choose(devices.find(), local, choice.device, choice.gid_index)
        key = route.device, route.port
        adapter = self._adapters.get(key)
        if adapter is None:
            limit_bytes = choice.limit_bytes or _default_limit_bytes()
            adapter = self._open.enter_context(Adapter(load(), route, limit_bytes))
            self._adapters[key] = adapter
            log.info(
                "parameters move by RDMA through %s port %d (%s)",
                route.device, route.port, route.gid.kind,
            )  # fmt: skip
        adapter.add_gid(route.gid.number, route.gid.value)
        return adapter, route.gid.number


def _default_limit_bytes() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    limit = devices.memlock_limit()
    return memory if limit is None else min(memory, limit)
