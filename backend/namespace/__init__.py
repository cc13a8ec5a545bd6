"""The namespace: the tree of directories, names and inodes that programs change."""

from .namespace import (
    NAME_MAX,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    RENAME_WHITEOUT,
    ROOT_INO,
    XATTR_SIZE_MAX,
    Dentry,
    Inode,
    Namespace,
    Outdated,
    SharedCommitter,
    Tree,
    fail,
    load_own,
)

__all__ = [
    "NAME_MAX",
    "RENAME_EXCHANGE",
    "RENAME_NOREPLACE",
    "RENAME_WHITEOUT",
    "ROOT_INO",
    "XATTR_SIZE_MAX",
    "Dentry",
    "Inode",
    "Namespace",
    "Outdated",
    "SharedCommitter",
    "Tree",
    "fail",
    "load_own",
]
