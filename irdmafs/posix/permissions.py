"""Permissions of callers, and the privileges that a file loses when others change it.

The privileges are set-user-id, set-group-id and capabilities. Linux removes them before the change, in
file_remove_privs(). For a FUSE file whose server handles this (the kernel session agrees to
HANDLE_KILLPRIV_V2) the kernel asks for capabilities and removes them itself, and tells of the two bits:
by a flag in OPEN (O_TRUNC), WRITE and SETATTR (truncation), and before any other change, a write that
passes through included, by a SETATTR that sets nothing. It knows only the node that is written. A file
may have got privileges through another node, or on another host, while a private copy was written: it
loses them when the copy is published.
"""

import errno
import stat
from typing import Final, NamedTuple

from ..backend.namespace import Inode, acl, fail
from ..callers.processes import (
    CAP_DAC_OVERRIDE,
    CAP_DAC_READ_SEARCH,
    CAP_FOWNER,
    CAP_FSETID,
    Processes,
)
from ..inline import detach
from ..mount_options import MountOptions
from .calls import Caller

SEARCH: Final = stat.S_IXOTH
LIST: Final = stat.S_IROTH
CAPABILITY: Final = b"security.capability"
SET_IDS: Final = stat.S_ISUID | stat.S_ISGID
_HAS_CAPABILITY: Final = 1 << 16


async def refuse_access(
    directory: Inode, wanted: int, ctx: Caller, processes: Processes, options: MountOptions
) -> None:
    """Raise OSError EACCES unless the caller may do what is wanted (SEARCH, LIST or both) in a directory,
    by the owners and modes that the mount shows. The kernel checks too late: when an answer has told
    what it was to protect."""
    owner = directory.uid if options.uid is None else options.uid
    group = directory.gid if options.gid is None else options.gid
    mode = directory.mode & ~(options.umask or 0)
    access = directory.xattrs.get(acl.ACCESS) if ctx.uid != owner else None
    if ctx.uid == owner:
        granted = mode >> 6
    elif access is None:
        granted = mode & mode >> 3  # both for members of the group and for others
    else:
        granted = 0
    if granted & wanted == wanted:
        return
    await detach(any_signal=True)
    caller = await processes.credentials(ctx.pid)
    if caller.has(CAP_DAC_OVERRIDE) or caller.has(CAP_DAC_READ_SEARCH):
        return
    if ctx.uid != owner:
        groups = {ctx.gid, *caller.groups}
        if access is not None:
            is_granted = acl.grants(access, wanted, ctx.uid, group, groups)
        else:
            is_granted = (mode >> 3 if group in groups else mode) & wanted == wanted
        if is_granted:
            return
    raise fail(errno.EACCES)


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
