"""The namespace: the tree of directories, names and inodes that programs change."""

from .clones import NewClone
from .commit import Joint
from .inode import FIRST_VIRTUAL_INO, NAME_MAX, ROOT_INO, Inode, NoInode, Unread, fail
from .known import answered
from .local import LocalCommitter
from .namespace import XATTR_SIZE_MAX, Namespace
from .planner import RENAME_EXCHANGE, RENAME_NOREPLACE, RENAME_WHITEOUT, NewVersion, Outdated
from .shared import SharedCommitter
from .tree import Tree

__all__ = [
    "FIRST_VIRTUAL_INO",
    "NAME_MAX",
    "RENAME_EXCHANGE",
    "RENAME_NOREPLACE",
    "RENAME_WHITEOUT",
    "ROOT_INO",
    "XATTR_SIZE_MAX",
    "Inode",
    "Joint",
    "LocalCommitter",
    "Namespace",
    "NewClone",
    "NewVersion",
    "NoInode",
    "Outdated",
    "SharedCommitter",
    "Tree",
    "Unread",
    "answered",
    "fail",
]
