"""The key-value engine of one host: a SQLite file that one process has to itself.

Why it is shaped as it is:

- No method waits, so callers may drive the coroutines inline. SQLite takes less than 10 us for a
  put and its commit, which is less than handing it to a thread.
- Non-durable transactions share one open SQLite transaction, which the next durable one commits.
  Pages are not spilled before that (cache_spill=0): until COMMIT nothing of it is in the file, so
  a crash loses it whole.
- SQLite may answer a failed statement or commit by rolling back everything that is open. The tail
  of recent transactions, kept for watchers, has what was acknowledged since the last commit: it is
  applied again.
- The revision is not written with every transaction, which would dirty one more page. A put leaves
  it in its row and only a delete writes it to `meta`; the largest of all these is the file's.
"""

import errno
import os
import sqlite3
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NoReturn, Self
from urllib.parse import quote

import trio

from . import Compacted, Conflict, Damaged, Delete, Event, KeyValue, NoSpace, Put
from .ballast import Ballast
from .wal import is_log_header

FORMAT = 1

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
    revision INTEGER NOT NULL -- of the last transaction that deleted a key
);
INSERT INTO meta VALUES (%d, 0);
COMMIT;
"""
_GET = "SELECT key, value, mod_revision FROM kv WHERE key = ?"
_RANGE = "SELECT key, value, mod_revision FROM kv WHERE key >= ? AND key < ? ORDER BY key LIMIT ?"
_MOD_REVISION = "SELECT mod_revision FROM kv WHERE key = ?"
_PUT = "REPLACE INTO kv (key, mod_revision, value) VALUES (?, ?, ?)"
_DELETE = "DELETE FROM kv WHERE key = ?"
_DELETED_AT = "UPDATE meta SET revision = ?"
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
# Non-durable transactions in a row before they are committed anyway. Touching three pages of 4 KiB
# each, they fit into the ballast; a commit is 3 us shared by all of them.
_UNFLUSHED_TRANSACTIONS = 256
# The log goes into the file at 1 MiB, well below the ballast. Measured: no slower than at 4 MiB.
_CHECKPOINT_PAGES = 256

assert _UNFLUSHED_TRANSACTIONS <= _TAIL_TRANSACTIONS


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
            if os.path.lexists(path + "-wal"):
                raise self._damaged("it is missing, but its log is there")
            self._create(power_safe)
        self._check_files()
        self._db = self._connect(path, power_safe)
        self._execute = self._db.cursor().execute
        try:
            # Visible here, and safe in the file.
            self._revision = self._flushed = self._load()
        except BaseException:
            self._db.close()
            raise
        self._ballast = Ballast(path + "-ballast")

    @property
    def revision(self) -> int:
        return self._revision

    async def get(self, key: bytes) -> KeyValue | None:
        try:
            row = self._execute(_GET, (key,)).fetchone()
        except sqlite3.Error as error:
            self._fail(error)
        return KeyValue._make(row) if row else None

    async def range(self, start: bytes, end: bytes, limit: int = 0) -> list[KeyValue]:
        try:
            return list(map(KeyValue._make, self._execute(_RANGE, (start, end, limit or -1))))
        except sqlite3.Error as error:
            self._fail(error)

    async def transact(
        self,
        compares: Sequence[tuple[bytes, int]],
        operations: Sequence[Put | Delete],
        *,
        durable: bool = True,
        urgent: bool = False,
    ) -> int:
        if len(operations) > 1 and len({op.key for op in operations}) < len(operations):
            raise ValueError("a key may occur in one operation of a transaction only")
        try:
            return self._transact(compares, operations, durable)
        except sqlite3.Error as error:
            urgent = urgent or all(isinstance(op, Delete) for op in operations)
            if not (urgent and _is_full(error) and self._ballast.give_up()):
                self._fail(error)
        try:
            return self._transact(compares, operations, durable)
        except sqlite3.Error as error:
            self._fail(error)

    async def flush(self) -> None:
        if self._flushed < self._revision:
            await self.transact((), (), urgent=True)

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
        finally:
            self._shut()

    def _shut(self) -> None:
        self._closed = True
        self._db.close()
        self._watchers.unpark_all()

    def _transact(
        self,
        compares: Sequence[tuple[bytes, int]],
        operations: Sequence[Put | Delete],
        durable: bool,
    ) -> int:
        execute = self._execute
        for key, expected in compares:
            row = execute(_MOD_REVISION, (key,)).fetchone()
            if (row[0] if row else 0) != expected:
                raise Conflict(key)
        revision = self._revision + 1
        try:
            if not self._db.in_transaction:
                execute("BEGIN")
            applied = self._apply(revision, operations)
            if not applied:
                revision = self._revision
            if durable or revision - self._flushed >= _UNFLUSHED_TRANSACTIONS:
                execute("COMMIT")
                self._flushed = revision
        except BaseException:
            self._undo()
            raise
        if applied:
            self._revision = revision
            self._tail.append((revision, applied))
            if self._watchers:
                self._watchers.unpark_all()
        if not self._ballast.held and self._flushed == self._revision:
            self._ballast.take()
        return revision

    def _apply(self, revision: int, operations: Sequence[Put | Delete]) -> Sequence[Put | Delete]:
        """Returns the operations that changed something: all but deletes of missing keys."""
        execute = self._execute
        deleted = False
        missing = []
        for operation in operations:
            if isinstance(operation, Put):
                execute(_PUT, (operation.key, revision, operation.value))
            elif execute(_DELETE, (operation.key,)).rowcount:
                deleted = True
            else:
                missing.append(operation)
        if deleted:
            execute(_DELETED_AT, (revision,))
        if missing:
            return tuple(op for op in operations if op not in missing)
        return tuple(operations)

    def _undo(self) -> None:
        """Go back to the newest transaction that was acknowledged: the file's, then the tail's."""
        if self._closed:
            return
        try:
            if self._db.in_transaction:
                self._execute("ROLLBACK")
            if self._flushed < self._revision:
                self._execute("BEGIN")
                for revision, operations in self._newer_than(self._flushed):
                    self._apply(revision, operations)
        except sqlite3.Error as error:
            # What was acknowledged cannot be shown any more: refuse everything from here on.
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
            f"{self._path} is damaged: {reason}. Restore it and {self._path}-wal from a copy,"
            " or move both away to start with an empty store."
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
    """Events of a range, read from the engine's tail when asked for.

    Nothing is queued for a slow reader, which in the end gets Compacted.
    """

    def __init__(self, engine: SQLiteEngine, start: bytes, end: bytes, from_revision: int) -> None:
        self._engine = engine
        self._start = start
        self._end = end
        self._seen = from_revision
        self._events: deque[Event] = deque()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        await trio.lowlevel.checkpoint()
        while not self._events:
            self.collect()
            if self._events:
                break
            if self._engine._closed:
                raise StopAsyncIteration
            await self._engine._watchers.park()
        return self._events.popleft()

    def collect(self) -> None:
        """Take over the events that came since the last call. Raises Compacted."""
        for revision, operations in self._engine._newer_than(self._seen):
            for operation in operations:
                if self._start <= operation.key < self._end:
                    value = operation.value if isinstance(operation, Put) else None
                    self._events.append(Event(revision, operation.key, value))
            self._seen = revision


def _is_full(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
