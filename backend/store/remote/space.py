"""The room for files in a cluster."""

import os

from ...cluster.membership import Members
from .contents import Contents

__all__ = ["Space"]

_BLOCK_BYTES = 4096


class Space:
    """The room that store nodes reported, less what was published since."""

    def __init__(self, members: Members, contents: Contents) -> None:
        self._members = members
        self._contents = contents
        self._untold_bytes = 0
        members.node_changed.append(self._told)

    def _told(self, node: int) -> None:
        self._untold_bytes = 0

    def published(self, size: int) -> None:
        """Note that so many bytes were published."""
        self._untold_bytes += size

    def statvfs(self) -> os.statvfs_result:
        """Return the space in the cluster, in files kept with its usual number of replicas."""
        settings, nodes = self._members.settings, self._members.nodes.values()
        assert settings is not None, "a mount starts with the settings"
        copies = max(1, min(settings.replicas, len(nodes)))
        total = sum(node.total_bytes for node in nodes) // copies // _BLOCK_BYTES
        free_bytes = sum(node.free_bytes for node in nodes) // copies
        free = max(0, free_bytes - self._untold_bytes) // _BLOCK_BYTES
        below = self._contents.statvfs()
        return os.statvfs_result(
            (_BLOCK_BYTES, _BLOCK_BYTES, total, free, free, below.f_files, below.f_ffree,
             below.f_favail, below.f_flag, 255)
        )  # fmt: skip
