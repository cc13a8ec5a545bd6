"""The key-value engine of one host: a SQLite file that one process has to itself.

The reasons for its design:

- No method waits, so callers may drive the coroutines inline. SQLite takes less than 10 us for a
  put and its commit, which is less than handing it to a thread.
- A durable transaction is appended to a journal, together with the non-durable ones before it:
  one write(2) of 3 us, where a SQLite transaction takes 30 us. Changes in the journal that are not yet
  in the database are in memory, too. When they are many, all go into the database in one SQLite
  transaction, in which a key that was put many times (a directory) is written once.
- No other process changes a key, so there are no compares and no watches.
"""

import errno
import logging
import os
from collections.abc import Sequence

import msgspec
import trio

from . import Damaged, Delete, KeyValue, NoSpace, Put
from .ballast import Ballast
from .database import Database
from .journal import Damage, Journal

log = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[int, bytes, bytes | None]]).decode

# Limits of pending keys, and of the journal, above which the pending changes go into the database although
# there are requests to serve; it takes 4 us a key.
_PENDING_KEYS = 2048
_JOURNAL_BYTES = 1024 * 1024


class SQLiteEngine:
    """An OwnEngine on the file `path`, its log `path`-wal, its journal `path`-redo and its ballast
    `path`-ballast.

    power_safe: sync every durable transaction to the disk. Without it a durable transaction
    survives the death of this process but not of the machine, which is all a tmpfs can offer.

    Raises Damaged, NoSpace, and OSError (EBUSY: another process has the file open).
    """

    def __init__(self, path: str, *, power_safe: bool) -> None:
        self._path = path
        self._database = Database(path, power_safe=power_safe)
        # Changes that the database does not have yet: key -> (revision, value; None: deleted).
        self._pending: dict[bytes, tuple[int, bytes | None]] = {}
        # Changes that the journal does not have yet, either: (revision, key, value).
        self._volatile: list[tuple[int, bytes, bytes | None]] = []
        self._revision = self._database.revision
        try:
            self._journal = Journal(path + "-redo", power_safe=power_safe)
            try:
                self._replay()
            except BaseException:
                self._journal.close()
                raise
        except BaseException:
            self._database.close()
            raise
        self._ballast = Ballast(path + "-ballast")

    async def range(self, start: bytes, end: bytes) -> list[KeyValue]:
        settled = self._settle()
        rows = self._database.range(start, end)
        return rows if settled else self._overlaid(rows, start, end)

    def _overlaid(self, rows: list[KeyValue], start: bytes, end: bytes) -> list[KeyValue]:
        """Return the rows of the database brought up to date with the pending changes."""
        found = {row.key: row for row in rows}
        for key, (revision, value) in self._pending.items():
            if start <= key < end:
                found.pop(key, None)
                if value is not None:
                    found[key] = KeyValue(key, value, revision)
        return sorted(found.values())

    async def transact(
        self, operations: Sequence[Put | Delete], *, durable: bool = True, urgent: bool = False
    ) -> int:
        """Apply all operations, as OwnEngine says. A Put with a lease is a ValueError."""
        if self._database.closed:
            raise trio.ClosedResourceError("the engine is closed")
        if self._ballast.low and not _frees(operations, urgent):
            self._ballast.take()
            if self._ballast.low:
                raise NoSpace(self._path)
        try:
            return self._transact(operations, durable)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            if not (_frees(operations, urgent) and self._ballast.give_up()):
                raise NoSpace(self._path) from error
        try:
            return self._transact(operations, durable)
        except OSError as error:
            self._ballast.take()
            raise NoSpace(self._path) if error.errno == errno.ENOSPC else error from error

    async def flush(self) -> None:
        if self._volatile:
            await self.transact((), urgent=True)

    async def idle(self) -> None:
        """Move the pending changes to the database."""
        self._settle()

    async def close(self) -> None:
        if self._database.closed:
            return
        try:
            await self.flush()
            self._settle()
        finally:
            self._database.close()
            self._journal.close()

    def _transact(self, operations: Sequence[Put | Delete], durable: bool) -> int:
        revision = self._revision + 1
        changes: dict[bytes, tuple[int, bytes | None]] = {}
        for operation in operations:
            if isinstance(operation, Delete):
                changes[operation.key] = (revision, None)
            elif operation.lease:
                raise ValueError("an engine of one process has no leases")
            else:
                changes[operation.key] = (revision, operation.value)
        if len(changes) < len(operations):
            raise ValueError("a key may occur in one operation of a transaction only")
        volatile = [(revision, key, value) for key, (_, value) in changes.items()]
        if durable and (volatile or self._volatile):
            self._journal.append(_encode([*self._volatile, *volatile]))
            self._volatile.clear()
        else:
            self._volatile += volatile
        self._pending.update(changes)
        if changes:
            self._revision = revision
        if len(self._pending) > _PENDING_KEYS or self._journal.size > _JOURNAL_BYTES:
            self._settle()
        if not self._ballast.whole:
            self._ballast.take()
        return self._revision

    def _settle(self) -> bool:
        """Move the pending changes to the database. Return False on a full store: they stay in the
        journal."""
        if not self._pending:
            return True
        for _ in range(2):
            try:
                self._database.write(self._pending)
            except NoSpace:
                if not self._ballast.give_up():
                    break
            except OSError:
                if self._database.closed:
                    self._journal.close()
                raise
            else:
                self._pending = {}
                self._volatile.clear()
                self._journal.clear()
                if not self._ballast.whole:
                    self._ballast.take()
                return True
        self._ballast.take()
        log.warning("%s: the store is full; its journal goes on growing", self._path)
        return False

    def _replay(self) -> None:
        """Take the records that a crash left in the journal as pending changes."""
        try:
            for payload in self._journal.load():
                for revision, key, value in _decode(payload):
                    if revision > self._revision:
                        self._pending[key] = (revision, value)
        except Damage as error:
            raise Damaged(
                f"{error}. Nothing was changed. To go on with all that is sound: irdmafs recover "
                f"{os.path.dirname(os.path.abspath(self._path))} (it keeps a copy of the damaged file, and "
                "puts what has lost its name into lost+found)"
            ) from error
        except (msgspec.DecodeError, ValueError) as error:
            raise self._database.damaged(f"{self._path}-redo cannot be read ({error})") from error
        if self._pending:
            self._revision = max(revision for revision, _ in self._pending.values())


def _frees(operations: Sequence[Put | Delete], urgent: bool) -> bool:
    return urgent or all(isinstance(operation, Delete) for operation in operations)
