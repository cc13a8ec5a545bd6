"""The choice between replacing a file as a whole at its close, and at once as on other filesystems."""

from contextlib import suppress

from ..backend.namespace import Inode, Namespace
from ..backend.namespace.attributes import ISOLATION


class Isolation:
    """`default` is the mount's; the nearest directory above a file that has the attribute
    user.irdmafs.isolation ("on" or "off") decides otherwise."""

    def __init__(self, namespace: Namespace, *, default: bool = True) -> None:
        self._namespace = namespace
        self._default = default

    def of(self, inode: Inode) -> bool:
        """Return whether opening this file with O_TRUNC begins a version of its own."""
        return self.below(inode.parent or next(iter(self._namespace.parents_of(inode.ino)), 0))

    def below(self, ino: int) -> bool:
        """Return whether files in this directory are isolated. If so, other hosts do not see the name of a
        new one before its first version, either."""
        inodes = self._namespace.inodes
        with suppress(KeyError):  # a directory that is gone
            while ino:
                directory = inodes[ino]
                value = directory.xattrs.get(ISOLATION)
                if value is not None:
                    return value != b"off"
                ino = directory.parent
        return self._default
