"""Find out whether etcd still has the history that this process knew, or was restored from a backup.

Store nodes free extents that etcd does not name, and mounts trust its records; so no process may act on an
etcd that has lost changes. There are two ways to find out:

    by the engine   while a process runs (etcd/calls.py)
    by a mark       the newest transaction that a node knew, which its store remembers (node/identity.py):
                    etcd must still have it in its history, if that goes back so far

A node that finds a loss puts a report into that etcd. Every process that sees a report stops, and checks
again until the newest data are back or a new *epoch* has begun: an administrator has accepted the loss
(`accept`). Before an epoch begins, etcd's revision is raised above all that were seen, so that
revisions, and with them the numbers of sessions and contents, are never used twice.
"""

import errno
import logging
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
import trio

from ..etcd.engine import EtcdEngine
from ..kv import Compare, Conflict, Delete, Put, WentBack
from ..kv.faults import Faults
from ..model.records import EPOCH_KEY, REPORT, Epoch, Report, decode, encode, key_of
from ..observe.logs import log_failure
from .lease import Session
from .record_keeper import RecordKeeper

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0
# Nodes store the revision that they saw a moment later; mounts may have made more transactions since.
_MARGIN_REVISIONS = 10_000
_STEP_REVISIONS = 1000
_COMPACTED_EVERY = 50


class History(RecordKeeper):
    """The epoch, and reports. `session` is doubted when etcd cannot be trusted any more, and lost when
    a new epoch is adopted, or found after changes were missed: then no operation under way may go on."""

    prefixes: tuple[bytes, ...] = (EPOCH_KEY, REPORT)

    def __init__(
        self, engine: EtcdEngine, session: Session | None = None, faults: Faults | None = None
    ) -> None:
        super().__init__(faults)
        self._engine = engine
        self._session = session
        self.epoch = Epoch()

    async def check(self) -> None:
        """Check etcd's history; awaited before all keys are read. Raises WentBack, OSError."""
        if reports := await read_reports(self._engine):
            raise WentBack(described(reports))

    async def wait_resolved(self, error: WentBack) -> bool:
        """Wait until etcd, which is doubted, has its newest data back, or a new epoch has begun. Return if
        they are back."""
        log.error("%s", error.strerror)
        if self._session is not None:
            self._session.doubt()
        while True:
            await trio.sleep(LOOK_AGAIN_S)
            with log_failure(log.info, "etcd cannot be asked whether it has its newest data again"):
                epoch = await read_epoch(self._engine)
                if await read_reports(self._engine):
                    continue
                if epoch.number > self.epoch.number:
                    self._engine.calls.trust()
                    log.warning("etcd's restored state was accepted: everything is read anew")
                    self.epoch = epoch
                    if self._session is not None:
                        self._session.lose()
                    return False
                if epoch == self.epoch and await self._engine.calls.is_continued():
                    self._engine.calls.trust()
                    log.warning("etcd's newest data are back")
                    return True

    def take(self, key: bytes, value: bytes | None, revision: int) -> None:
        if key == EPOCH_KEY:
            before, self.epoch = self.epoch, self.faults.sound(key, value, Epoch) or self.epoch
            if self.epoch.number > before.number and self._session is not None:
                self._session.lose()
        elif key.startswith(REPORT):
            report = self.faults.sound(key, value, Report)
            if report is not None:
                number = int.from_bytes(key[1:], "big")
                self._engine.calls.doubt(WentBack(described({number: report})))


def described(reports: dict[int, Report]) -> str:
    """Describe, for people, the report of the node that had seen the newest revision."""
    node, report = max(reports.items(), key=lambda item: item[1].seen)
    return f"it is at revision {report.found}, and store node {node:016x} had seen {report.seen}"


async def read_epoch(engine: EtcdEngine) -> Epoch:
    """Return the current epoch. Raises OSError."""
    found = await engine.get(EPOCH_KEY)
    try:
        return decode(found.value, Epoch) if found is not None else Epoch()
    except msgspec.DecodeError as error:
        raise OSError(f"the record of the epoch in etcd is damaged: {error}") from error


async def read_reports(engine: EtcdEngine) -> dict[int, Report]:
    """Return the reports by node. Raises OSError."""
    reports = {}
    for record in await engine.range(REPORT, REPORT + b"\xff"):
        try:
            report = decode(record.value, Report)
        except msgspec.DecodeError:
            report = Report(0, record.mod_revision, 0, 0.0)
        reports[int.from_bytes(record.key[1:], "big")] = report
    return reports


def goal(reports: dict[int, Report], above: int = 0) -> int:
    """Return a revision that is higher than any that was seen."""
    return max(above, *(report.seen for report in reports.values())) + _MARGIN_REVISIONS


async def accept(
    engine: EtcdEngine, floor: int, progress: Callable[[int, int], Any]
) -> Epoch | None:
    """Raise etcd's revision to `floor`, begin a new epoch and return it; None: there is no report any more.
    Raises OSError, and EBUSY when another report was made meanwhile; changes made so far are kept."""
    start, steps = engine.revision, 0
    while engine.revision < floor:
        await engine.admin.spend(min(_STEP_REVISIONS, floor - engine.revision))
        progress(min(engine.revision, floor) - start, floor - start)
        steps += 1
        if steps % _COMPACTED_EVERY == 0:
            await engine.admin.compact(engine.revision)
    reports = await read_reports(engine)
    if not reports:
        return None
    if any(report.seen > engine.revision for report in reports.values()):
        raise OSError(
            errno.EBUSY, "another store node has seen a later revision; give the command again"
        )
    before = await engine.get(EPOCH_KEY)
    known = await read_epoch(engine)
    number = max(known.number, *(report.epoch for report in reports.values())) + 1
    epoch = Epoch(number, secrets.token_hex(8), engine.revision)
    compares: list[Compare] = [(EPOCH_KEY, before.mod_revision if before else 0)]
    try:
        await engine.transact(
            compares,
            [Put(EPOCH_KEY, encode(epoch)), *(Delete(key_of(REPORT, node)) for node in reports)],
        )
    except Conflict:
        raise OSError(errno.EBUSY, "somebody else has just accepted it") from None
    return epoch
