"""Subvolumes: directories that a mount can be kept to.

etcd's roles are ranges of keys, and the keys of names, inodes, locks and claims begin with the numbers of
inodes. So the inodes of a subvolume have numbers of a range of their own; the first is the directory's. As
between project quotas, nothing is moved or linked into it or out of it: EXDEV.
"""

from ..model.records import NEXT_INO_KEY, NEXT_INO_OF, key_of
from .inode import FIRST_VIRTUAL_INO, ROOT_INO

# All that have records, those of subvolumes among them.
ALL_INOS = range(ROOT_INO, FIRST_VIRTUAL_INO)
_SIZE = 1 << 36
# The directories that may be subvolumes.
SUBVOLUMES = range(FIRST_VIRTUAL_INO // 2, FIRST_VIRTUAL_INO, _SIZE)


def subvolume_of(ino: int) -> int:
    """Return the directory of the subvolume that an inode is in; ROOT_INO if it is in none."""
    return ino & -_SIZE if SUBVOLUMES.start <= ino < SUBVOLUMES.stop else ROOT_INO


def numbers_of(subvolume: int) -> range:
    """Return the numbers of a subvolume's inodes; for ROOT_INO of those that are in none."""
    if subvolume == ROOT_INO:
        return range(ROOT_INO, SUBVOLUMES.start)
    return range(subvolume, subvolume + _SIZE)


def belongs(ino: int, directory: int) -> bool:
    """Return whether an inode may have a name in a directory."""
    own, subvolume = subvolume_of(ino), subvolume_of(directory)
    return own == subvolume or (subvolume == ROOT_INO and ino == own)


def next_ino_key(subvolume: int) -> bytes:
    """Return the key of the next free inode number of a subvolume; ROOT_INO: outside of all."""
    return NEXT_INO_KEY if subvolume == ROOT_INO else key_of(NEXT_INO_OF, subvolume)
