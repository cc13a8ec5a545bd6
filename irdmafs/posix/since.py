"""Names that wait: a directory with user.irdmafs.awaits = DIRECTORY leads to names that are to come.

Each name in it is a symbolic link to that name in the directory DIRECTORY beside it. No listing shows
the links. A reader of a link waits until the name is there and, if it is a file, has a version. A
decimal number N leads to the largest number M >= N among the names. Names that begin with a dot are
no links.

A link is an inode of the tree without a record, as a file without a name is. Its number follows from its
directory and N, on every host. Each lookup makes a node of its own: the kernel keeps a link's target with
the node, and everybody who reads it waits with the page locked, which no signal ends.
"""

import errno
import math
import stat
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import trio

from ..backend.namespace import FIRST_VIRTUAL_INO, Inode, fail
from ..backend.namespace.attributes import AWAITS, awaits_timeout_s
from ..inline import detach
from .calls import Attributes, Caller
from .metadata import Part, Superblock
from .permissions import LIST, SEARCH, refuse_access
from .waits import Waits

if TYPE_CHECKING:
    from ..backend.store.remote.versions import Freshness

_DIGITS_MAX: Final = 18
# A node's id has 16 bits that tell it from others of its inode.
_NODES_MAX: Final = 1 << 15
_PRUNE_EVERY: Final = 256


class Since(Part):
    """The links of all such directories."""

    def __init__(self, block: Superblock, waits: Waits) -> None:
        super().__init__(block)
        self._waits = waits
        # None where nobody else changes the namespace.
        self._freshness = self._store.freshness
        # Nodes that the kernel keeps although it asks for the names again: those since it was made to drop
        # them, and those that it was to drop.
        self._found: set[int] = set()
        self._pruned: set[int] = set()
        self._prune_at = _PRUNE_EVERY

    def find(self, directory: Inode, name: bytes) -> Attributes | None:
        """Return the answer to a lookup of a name that does not exist, if it is to be a link. Raises
        OSError EAGAIN if too many hold it."""
        if not _is_link(directory, name):
            return None
        link = self._link(directory, name)
        if len(self._nodes.siblings.get(link.ino, ())) >= _NODES_MAX:
            raise fail(errno.EAGAIN)
        node = self._nodes.add(link)
        node.lookups += 1
        self._found.add(node.id)
        if len(self._found) >= self._prune_at:
            self._prune()
        return self._metadata.describe(node, link)

    def _prune(self) -> None:
        """Have the kernel drop the links that nobody uses."""
        in_use = self._pruned & self._nodes.by_id.keys()
        self._pruned = in_use | self._found
        self._found.clear()
        self._prune_at = len(in_use) + _PRUNE_EVERY
        self._cache.kernel.prune(list(self._pruned))

    def refuse(self, directory: Inode, name: bytes) -> None:
        """Raise OSError EPERM if a name that is to be made or removed is a link."""
        if _is_link(directory, name) and self._namespace.lookup(directory.ino, name) is None:
            raise fail(errno.EPERM)

    async def target(self, link: Inode, ctx: Caller) -> bytes:
        """Return the target of a link, as soon as there is one. Raises OSError ETIMEDOUT; EACCES to who may
        not look where it leads; EAGAIN, EINTR as Waits does; ESTALE if its directory is gone, ENOENT if
        that is an ordinary one now."""
        directory = self._namespace.inode(link.parent)
        if self._freshness is not None:
            await self._freshen(self._freshness, directory)
        found = await self._found_by(directory, link.target, ctx)
        if found is not None:
            return found
        await detach(any_signal=True)
        with trio.move_on_after(awaits_timeout_s(directory)):
            while True:
                directory = self._namespace.inode(link.parent)
                awaited = self._awaited(directory)
                watched = awaited.ino if awaited else self._namespace.parent_of(directory.ino)
                count = self._waits.count(watched)
                found = await self._found_by(directory, link.target, ctx)
                if found is not None:
                    return found
                await self._waits.changed(watched, count, math.inf, ctx)
        raise fail(errno.ETIMEDOUT)

    def _link(self, directory: Inode, name: bytes) -> Inode:
        """Return the inode of a link, made unless it is there."""
        # Two spellings of a number are one link.
        target = b"%d" % int(name) if _is_number(name) else name
        digest = blake2b(b"%d/%b" % (directory.ino, target), digest_size=8).digest()
        ino = FIRST_VIRTUAL_INO + int.from_bytes(digest) % FIRST_VIRTUAL_INO
        while (known := self._inodes.get(ino)) is not None:
            if known.parent == directory.ino and known.target == target:
                return known
            ino = FIRST_VIRTUAL_INO + (ino + 1) % FIRST_VIRTUAL_INO
        link = Inode(ino, stat.S_IFLNK | 0o777, 0, 0, directory.birth_ns)
        link.parent, link.target = directory.ino, target
        self._namespace.add_virtual(link)
        return link

    async def _freshen(self, freshness: "Freshness", directory: Inode) -> None:
        """Have the namespace know every name that was committed before."""
        parent = self._inodes.get(self._namespace.parent_of(directory.ino))
        if parent is None:
            return
        for inode in (parent, self._awaited(directory)):
            if inode is not None and not freshness.is_fresh(inode):
                await detach(any_signal=True)
                await freshness.freshen(inode)

    def _awaited(self, directory: Inode) -> Inode | None:
        """Return the directory that the links of another lead to, if it is there. Raises OSError."""
        name = directory.xattrs.get(AWAITS)
        if name is None:
            raise fail(errno.ENOENT)
        found = self._namespace.lookup(self._namespace.parent_of(directory.ino), name)
        return found if found is not None and found.is_dir else None

    async def _found_by(self, directory: Inode, name: bytes, ctx: Caller) -> bytes | None:
        """Return the target of the link with this name, if there is one. Raises OSError."""
        awaited = self._awaited(directory)
        if awaited is None:
            return None
        wanted = SEARCH | LIST if _is_number(name) else SEARCH
        await refuse_access(awaited, wanted, ctx, self._processes, self._options)
        if _is_number(name):
            numbers = (one for one, _ in self._namespace.children(awaited.ino) if _is_number(one))
            at_least = [one for one in numbers if int(one) >= int(name)]
            found = max(filter(partial(self._is_there, awaited), at_least), key=int, default=None)
        else:
            found = name if self._is_there(awaited, name) else None
        return None if found is None else b"../%b/%b" % (directory.xattrs[AWAITS], found)

    def _is_there(self, directory: Inode, name: bytes) -> bool:
        """Return whether a name is in a directory, and is no file that has no version yet."""
        found = self._namespace.lookup(directory.ino, name)
        if found is None or not stat.S_ISREG(found.mode) or found.version > 0:
            return found is not None
        # In a cluster a file that stays empty gets no version, but everybody sees its name.
        return self._freshness is not None and not found.maker


def _is_number(name: bytes) -> bool:
    return name.isdigit() and len(name) <= _DIGITS_MAX


def _is_link(directory: Inode, name: bytes) -> bool:
    """Return whether a name is a link, unless something has that name."""
    return AWAITS in directory.xattrs and not name.startswith(b".")
