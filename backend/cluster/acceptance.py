"""Accept that etcd's newest data are lost, by beginning a new epoch (history.py)."""

import errno
import secrets
from collections.abc import Callable
from typing import Any

from ..etcd.engine import EtcdEngine
from ..kv import Compare, Conflict, Delete, Put
from ..model.records import EPOCH_KEY, Epoch, Report, encode
from .history import read_epoch, read_reports, report_key

__all__ = ["accept", "goal"]

# Nodes store the revision that they saw a moment later; mounts may have made more transactions since.
_MARGIN_REVISIONS = 10_000
_STEP_REVISIONS = 1000
_COMPACTED_EVERY = 50


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
            await engine.admin.room.compact(engine.revision)
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
            [Put(EPOCH_KEY, encode(epoch)), *(Delete(report_key(node)) for node in reports)],
        )
    except Conflict:
        raise OSError(errno.EBUSY, "somebody else has just accepted it") from None
    return epoch
