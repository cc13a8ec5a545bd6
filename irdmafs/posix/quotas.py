"""Quotas of directory trees as a mount shows them: who may set them, what is used, what statfs(2) says."""

import errno
import os
from typing import Any, Final

from ..backend.namespace import Namespace, fail
from ..backend.namespace.quotas import Usage
from ..callers.processes import CAP_SYS_ADMIN, Processes
from .calls import Space

USED_BYTES: Final = b"user.irdmafs.quota_used_bytes"
USED_INODES: Final = b"user.irdmafs.quota_used_inodes"
# An attribute's value is at most 64 KiB.
_REPORTED_MAX = 32


async def may_set(uid: int, pid: int, processes: Processes) -> bool:
    """Return whether the caller may set and take quotas: root with CAP_SYS_ADMIN, or the user whose own
    daemon this is. Root of a user namespace is another user here."""
    is_ours = uid == os.geteuid() != 0
    return is_ours or (not uid and (await processes.credentials(pid)).has(CAP_SYS_ADMIN))


def used(namespace: Namespace, directory: int, name: bytes) -> bytes:
    """Return what is charged to a directory. Raises OSError ENODATA for one without a quota."""
    if (usage := namespace.quotas.usages.get(directory)) is None:
        raise fail(errno.ENODATA)
    namespace.tree.known.require_all_below(directory)
    return b"%d" % (usage.bytes if name == USED_BYTES else usage.inodes)


def report(namespace: Namespace) -> list[dict[str, Any]]:
    """Return the fullest quotas for `irdmafs status`, the fullest first."""
    found = []
    for directory, usage in namespace.quotas.usages.items():
        if not namespace.tree.known.all_below(directory):
            continue
        limit_bytes, limit_inodes = usage.limits
        full = max(usage.bytes / usage.limit_bytes, usage.inodes / usage.limit_inodes)
        row = {
            "path": os.fsdecode(namespace.path_of(directory)) or "/",
            "bytes": usage.bytes,
            "limit_bytes": limit_bytes,
            "inodes": usage.inodes,
            "limit_inodes": limit_inodes,
        }
        found.append((full, row))
    return [row for _, row in sorted(found, key=lambda one: -one[0])[:_REPORTED_MAX]]


def limit(data: Space, usage: Usage) -> None:
    """Show no more space than a quota leaves, as statfs(2) does below a project quota. f_blocks and f_files
    are 0 on a filesystem without a limit."""
    limit_bytes, limit_inodes = usage.limits
    if limit_bytes is not None:
        free = max(0, limit_bytes - usage.bytes) // data.f_frsize
        data.f_bfree = data.f_bavail = min(data.f_bavail, free) if data.f_blocks else free
        blocks = limit_bytes // data.f_frsize
        data.f_blocks = min(data.f_blocks, blocks) if data.f_blocks else blocks
    if limit_inodes is not None:
        free = max(0, limit_inodes - usage.inodes)
        data.f_ffree = data.f_favail = min(data.f_ffree, free) if data.f_files else free
        data.f_files = min(data.f_files, limit_inodes) if data.f_files else limit_inodes
