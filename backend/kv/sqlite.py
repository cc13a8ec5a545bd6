"""The key-value engine of one host: a SQLite file that one process has to itself.

Why it is shaped as it is:

- No method waits, so callers may drive the coroutines inline. SQLite takes less than 10 us for a
  put and its commit, which is less than handing it to a thread.
- A durable transaction is appended to a journal, together with the non-durable ones before it:
  one write(2) of 3 us, where a SQLite transaction takes 30 us. What is in the journal but not yet
  in the database is kept in memory, too. When that is much, it all goes into the database in one
  SQLite transaction, in which a key that was put many times (a directory) is written once.
- Revisions of recently used keys are remembered, so that most compares read nothing.
"""

import errno
import logging
import os
import sqlite3
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NoReturn, Self
from urllib.parse import quote

import msgspec
import trio

from . import (
    Change,
    Compacted,
    Compare,
    Conflict,
    Damaged,
    Delete,
    Empty,
    Event,
    Exists,
    KeyValue,
    NoSpace,
    Put,
)
from .ballast import Ballast
from .journal import Damage, Journal
from .wal import is_log_header

log = logging.getLogger(__name__)

FORMAT = 2

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[int, bytes, bytes | None]]).decode

# mod_revision stands before value: a compare need not walk the overflow pages of a large value.
_SCHEMA = """
BEGIN;
CREATE TABLE kv (
    key BLOB PRIMARY KEY,
    mod_revision INTEGER NOT NULL, -- revision of the transaction that put this value
    value BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE meta (
    format INTEGER NOT NULL,
    revision INTEGER NOT NULL -- of the last transaction that is in this file
);
INSERT INTO meta VALUES (%d, 0);
COMMIT;
"""
_GET = "SELECT key, value, mod_revision FROM kv WHERE key = ?"
_RANGE = "SELECT key, value, mod_revision FROM kv WHERE key >= ? AND key < ? ORDER BY key LIMIT ?"
_KEYS = "SELECT key FROM kv WHERE key >= ? AND key < ?"
_MOD_REVISION = "SELECT mod_revision FROM kv WHERE key = ?"
_PUT = "REPLACE INTO kv (key, mod_revision, value) VALUES (?, ?, ?)"
_DELETE = "DELETE FROM kv WHERE key = ?"
_REVISION = "UPDATE meta SET revision = ?"
_META = """
SELECT format, revision FROM meta
WHERE typeof(format) = 'integer' AND typeof(revision) = 'integer'
"""
# Reads every page but those of large values, so that a torn tree is found when the file is opened.
_SCAN = """
SELECT CAST(max(mod_revision) AS INTEGER), count(*),
       sum(typeof(key) = 'blob' AND typeof(value) = 'blob' AND typeof(mod_revision) = 'integer')
FROM kv
"""

# Transactions that watchers can still ask for.
_TAIL_TRANSACTIONS = 4096
# Keys, and bytes of journal, before the pending changes go into the database although there are
# requests to serve; it takes 4 us a key.
_PENDING_KEYS = 2048
_JOURNAL_BYTES = 1024 * 1024
# Remembered revisions of keys, before all are forgotten; 150 bytes each.
_KNOWN_REVISIONS = 65536
# The log goes into the file at 1 MiB, well below the ballast. Measured: no slower than at 4 MiB.
_CHECKPOINT_PAGES = 256


class SQLiteEngine:
    """An Engine on the file `path`, its log `path`-wal and its ballast `path`-ballast.

    power_safe: sync every durable transaction to the disk. Without it a durable transaction
    survives the death of this process but not of the machine, which is all a tmpfs can offer.

    Raises Damaged, NoSpace, and OSError (EBUSY: another process has the file open).
    """

    def __init__(self, path: str, *, power_safe: bool) -> None:
        self._path = path
        self._closed = False
        # (revision, operations that changed something), revisions without a gap.
        self._tail: deque[tuple[int, Sequence[Put | Delete]]] = deque(maxlen=_TAIL_TRANSACTIONS)
        self._watchers = trio.lowlevel.ParkingLot()
        if not os.path.lexists(path):
            for suffix in ("-wal", "-redo"):
                if os.path.lexists(path + suffix):
                    raise self._damaged(f"it is missing, but its log is there ({path}{suffix})")
            self._create(power_safe)
        self._check_files()
        self._db = self._connect(path, power_safe)
        cursor = self._db.cursor()
        self._execute, self._executemany = cursor.execute, cursor.executemany
        # What the database does not have yet: key -> (revision, value; None: deleted).
        self._pending: dict[bytes, tuple[int, bytes | None]] = {}
        # What the journal does not have yet, either: (revision, key, value).
        self._volatile: list[tuple[int, bytes, bytes | None]] = []
        self._known: dict[bytes, int] = {}
        try:
            self._revision = self._load()
            self._journal = Journal(path + "-redo", power_safe=power_safe)
            self._replay()
        except BaseException:
            self._db.close()
            raise
        self._ballast = Ballast(path + "-ballast")

    @property
    def shared(self) -> bool:
        return False

    @property
    def revision(self) -> int:
        return self._revision

    async def get(self, key: bytes) -> KeyValue | None:
        pending = self._pending.get(key)
        if pending is not None:
            revision, value = pending
            return KeyValue(key, value, revision) if value is not None else None
        try:
            row = self._execute(_GET, (key,)).fetchone()
        except sqlite3.Error as error:
            self._fail(error)
        return KeyValue._make(row) if row else None

    async def range(self, start: bytes, end: bytes, limit: int = 0) -> list[KeyValue]:
        settled = self._settle()
        try:
            bound = (limit or -1) if settled else -1
            rows = list(map(KeyValue._make, self._execute(_RANGE, (start, end, bound))))
        except sqlite3.Error as error:
            self._fail(error)
        return rows if settled else self._overlaid(rows, start, end)[: limit or None]

    def _overlaid(self, rows: list[KeyValue], start: bytes, end: bytes) -> list[KeyValue]:
        """What the database said, brought up to date with what is pending."""
        found = {row.key: row for row in rows}
        for key, (revision, value) in self._pending.items():
            if start <= key < end:
                found.pop(key, None)
                if value is not None:
                    found[key] = KeyValue(key, value, revision)
        return sorted(found.values())

    async def transact(
        self,
        compares: Sequence[Compare],
        operations: Sequence[Put | Delete],
        *,
        durable: bool = True,
        urgent: bool = False,
    ) -> int:
        """As Engine says. There are no leases: ValueError for a Put with one."""
        if self._closed:
            raise trio.ClosedResourceError("the engine is closed")
        if len(operations) > 1 and len({op.key for op in operations}) < len(operations):
            raise ValueError("a key may occur in one operation of a transaction only")
        try:
            return self._transact(compares, operations, durable)
        except sqlite3.Error as error:
            self._fail(error)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            urgent = urgent or all(isinstance(op, Delete) for op in operations)
            if not (urgent and self._ballast.give_up()):
                raise NoSpace(self._path) from error
        try:
            return self._transact(compares, operations, durable)
        except OSError as error:
            raise NoSpace(self._path) if error.errno == errno.ENOSPC else error from error

    async def flush(self) -> None:
        if self._volatile:
            await self.transact((), (), urgent=True)

    async def idle(self) -> None:
        """There is nothing else to do: a good time to move what is pending to the database."""
        self._settle()

    async def snapshot(self, start: bytes, end: bytes) -> tuple[int, list[KeyValue]]:
        return self._revision, await self.range(start, end)

    async def barrier(self) -> int:
        if self._closed:
            raise trio.ClosedResourceError("the engine is closed")
        return self._revision

    def watch(self, start: bytes, end: bytes, from_revision: int) -> "Watch":
        watch = Watch(self, start, end, from_revision)
        watch.collect()
        return watch

    async def check(self) -> None:
        """Read the whole file and raise Damaged if its structure is broken anywhere.

        Takes 0.2 us a key.
        """
        try:
            (verdict,) = self._execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.Error as error:
            self._fail(error)
        if verdict != "ok":
            raise self._damaged(verdict)

    async def close(self) -> None:
        if self._closed:
            return
        try:
            await self.flush()
            self._settle()
        finally:
            self._shut()

    def _shut(self) -> None:
        self._closed = True
        self._db.close()
        self._journal.close()
        self._watchers.unpark_all()

    def _transact(
        self,
        compares: Sequence[Compare],
        operations: Sequence[Put | Delete],
        durable: bool,
    ) -> int:
        for compare in compares:
            self._check(compare)
        revision = self._revision + 1
        changes: dict[bytes, tuple[int, bytes | None]] = {}
        for operation in operations:
            if isinstance(operation, Put):
                if operation.lease:
                    raise ValueError("an engine of one process has no leases")
                changes[operation.key] = (revision, operation.value)
            elif self._mod_revision(operation.key):
                changes[operation.key] = (revision, None)
        volatile = [(revision, key, value) for key, (_, value) in changes.items()]
        if durable and (volatile or self._volatile):
            self._journal.append(_encode([*self._volatile, *volatile]))
            self._volatile.clear()
        else:
            self._volatile += volatile
        self._pending.update(changes)
        if len(self._pending) > _PENDING_KEYS or self._journal.size > _JOURNAL_BYTES:
            self._settle()
        if not self._ballast.held:
            self._ballast.take()
        if not changes:
            return self._revision
        if len(self._known) > _KNOWN_REVISIONS:
            self._known.clear()
        for key, (_, value) in changes.items():
            self._known[key] = 0 if value is None else revision
        self._revision = revision
        if len(changes) < len(operations):
            operations = [op for op in operations if op.key in changes]
        self._tail.append((revision, operations))
        if self._watchers:
            self._watchers.unpark_all()
        return revision

    def _check(self, compare: Compare) -> None:
        """Raises Conflict."""
        if isinstance(compare, Exists):
            if not self._mod_revision(compare.key):
                raise Conflict(compare.key)
        elif isinstance(compare, Empty):
            if not self._is_empty(compare.start, compare.end):
                raise Conflict(compare.start)
        elif self._mod_revision(compare[0]) != compare[1]:
            raise Conflict(compare[0])

    def _is_empty(self, start: bytes, end: bytes) -> bool:
        pending = self._pending
        if any(value is not None and start <= key < end for key, (_, value) in pending.items()):
            return False
        return all(key in pending for (key,) in self._execute(_KEYS, (start, end)))

    def _mod_revision(self, key: bytes) -> int:
        """The revision that last put the key, 0 when it does not exist."""
        pending = self._pending.get(key)
        if pending is not None:
            return pending[0] if pending[1] is not None else 0
        known = self._known.get(key)
        if known is None:
            row = self._execute(_MOD_REVISION, (key,)).fetchone()
            known = self._known[key] = row[0] if row else 0
        return known

    def _settle(self) -> bool:
        """Move what is pending to the database; False on a full store: it stays in the journal."""
        if not self._pending:
            return True
        for _ in range(2):
            try:
                self._write_back()
                return True
            except sqlite3.Error as error:
                if not _is_full(error):
                    self._fail(error)
                if not self._ballast.give_up():
                    break
        log.warning("%s: the store is full; its journal goes on growing", self._path)
        return False

    def _write_back(self) -> None:
        """Commit what is pending to the database, all or nothing. Raises sqlite3.Error."""
        pending = self._pending
        puts = [(key, at, value) for key, (at, value) in pending.items() if value is not None]
        deletes = [(key,) for key, (_, value) in pending.items() if value is None]
        try:
            self._execute("BEGIN")
            self._executemany(_PUT, puts)
            self._executemany(_DELETE, deletes)
            self._execute(_REVISION, (max(at for at, _ in pending.values()),))
            self._execute("COMMIT")
        except BaseException:
            self._roll_back()
            raise
        self._pending = {}
        self._volatile.clear()
        self._journal.clear()

    def _replay(self) -> None:
        """Take over what a crash left in the journal."""
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
            raise self._damaged(f"{self._path}-redo cannot be read ({error})") from error
        if self._pending:
            self._revision = max(revision for revision, _ in self._pending.values())

    def _roll_back(self) -> None:
        """Undo a write that failed; SQLite may have done so by itself."""
        try:
            if self._db.in_transaction:
                self._execute("ROLLBACK")
        except sqlite3.Error as error:
            # The file cannot be trusted to hold what was acknowledged: refuse everything from here.
            self._shut()
            raise OSError(errno.EIO, f"the store cannot be read: {error}", self._path) from error

    def _newer_than(self, revision: int) -> list[tuple[int, Sequence[Put | Delete]]]:
        oldest = self._tail[0][0] - 1 if self._tail else self._revision
        if revision < oldest:
            raise Compacted(oldest)
        return list(islice(self._tail, revision - oldest, None))

    def _create(self, power_safe: bool) -> None:
        """Make an empty store under another name first: a file called `path` is always complete."""
        draft = self._path + "-new"
        for leftover in (draft, draft + "-wal", draft + "-journal"):
            if os.path.lexists(leftover):
                os.unlink(leftover)
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        db = self._connect(draft, power_safe)
        try:
            db.executescript(_SCHEMA % FORMAT)
        except sqlite3.Error as error:
            self._fail(error)
        finally:
            db.close()
        if os.path.lexists(draft + "-wal"):  # closing could not move the log into the file
            raise NoSpace(draft)
        os.rename(draft, self._path)
        if power_safe:
            directory = os.open(os.path.dirname(self._path) or ".", os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def _connect(self, path: str, power_safe: bool) -> sqlite3.Connection:
        uri = f"file:{quote(os.fsencode(os.path.abspath(path)))}?mode=rw"
        db = None
        try:
            db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=0)
            # The lock comes before the log: an exclusive log needs no shared memory file.
            for pragma in (
                "locking_mode = EXCLUSIVE",
                "journal_mode = WAL",
                f"synchronous = {'FULL' if power_safe else 'OFF'}",
                f"wal_autocheckpoint = {_CHECKPOINT_PAGES}",
                "cache_spill = 0",
                "cache_size = -16384",  # KiB
                "temp_store = MEMORY",
                "secure_delete = 0",
                "cell_size_check = 1",
            ):
                db.execute("PRAGMA " + pragma).fetchall()
            return db
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if db:
                db.close()
            self._fail(error)

    def _check_files(self) -> None:
        """Refuse what SQLite would take for empty, and silently drop transactions with it."""
        if not os.path.getsize(self._path):
            raise self._damaged("it is empty")
        try:
            with open(self._path + "-wal", "rb") as log:
                header = log.read(32)
                has_frames = log.read(1)
        except FileNotFoundError:
            return
        if has_frames and not is_log_header(header):
            raise self._damaged("the header of its log is broken")

    def _load(self) -> int:
        """Check the contents. Returns the revision."""
        try:
            meta = self._execute(_META).fetchall()
            newest, keys, sound = self._execute(_SCAN).fetchone()
        except sqlite3.Error as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_ERROR:  # no such table or column
                raise self._damaged(f"it is not a store of irdmafs ({error})") from error
            self._fail(error)
        if len(meta) != 1 or keys != (sound or 0):
            raise self._damaged("it holds values of the wrong type")
        stored_format, deleted_at = meta[0]
        if stored_format != FORMAT:
            raise self._damaged(f"its format is {stored_format}, this irdmafs knows {FORMAT}")
        return max(int(deleted_at), newest or 0)

    def _damaged(self, reason: str) -> Damaged:
        return Damaged(
            f"{self._path} is damaged: {reason}. Restore it with its -wal and -redo files from a copy,"
            " or move them away to start with an empty store."
        )

    def _fail(self, error: sqlite3.Error | UnicodeDecodeError) -> NoReturn:
        """Raise what `error` means to a caller."""
        if self._closed:
            raise trio.ClosedResourceError("the engine is closed") from error
        if isinstance(error, UnicodeDecodeError):  # SQLite quotes a broken schema in its message
            raise self._damaged("its schema is not text") from error
        code = getattr(error, "sqlite_errorcode", None)
        if code is None:  # not from the storage: wrong use of the sqlite3 module
            raise error
        match code & 0xFF:
            case sqlite3.SQLITE_FULL:
                raise NoSpace(self._path) from error
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                raise self._damaged(str(error)) from error
            case sqlite3.SQLITE_BUSY:
                raise OSError(errno.EBUSY, "another process uses the store", self._path) from error
            case _:
                raise OSError(errno.EIO, f"SQLite says: {error}", self._path) from error


class Watch:
    """Changes of a range, read from the engine's tail when asked for.

    Nothing is queued for a slow reader, which in the end gets Compacted.
    """

    def __init__(self, engine: SQLiteEngine, start: bytes, end: bytes, from_revision: int) -> None:
        self._engine = engine
        self._start = start
        self._end = end
        self._seen = from_revision
        self._changes: deque[Change] = deque()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        await trio.lowlevel.checkpoint()
        while not self._changes:
            self.collect()
            if self._changes:
                break
            if self._engine._closed:
                raise StopAsyncIteration
            await self._engine._watchers.park()
        return self._changes.popleft()

    def collect(self) -> None:
        """Take over the changes that came since the last call. Raises Compacted."""
        for revision, operations in self._engine._newer_than(self._seen):
            events = tuple(
                Event(revision, op.key, op.value if isinstance(op, Put) else None)
                for op in operations
                if self._start <= op.key < self._end
            )
            if events:
                self._changes.append(Change(revision, events))
            self._seen = revision


def _is_full(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
