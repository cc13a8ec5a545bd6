"""A file of records that are appended whole, so that making one durable is a single write(2).

    record: length of the payload (u32 LE), its CRC-32 (u32 LE), payload

A record that a crash cut short is the last one; loading drops it. It was never acknowledged. One
that is broken before the last was damaged later.
"""

import errno
import os
import struct
import zlib

_HEADER = struct.Struct("<II")


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
        """The payloads of all records, without a last one that is cut short.

        Raises ValueError when a record is broken that others follow.
        """
        data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        payloads = []
        offset = 0
        while offset + _HEADER.size <= len(data):
            length, checksum = _HEADER.unpack_from(data, offset)
            payload = data[offset + _HEADER.size : offset + _HEADER.size + length]
            end = offset + _HEADER.size + length
            if zlib.crc32(payload) != checksum or not length:
                if length and end < len(data):
                    raise ValueError(f"the record at byte {offset} is broken")
                break
            payloads.append(payload)
            offset = end
        self.size = offset
        os.ftruncate(self._fd, offset)
        return payloads

    def append(self, payload: bytes) -> None:
        """Raises OSError (ENOSPC); the journal is then as it was."""
        record = _HEADER.pack(len(payload), zlib.crc32(payload)) + payload
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
