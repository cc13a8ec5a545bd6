"""Names that wait: a directory with user.irdmafs.train = "since" leads to versions that are to come.

Each decimal number N is a name in it that no listing shows: a symbolic link whose target is known
when the directory `versions` beside it has a name that is a number M >= N. The target is ../versions/M, of
all such M the largest.

A link is an inode of the tree without a record, as a file without a name is. Its number follows from its
directory and N, on every host. Each lookup makes a node of its own: the kernel keeps a link's target with
the node, and everybody who reads it waits with the page locked, which no signal ends.
"""

import errno
import math
import stat
from hashlib import blake2b
from typing import Final

import trio

from ..backend.namespace import FIRST_VIRTUAL_INO, Inode, Namespace, fail
from ..backend.namespace.attributes import SINCE, SINCE_TIMEOUT, TRAIN, since_timeout_s
from ..backend.store.api import Freshness
from ..coherence.kernel_cache import KernelCache
from ..coherence.nodes import NodeTable
from ..inline import detach
from .answers import Answers
from .calls import Attributes, Caller
from .waits import Waits

__all__ = ["Since"]

_VERSIONS: Final = b"versions"
_DIGITS_MAX: Final = 18
# A node's id has 16 bits that tell it from others of its inode.
_NODES_MAX: Final = 1 << 15
_PRUNE_EVERY: Final = 256


class Since:
    """The links of all such directories. `freshness` is None where nobody else changes the namespace."""

    def __init__(
        self,
        namespace: Namespace,
        nodes: NodeTable,
        answers: Answers,
        waits: Waits,
        freshness: Freshness | None,
        kernel: KernelCache,
    ) -> None:
        self._namespace = namespace
        self._inodes = namespace.inodes
        self._nodes = nodes
        self._answers = answers
        self._waits = waits
        self._freshness = freshness
        self._kernel = kernel
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
        link = self._link(directory, int(name))
        if self._nodes.count(link.ino) >= _NODES_MAX:
            raise fail(errno.EAGAIN)
        node = self._nodes.add(link)
        node.lookups += 1
        self._found.add(node.id)
        if len(self._found) >= self._prune_at:
            self._prune()
        return self._answers.attributes(node, link)

    def _prune(self) -> None:
        """Have the kernel drop the links that nobody uses."""
        in_use = self._pruned & self._nodes.by_id.keys()
        self._pruned = in_use | self._found
        self._found.clear()
        self._prune_at = len(in_use) + _PRUNE_EVERY
        self._kernel.prune(list(self._pruned))

    def refuse(self, directory: Inode, name: bytes) -> None:
        """Raise OSError EPERM if a name that is to be made or removed is a link."""
        if _is_link(directory, name) and self._namespace.lookup(directory.ino, name) is None:
            raise fail(errno.EPERM)

    async def target(self, link: Inode, ctx: Caller) -> bytes:
        """Return the target of a link, as soon as there is one. Raises OSError ETIMEDOUT; EAGAIN, EINTR as
        Waits does; ESTALE if its directory is gone."""
        first = int(link.target)
        if self._freshness is not None:
            await self._freshen(self._freshness, link.parent)
        found = self._newest(link.parent, first)
        if found is not None:
            return found
        directory = self._namespace.inode(link.parent)
        await detach(any_signal=True)
        timeout_s = since_timeout_s(directory.xattrs.get(SINCE_TIMEOUT, b""))
        with trio.move_on_after(timeout_s):
            while True:
                watched = self._versions(link.parent) or self._namespace.parent_of(link.parent)
                count = self._waits.count(watched)
                found = self._newest(link.parent, first)
                if found is not None:
                    return found
                await self._waits.changed(watched, count, math.inf, ctx)
        raise fail(errno.ETIMEDOUT)

    def _link(self, directory: Inode, number: int) -> Inode:
        """Return the inode of a link, made unless it is there."""
        target = b"%d" % number
        digest = blake2b(b"%d/%d" % (directory.ino, number), digest_size=8).digest()
        ino = FIRST_VIRTUAL_INO + int.from_bytes(digest) % FIRST_VIRTUAL_INO
        while (known := self._inodes.get(ino)) is not None:
            if known.parent == directory.ino and known.target == target:
                return known
            ino = FIRST_VIRTUAL_INO + (ino + 1) % FIRST_VIRTUAL_INO
        link = Inode(ino, stat.S_IFLNK | 0o777, 0, 0, directory.birth_ns)
        link.parent, link.target = directory.ino, target
        self._namespace.add_virtual(link)
        return link

    async def _freshen(self, freshness: Freshness, directory: int) -> None:
        """Have the namespace know every version that was committed before."""
        parent = self._inodes.get(self._namespace.parent_of(directory))
        if parent is None:
            return
        for ino in (parent.ino, self._versions(directory)):
            inode = self._inodes.get(ino)
            if inode is not None and not freshness.is_fresh(inode):
                await detach(any_signal=True)
                await freshness.freshen(inode)

    def _versions(self, directory: int) -> int:
        """Return the directory of versions beside a directory, 0: there is none."""
        found = self._namespace.lookup(self._namespace.parent_of(directory), _VERSIONS)
        return found.ino if found is not None and found.is_dir else 0

    def _newest(self, directory: int, first: int) -> bytes | None:
        """Return the path of the newest version if that is at least `first`."""
        versions = self._versions(directory)
        if not versions:
            return None
        names = [name for name, _ in self._namespace.children(versions) if _is_number(name)]
        newest = max(names, key=int, default=None)
        if newest is None or int(newest) < first:
            return None
        return b"../" + _VERSIONS + b"/" + newest


def _is_number(name: bytes) -> bool:
    return name.isdigit() and len(name) <= _DIGITS_MAX


def _is_link(directory: Inode, name: bytes) -> bool:
    """Return whether a name is a link, unless something has that name."""
    return bool(directory.xattrs) and directory.xattrs.get(TRAIN) == SINCE and _is_number(name)
