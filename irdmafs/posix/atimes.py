"""When files were last read, without a request or a transaction for a read.

Reads that pass through are reads of the extent, a file of the store. The kernel keeps its access time by
the rule of relatime, and it is looked up when somebody asks for the file's. Reads that come through the
daemon (cached reads, listings, links) are noted by the same rule. A time goes into the inode's record with
the next change of its attributes, and at the unmount; until then it is in memory only. Each host of a
cluster knows its own reads.
"""

import ctypes
import os
import struct
import time
from typing import Final

from ..backend.files.extents import ExtentStore
from ..backend.model.clock import now_ns
from ..backend.model.records import NO_CONTENT
from ..backend.namespace import Inode, Namespace
from ..coherence.nodes import Node
from ..mount_options import MountOptions

# Files whose last read is remembered; of more, the first ones seem not to have been read.
_KNOWN_MAX: Final = 1 << 16
# In one transaction.
_STORED_AT_ONCE: Final = 50
_SECOND_NS: Final = 1_000_000_000
_DAY_NS: Final = 86_400 * _SECOND_NS
_UTIME_OMIT: Final = (1 << 30) - 2
_TIMES: Final = struct.Struct("qqqq")
_AT_FDCWD: Final = -100

_libc = ctypes.CDLL(None, use_errno=True)


class Atimes:
    """Access times that are newer than the inodes' records."""

    def __init__(self, options: MountOptions, extents: ExtentStore) -> None:
        self._extents = extents
        self._noatime = options.read_only or options.noatime
        self._nodiratime = self._noatime or options.nodiratime
        self._read: dict[int, int] = {}
        # By inode: the nodes through which it may have been read since their extents were looked at.
        self._may_be_read: dict[int, set[Node]] = {}

    def opened(self, node: Node) -> None:
        """Note that a node whose reads pass through was opened for reading."""
        if not self._noatime:
            self._may_be_read.setdefault(node.ino, set()).add(node)

    def gone(self, node: Node) -> None:
        """Note that reads of a node pass through no more; the extent may go."""
        nodes = self._may_be_read.get(node.ino)
        if nodes is not None and node in nodes:
            self._look_at(node)
            self._forget(node, nodes)

    def read(self, inode: Inode) -> None:
        """Note that an inode was read through the daemon."""
        if self._nodiratime if inode.is_dir else self._noatime:
            return
        atime_ns = self._read.get(inode.ino, inode.atime_ns)
        counts = (
            atime_ns <= max(inode.mtime_ns, inode.ctime_ns)
            or time.time_ns() - atime_ns > _DAY_NS  # the clock of files takes far longer
        )
        if counts:
            self._note(inode.ino, now_ns())

    def _note(self, ino: int, atime_ns: int) -> None:
        if len(self._read) >= _KNOWN_MAX:
            del self._read[next(iter(self._read))]
        self._read[ino] = atime_ns

    def of(self, inode: Inode) -> int:
        """Return an inode's access time in ns."""
        if inode.ino in self._may_be_read:
            self._look(inode.ino)
        return self._read.get(inode.ino, inode.atime_ns) if self._read else inode.atime_ns

    async def store(self, namespace: Namespace) -> None:
        """Put access times that no record has into the inodes' records, newest first. Raises OSError."""
        for ino in [*self._may_be_read]:
            self._look(ino)
        newest = [*self._read.items()][::-1]
        for start in range(0, len(newest), _STORED_AT_ONCE):
            await namespace.note_reads(dict(newest[start : start + _STORED_AT_ONCE]))

    def saved(self, inode: Inode) -> None:
        """Note that an inode's changed record has its access time. By the rule of relatime the next read
        counts, so its extents have to be told of the change, also if none passes through just now."""
        self._read.pop(inode.ino, None)
        seconds, rest = divmod(inode.atime_ns, _SECOND_NS)
        times = _TIMES.pack(seconds, rest, 0, _UTIME_OMIT)
        nodes = self._showing(inode.ino)
        for extent in {inode.extent, *(node.backing_extent for node in nodes)} - {NO_CONTENT}:
            path = os.fsencode(self._extents.path(extent))
            if _libc.utimensat(_AT_FDCWD, path, times, 0) == 0:
                for node in nodes:
                    if node.backing_extent == extent:
                        node.read_ns = inode.atime_ns

    def _look(self, ino: int) -> None:
        """Look at the extents of an inode that may have been read."""
        nodes = self._may_be_read[ino]
        for node in self._showing(ino):
            self._look_at(node)
            if not node.is_bound:
                self._forget(node, nodes)

    def _showing(self, ino: int) -> list[Node]:
        """Return the nodes of an inode that may have been read, without those of old versions: there may be
        thousands, and reads of these count when the last one closes."""
        nodes = self._may_be_read.get(ino, ())
        return [node for node in nodes if node.content is None or not node.content.state.ended]

    def _look_at(self, node: Node) -> None:
        try:
            found = self._extents.stat(node.backing_extent).st_atime_ns
        except OSError:
            return
        if found != node.read_ns:
            self._note(node.ino, found)
            node.read_ns = found

    def _forget(self, node: Node, nodes: set[Node]) -> None:
        nodes.remove(node)
        if not nodes:
            del self._may_be_read[node.ino]
