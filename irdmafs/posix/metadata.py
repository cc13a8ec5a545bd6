"""The attributes of inodes: asked for, set by their owners, and taken by others' changes."""

import errno
import os

from ..backend.namespace import ROOT_INO, Inode, fail
from ..backend.namespace.protection import APPEND, IMMUTABLE
from ..backend.store.api import Store
from ..coherence.cache import Cache
from ..coherence.protocol import Coherence
from . import quotas
from .answers import Answers
from .atimes import Atimes
from .calls import OFFSET_MAX, Attributes, Caller, Fields, Space, refuse_other_than_file
from .privileges import CAPABILITY, SET_IDS, may_keep_set_ids, mode_left, refuse_stranger
from .privileges import Caller as Changer


class Metadata:
    """Shows and changes the attributes that stat(2), statfs(2) and lsattr(1) show."""

    def __init__(
        self, store: Store, cache: Cache, coherence: Coherence, answers: Answers, atimes: Atimes
    ) -> None:
        self._store = store
        self._namespace = store.namespace
        self._inodes = store.namespace.inodes
        self._cache = cache
        self._nodes = cache.nodes
        self._processes = cache.processes
        self._coherence = coherence
        self._answers = answers
        self._atimes = atimes

    async def getattr(self, inode: int, ctx: Caller) -> Attributes:
        return self.attributes(inode)

    def attributes(self, node_id: int) -> Attributes:
        node, found = self._nodes.get(node_id)
        answer = self._answers.attributes(node, found)
        self._coherence.attributes(answer, node, found)
        return answer

    async def setattr(
        self,
        inode: int,
        attr: Attributes,
        fields: Fields,
        fh: int | None,
        ctx: Caller,
        *,
        lose_set_ids: bool = False,
        touch: bool = False,
    ) -> Attributes:
        """Set attributes. `lose_set_ids`: the caller is about to change the content, or does so by this
        truncation, and may not keep set-user-id and set-group-id. `touch`: set both times to now."""
        node, found = self._nodes.get(inode)
        await self._coherence.before_change()
        if fields.update_size:
            await self._truncate(found, attr.st_size, fh)
            self._answers.refresh_other_nodes(node, node.ino)  # one may show the cut content
            found = self._nodes.inode_of(inode)
        changes: dict[str, int] = {}
        if touch and found.flags & IMMUTABLE:
            raise fail(errno.EPERM)
        sets_times = (fields.update_atime or fields.update_mtime) and not touch
        asked_for = fields.update_mode or fields.update_uid or fields.update_gid or sets_times
        if lose_set_ids or fields.update_uid or fields.update_gid:
            changes["mode"] = await mode_left(found, ctx, self._processes)
            if (
                lose_set_ids
                and not fields.update_size
                and not self._cache.looks.is_written(found.ino)
            ):
                await refuse_stranger(found, changes["mode"], ctx, self._processes)
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
            self._cache.carried.set_mtime(node, attr.st_mtime_ns)
        atime_ns = self._atimes.of(found)
        if not changes and not fields.update_size:
            changes["mode"] = found.mode  # chown(2) to nobody: the time of change moves
        if changes:
            changes.setdefault("atime_ns", atime_ns)
            await self._namespace.set_attributes(node.ino, **changes, asked_for=asked_for)
            self._atimes.saved(self._inodes[node.ino])
            self._answers.refresh_other_nodes(node, node.ino)
        answer = self._answers.attributes(node, self._inodes[node.ino])
        self._coherence.changed(answer, node)
        return answer

    async def _truncate(self, inode: Inode, size: int, fh: int | None) -> None:
        refuse_other_than_file(inode)
        if inode.flags & APPEND or (inode.flags & IMMUTABLE and fh is None):
            raise fail(errno.EPERM)
        if not 0 <= size <= OFFSET_MAX:
            raise fail(errno.EINVAL)
        if size > self._store.size_max:
            raise fail(errno.EFBIG)
        handle = self._nodes.handles.get(fh) if fh is not None else None
        if handle is not None and handle.writing:
            await self._cache.carried.change(handle, lambda fd: os.ftruncate(fd, size))
        else:
            inode = await self._coherence.bring(inode, content=size > 0)
            await self._cache.carried.truncate(inode, size)

    async def lose_privileges(
        self, ino: int, ctx: Changer, *, lose_set_ids: bool | None = None
    ) -> None:
        """Take the privileges of a file whose content is about to change (see privileges). `lose_set_ids`
        is None if the session does not say whether the caller may keep them."""
        found = self._inodes[ino]
        if not found.xattrs and not found.mode & SET_IDS:
            return
        await self._coherence.before_change()
        if CAPABILITY in found.xattrs:
            await self._namespace.remove_xattr(ino, CAPABILITY)
        if found.mode & SET_IDS:
            lose = lose_set_ids
            if lose is None:
                lose = not await may_keep_set_ids(ctx, self._processes)
            mode = await mode_left(found, ctx, self._processes) if lose else found.mode
            if mode != found.mode:
                await self._namespace.set_attributes(ino, mode=mode, asked_for=False)
                self._answers.refresh_other_nodes(None, ino)

    def has_set_ids(self, node_id: int) -> bool:
        return bool(self._nodes.inode_of(node_id).mode & SET_IDS)

    def birth_ns(self, node_id: int) -> int:
        """Return when an inode was made (ns), 0 if nobody noted it."""
        return self._nodes.inode_of(node_id).birth_ns

    def flags(self, node_id: int) -> int:
        """Return the flags of an inode that chattr(1) sets."""
        return self._nodes.inode_of(node_id).flags

    async def set_flags(self, node_id: int, flags: int) -> None:
        node, _ = self._nodes.get(node_id)
        await self._coherence.before_change()
        await self._namespace.set_attributes(node.ino, flags=flags)
        self._answers.refresh_other_nodes(None, node.ino)

    async def statfs(self, ctx: Caller, node_id: int = ROOT_INO) -> Space:
        """Return the space of the filesystem, or what quotas leave of it at the node."""
        below = self._store.statvfs()
        data = Space(
            f_bsize=below.f_bsize, f_frsize=below.f_frsize, f_blocks=below.f_blocks,
            f_bfree=below.f_bfree, f_bavail=below.f_bavail, f_files=below.f_files,
            f_ffree=below.f_ffree, f_favail=below.f_ffree, f_namemax=255,
        )  # fmt: skip
        node = self._nodes.by_id.get(node_id)
        if self._namespace.quotas.in_use and node is not None:
            for usage in self._namespace.quotas.around(node.ino):
                quotas.limit(data, usage)
        return data
