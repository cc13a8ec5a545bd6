"""Extended attributes: those that are kept, and our own, which tell or do something."""

import errno
import json
import os
from collections.abc import Callable
from typing import Any, Final

from ..backend.namespace import ROOT_INO, Inode, acl, fail
from ..backend.namespace.attributes import AWAITS
from ..backend.namespace.quotas import QUOTA_NAMES
from ..callers.credentials import CAP_SYS_ADMIN
from ..callers.processes import ids_of, open_thread
from ..inline import detach
from . import own_xattrs, quotas
from .calls import Caller
from .listing import tree_below
from .privileges import privileges_of
from .superblock import Part, Superblock
from .waits import Waits

_DESCRIPTOR_MAX: Final = 2**31 - 1
_WHY_MAX: Final = 96
_TRUSTED: Final = b"trusted."
_XATTR_NAMESPACES: Final = (b"user.", _TRUSTED, b"security.")


class Xattrs(Part):
    """Sets, shows and removes extended attributes. `status`: what user.irdmafs.status tells; `acls`: the
    session has the kernel check ACLs, otherwise there are none."""

    def __init__(
        self, block: Superblock, waits: Waits, status: Callable[[], dict[str, Any]], *, acls: bool
    ) -> None:
        super().__init__(block)
        self._waits = waits
        self._status = status
        self._acls = acls
        self._refusals = own_xattrs.Refusals(block.namespace)

    async def setxattr(
        self,
        inode: int,
        name: bytes,
        value: bytes,
        ctx: Caller,
        flags: int = 0,
        *,
        drop_set_gid: bool = False,
    ) -> None:
        found = self._nodes.inode_of(inode)
        self._refuse_unknown_xattr(name)
        if name.startswith(own_xattrs.PREFIX):
            with self._refusals.saying_why(found, name, value, ctx.pid):
                if name == own_xattrs.DISCARD:
                    self._cache.sharing.discard(self._nodes.get(inode)[0])
                    return
                self._namespace.check_writable(found.ino)
                own_xattrs.refuse_nonsense(found, name, value)
                if name in QUOTA_NAMES:
                    await quotas.refuse_setting(ctx.uid, ctx.pid, self._processes)
                await self._store.prepare_attribute(found, name, value)
        await self._namespace.set_xattr(found.ino, name, value, flags, drop_set_gid=drop_set_gid)
        self._answers.refresh_several(found.ino)
        if name == AWAITS and self._cache.kernel.can_forget:
            # The kernel may remember that names do not exist in this directory.
            self._cache.kernel.forget((), names=True)
        node = self._nodes.by_id.get(inode)
        if node is not None:
            node.told |= privileges_of(self._nodes.inode_of(inode))

    def _refuse_unknown_xattr(self, name: bytes) -> None:
        """Raise OSError EINVAL for a namespace without a name, and EOPNOTSUPP for an unknown namespace.

        A mount that does not check ACLs refuses them, too, so that no program relies on one.
        """
        if name in _XATTR_NAMESPACES:
            raise fail(errno.EINVAL)
        if name.startswith(_XATTR_NAMESPACES) or (name in acl.NAMES and self._acls):
            return
        raise fail(errno.EOPNOTSUPP)

    async def getxattr(self, inode: int, name: bytes, ctx: Caller) -> bytes:
        found = self._nodes.inode_of(inode)
        self._refuse_unknown_xattr(name)
        value = found.xattrs.get(name)
        if value is not None:
            return value
        if name == own_xattrs.VERSION and found.is_file:
            node, _ = self._nodes.get(inode)
            return b"%d" % self._cache.looks.version(node, found)
        if name == own_xattrs.VERSIONS and found.is_file:
            return json.dumps(own_xattrs.versions(found, self._cache, self._nodes)).encode()
        if name == own_xattrs.KEEPS_NO_PAGES and found.is_file:
            return b"%d" % self._cache.references.announce(ctx.pid, found.ino, ctx.uid)
        if name == own_xattrs.PREFETCH_NOW:
            self._store.prefetch(found.ino)
        if name in (own_xattrs.PREFETCH, own_xattrs.PREFETCH_NOW):
            return json.dumps(self._store.prefetch_progress(found.ino)).encode()
        if name.startswith(own_xattrs.CHANGES) and found.is_dir:
            return b"%d" % await self._count(found.ino, name, own_xattrs.CHANGES, ctx)
        if name.startswith(own_xattrs.TREE) and found.is_dir:
            counter = await self._count(found.ino, name, own_xattrs.TREE, ctx)
            found = self._namespace.inode(found.ino)
            return tree_below(self._namespace, found, counter, ctx.uid)
        if name == own_xattrs.STATUS and found.ino == ROOT_INO:
            status = self._status()
            status["warnings"] += self._refusals.warnings()
            return json.dumps(status).encode()
        if name == own_xattrs.NODES and found.is_file:
            return await self._nodes_of(found)
        if name in (own_xattrs.QUOTA_USED_BYTES, own_xattrs.QUOTA_USED_INODES):
            await self._coherence.freshen(found)
            return quotas.used(self._namespace, found.ino, name)
        if name.startswith(own_xattrs.READ_INTO) and found.is_file and self._store.reads_into:
            try:
                answer = await self._read_into(inode, name, ctx)
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:
                    raise
                answer = {"why_not": str(error.strerror)[:_WHY_MAX]}
            return json.dumps(answer).encode()
        raise fail(errno.ENODATA)

    async def _nodes_of(self, inode: Inode) -> bytes:
        await self._coherence.freshen(inode)
        if self._store.sends:
            await detach()
        found = await self._store.nodes_of(self._namespace.inode(inode.ino))
        return json.dumps(found, separators=(",", ":")).encode()

    async def _count(self, directory: int, name: bytes, attribute: bytes, ctx: Caller) -> int:
        """Return the counter of changes below a directory, as the name of an attribute asks for it."""
        asked = own_xattrs.changes_asked(name, attribute)
        if asked is not None:
            count, seconds = asked
            await self._waits.changed(directory, count, seconds, ctx)
        return self._waits.count(directory)

    async def _read_into(self, node_id: int, name: bytes, ctx: Caller) -> dict[str, Any]:
        """Read a file's current version, as an open would find it, into memory that the caller lends. An
        answer fits the buffer of a first getxattr(2) call. Raises OSError EOPNOTSUPP, with the reason, if
        the file should be opened instead."""
        _, *numbers = name.removeprefix(own_xattrs.READ_INTO).split(b".")
        if len(numbers) != 2 or not all(map(bytes.isdigit, numbers)):
            raise fail(errno.EINVAL)
        lent = [*map(int, numbers)]
        if max(lent) > _DESCRIPTOR_MAX:
            raise fail(errno.EBADF)
        _, found = await self._coherence.settle_names(node_id, ctx.pid, by_name=True)
        if self._cache.sharing.is_written_in_place(found):
            raise fail(errno.EOPNOTSUPP, "it is being written on this host")
        await detach()
        memory, lifeline = await self._take(ctx.pid, *lent)
        found = await self._store.read_into(found.ino, memory, lifeline)
        return {"version": found.version, "size": found.size}

    async def _take(self, thread: int, memory: int, lifeline: int) -> tuple[int, int]:
        process = open_thread(thread)
        try:
            uid = ids_of(thread).uid
            return await self._processes.onlookers.lend(uid, process, thread, memory, lifeline)
        finally:
            os.close(process)

    async def listxattr(self, inode: int, ctx: Caller) -> list[bytes]:
        # A quota belongs to its place, so `cp -a` and `rsync -X` must not copy it.
        names = [name for name in self._nodes.inode_of(inode).xattrs if name not in QUOTA_NAMES]
        trusted = any(name.startswith(_TRUSTED) for name in names)
        if trusted and not (await self._processes.credentials(ctx.pid)).has(CAP_SYS_ADMIN):
            names = [name for name in names if not name.startswith(_TRUSTED)]
        return names if self._acls else [name for name in names if name not in acl.NAMES]

    async def removexattr(self, inode: int, name: bytes, ctx: Caller) -> None:
        found = self._nodes.inode_of(inode)
        self._refuse_unknown_xattr(name)
        if name in QUOTA_NAMES:
            await quotas.refuse_setting(ctx.uid, ctx.pid, self._processes)
        await self._namespace.remove_xattr(found.ino, name)
        self._answers.refresh_several(found.ino)
