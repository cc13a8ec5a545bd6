"""The privileges that a file loses when others change it: set-user-id, set-group-id and capabilities.

Linux removes them before the change, in file_remove_privs(). For a FUSE file whose server handles this (the
kernel session agrees to HANDLE_KILLPRIV_V2) the kernel asks for capabilities and removes them itself, and
tells of the two bits: by a flag in OPEN (O_TRUNC), WRITE and SETATTR (truncation), and before any other
change, a write that passes through included, by a SETATTR that sets nothing. It knows only
the node that is written. A file may have got privileges through another node, or on another host, while a
private copy was written: it loses them when the copy is published.
"""

import errno
import stat
from typing import Final, NamedTuple

from ..backend.namespace import Inode, fail
from ..callers.credentials import CAP_FOWNER, CAP_FSETID
from ..callers.processes import Processes
from .calls import Caller

CAPABILITY: Final = b"security.capability"
SET_IDS: Final = stat.S_ISUID | stat.S_ISGID


_HAS_CAPABILITY: Final = 1 << 16


class Closer(NamedTuple):
    """A caller that closes a file. No more is told of it."""

    pid: int
    gid: int = -1
    uid: int = -1


def privileges_of(inode: Inode) -> int:
    """Return the privileges that a file has, a bit for each kind."""
    capability = _HAS_CAPABILITY if CAPABILITY in inode.xattrs else 0
    return capability if inode.is_dir else inode.mode & SET_IDS | capability


async def mode_left(inode: Inode, caller: Caller, processes: Processes) -> int:
    """Return the mode that is left when a caller who may not keep set-ids writes a file, or when anybody
    gives it to another owner. Directories keep theirs."""
    mode = inode.mode
    if inode.is_dir or not mode & SET_IDS:
        return mode
    mode &= ~stat.S_ISUID
    if mode & stat.S_ISGID and (
        mode & stat.S_IXGRP or not await _is_in_group(caller, inode.gid, processes)
    ):
        mode &= ~stat.S_ISGID
    return mode


async def may_keep_set_ids(caller: Caller, processes: Processes) -> bool:
    """Return whether a write by this caller leaves set-user-id and set-group-id as they are."""
    return (await processes.credentials(caller.pid)).has(CAP_FSETID)


async def refuse_stranger(inode: Inode, mode: int, caller: Caller, processes: Processes) -> None:
    """Raise OSError EPERM for a chown(2) that changes neither owner nor group, by a caller who may not
    change the file's mode. The kernel reports it in the same way as a write."""
    if mode == inode.mode or caller.uid == inode.uid:
        return
    if not (await processes.credentials(caller.pid)).has(CAP_FOWNER):
        raise fail(errno.EPERM)


async def _is_in_group(caller: Caller, gid: int, processes: Processes) -> bool:
    if caller.gid == gid:
        return True
    found = await processes.credentials(caller.pid)
    return gid in found.groups or found.has(CAP_FSETID)
