"""A file of records that are appended whole, so that making one durable is a single write(2).

    record: 0xA7, length of the payload (u32 LE), CRC-32 (u32 LE), payload, 0x7A

The CRC is over the record's place in the file, the length and the payload. Journals differ from other
data in that their last record may be cut short: by the death of the process in the middle of its write, or,
on a disk, by a power loss before its sync. It was never acknowledged then, and is dropped. All else that
is not a record is damage, and is told apart so:

- A process that dies leaves a first part of what it wrote: fewer bytes than the length says. If the CRC is
  right for all the bytes there are, only the length was changed later.
- A power loss leaves sectors out, which read as zeros: the bytes at both ends of a record are not zero, so
  that each sector which it begins or ends in shows whether it was written.
- Nothing was appended behind a record that was cut short: if a record follows, it is damage.
"""

import errno
import os
import struct
import zlib
from typing import NamedTuple

__all__ = ["Broken", "Damage", "Journal", "Survey", "survey"]

_HEADER = struct.Struct("<BII")
_PLACE = struct.Struct("<QI")
_BEGIN, _END = 0xA7, 0x7A
_BEGIN_BYTE = bytes([_BEGIN])
_AROUND = _HEADER.size + 1
# The unit in which a disk writes.
_SECTOR_BYTES = 512


class Broken(NamedTuple):
    """A range of the file that differs from what was written: bytes from `start` to `end`."""

    start: int
    end: int


class Survey(NamedTuple):
    """The contents of a journal. `payloads` are those of sound records, in order. `after` of them are
    behind the first damage. `broken` are the damaged ranges. `end` is where a last record begins that was
    cut short, or the file's length if none was."""

    payloads: list[bytes]
    broken: list[Broken]
    end: int
    after: int


class Damage(ValueError):
    """An acknowledged record is damaged."""

    def __init__(self, path: str, found: Survey) -> None:
        first = found.broken[0]
        super().__init__(
            f"{path} is damaged from byte {first.start} to {first.end}, where at least one acknowledged "
            f"change was; {len(found.payloads) - found.after} records before it and {found.after} behind "
            "it are sound"
        )
        self.survey = found


def survey(data: bytes, *, power_safe: bool) -> Survey:
    """Find the records of a journal. `power_safe`: it lies on a disk, where a power loss may leave any
    sector of the last record out."""
    payloads: list[bytes] = []
    broken: list[Broken] = []
    offset = after = 0
    while offset < len(data):
        payload = _record_at(data, offset)
        if payload is not None:
            payloads.append(payload)
            after += bool(broken)
            offset += _AROUND + len(payload)
            continue
        following = _next_record(data, offset + 1)
        if following is None and _was_cut_short(data, offset, power_safe):
            break
        end = len(data) if following is None else following
        broken.append(Broken(offset, end))
        offset = end
    return Survey(payloads, broken, offset, after)


def _checksum(offset: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_PLACE.pack(offset, len(payload))))


def _record_at(data: bytes, offset: int) -> bytes | None:
    """Return the payload of a sound record."""
    if offset + _AROUND > len(data):
        return None
    _, length, checksum = _HEADER.unpack_from(data, offset)
    start = offset + _HEADER.size
    if not length or start + length + 1 > len(data):
        return None
    payload = data[start : start + length]
    return payload if _checksum(offset, payload) == checksum else None


def _next_record(data: bytes, offset: int) -> int | None:
    while (offset := data.find(_BEGIN_BYTE, offset)) >= 0:
        if _record_at(data, offset) is not None:
            return offset
        offset += 1
    return None


def _was_cut_short(data: bytes, offset: int, power_safe: bool) -> bool:
    """Return whether the bytes from here on, after which there is no record, were never written whole."""
    rest = data[offset:]
    if power_safe and _lacks_sector(data, offset):
        return True
    if len(rest) < _HEADER.size:
        return _BEGIN_BYTE.startswith(rest[:1])
    begin, length, checksum = _HEADER.unpack_from(rest)
    if begin != _BEGIN or len(rest) >= _AROUND + length:
        return False
    # All but the last byte may be there, too.
    whole = (rest[_HEADER.size : len(rest) - cut] for cut in (0, 1))
    return all(_checksum(offset, each) != checksum for each in whole if len(each) != length)


def _lacks_sector(data: bytes, offset: int) -> bool:
    start = offset
    while start < len(data):
        end = min((start // _SECTOR_BYTES + 1) * _SECTOR_BYTES, len(data))
        if not any(data[start:end]):
            return True
        start = end
    return False


class Journal:
    """The records in the file `path`. `power_safe`: sync every record to the disk."""

    def __init__(self, path: str, *, power_safe: bool) -> None:
        self._path = path
        self._power_safe = power_safe
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.size = 0

    def close(self) -> None:
        os.close(self._fd)

    def load(self) -> list[bytes]:
        """Return the payloads of all records, without a last one that is cut short. Raises Damage; then the
        file is unchanged."""
        data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        found = survey(data, power_safe=self._power_safe)
        if found.broken:
            raise Damage(self._path, found)
        self.size = found.end
        os.ftruncate(self._fd, found.end)
        return found.payloads

    def append(self, payload: bytes) -> None:
        """Append a record. Raises OSError (ENOSPC); then the journal is unchanged."""
        checksum = _checksum(self.size, payload)
        record = b"%b%b%c" % (_HEADER.pack(_BEGIN, len(payload), checksum), payload, _END)
        try:
            if os.pwrite(self._fd, record, self.size) != len(record):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
            if self._power_safe:
                os.fdatasync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self.size)
            raise
        self.size += len(record)

    def clear(self) -> None:
        os.ftruncate(self._fd, 0)
        self.size = 0
