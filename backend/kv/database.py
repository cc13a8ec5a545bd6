"""A SQLite file of keys: created complete, checked when it is opened, and changed atomically."""

import errno
import os
import sqlite3
from collections.abc import Mapping
from typing import NoReturn
from urllib.parse import quote

import trio

from . import Damaged, KeyValue, NoSpace
from .wal import is_log_header

__all__ = ["Database"]

FORMAT = 2

# mod_revision is before value, so that reading it need not walk the overflow pages of a large value.
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
_RANGE = "SELECT key, value, mod_revision FROM kv WHERE key >= ? AND key < ? ORDER BY key"
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

# The log is checkpointed at 1 MiB, well below the ballast. Measured: no slower than at 4 MiB.
_CHECKPOINT_PAGES = 256


class Database:
    """The keys of one process in the file `path`, with its log `path`-wal.

    power_safe: sync every change to the disk. Every method raises Damaged when the file is invalid,
    NoSpace on a full filesystem, OSError (EBUSY: another process has the file open) and, once it is closed,
    trio.ClosedResourceError.
    """

    def __init__(self, path: str, *, power_safe: bool) -> None:
        self._path = path
        self.closed = False
        if not os.path.lexists(path):
            for suffix in ("-wal", "-redo"):
                if os.path.lexists(path + suffix):
                    raise self.damaged(f"it is missing, but its log is there ({path}{suffix})")
            self._create(power_safe)
        self._check_files()
        self._db = self._connect(path, power_safe)
        cursor = self._db.cursor()
        self._execute, self._executemany = cursor.execute, cursor.executemany
        try:
            # The revision of the newest transaction in the file.
            self.revision = self._load()
        except BaseException:
            self._db.close()
            raise

    def range(self, start: bytes, end: bytes) -> list[KeyValue]:
        """Return the keys with start <= key < end in order."""
        try:
            return list(map(KeyValue._make, self._execute(_RANGE, (start, end))))
        except sqlite3.Error as error:
            self._fail(error)

    def write(self, changes: Mapping[bytes, tuple[int, bytes | None]]) -> None:
        """Put keys with their revision and value, delete those whose value is None; all or nothing."""
        puts = [(key, at, value) for key, (at, value) in changes.items() if value is not None]
        deletes = [(key,) for key, (_, value) in changes.items() if value is None]
        try:
            try:
                self._execute("BEGIN")
                self._executemany(_PUT, puts)
                self._executemany(_DELETE, deletes)
                self._execute(_REVISION, (max(at for at, _ in changes.values()),))
                self._execute("COMMIT")
            except BaseException:
                self._roll_back()
                raise
        except sqlite3.Error as error:
            self._fail(error)

    def close(self) -> None:
        self.closed = True
        self._db.close()

    def damaged(self, reason: str) -> Damaged:
        """Return the error to raise, with the remedy."""
        return Damaged(
            f"{self._path} is damaged: {reason}. Restore it with its -wal and -redo files from a copy,"
            " or move them away to start with an empty store."
        )

    def _roll_back(self) -> None:
        """Undo a write that failed; SQLite may have done so by itself."""
        try:
            if self._db.in_transaction:
                self._execute("ROLLBACK")
        except sqlite3.Error as error:
            # The file may lack acknowledged transactions: refuse every call from now on.
            self.close()
            raise OSError(errno.EIO, f"the store cannot be read: {error}", self._path) from error

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
        """Refuse files that SQLite would take for empty, dropping their transactions silently."""
        if not os.path.getsize(self._path):
            raise self.damaged("it is empty")
        try:
            with open(self._path + "-wal", "rb") as log:
                header = log.read(32)
                has_frames = log.read(1)
        except FileNotFoundError:
            return
        if has_frames and not is_log_header(header):
            raise self.damaged("the header of its log is broken")

    def _load(self) -> int:
        """Check the contents, and return the revision."""
        try:
            meta = self._execute(_META).fetchall()
            newest, keys, sound = self._execute(_SCAN).fetchone()
        except sqlite3.Error as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_ERROR:  # no such table or column
                raise self.damaged(f"it is not a store of irdmafs ({error})") from error
            self._fail(error)
        if len(meta) != 1 or keys != (sound or 0):
            raise self.damaged("it holds values of the wrong type")
        stored_format, deleted_at = meta[0]
        if stored_format != FORMAT:
            raise self.damaged(f"its format is {stored_format}, this irdmafs knows {FORMAT}")
        return max(int(deleted_at), newest or 0)

    def _fail(self, error: sqlite3.Error | UnicodeDecodeError) -> NoReturn:
        """Raise the engine's error for an error of SQLite."""
        if self.closed:
            raise trio.ClosedResourceError("the engine is closed") from error
        if isinstance(error, UnicodeDecodeError):  # SQLite quotes a broken schema in its message
            raise self.damaged("its schema is not text") from error
        code = getattr(error, "sqlite_errorcode", None)
        if code is None:  # not from the storage: wrong use of the sqlite3 module
            raise error
        match code & 0xFF:
            case sqlite3.SQLITE_FULL:
                raise NoSpace(self._path) from error
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                raise self.damaged(str(error)) from error
            case sqlite3.SQLITE_BUSY:
                raise OSError(errno.EBUSY, "another process uses the store", self._path) from error
            case _:
                raise OSError(errno.EIO, f"SQLite says: {error}", self._path) from error
