"""Watching the room that etcd has, and its alarms, which stop the whole cluster."""

import logging
import time
from collections import deque

import trio

from ..etcd.admin import remedy
from ..etcd.engine import EtcdEngine
from .figures import EtcdFigures

log = logging.getLogger(__name__)

_PERIOD_S = 30.0
_GROWTH_S = 3600.0
_ALARMS = ("CORRUPT", "NOSPACE")


class EtcdWatch:
    """Asks etcd for its room from time to time, and logs what needs an administrator."""

    def __init__(self, engine: EtcdEngine) -> None:
        self._engine = engine
        self.figures = EtcdFigures()
        self._seen: deque[tuple[float, int]] = deque()  # times, and the bytes in use then
        self._told: tuple[object, ...] = (False,)  # the alarms, and whether there was a fault

    async def run(self) -> None:
        while True:
            try:
                await self.look()
            except OSError as error:
                log.info("the room of etcd is not known: %s", error)
            await trio.sleep(_PERIOD_S)

    async def look(self) -> None:
        """Ask etcd once. Raises OSError."""
        room = await self._engine.admin.room.here()
        seen, now = self._seen, time.monotonic()
        seen.append((now, room.used_bytes))
        while seen[0][0] < now - _GROWTH_S:
            seen.popleft()
        self.figures = EtcdFigures(
            room.file_bytes,
            room.used_bytes,
            room.quota_bytes,
            room.used_bytes - seen[0][1],
            now - seen[0][0],
            {alarm: int(alarm in room.alarms) for alarm in _ALARMS},
        )
        fault = remedy(room)
        kind = (*room.alarms, bool(fault))
        if kind != self._told:
            self._told = kind
            if fault:
                log.error("%s", fault)
            else:
                log.info("etcd has room, and no alarm")
