"""Copies of extents in files of the node's own, for RDMA.

A store node adopts the file that a program on its host wrote. Such a file is another one for each version,
and the program may still have it open for writing, so it cannot stay registered: each read of it would
register it anew (0.5 ms per MiB with soft-RoCE). So when such an extent is first read by RDMA, it is copied
into a file that is used again (reuse.py), and is registered already (0.35 ms per MiB). The copy takes its
place.
"""

import logging
import os
from contextlib import closing

import trio

from ..files.extents import copy_all
from ..transport import Extent
from .files import Files, Incoming
from .reuse import SPARE_BYTES_MIN

log = logging.getLogger(__name__)


class OwnCopies:
    """Copies each extent once, however many ask for it at the same time."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._copying: dict[Extent, trio.Event] = {}

    async def make(self, extent: Extent) -> None:
        """Put a copy in the place of an extent that lies in a file of an application. Where there is no
        room for it nothing changes."""
        while (copied := self._copying.get(extent)) is not None:
            await copied.wait()
        if not self._is_wanted(extent):
            return
        done = self._copying[extent] = trio.Event()
        try:
            await self._copy(extent)
        except OSError as error:
            log.info("extent %x.%x stays in its file: %s", *extent, error)
        finally:
            del self._copying[extent]
            done.set()

    def _is_wanted(self, extent: Extent) -> bool:
        size = self._files.size(extent)
        return size is not None and size >= SPARE_BYTES_MIN and self._files.is_foreign(extent)

    async def _copy(self, extent: Extent) -> None:
        with closing(self._files.hold(extent)) as source:
            size = os.fstat(source.fd).st_size
            with closing(await self._files.make(size, size)) as incoming:
                await trio.to_thread.run_sync(self._fill, source.fd, incoming)
                if not self._is_wanted(extent):
                    return
                self._files.replace(incoming, extent)
        await trio.to_thread.run_sync(self._files.settle)

    def _fill(self, source_fd: int, incoming: Incoming) -> None:
        copy_all(source_fd, incoming.fd)
        self._files.harden(incoming)
