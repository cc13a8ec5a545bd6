"""The header of SQLite's write-ahead log, whose damage SQLite does not report."""

import struct


def is_log_header(header: bytes) -> bool:
    """Return whether these 32 bytes have the magic and the checksum of a write-ahead log.

    SQLite takes a log with another header for an empty one and drops every transaction in it.
    The format is described at https://sqlite.org/fileformat2.html#walformat
    """
    magic, *_, stored0, stored1 = struct.unpack(">8I", header)
    if magic & ~1 != 0x377F0682:
        return False
    sum0 = sum1 = 0
    words = iter(struct.unpack(">6I" if magic & 1 else "<6I", header[:24]))
    for even, odd in zip(words, words, strict=True):
        sum0 = (sum0 + even + sum1) & 0xFFFFFFFF
        sum1 = (sum1 + odd + sum0) & 0xFFFFFFFF
    return (sum0, sum1) == (stored0, stored1)
