"""The room for files in a cluster."""

import os
import time
from collections import deque
from typing import Final

from ...cluster.membership import Members
from ...files.sparse import allocated_bytes
from ...namespace import Inode
from .contents import Contents

_BLOCK_BYTES = 4096
# A node that has less room than it last told says so within this time, if the difference is worth it.
_TOLD_WITHIN_S: Final = 10.0


class Space:
    """The room that store nodes reported, less what was published since. They do not report what was freed
    again soon."""

    def __init__(self, members: Members, contents: Contents) -> None:
        self._members = members
        self._contents = contents
        # Times and sizes of what was published since.
        self._untold: deque[tuple[float, int]] = deque()
        self._untold_bytes = 0
        members.node_changed.append(self._told)

    def _told(self, node: int) -> None:
        self._untold.clear()
        self._untold_bytes = 0

    def published(self, size: int) -> None:
        """Note that a version has so many bytes more than the one before, which is freed."""
        self._forget_old()
        self._untold.append((time.monotonic(), size))
        self._untold_bytes += size

    def lost_by(self, old: Inode, new: Inode | None) -> None:
        """Take back what was counted for a file when its last name is gone."""
        if old.nlink and not (new is not None and new.nlink):
            counted = max(0, self._untold_bytes)
            self.published(-min(counted, allocated_bytes(old.size, old.blocks)))

    def _forget_old(self) -> None:
        while self._untold and self._untold[0][0] < time.monotonic() - _TOLD_WITHIN_S:
            self._untold_bytes -= self._untold.popleft()[1]

    def statvfs(self) -> os.statvfs_result:
        """Return the space in the cluster, in files kept with its usual number of replicas: on nodes that
        take new files, which a dead or a draining one does not."""
        settings, addresses = self._members.settings, self._members.nodes
        assert settings is not None, "a mount starts with the settings"
        nodes = [addresses[candidate.node] for candidate in self._members.candidates()]
        self._forget_old()
        copies = max(1, min(settings.replicas, len(nodes)))
        total = sum(node.total_bytes for node in nodes) // copies // _BLOCK_BYTES
        free_bytes = sum(node.free_bytes for node in nodes) // copies
        free = max(0, free_bytes - max(0, self._untold_bytes)) // _BLOCK_BYTES
        below = self._contents.statvfs()
        return os.statvfs_result(
            (_BLOCK_BYTES, _BLOCK_BYTES, total, free, free, below.f_files, below.f_ffree,
             below.f_favail, below.f_flag, 255)
        )  # fmt: skip
