"""File contents that tell a torn, partial or mixed read from a whole one.

Every page starts with its version, its own number and the size of the whole content, so that any
page can be checked alone and a page of another version, or from another place, is noticed.
"""

import hashlib
import struct

PAGE_BYTES = 4096
_HEADER = struct.Struct("<QQQ")
HEADER_BYTES = _HEADER.size


def pattern(version: int, size: int) -> bytes:
    """The content of `size` bytes that stands for `version`."""
    token = hashlib.blake2b(b"%d" % version, digest_size=32).digest()
    filler = (token * (PAGE_BYTES // len(token)))[HEADER_BYTES:]
    pages = (size + PAGE_BYTES - 1) // PAGE_BYTES
    content = b"".join(_HEADER.pack(version, page, size) + filler for page in range(pages))
    return content[:size]


def version_of(content: bytes) -> int:
    """The version that `content` is, whole. Raises AssertionError, naming the first wrong page."""
    if len(content) < HEADER_BYTES:
        raise AssertionError(f"only {len(content)} bytes: {content!r}")
    version, _, size = _HEADER.unpack_from(content)
    if content == pattern(version, len(content)):
        return int(version)
    if size != len(content):
        raise AssertionError(f"partial: {len(content)} of the {size} bytes of version {version}")
    expected = pattern(version, size)
    for start in range(0, size, PAGE_BYTES):
        page = content[start : start + PAGE_BYTES]
        if page != expected[start : start + PAGE_BYTES]:
            found = _HEADER.unpack_from(page.ljust(_HEADER.size, b"\0"))
            at = next(i for i, byte in enumerate(page) if byte != expected[start + i])
            raise AssertionError(
                f"torn: the first page is of version {version}, page {start // PAGE_BYTES} of "
                f"{size // PAGE_BYTES} starts with (version, page, size) = {found} and differs "
                f"from byte {at} on, which is {page[at]}"
            )
    raise AssertionError("unreachable: contents differ but no page does")
