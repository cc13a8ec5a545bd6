"""Checks of permissions that the kernel makes too late: when an answer has told what it was to protect."""

import errno
import stat
from typing import Final

from ..backend.namespace import Inode, acl, fail
from ..callers.credentials import CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
from ..callers.processes import Processes
from ..inline import detach
from ..mount_options import MountOptions
from .calls import Caller

SEARCH: Final = stat.S_IXOTH
LIST: Final = stat.S_IROTH


class Permissions:
    """Tells what callers may do in directories, by the owners and modes that the mount shows."""

    def __init__(self, processes: Processes, options: MountOptions) -> None:
        self._processes = processes
        self._options = options

    async def check(self, directory: Inode, wanted: int, ctx: Caller) -> None:
        """Raise OSError EACCES unless the caller may do what is wanted, a sum of SEARCH and LIST."""
        options = self._options
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
        caller = await self._processes.credentials(ctx.pid)
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
