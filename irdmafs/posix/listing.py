"""What is below a directory, whole, in one answer: the attribute user.irdmafs.tree.

A program that waits for changes would otherwise look at each name by requests of its own, and in a cluster
ask etcd for each. This answer needs no request to etcd: it is what this mount has been told so far, at one
revision, with the counter of changes that belongs to it. Whoever waits for another counter misses nothing.
"""

import errno
import json
import os
import stat
from typing import Any, Final

from ..backend.namespace import Inode, Namespace, fail
from ..backend.namespace.acl import ACCESS

# The largest value of an attribute that Linux takes.
_BYTES_MAX: Final = 65536
# What an entry needs at least beside its name: '"":[1],'.
_ENTRY_BYTES: Final = 7
_ALL: Final = stat.S_IROTH | stat.S_IXOTH


def tree_below(namespace: Namespace, directory: Inode, counter: int, uid: int) -> bytes:
    """Return what a user may see below a directory as JSON: the counter and its entries, by name. Of a file
    [ino, ctime_ns, size, version, nlink], as published; of a directory [ino, entries], or [ino, null] if
    it is not sure that the user may look there; of anything else [ino]. Raises OSError EACCES for the
    directory itself, and E2BIG if there is too much for an attribute."""
    if not _may_look(directory, uid):
        raise fail(errno.EACCES, "only its owner, or everybody, may ask for all that is below it")
    room = _BYTES_MAX

    def entries(ino: int) -> dict[str, Any]:
        nonlocal room
        found = {}
        for name, child in namespace.children(ino):
            room -= len(name) + _ENTRY_BYTES
            if room < 0:
                raise _too_much()
            inode = namespace.inodes.get(child)
            if inode is not None:
                found[os.fsdecode(name)] = entry(inode)
        return found

    def entry(inode: Inode) -> list[Any]:
        if inode.is_file:
            return [inode.ino, inode.ctime_ns, inode.size, inode.version, inode.nlink]
        if inode.is_dir:
            return [inode.ino, entries(inode.ino) if _may_look(inode, uid) else None]
        return [inode.ino]

    answer = json.dumps([counter, entries(directory.ino)], separators=(",", ":")).encode()
    if len(answer) > _BYTES_MAX:
        raise _too_much()
    return answer


def _may_look(directory: Inode, uid: int) -> bool:
    """Return whether a user may surely list a directory and see its files' status. Who is in a group, and
    what ACLs and capabilities allow, is left to the kernel."""
    mode = directory.mode
    if uid == directory.uid:
        return mode >> 6 & _ALL == _ALL
    return ACCESS not in directory.xattrs and mode & mode >> 3 & _ALL == _ALL


def _too_much() -> OSError:
    return fail(errno.E2BIG, "there is too much below it for one answer")
