"""Drafts: directories whose new files a mount may store a while after they are closed.

The attribute user.irdmafs.drafts of a directory has patterns of names (fnmatch), with spaces between them.
A directory below it whose name matches one is a draft while it has that name, and so is all that is below.
A directory whose name begins with ".draft-" is always one: programs that use irdmafs.client make these.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from .inode import Inode, Unread, upwards

DRAFTS = b"user.irdmafs.drafts"
_NAMED = b".draft-"
# Each close in a draft compares them with each name of its path.
_PATTERNS_MAX_BYTES = 255


def check(value: bytes) -> None:
    """Raise ValueError unless this is a value of DRAFTS."""
    if not value.split() or b"/" in value or len(value) > _PATTERNS_MAX_BYTES:
        raise ValueError(
            "user.irdmafs.drafts has patterns of the names of directories, such as *.tmp, with spaces "
            f"between them, {_PATTERNS_MAX_BYTES} bytes at most; not {value.decode(errors='replace')!r}"
        )


def is_named_draft(name: bytes) -> bool:
    """Return whether a directory of this name is a draft wherever it is."""
    return name.startswith(_NAMED)


def is_in_named_draft(inodes: Mapping[int, Inode], directory: int) -> bool:
    """Return whether a directory is such a draft, or below one."""
    return any(is_named_draft(inode.name) for inode in upwards(inodes, directory))


def is_draft(inodes: Mapping[int, Inode], directory: int, *below: bytes) -> bool:
    """Return whether a directory is a draft, or below one; or else one of the directories `below` it.
    Raises Unread if the name of one above is not known."""
    names, patterns = [*below], list[bytes]()
    for inode in upwards(inodes, directory):
        if not patterns and DRAFTS in inode.xattrs:
            # A member may have forged longer ones.
            patterns = inode.xattrs[DRAFTS][:_PATTERNS_MAX_BYTES].split()
            if any(fnmatchcase(name, pattern) for pattern in patterns for name in names):
                return True
        if inode.parent and inode.nlink and not inode.name:
            raise Unread(inode.parent)
        names.append(inode.name)
    return any(map(is_named_draft, names))
