"""The description of a file's next version, on its way from the mount that wrote it into the namespace."""

import os
from typing import NamedTuple

from ..model.records import ContentId, Layout


class NewVersion(NamedTuple):
    """A file's next version: `extent` has its bytes. `size` is in bytes, `blocks` in 512-byte units, times
    in nanoseconds.

    `ctime_ns`: the time of the change, None: now, 0: no change. `base`: the version that it was made of, if
    that must still be the newest one. `mapped`: programs may have its file mapped, and change it without a
    trace. `layout`: where its bytes are, None: where the file's are; `digests`: of its bytes. `in_quotas`:
    it is refused if a quota has no room for it, and not only charged. `name`: a directory, and what the
    file is called there from then on, too. `pid`: the process (or thread) that publishes it, 0: the mount
    by itself.
    """

    ino: int
    extent: ContentId
    size: int
    blocks: int
    mtime_ns: int
    ctime_ns: int | None = None
    base: int | None = None
    mapped: bool = False
    layout: Layout | None = None
    digests: bytes = b""
    in_quotas: bool = True
    name: tuple[int, bytes] | None = None
    pid: int = 0

    @classmethod
    def of_file(
        cls, ino: int, extent: ContentId, status: os.stat_result, mtime_ns: int
    ) -> "NewVersion":
        """Return the version whose bytes are an extent; `status` is its stat."""
        return cls(ino, extent, status.st_size, status.st_blocks, mtime_ns)

    def with_bytes_of(self, extent: ContentId, status: os.stat_result) -> "NewVersion":
        """Return it with the bytes in another extent; `status` is that one's stat."""
        return self._replace(
            extent=extent, size=status.st_size, blocks=status.st_blocks, mapped=False
        )
