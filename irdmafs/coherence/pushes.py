"""Pushes: files that are checked before they are published, because a directory above has the
attribute user.irdmafs.train=push (docs/training.md)."""

from typing import NamedTuple, Protocol

from ..backend.namespace import Inode, Namespace
from ..backend.namespace.attributes import PUSH, TRAIN

__all__ = ["Checker", "Owner", "Pushes", "Refused"]

# Levels below the directory with the attribute: a push is a file, or a directory of files, which a worker
# writes in a directory of its own.
_DEPTH = 3


class Refused(OSError):
    """A push is not in order, or could not be checked; `strerror` says why."""


class Owner(NamedTuple):
    """A directory's user and group."""

    uid: int
    gid: int


class Checker(Protocol):
    async def check(self, directory: bytes, name: bytes, fd: int, owner: Owner) -> None:
        """Check a push with the rights of `owner`. `directory` is the path of that with the attribute, from
        the root of the mount; `name` is that of the push, from there. Raises Refused."""


class Pushes:
    """Tells which files are pushes, and has them checked."""

    def __init__(self, namespace: Namespace, checker: Checker) -> None:
        self._namespace = namespace
        self._inodes = namespace.inodes
        self._checker = checker

    def directory_of(self, inode: Inode) -> int:
        """Return the directory with the attribute if the file is a push, else 0."""
        if inode.parent:
            return self._above(inode.parent)
        return next(filter(None, map(self._above, self._namespace.parents_of(inode.ino))), 0)

    def _above(self, parent: int) -> int:
        for _ in range(_DEPTH):
            directory = self._inodes.get(parent)
            if directory is None:
                break
            if directory.xattrs and directory.xattrs.get(TRAIN) == PUSH:
                return parent
            parent = directory.parent
        return 0

    async def check(self, ino: int, directory: int, fd: int) -> None:
        """Check the content `fd` of a push. Raises Refused; OSError ESTALE if it was moved away."""
        path = self._namespace.path_of(directory)
        name = self._name_below(ino, path + b"/")
        found = self._namespace.inode(directory)
        await self._checker.check(path, name, fd, Owner(found.uid, found.gid))

    def _name_below(self, ino: int, prefix: bytes) -> bytes:
        paths = (
            self._namespace.path_of(parent) + b"/" + name
            for parent, name in self._namespace.names_of(ino)
        )
        return next((path for path in paths if path.startswith(prefix)), prefix).removeprefix(
            prefix
        )
