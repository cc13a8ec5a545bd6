"""The POSIX operations of a mount, which both sessions run.

Names and attributes are answered from the namespace's replica; contents are the cache's business.
Methods raise OSError. Those of the kernel session that pyfuse3 has no name for (fallocate, lseek,
copy_file_range, locks, tmpfile) are ordinary methods here.
"""

import ctypes
import errno
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pyfuse3

from ..backend.namespace import RENAME_EXCHANGE, ROOT_INO, Inode, Namespace, acl, fail
from ..backend.namespace.protection import APPEND, IMMUTABLE, refuse_open
from ..backend.namespace.quotas import QUOTA_NAMES
from ..backend.store.api import Store
from ..callers.credentials import CAP_SYS_ADMIN
from ..callers.processes import ids_of, open_thread
from ..coherence.beliefs import Beliefs
from ..coherence.cache import Cache, truncates
from ..coherence.content import Content
from ..coherence.freshness import LookupTrails, TrailStep
from ..coherence.kernel_cache import Name
from ..coherence.nodes import INO_BITS, Handle, Node
from ..inline import detach
from ..mount.config import MountOptions
from . import own_xattrs, quotas
from .atimes import Atimes
from .calls import Attributes, Caller, Fields, OpenInfo
from .locking import Locking
from .locks import Lock
from .privileges import (
    CAPABILITY,
    SET_IDS,
    Closer,
    may_keep_set_ids,
    mode_left,
    privileges_of,
    refuse_stranger,
)
from .privileges import Caller as Changer

log = logging.getLogger(__name__)

_OFFSET_MAX = 2**63 - 1
_DESCRIPTOR_MAX = 2**31 - 1
# The mask of a generation, which tells an inode in a file handle from an earlier one of its number. The
# kernel keeps 32 bits.
_GENERATION = 2**31 - 1
# A file that is replaced each time before its content is here.
_LEADS_MAX = 20
_WHY_MAX = 96
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_TRUSTED = b"trusted."
_XATTR_NAMESPACES = (b"user.", _TRUSTED, b"security.")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def _refuse_other_than_file(inode: Inode) -> None:
    if not inode.is_file:
        # The kernel opens devices and fifos itself.
        raise fail(errno.EISDIR if inode.is_dir else errno.EINVAL)


def _name_of(node: Node | None, names: Sequence[TrailStep]) -> TrailStep | None:
    """The name by which an open came to a node: of those that the thread looked up, or the one that
    the kernel did not look up again."""
    if node is None:
        return names[-1] if names else None
    for step in reversed(names):
        if step.ino == node.ino:
            return step
    return TrailStep(*node.name, node.ino) if node.name is not None else None


class Operations:
    """One mounted filesystem."""

    # True if the session has the kernel check ACLs. Otherwise there are none.
    enforces_acls = False
    # True if the session has one number for a node and its inode in a listing.
    lists_one_number = False
    # How the session takes an entry of a directory; False: it has no room for it.
    readdir_reply: Callable[[Any, bytes, Attributes, int], bool]

    def __init__(
        self,
        store: Store,
        cache: Cache,
        options: MountOptions,
        status: Callable[[], dict[str, Any]],
    ) -> None:
        self._store = store
        self._namespace: Namespace = store.namespace
        self._cache = cache
        self.processes = cache.processes
        self.nodes = cache.nodes
        self._inodes = store.namespace.inodes
        self._status = status
        self.extents = store.extents
        self._shared = store.shared
        # What is believed of a shared namespace is decided answer by answer.
        self._valid_s = 0.0 if store.shared else store.believable_s(ROOT_INO)
        self.listings_stay = not store.shared
        self._trails = LookupTrails(store.namespace)
        self.beliefs = Beliefs(store.namespace, cache.nodes, cache.kernel)
        self._options = options
        self.atimes = Atimes(options, store.extents, cache.nodes.in_use)
        self._umask = options.umask or 0
        self.locking = Locking(options.locks, store.locks, cache, store.namespace.describe)

    # -- helpers ---------------------------------------------------------------------------------

    def _inode(self, node_id: int) -> Inode:
        return self._node(node_id)[1]

    def _node(self, node_id: int) -> tuple[Node, Inode]:
        node = self.nodes.by_id.get(node_id)
        inode = self._inodes.get(node.ino) if node is not None else None
        if node is None or inode is None:
            raise fail(errno.ESTALE)
        return node, inode

    def _file_handle(self, fh: int, *, writing: bool = False) -> Handle:
        """An open file; KeyError when there is none, OSError EBADF when it is not open for this."""
        handle = self.nodes.handles[fh]
        if handle.is_directory or (writing and not handle.writing):
            raise fail(errno.EBADF)
        return handle

    @staticmethod
    def _content(handle: Handle) -> Content:
        assert handle.content is not None
        return handle.content

    def _directory_handle(self, fh: int) -> Handle:
        handle = self.nodes.handles[fh]
        if not handle.is_directory:
            raise fail(errno.ENOTDIR)
        return handle

    def _attributes(self, node: Node, inode: Inode, *, is_new: bool = False) -> Attributes:
        """`is_new`: nobody can have written it."""
        entry = Attributes()
        mode = inode.mode
        entry.ino = inode.ino
        entry.st_ino = node.id
        if mode & 0o170000 == stat.S_IFREG and not is_new:
            shown = self._cache.shown(node, inode)
            entry.st_size, entry.st_blocks, entry.st_mtime_ns, entry.st_ctime_ns = shown
        else:
            entry.st_size = inode.size
            entry.st_mtime_ns = inode.mtime_ns
            entry.st_ctime_ns = inode.ctime_ns
        options = self._options
        entry.st_mode = mode & ~self._umask
        entry.st_nlink = inode.nlink
        node.told = privileges_of(inode) if mode & SET_IDS or inode.xattrs else 0
        entry.st_uid = inode.uid if options.uid is None else options.uid
        entry.st_gid = inode.gid if options.gid is None else options.gid
        entry.st_rdev = inode.rdev
        entry.st_atime_ns = self.atimes.of(inode)
        entry.generation = inode.birth_ns & _GENERATION if inode.ino != ROOT_INO else 0
        entry.entry_timeout = entry.attr_timeout = self._valid_s
        if self._cache.changes_unnoticed(node):
            entry.attr_timeout = 0
        return entry

    def _entry(
        self, parent: int, name: bytes, inode: Inode, pid: int, *, made: bool = False
    ) -> Attributes:
        """What a lookup answers; the kernel then holds one more reference to the node."""
        node = self._cache.node_of(inode, pid)
        node.lookups += 1
        entry = self._attributes(node, inode)
        if not self._cache.names_are_stable(inode.ino):
            entry.entry_timeout = 0
        elif self._shared:
            node.name = (parent, name)
            # What leads to a directory is no question about the one it lies in.
            valid_s = self._store.believable_s(parent, used=not inode.is_dir)
            if inode.is_dir and not valid_s:
                valid_s = self._store.path_valid_s(inode.ino)
            self._let_believe(entry, parent, name, inode, valid_s, made=made)
        return entry

    def _let_believe(
        self,
        entry: Attributes,
        parent: int,
        name: bytes,
        inode: Inode,
        valid_s: float,
        *,
        made: bool = False,
    ) -> None:
        """Say in an answer for how long its name and attributes hold in a shared namespace; `made`:
        the kernel takes the attributes for the newest, though they may be older than others."""
        if not valid_s or not self._cache.kernel.can_forget:
            if inode.is_dir and not made:
                self._let_believe_attributes(entry, inode)
            return
        if made and not self._leads_to(parent, name, inode.ino):
            return  # others changed it again while they were waited for
        entry.entry_timeout = valid_s
        self.beliefs.name(parent, name, inode.ino, valid_s)
        if not made:
            self._let_believe_attributes(entry, inode, parent, valid_s)

    def _let_believe_attributes(
        self, entry: Attributes, inode: Inode, parent: int = 0, valid_s: float = 0.0
    ) -> None:
        """`valid_s`: for how long `parent` is believable. What has names in several directories is
        believed if all of them are."""
        if self._cache.changes_unnoticed(self.nodes.by_id[entry.st_ino]):
            return
        if parent and inode.parent == parent:
            pass
        elif inode.is_dir:
            valid_s = self._store.believable_s(inode.ino, used=False)
            # Modes of directories are checked at each step of a path.
            valid_s = valid_s or self._store.directories_believable_s()
        else:
            valid_s = min(
                map(self._store.believable_s, self._namespace.parents_of(inode.ino)), default=0.0
            )
        if valid_s and self._cache.kernel.can_forget:
            entry.attr_timeout = valid_s
            self.beliefs.attributes(inode.ino, valid_s)

    def _refresh_other_nodes(self, node: Node | None, ino: int) -> None:
        """An inode's attributes changed through one node: the kernel may hold them for others."""
        for other in self.nodes.of(ino):
            if other is not node:
                self._cache.kernel.invalidate_attributes(other)

    def _refresh_several(self, ino: int) -> None:
        """Something changed that the kernel notes by itself for one node, and cannot for others."""
        nodes = list(self.nodes.of(ino))
        for node in nodes if len(nodes) > 1 else ():
            self._cache.kernel.invalidate_attributes(node)

    # -- names -----------------------------------------------------------------------------------

    def _found_by_handle(self, node_id: int) -> Attributes:
        """Return the attributes of a file handle's node (name_to_handle_at(2)). The kernel may have
        forgotten it."""
        node = self.nodes.by_id.get(node_id)
        inode = self._inodes.get(node.ino if node is not None else node_id % (1 << INO_BITS))
        if inode is None:
            raise fail(errno.ESTALE)
        if node is None:
            node = self._cache.node_of(inode, 0)
            if node.id != node_id:
                node = self.nodes.add(inode, node_id)
        node.lookups += 1
        return self._attributes(node, inode)

    async def lookup(self, parent_inode: int, name: bytes, ctx: Caller) -> Attributes:
        found = self.find(parent_inode, name, ctx.pid)
        if found is not None:
            return found
        parent = self._inode(parent_inode)
        await self._freshen(parent)
        inode = self._namespace.lookup(parent.ino, name)
        if inode is None:
            self._trails.forget(ctx.pid)
            return self._missing()
        return self._entry(parent.ino, name, inode, ctx.pid)

    def find(self, parent_inode: int, name: bytes, pid: int) -> Attributes | None:
        """Return the answer to a lookup by a thread; None: the namespace has to be fresh first."""
        if name == b".":
            return self._found_by_handle(parent_inode)
        parent = self._inode(parent_inode)
        if name == b"..":
            return self._found_by_handle(self._namespace.parent_of(parent.ino))
        inode = self._namespace.lookup(parent.ino, name)
        if self._shared:
            led = self._inodes.get(self._trails.led(pid, (parent.ino, name)))
            if led is not None and self._cache.is_promised(pid, led.ino):
                return self._entry(parent.ino, name, led, pid)
            if inode is None:
                return None
            self._trails.note(pid, parent.ino, name, inode)
        if inode is None:
            return self._missing()
        return self._entry(parent.ino, name, inode, pid)

    def _missing(self) -> Attributes:
        answer = Attributes()
        answer.entry_timeout = self._valid_s
        return answer

    async def _freshen(self, inode: Inode, *, content: bool = False) -> bool:
        """See to it that the namespace is fresh; whether it was without asking. `content`: a small
        file's is wanted, too."""
        if self._store.is_fresh(inode):
            return True
        await detach()
        await self._store.freshen(inode, content=content)
        return False

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for node_id, lookups in inode_list:
            self.nodes.forget(node_id, lookups)
        await self._cache.forget_nameless()

    async def _make(
        self, parent: int, name: bytes, mode: int, ctx: Caller, **what: Any
    ) -> Attributes:
        directory = self._inode(parent)
        if self._shared:
            await detach()
        inode = await self._namespace.create(
            directory.ino, name, mode, ctx.uid, ctx.gid, umask=ctx.umask, **what
        )
        return self._entry(directory.ino, name, inode, ctx.pid, made=True)

    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: Caller
    ) -> Attributes:
        return await self._make(parent_inode, name, mode, ctx, rdev=rdev, version=1)

    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: Caller) -> Attributes:
        mode = mode & ~stat.S_IFMT(mode) | stat.S_IFDIR
        return await self._make(parent_inode, name, mode, ctx)

    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: Caller
    ) -> Attributes:
        if len(target) >= 4096:
            raise fail(errno.ENAMETOOLONG)
        return await self._make(parent_inode, name, stat.S_IFLNK | 0o777, ctx, target=target)

    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: Caller
    ) -> Attributes:
        node, _ = self._node(inode)
        directory = self._inode(new_parent_inode)
        if self._shared:
            await detach()
        await self._cache.publish_now(node.ino)
        linked = await self._namespace.link(node.ino, directory.ino, new_name)
        self._refresh_other_nodes(None, node.ino)  # the name may lead to a further one
        return self._entry(directory.ino, new_name, linked, ctx.pid, made=True)

    async def unlink(self, parent_inode: int, name: bytes, ctx: Caller) -> None:
        parent = self._inode(parent_inode).ino
        if self._shared:
            self._trails.forget(ctx.pid)  # what it looked up was for this
            await detach()
        found = self._namespace.lookup(parent, name)
        in_use = found is not None and self.nodes.has_nodes(found.ino)
        with self._changing((parent, name)):
            inode = await self._namespace.unlink(parent, name, in_use=in_use)
        await self._unnamed(inode, in_use)

    async def rmdir(self, parent_inode: int, name: bytes, ctx: Caller) -> None:
        parent = self._inode(parent_inode).ino
        if self._shared:
            await detach()
        found = self._namespace.lookup(parent, name)
        # Whoever stands in it still asks us about it.
        in_use = found is not None and any(self.nodes.of(found.ino))
        with self._changing((parent, name)):
            await self._namespace.rmdir(parent, name, in_use=in_use)

    async def _unnamed(self, inode: Inode, in_use: bool) -> None:
        """An inode lost a name."""
        if inode.nlink:
            self._refresh_other_nodes(None, inode.ino)
        elif in_use:
            self._refresh_several(inode.ino)
        else:
            self._cache.unnamed(inode)
            self._store.retire(inode.extent)

    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: Caller,
    ) -> None:
        old, new = self._inode(parent_inode_old).ino, self._inode(parent_inode_new).ino
        if self._shared:
            await detach()
        moved = self._namespace.lookup(old, name_old)
        if moved is not None and moved.is_file:
            await self._cache.publish_now(moved.ino)
        if len(name_new) > 255:
            raise fail(errno.ENAMETOOLONG)
        replaced = self._namespace.lookup(new, name_new)
        in_use = replaced is not None and self.nodes.has_nodes(replaced.ino)
        with self._changing((old, name_old), (new, name_new)):
            unnamed = await self._namespace.rename(
                old, name_old, new, name_new, flags, in_use=in_use
            )
        if self._shared:
            self._trails.forget(ctx.pid)  # what it looked up was for this
            # The kernel moves its name, and does not look it up again.
            if moved is not None:
                self._renamed(moved, (old, name_old), (new, name_new))
            if replaced is not None and flags & RENAME_EXCHANGE:
                self._renamed(replaced, (new, name_new), (old, name_old))
        if moved is not None:
            self._refresh_several(moved.ino)
        if unnamed is not None:
            await self._unnamed(unnamed, in_use)
        elif replaced is not None:
            self._refresh_several(replaced.ino)

    def _changing(self, *names: Name) -> AbstractContextManager[None]:
        """While a program here changes names. Where nobody else does, the kernel knows all of it."""
        return self.beliefs.changing(*names) if self._shared else nullcontext()

    def _renamed(self, inode: Inode, old: Name, new: Name) -> None:
        for node in self.nodes.of(inode.ino):
            if node.name == old:
                node.name = new

    async def readlink(self, inode: int, ctx: Caller) -> bytes:
        found = self._inode(inode)
        self.atimes.read(found)
        return found.target

    # -- attributes ------------------------------------------------------------------------------

    async def getattr(self, inode: int, ctx: Caller) -> Attributes:
        return self.attributes(inode)

    def attributes(self, node_id: int) -> Attributes:
        node, found = self._node(node_id)
        entry = self._attributes(node, found)
        if self._shared:
            self._let_believe_attributes(entry, found)
        return entry

    async def setattr(
        self,
        inode: int,
        attr: Attributes | pyfuse3.EntryAttributes,
        fields: Fields,
        fh: int | None,
        ctx: Caller,
        *,
        lose_set_ids: bool = False,
        touch: bool = False,
    ) -> Attributes:
        """`lose_set_ids`: the caller is about to change the content, or does it by this truncation, and
        may not keep set-user-id and set-group-id. `touch`: both times are to be now."""
        node, found = self._node(inode)
        if self._shared:
            await detach()
        if fields.update_size:
            await self._truncate(found, attr.st_size, fh)
            self._refresh_other_nodes(node, node.ino)  # one of them may show what was cut
            found = self._inode(inode)
        changes: dict[str, int] = {}
        if touch and found.flags & IMMUTABLE:
            raise fail(errno.EPERM)
        sets_times = (fields.update_atime or fields.update_mtime) and not touch
        asked_for = fields.update_mode or fields.update_uid or fields.update_gid or sets_times
        if lose_set_ids or fields.update_uid or fields.update_gid:
            changes["mode"] = await mode_left(found, ctx, self.processes)
            if lose_set_ids and not fields.update_size and not self._cache.is_written(found.ino):
                await refuse_stranger(found, changes["mode"], ctx, self.processes)
        if fields.update_mode:
            changes["mode"] = attr.st_mode
        if fields.update_uid:
            changes["uid"] = attr.st_uid
        if fields.update_gid:
            changes["gid"] = attr.st_gid
        if fields.update_atime:
            changes["atime_ns"] = attr.st_atime_ns
        if fields.update_mtime:
            changes["mtime_ns"] = attr.st_mtime_ns
            self._cache.set_mtime(node, attr.st_mtime_ns)
        atime_ns = self.atimes.of(found)
        if not changes and not fields.update_size:
            changes["mode"] = found.mode  # chown(2) to nobody: the time of change moves
        if changes:
            changes.setdefault("atime_ns", atime_ns)
            await self._namespace.set_attributes(node.ino, **changes, asked_for=asked_for)
            self.atimes.saved(self._inodes[node.ino])
            self._refresh_other_nodes(node, node.ino)
        return self._attributes(node, self._inodes[node.ino])

    async def _truncate(self, inode: Inode, size: int, fh: int | None) -> None:
        _refuse_other_than_file(inode)
        if inode.flags & APPEND or (inode.flags & IMMUTABLE and fh is None):
            raise fail(errno.EPERM)
        if not 0 <= size <= _OFFSET_MAX:
            raise fail(errno.EINVAL)
        if size > self._store.size_max:
            raise fail(errno.EFBIG)
        handle = self.nodes.handles.get(fh) if fh is not None else None
        if handle is not None and handle.writing:
            await self._cache.change(handle, lambda fd: os.ftruncate(fd, size))
        else:
            if size:
                inode = await self._ensure_local(inode)
            inode = await self._refreshed(inode, bring=size > 0)
            await self._cache.truncate(inode, size)

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
        found = self._inode(inode)
        self._refuse_unknown_xattr(name)
        if name == own_xattrs.PREFETCH:
            self._store.prefetch(found.ino)
            return
        if name.startswith(own_xattrs.PREFIX):
            with own_xattrs.saying_why(self._namespace, found, name):
                if name == own_xattrs.DISCARD:
                    self._cache.discard(self._node(inode)[0])
                    return
                own_xattrs.refuse_nonsense(found, name, value)
                if name in QUOTA_NAMES:
                    await quotas.refuse_setting(ctx.uid, ctx.pid, self.processes)
                if self._shared:
                    await detach()
                    await self._store.check_attribute(found, name, value)
        elif self._shared:
            await detach()
        await self._namespace.set_xattr(found.ino, name, value, flags, drop_set_gid=drop_set_gid)
        self._refresh_several(found.ino)
        node = self.nodes.by_id.get(inode)
        if node is not None:
            node.told |= privileges_of(self._inode(inode))

    def _refuse_unknown_xattr(self, name: bytes) -> None:
        """Raises OSError EINVAL for a namespace without a name, EOPNOTSUPP for another one, so that no
        program takes an ACL for checked that nobody checks."""
        if name in _XATTR_NAMESPACES:
            raise fail(errno.EINVAL)
        if name.startswith(_XATTR_NAMESPACES) or (name in acl.NAMES and self.enforces_acls):
            return
        raise fail(errno.EOPNOTSUPP)

    async def getxattr(self, inode: int, name: bytes, ctx: Caller) -> bytes:
        found = self._inode(inode)
        self._refuse_unknown_xattr(name)
        value = found.xattrs.get(name)
        if value is not None:
            return value
        if name == own_xattrs.VERSION and found.is_file:
            node, _ = self._node(inode)
            return b"%d" % self._cache.version(node, found)
        if name == own_xattrs.VERSIONS and found.is_file:
            return json.dumps(own_xattrs.versions(found, self._cache, self.nodes)).encode()
        if name == own_xattrs.PREFETCH_NOW:
            self._store.prefetch(found.ino)
        if name in (own_xattrs.PREFETCH, own_xattrs.PREFETCH_NOW):
            return json.dumps(self._store.prefetch_progress(found.ino)).encode()
        if name == own_xattrs.STATUS and found.ino == ROOT_INO:
            return json.dumps(self._status()).encode()
        if name in (own_xattrs.QUOTA_USED_BYTES, own_xattrs.QUOTA_USED_INODES):
            await self._freshen(found)
            return quotas.used(self._namespace, found.ino, name)
        if name.startswith(own_xattrs.READ_INTO) and found.is_file and self._shared:
            try:
                answer = await self._read_into(inode, name, ctx)
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:
                    raise
                answer = {"why_not": str(error.strerror)[:_WHY_MAX]}
            return json.dumps(answer).encode()
        raise fail(errno.ENODATA)

    async def _read_into(self, node_id: int, name: bytes, ctx: Caller) -> dict[str, Any]:
        """Read a file's current version, as an open would find it, into memory that the caller lends. An
        answer is short enough for what getxattr(2) is first called with. Raises OSError EOPNOTSUPP, which
        says why, where the file had better be opened."""
        _, *numbers = name.removeprefix(own_xattrs.READ_INTO).split(b".")
        if len(numbers) != 2 or not all(map(bytes.isdigit, numbers)):
            raise fail(errno.EINVAL)
        lent = [*map(int, numbers)]
        if max(lent) > _DESCRIPTOR_MAX:
            raise fail(errno.EBADF)
        names = self._trails.take(ctx.pid)
        believed = await self._freshen(self._inode(node_id))
        found = self._inode(node_id)
        if not self._trails.hold(ctx.pid, names, found.ino, believed=believed):
            raise fail(errno.ESTALE)  # the kernel looks the name up again, once
        if self._cache.is_written_in_place(found):
            raise fail(errno.EOPNOTSUPP, "it is being written on this host")
        await detach()
        memory, lifeline = await self._take(ctx.pid, *lent)
        found = await self._store.read_into(found.ino, memory, lifeline)
        return {"version": found.version, "size": found.size}

    def has_set_ids(self, node_id: int) -> bool:
        return bool(self._inode(node_id).mode & SET_IDS)

    async def _take(self, thread: int, memory: int, lifeline: int) -> tuple[int, int]:
        process = open_thread(thread)
        try:
            uid = ids_of(thread).uid
            return await self.processes.onlookers.lend(uid, process, thread, memory, lifeline)
        finally:
            os.close(process)

    def has_xattrs(self, node_id: int) -> bool:
        return bool(self._inode(node_id).xattrs)

    async def listxattr(self, inode: int, ctx: Caller) -> list[bytes]:
        # A quota belongs to its place, so `cp -a` and `rsync -X` are not to copy it.
        names = [name for name in self._inode(inode).xattrs if name not in QUOTA_NAMES]
        trusted = any(name.startswith(_TRUSTED) for name in names)
        if trusted and not (await self.processes.credentials(ctx.pid)).has(CAP_SYS_ADMIN):
            names = [name for name in names if not name.startswith(_TRUSTED)]
        return names if self.enforces_acls else [name for name in names if name not in acl.NAMES]

    async def removexattr(self, inode: int, name: bytes, ctx: Caller) -> None:
        found = self._inode(inode)
        self._refuse_unknown_xattr(name)
        if name in QUOTA_NAMES:
            await quotas.refuse_setting(ctx.uid, ctx.pid, self.processes)
        if self._shared:
            await detach()
        await self._namespace.remove_xattr(found.ino, name)
        self._refresh_several(found.ino)

    def birth_ns(self, node_id: int) -> int:
        """When an inode was made, 0: before that was kept."""
        return self._inode(node_id).birth_ns

    def flags(self, node_id: int) -> int:
        """chattr(1)'s flags of an inode."""
        return self._inode(node_id).flags

    async def set_flags(self, node_id: int, flags: int) -> None:
        node, _ = self._node(node_id)
        if self._shared:
            await detach()
        await self._namespace.set_attributes(node.ino, flags=flags)
        self._refresh_other_nodes(None, node.ino)

    async def statfs(self, ctx: Caller, node_id: int = ROOT_INO) -> pyfuse3.StatvfsData:
        """Return the space of the filesystem, or what quotas leave of it at the node."""
        below = self._store.statvfs()
        data = pyfuse3.StatvfsData()
        data.f_bsize, data.f_frsize = below.f_bsize, below.f_frsize
        data.f_blocks, data.f_bfree, data.f_bavail = below.f_blocks, below.f_bfree, below.f_bavail
        data.f_files = below.f_files
        data.f_ffree = data.f_favail = below.f_ffree
        data.f_namemax = 255
        node = self.nodes.by_id.get(node_id)
        if self._namespace.quotas.in_use and node is not None:
            for usage in self._namespace.quotas.around(node.ino):
                quotas.limit(data, usage)
        return data

    # -- files -----------------------------------------------------------------------------------

    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: Caller
    ) -> tuple[OpenInfo, Attributes]:
        directory = self._inode(parent_inode)
        if self._shared:
            await detach()
        if self._namespace.lookup(directory.ino, name) is None:
            writing = flags & os.O_ACCMODE != os.O_RDONLY
            # A file nobody writes is published as it is: empty. Else the name is made durable
            # together with the first version; a crash before that leaves neither.
            try:
                inode = await self._namespace.create(
                    directory.ino, name, mode & 0o7777 | stat.S_IFREG, ctx.uid, ctx.gid,
                    version=0 if writing else 1, durable=not writing, umask=ctx.umask,
                    layout=self._store.layout(directory.ino, name),
                )  # fmt: skip
            except FileExistsError:
                pass  # another host was first
            else:
                return self._created(inode, flags, ctx, (directory.ino, name))
        found = self._namespace.lookup(directory.ino, name)
        if found is None or flags & os.O_EXCL:
            raise fail(errno.EEXIST)
        _refuse_other_than_file(found)
        if not flags & os.O_TRUNC:
            found = await self._ensure_local(found)
        found = await self._refreshed(found, bring=not flags & os.O_TRUNC)
        handle = await self._cache.open_any(found, flags, ctx.pid)
        handle.node.lookups += 1
        if not truncates(flags):
            self._store.count_open(found.extent)
        return self._opened(handle), self._attributes(handle.node, found)

    async def _ensure_local(self, inode: Inode) -> Inode:
        """Return the inode once what an open is to get of it is on this host."""
        if inode.extent and not (
            self._cache.is_at_hand(inode) or self._store.is_here(inode.extent)
        ):
            await detach()
            inode = await self._store.bring(inode.ino)
        return inode

    async def _refreshed(self, inode: Inode, *, bring: bool) -> Inode:
        """Return the inode once what is written in place here is not older than its version. `bring`: that
        is on this host, and has to be again if another one is published meanwhile."""
        while True:
            await self._cache.refresh(inode.ino)
            now = self._namespace.inode(inode.ino)
            if now.version == inode.version:
                return now
            inode = await self._ensure_local(now) if bring else now

    async def _settled(
        self, node_id: int, names: Sequence[TrailStep], flags: int, pid: int
    ) -> tuple[Node, Inode]:
        """The node and the inode that an open came to, once it is sure that they are the right ones and
        the content is on this host.

        Raises OSError ESTALE when the names that led here mean something else by now: what they mean is
        then ready for the thread's second try.
        """
        node = self.nodes.by_id.get(node_id)
        if node is not None and self._cache.is_promised(pid, node.ino):
            return self._node(node_id)  # it was settled when the open came to the other node
        inode = self._inodes.get(node.ino) if node is not None else None
        name = _name_of(node, names)
        if inode is None and name is not None:
            inode = self._inodes.get(name.parent)
        asked = inode or self._inodes[ROOT_INO]
        believed = await self._freshen(asked, content=not truncates(flags))
        try:
            node, inode = self._node(node_id)
            if not self._trails.hold(pid, names, inode.ino, believed=believed):
                raise fail(errno.ESTALE)
            if not inode.nlink and not self.nodes.in_use(inode.ino):
                raise fail(errno.ESTALE)  # its content may be gone with its last name
            return node, inode if truncates(flags) else await self._ensure_local(inode)
        except OSError as error:
            if error.errno == errno.ESTALE and name is not None:
                await self._lead_on(name, flags, pid, node)
            raise

    async def _lead_on(self, name: TrailStep, flags: int, pid: int, came_to: Node | None) -> None:
        """Have ready what a name means now for a thread that is to look it up once more. By then it may
        mean yet another file; the thread is led to this one all the same."""
        for _ in range(_LEADS_MAX):
            found = self._trails.find(name)
            if found is None or not found.is_file:
                return  # the second try finds out
            try:
                if not truncates(flags):
                    found = await self._ensure_local(found)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                await self._freshen(found)  # that one is gone, too
            else:
                self._cache.promise(found, flags, pid, came_to)
                self._trails.lead(pid, (name.parent, name.name), found.ino)
                return

    async def tmpfile(
        self, parent_inode: int, mode: int, flags: int, ctx: Caller
    ) -> tuple[OpenInfo, Attributes]:
        """O_TMPFILE: a file without a name, that linkat(2) may give one."""
        directory = self._inode(parent_inode)
        mode = mode & 0o7777 | stat.S_IFREG
        inode = self._namespace.orphan(
            mode, ctx.uid, ctx.gid, directory=directory.ino, umask=ctx.umask
        )
        return self._created(inode, flags, ctx)

    def _created(
        self, inode: Inode, flags: int, ctx: Caller, name: Name | None = None
    ) -> tuple[OpenInfo, Attributes]:
        handle = self._cache.create(inode, flags, ctx.pid)
        node = handle.node
        node.lookups += 1
        info = self._opened(handle)
        entry = self._attributes(node, inode, is_new=True)
        if name is not None and self._shared:
            node.name = name
            valid_s = self._store.believable_s(name[0], used=False)
            self._let_believe(entry, *name, inode, valid_s, made=True)
        return info, entry

    async def _lose_privileges(
        self, ino: int, ctx: Changer, *, lose_set_ids: bool | None = None
    ) -> None:
        """A file's content is about to be replaced. None: the session does not say what may be kept."""
        found = self._inodes[ino]
        if not found.xattrs and not found.mode & SET_IDS:
            return
        if self._shared:
            await detach()
        if CAPABILITY in found.xattrs:
            await self._namespace.remove_xattr(ino, CAPABILITY)
        if found.mode & SET_IDS:
            lose = lose_set_ids
            if lose is None:
                lose = not await may_keep_set_ids(ctx, self.processes)
            mode = await mode_left(found, ctx, self.processes) if lose else found.mode
            if mode != found.mode:
                await self._namespace.set_attributes(ino, mode=mode, asked_for=False)
                self._refresh_other_nodes(None, ino)

    async def open(
        self, inode: int, flags: int, ctx: Caller, *, lose_set_ids: bool | None = None
    ) -> OpenInfo:
        names: Sequence[TrailStep] = ()
        if not flags:
            # The kernel's own open, for an ioctl on what a program has open: whoever opens by a name has
            # O_LARGEFILE among the flags (or is a 32-bit program without it). It would not come again.
            node, found = self._node(inode)
            _refuse_other_than_file(found)
            return self._opened(self._cache.open_here(found, node, flags, ctx.pid))
        if self._shared:
            names = self._trails.take(ctx.pid)
            node, found = await self._settled(inode, names, flags, ctx.pid)
            found = await self._refreshed(found, bring=not truncates(flags))
        else:
            node, found = self._node(inode)
        _refuse_other_than_file(found)
        if found.flags:
            refuse_open(found, flags)
        if flags & os.O_TRUNC:
            await self._lose_privileges(found.ino, ctx, lose_set_ids=lose_set_ids)
            found = self._inodes[found.ino]
        try:
            handle = await self._cache.open(found, node, flags, ctx.pid)
        except OSError as error:
            if error.errno == errno.ESTALE and self._shared:
                # It has to come back by the same name, although that may mean another file by then.
                name = _name_of(self.nodes.by_id.get(inode), names)
                if name is not None:
                    self._trails.lead(ctx.pid, (name.parent, name.name), found.ino)
            raise
        if self._shared and not truncates(flags):
            self._store.count_open(found.extent)
        return self._opened(handle)

    def _opened(self, handle: Handle) -> OpenInfo:
        node = handle.node
        info = OpenInfo(handle.fh, False, node.opens > 1 and node.cached, False)
        info.handle = handle
        info.passthrough = not node.cached
        # Closing any descriptor of a file drops its process's POSIX locks: then we must hear of it.
        info.noflush = not handle.writing and not self.locking.must_hear_of_closes(node.ino)
        return info

    async def cancel_open(self, handle: Handle) -> None:
        """An open that was decided on cannot be answered: nobody will release what nobody got."""
        handle.aborted = True
        await self._cache.release(handle.fh)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        if off > _OFFSET_MAX:
            raise fail(errno.EINVAL)
        handle = self._file_handle(fh)
        if not handle.flags & os.O_NOATIME:
            self.atimes.read(self._inodes[handle.node.ino])
        return await self._cache.read(handle, off, size)

    async def write(self, fh: int, off: int, buf: "memoryview | bytes") -> int:
        if off > _OFFSET_MAX:
            raise fail(errno.EINVAL)
        handle = self._file_handle(fh, writing=True)
        inode = self._inodes[handle.node.ino]
        # The kernel let O_APPEND be taken off: it does not know that this is not to be.
        if inode.flags & APPEND and off < self._attributes(handle.node, inode).st_size:
            raise fail(errno.EPERM)
        return await self._cache.write(handle, off, buf)

    async def flush(self, fh: int, pid: int = 0) -> None:
        handle = self._file_handle(fh)
        pid = pid or handle.pid
        found = self._inodes[handle.node.ino]
        if handle.writing and privileges_of(found) & ~handle.node.told:
            await self._lose_privileges(found.ino, Closer(pid))
        await self._publish(handle, pid, self._cache.flush(handle, pid))

    async def _publish(self, handle: Handle, pid: int, step: Coroutine[Any, Any, None]) -> None:
        """Run what may publish something for a process, unless that has lost a lock."""
        if not self._shared:
            await step
            return
        try:
            self.locking.check(pid)
        except OSError:
            if self._cache.give_up(handle):
                step.close()
                raise
        with self.locking.publishing(handle.node.ino, pid):
            await step

    async def release(self, fh: int) -> None:
        self._file_handle(fh)
        await self._cache.release(fh)

    def release_can_wait(self, fh: int) -> bool:
        """Whether releasing this handle shows others nothing that its flush did not show before.

        Raises OSError EBADF for a directory's, KeyError when there is none.
        """
        return not self._file_handle(fh).writing

    async def fsync(self, fh: int, datasync: bool) -> None:
        handle = self._file_handle(fh)
        await self._publish(handle, handle.pid, self._cache.fsync(handle))

    # -- what only the kernel session can ask for ------------------------------------------------

    async def fallocate(self, fh: int, mode: int, offset: int, length: int) -> None:
        handle = self._file_handle(fh, writing=True)
        protected = self._inodes[handle.node.ino].flags
        if protected & IMMUTABLE or (protected & APPEND and mode & ~_FALLOC_FL_KEEP_SIZE):
            raise fail(errno.EPERM)
        if offset + length > self._store.size_max:
            raise fail(errno.EFBIG)

        def change(fd: int) -> None:
            if not mode & _FALLOC_FL_PUNCH_HOLE:
                self._cache.refuse_growth(handle.node.ino, fd, offset, length)
            if _libc.fallocate(fd, mode, offset, length):
                raise fail(ctypes.get_errno())

        await self._cache.change(handle, change)

    async def lseek(self, fh: int, offset: int, whence: int) -> int:
        content = self._content(self._file_handle(fh))
        if whence not in (os.SEEK_DATA, os.SEEK_HOLE):
            raise fail(errno.EINVAL)
        if not content.extent:
            raise fail(errno.ENXIO)
        with self.extents.opened(content.extent) as fd:
            return os.lseek(fd, offset, whence)

    async def copy_file_range(
        self, fh_in: int, off_in: int, fh_out: int, off_out: int, length: int
    ) -> int:
        if max(off_in, off_out) > _OFFSET_MAX:
            raise fail(errno.EOVERFLOW)
        source = self._content(self._file_handle(fh_in))
        target = self._file_handle(fh_out, writing=True)
        if self._inodes[target.node.ino].flags & (IMMUTABLE | APPEND):
            raise fail(errno.EPERM)
        length = min(length, 16 * 1024 * 1024)  # other requests wait meanwhile
        copied = 0

        def change(out: int) -> None:
            nonlocal copied
            if source.extent:
                with self.extents.opened(source.extent) as fd:
                    left = max(0, os.fstat(fd).st_size - off_in)
                    self._cache.refuse_growth(target.node.ino, out, off_out, min(length, left))
                    copied = os.copy_file_range(fd, out, length, off_in, off_out)

        await self._cache.change(target, change)
        if copied:
            self.atimes.read(self._inodes[source.ino])
        return copied

    def newer_version(self, fh: int) -> tuple[int, bool]:
        """The handle's inode, and whether a version newer than the handle's was published."""
        handle = self._file_handle(fh)
        content, inode = self._content(handle), self._inodes[handle.node.ino]
        changing = content.is_changing and not content.superseded
        return inode.ino, not changing and content.version != inode.version

    async def test_lock(self, node_id: int, owner: int, lock: Lock) -> Lock:
        """fcntl(F_GETLK): the lock in the way, or `lock` as F_UNLCK."""
        return await self.locking.test(self._inode(node_id).ino, owner, lock)

    async def lock(self, fh: int, owner: int, lock: Lock, *, flock: bool, wait: bool) -> None:
        """fcntl(F_SETLK, F_SETLKW) and flock(2). Raises OSError EAGAIN, EDEADLK, ENOLCK, EIO."""
        ino = self._file_handle(fh).node.ino
        await self.locking.lock(fh, ino, owner, lock, flock=flock, wait=wait)

    async def close(self, fh: int, pid: int, owner: int) -> None:
        """close(2) of a descriptor in the kernel session, which tells whose locks on the file end with it.
        Whoever has such a lock next is to see what was written under it."""
        locking = self.locking
        try:
            await self.flush(fh, pid)
        finally:
            if locking.closes_matter:
                await locking.closed(fh, self._file_handle(fh).node.ino, owner)
        if locking.closes_matter:
            locking.tell_lost(pid, self._file_handle(fh).node.ino)

    async def release_locked(self, fh: int) -> None:
        """Release a handle through which locks may have been taken."""
        async with self.locking.releasing(fh, self._file_handle(fh).node.ino):
            await self.release(fh)

    # -- directories -----------------------------------------------------------------------------

    async def opendir(self, inode: int, ctx: Caller) -> int:
        node, found = self._node(inode)
        if not found.is_dir:
            raise fail(errno.ENOTDIR)
        if self._shared:
            names = self._trails.take(ctx.pid)
            await self._freshen(found)
            node, found = self._node(inode)
            if names and not self._trails.hold(ctx.pid, names, found.ino, believed=True):
                raise fail(errno.ESTALE)  # the kernel looks the names up again, once
        return self.nodes.open(node, None, os.O_RDONLY, ctx.pid).fh

    def _listing(self, handle: Handle, start_id: int) -> list[tuple[bytes, int]]:
        """The names of a directory as they were when its listing began."""
        if handle.entries is None or start_id == 0:
            ino = handle.node.ino
            inode = self._inodes[ino]
            self.atimes.read(inode)
            handle.entries = [(b".", ino), (b"..", inode.parent or ino)]
            handle.entries += self._namespace.children(ino)
        return handle.entries

    async def readdir(self, fh: int, start_id: int, token: Any) -> None:
        handle = self._directory_handle(fh)
        directory = handle.node.ino
        entries = self._listing(handle, start_id)
        valid_s = self._store.believable_s(directory) if self._shared else 0.0
        soon = time.monotonic() + valid_s / 2
        for index in range(start_id, len(entries)):
            name, ino = entries[index]
            inode = self._inodes.get(ino)
            if inode is None:
                continue
            if index < 2:
                dots = Attributes()
                dots.ino = dots.st_ino = ino
                dots.st_mode = stat.S_IFDIR
                if not self.readdir_reply(token, name, dots, index + 1):
                    return
                continue
            main = node = self._cache.node_of(inode, 0)
            if self.lists_one_number:
                node = self.nodes.numbered(inode)
            if valid_s and node.lookups and self.beliefs.holds((directory, name), ino, soon):
                # Without a node: the kernel has name and attributes, and will for a while.
                known = Attributes()
                known.ino, known.st_mode = ino, inode.mode
                if not self.readdir_reply(token, name, known, index + 1):
                    return
                continue
            entry = self._attributes(node, inode)
            is_stable = node is main and self._cache.names_are_stable(ino)
            if not is_stable or not self._leads_to(directory, name, ino):
                entry.entry_timeout = 0
            elif valid_s:
                node.name = (directory, name)
                self._let_believe(entry, directory, name, inode, valid_s)
            if not self.readdir_reply(token, name, entry, index + 1):
                self.nodes.drop_unused(node)
                return
            node.lookups += 1

    def _leads_to(self, directory: int, name: bytes, ino: int) -> bool:
        """Whether what was found out a while ago is still so."""
        try:
            found = self._namespace.lookup(directory, name)
        except OSError:  # the directory is gone
            return False
        return found is not None and found.ino == ino

    def names(self, fh: int, start_id: int) -> list[tuple[int, int, bytes, int]]:
        """A listing without attributes: (next id, ino, name, mode)."""
        entries = self._listing(self._directory_handle(fh), start_id)
        return [
            (index + 1, ino, name, self._inodes[ino].mode)
            for index, (name, ino) in enumerate(entries[start_id : start_id + 4096], start_id)
            if ino in self._inodes
        ]

    async def releasedir(self, fh: int) -> None:
        self._directory_handle(fh)
        self.nodes.drop_unused(self.nodes.close(fh).node)
        await self._cache.forget_nameless()

    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        await self._namespace.flush()

    async def idle(self) -> None:
        """No request came for a while."""
        await self._namespace.idle()

    async def ended(self) -> None:
        """The filesystem is unmounted: keep what was left for a later change."""
        if not self._shared:
            await self._namespace.note_reads(self.atimes.unsaved())

    # -- status ----------------------------------------------------------------------------------

    def count(self) -> dict[str, int]:
        """Figures for `irdmafs status`."""
        files = directories = published = 0
        for inode in self._inodes.values():
            if not inode.nlink:
                continue  # held without a name
            if inode.is_dir:
                directories += 1
            elif inode.is_file:
                files += 1
                published += inode.blocks * 512
        kept = files
        working = 0
        seen: set[Content] = set()
        for handle in self.nodes.handles.values():
            content = handle.content
            if content is None or content in seen:
                continue
            seen.add(content)
            if content.own:
                working += self._cache.look_of(content, self._inodes[content.ino]).blocks * 512
            elif content.superseded and content.extent:
                kept += 1
        return {
            "inodes": len(self._inodes),
            "files": files,
            "directories": directories,
            "versions_kept": kept,
            "bytes_published": published,
            "bytes_working": working,
            "bytes_carried": self._cache.carried_bytes,
            "nodes": len(self.nodes.by_id),
            "open_handles": len(self.nodes.handles),
            "locks": self.locking.count(),
            **self.beliefs.count(),
        }
