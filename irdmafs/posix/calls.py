"""The arguments of operations that say who calls them and for what, and their answers."""

import errno
from dataclasses import dataclass
from typing import Final, Protocol

from ..backend.namespace import Inode, fail

OFFSET_MAX: Final = 2**63 - 1


class Caller(Protocol):
    """The process that made a request; pyfuse3's RequestContext is one."""

    @property
    def uid(self) -> int: ...
    @property
    def gid(self) -> int: ...
    @property
    def pid(self) -> int: ...


class Attributes:
    """Attributes of a node, or a name that leads to none (`st_ino` 0). Names are those of
    pyfuse3.EntryAttributes, which takes longer to fill in and to read.

    `st_ino` is the node id; `ino` is what stat(2) shows. Timeouts are seconds.
    """

    entry_timeout: float = 0
    attr_timeout: float = 0
    generation: int = 0
    ino: int = 0
    st_ino: int = 0
    st_mode: int = 0
    st_nlink: int = 0
    st_uid: int = 0
    st_gid: int = 0
    st_rdev: int = 0
    st_size: int = 0
    st_blocks: int = 0
    st_atime_ns: int = 0
    st_mtime_ns: int = 0
    st_ctime_ns: int = 0


@dataclass(slots=True)
class Space:
    """The answer to statfs(2), in the names of its fields, and as statvfs(3) orders them."""

    f_bsize: int
    f_frsize: int
    f_blocks: int
    f_bfree: int
    f_bavail: int
    f_files: int
    f_ffree: int
    f_favail: int
    f_namemax: int = 255


def refuse_other_than_file(inode: Inode) -> None:
    """Raise OSError unless the inode is a file: the kernel opens devices and fifos itself."""
    if not inode.is_file:
        raise fail(errno.EISDIR if inode.is_dir else errno.EINVAL)
