"""An ordered map from bytes to bytes in one file, an LMDB database that this process has to itself.

There is always one transaction open: everything is read and written through it, so that nobody sees an
older state. `commit` ends it and opens the next. What is committed survives the death of the process: its
bytes are pages of the file. The two kinds of storage differ in one thing:

- In memory the file is mapped for writing, and a commit is a few stores (*measured* 5 us, by write(2) 21).
  A machine that loses its power loses the file with everything else.
- On a disk a commit writes its pages, syncs, and writes and syncs the page that points to them: LMDB's own
  way, so the file is always that of some commit, and that of the last one at least.

The file is as long as the map, and all of it is allocated: a store into the map cannot fail on a full
filesystem, and what is freed in the file stays in it. Some of the free pages are kept for changes that free
space.

LMDB has no checksums. Who closes the map can leave a note beside the file, with a digest of it: the next
one finds the note if there was no crash, and is told of any damage since then. After a crash every page is
looked at instead, on a disk (*measured* 3 s of processor time for 100,000 names).
"""

import contextlib
import errno
import logging
import os
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import lmdb
import msgspec
import trio
import xxhash
from lmdb.verify import VerifyError, verify

from ..observe.logs import log_failure
from ..unwrap import if_it_fails
from . import Damaged, NoSpace

log = logging.getLogger(__name__)

_FORMAT_KEY: Final = b"\0format"
_FORMAT: Final = b"irdmafs names 1"

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_FIRST_BYTES: Final = 512 << 10
_GROW_MAX_BYTES: Final = 16 << 20
_RESERVE_PAGES: Final = (1 << 20) // _PAGE_BYTES
# More than a change adds, beside its values: leaves that are split.
_CHANGE_PAGES: Final = 8
# No longer value is kept beside its key.
_INLINE_MAX: Final = 1024
# So many changes are committed, also if nobody needs them to be durable.
_OPEN_MAX: Final = 4096

_NOTE_SUFFIX: Final = "-closed"
_READ_BYTES: Final = 1 << 20

# A note has the number of bytes that were in use, their digest, and what the process left.
_encode_note = msgspec.msgpack.Encoder().encode
_decode_note = msgspec.msgpack.Decoder(tuple[int, bytes, bytes]).decode

_Change = tuple[bytes, bytes | None]


class Map:
    """The map in the file `path`, or in memory of this process alone (None).

    power_safe: a commit survives a power loss, too. `note` is what the last process left, None if it
    crashed. Raises Damaged, NoSpace and OSError; after `close` every method raises
    trio.ClosedResourceError.
    """

    def __init__(self, path: str | None = None, *, power_safe: bool = False) -> None:
        self._path = path or "memory"
        self._power_safe = power_safe
        self._fd = -1
        self.note: bytes | None = None
        self._left: bytes | None = None
        if path is None:
            fd = os.memfd_create("irdmafs-names", os.MFD_CLOEXEC)
            try:
                self._env = self._opened(f"/proc/self/fd/{fd}", _FIRST_BYTES)
            finally:
                os.close(fd)
        else:
            if not os.path.lexists(path):
                self._create(path)
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            status = os.fstat(self._fd)
            size = status.st_size
            with if_it_fails(partial(os.close, self._fd)):
                self.note = self._note(size)
                if self.note is None:
                    self._check(size)
                if status.st_blocks * 512 < size:
                    _allocate(self._fd, size, path)  # a copy may have holes
                self._env = self._opened(path, size)
        self._map_bytes = self._env.info()["map_size"]
        # Pages that are known to be free, less the reserve.
        self._spare_pages = 0
        # The changes in the open transaction, those of the last `begin` from `_begun` on.
        self._changes: list[_Change] = []
        self._begun = 0
        self.begun_count = 0  # of changes
        # Keys that were given values with pages of their own in the open transaction.
        self._large: set[bytes] = set()
        self._txn: lmdb.Transaction[bytes] | _Closed = self._env.begin(write=True)
        if path is not None and self.get(_FORMAT_KEY) != _FORMAT:
            self.close()
            raise self.damaged("it is not a store of this version of irdmafs")

    # -- reading -----------------------------------------------------------------------------------

    def get(self, key: bytes) -> bytes | None:
        try:
            return self._txn.get(key)
        except lmdb.Error as error:
            raise self._failed(error) from error

    def range(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield start <= key < end in order, with values. The map must not change meanwhile."""
        try:
            cursor = self._txn.cursor()
            if cursor.set_range(start):
                for key, value in cursor:
                    if key >= end:
                        return
                    yield key, value
        except lmdb.Error as error:
            raise self._failed(error) from error

    def first(self, start: bytes, end: bytes) -> bytes | None:
        """Return the first key with start <= key < end."""
        for key, _ in self.range(start, end):
            return key
        return None

    def last(self, start: bytes, end: bytes) -> bytes | None:
        """Return the last key with start <= key < end."""
        try:
            cursor = self._txn.cursor()
            found = cursor.prev() if cursor.set_range(end) else cursor.last()
            return cursor.key() if found and cursor.key() >= start else None
        except lmdb.Error as error:
            raise self._failed(error) from error

    # -- changing ----------------------------------------------------------------------------------

    def begin(self, size: int = 0, *, urgent: bool = False) -> None:
        """Begin a change of `size` bytes of values. `urgent`: it may use the reserve. Raises NoSpace."""
        if len(self._changes) >= _OPEN_MAX:
            self.commit()
        self._begun = len(self._changes)
        self.begun_count += 1
        pages = _CHANGE_PAGES + size // _PAGE_BYTES
        self._spare_pages -= pages
        if self._spare_pages < 0:
            self._make_room(pages, urgent)

    def put(self, key: bytes, value: bytes | None) -> None:
        """Put a value in the place of the one that the key has; None: there is no such key any more."""
        self._changes.append((key, value))
        try:
            # A shorter value would keep all pages of a longer one.
            if value is None or key in self._large:
                self._txn.delete(key)
            if value is not None:
                if len(value) > _INLINE_MAX:
                    self._large.add(key)
                self._txn.put(key, value)
        except lmdb.MapFullError:
            # A large value needs pages in a row.
            self._begin_again(grow=True)
        except lmdb.Error as error:
            raise self._failed(error) from error

    def commit(self) -> None:
        """Make every change so far survive a crash. If that fails, the change begun last is undone."""
        if not self._changes:
            return
        try:
            self._txn.commit()
        except lmdb.MapFullError:
            try:
                self._begin_again(grow=True)
                self.commit()
            except OSError:
                self.undo()
                raise
            return
        except lmdb.Error as error:
            self.undo()
            raise self._failed(error) from error
        self._txn = self._env.begin(write=True)
        self._changes.clear()
        self._large.clear()
        self._begun = 0

    def undo(self) -> None:
        """Take the change back that was begun last and failed; those before it stay."""
        del self._changes[self._begun :]
        self._begin_again(grow=False)

    def _begin_again(self, *, grow: bool) -> None:
        """Begin the transaction again, with its changes; with `grow`, in a larger file. Raises NoSpace."""
        with contextlib.suppress(lmdb.Error):  # a commit that failed has ended it
            self._txn.abort()
        changes, self._changes = self._changes, []
        self._large.clear()
        if grow and not self._extend(max(len(value or b"") for _, value in changes)):
            self._changes = changes
            raise NoSpace(self._path)
        self._txn = self._env.begin(write=True)
        for key, value in changes:
            self.put(key, value)

    def leave(self, note: bytes) -> None:
        """Leave a note when the map is closed, if there is space."""
        self._left = note

    def close(self) -> None:
        """Commit, and release the file. Closing twice does nothing."""
        txn, self._txn = self._txn, _CLOSED
        if isinstance(txn, _Closed):
            return
        try:
            txn.commit()
        except lmdb.Error as error:
            raise self._failed(error) from error
        else:
            self._write_note()
        finally:
            self._env.close()
            if self._fd >= 0:
                os.close(self._fd)

    # -- the file ----------------------------------------------------------------------------------

    def _opened(self, path: str, size: int) -> lmdb.Environment:
        try:
            return lmdb.open(
                path, map_size=size, subdir=False, mode=0o600, lock=False, readahead=False, meminit=False,
                writemap=not self._power_safe, sync=self._power_safe, metasync=self._power_safe,
            )  # fmt: skip
        except lmdb.Error as error:
            raise self._failed(error) from error

    def _create(self, path: str) -> None:
        """Make an empty map under another name first: a file called `path` is always complete."""
        draft = path + "-new"
        if os.path.lexists(draft):
            os.unlink(draft)
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with self._opened(draft, _FIRST_BYTES) as env:
                _allocate(fd, _FIRST_BYTES, draft)
                with env.begin(write=True) as txn:
                    txn.put(_FORMAT_KEY, _FORMAT)
            if self._power_safe:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(draft, path)
        if self._power_safe:
            _sync_directory(path)

    def _check(self, size: int) -> None:
        """Refuse a file that could end this process with a signal; on a disk, one with any damaged page."""
        if not size:
            raise self.damaged("it is empty")
        try:
            with lmdb.open(self._path, subdir=False, readonly=True, lock=False) as env:
                used = (env.info()["last_pgno"] + 1) * _PAGE_BYTES
            found = verify(self._path) if self._power_safe else []  # type: ignore[no-untyped-call]
        except (lmdb.InvalidError, lmdb.VersionMismatchError, VerifyError) as error:
            raise self.damaged(f"it is not an LMDB database ({error})") from error
        except lmdb.Error as error:
            raise self._failed(error) from error
        if size < used:
            raise self.damaged(f"it has {size} bytes, and {used} were in use")
        if found:
            raise self.damaged(str(found[0]))

    def _note(self, size: int) -> bytes | None:
        """Take the note away, and return it. Raises Damaged if the file is not as it was then."""
        path = self._path + _NOTE_SUFFIX
        try:
            with open(path, "rb") as file:
                used, digest, note = _decode_note(file.read())
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise self.damaged(f"{path} cannot be read ({error})") from error
        if used > size or _digest(self._fd, used) != digest:
            raise self.damaged("it is not as it was when it was closed")
        os.unlink(path)
        if self._power_safe:
            _sync_directory(path)
        return note

    def _write_note(self) -> None:
        if self._left is None or self._fd < 0:
            return
        used = (self._env.info()["last_pgno"] + 1) * _PAGE_BYTES
        path = self._path + _NOTE_SUFFIX
        with log_failure(log.info, "%s: the next start takes longer", path):
            with open(path + "-new", "wb") as file:
                file.write(_encode_note((used, _digest(self._fd, used), self._left)))
                if self._power_safe:
                    file.flush()
                    os.fsync(file.fileno())
            os.rename(path + "-new", path)

    def _make_room(self, pages: int, urgent: bool) -> None:
        """Have room for a change of so many pages. Raises NoSpace."""
        if self._has_room(pages):
            return
        self.commit()
        self._txn.abort()
        grown = self._extend(pages * _PAGE_BYTES)
        self._txn = self._env.begin(write=True)
        if not (grown and self._has_room(pages)) and not urgent:
            self._spare_pages = 0
            raise NoSpace(self._path)

    def _has_room(self, pages: int) -> bool:
        """Count the free pages, and return whether a change fits in."""
        stat = self._txn.stat()
        total = self._map_bytes // _PAGE_BYTES
        free = total - stat["branch_pages"] - stat["leaf_pages"] - stat["overflow_pages"]
        reserve = min(_RESERVE_PAGES, total // 4)
        # LMDB keeps a list of the pages that are free, in pages.
        self._spare_pages = free - free // 256 - reserve - pages
        return self._spare_pages >= 0

    def _extend(self, size: int) -> bool:
        """Make the file longer by `size` bytes in a row, outside of transactions; return if it could be."""
        step = max(_FIRST_BYTES, min(self._map_bytes // 4, _GROW_MAX_BYTES), 2 * size)
        after = self._map_bytes + step // _PAGE_BYTES * _PAGE_BYTES
        if self._fd >= 0:
            try:
                _allocate(self._fd, after, self._path)
            except OSError as error:
                os.ftruncate(self._fd, self._map_bytes)
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                return False
        self._env.set_mapsize(after)
        self._map_bytes = after
        return True

    def damaged(self, reason: str) -> Damaged:
        """Return the error to raise, with the remedy."""
        return Damaged(
            f"{self._path} is damaged: {reason}. Put a copy of the store in its place, or move the store "
            "away to start with an empty one."
        )

    def _failed(self, error: lmdb.Error) -> OSError | Damaged:
        """Return our error for one of LMDB's."""
        if isinstance(error, (lmdb.MapFullError, lmdb.TxnFullError)):
            return NoSpace(self._path)
        if isinstance(error, (lmdb.InvalidError, lmdb.VersionMismatchError)):
            return self.damaged(f"it is not an LMDB database ({error})")
        if isinstance(error, (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError)):
            return OSError(errno.EIO, str(self.damaged(str(error))))
        code = getattr(error, "code", 0)
        if code == errno.ENOSPC:
            return NoSpace(self._path)
        return OSError(code if code > 0 else errno.EIO, f"LMDB says: {error}", self._path)


def _digest(fd: int, size: int) -> bytes:
    """Return a digest of the first bytes of a file."""
    state = xxhash.xxh3_128()
    for offset in range(0, size, _READ_BYTES):
        state.update(os.pread(fd, min(_READ_BYTES, size - offset), offset))
    return state.digest()


class _Closed:
    """Stands for the transaction of a map that is closed."""

    def __getattr__(self, name: str) -> Any:
        raise trio.ClosedResourceError("the store is closed")


_CLOSED: Final = _Closed()


def _allocate(fd: int, size: int, path: str) -> None:
    """Have a file of this size without holes. Raises NoSpace, OSError."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise NoSpace(path) from error
        raise


def _sync_directory(path: str) -> None:
    fd = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
