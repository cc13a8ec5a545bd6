"""The attributes of inodes: asked for, set by their owners, and taken by others' changes."""

import errno
import os

from ..backend.namespace import ROOT_INO, Inode, fail
from ..inline import detach
from . import quotas
from .calls import OFFSET_MAX, Attributes, Caller, Space, refuse_other_than_file
from .privileges import CAPABILITY, SET_IDS, may_keep_set_ids, mode_left, refuse_stranger
from .superblock import Part


class Metadata(Part):
    """Shows and changes the attributes that stat(2) and statfs(2) show."""

    def attributes(self, node_id: int) -> Attributes:
        node, found = self._nodes.get(node_id)
        answer = self._answers.attributes(node, found)
        self._coherence.attributes(answer, node, found)
        return answer

    async def change(
        self,
        node_id: int,
        changes: dict[str, int],
        ctx: Caller,
        *,
        size: int | None = None,
        fh: int | None = None,
        lose_set_ids: bool = False,
    ) -> Attributes:
        """Set attributes: `changes` by the names of Namespace.set_attributes, and the size, through the
        handle `fh` if given. `lose_set_ids`: the caller is about to change the content, or does so by this
        truncation, and may not keep set-user-id and set-group-id."""
        node, found = self._nodes.get(node_id)
        if size is not None:
            await self._truncate(found, size, fh)
            self._answers.refresh_other_nodes(node, node.ino)  # one may show the cut content
            found = self._nodes.inode_of(node_id)
        if lose_set_ids or "uid" in changes or "gid" in changes:
            left = await mode_left(found, ctx, self._processes)
            changes.setdefault("mode", left)
            if lose_set_ids and size is None and not self._cache.looks.is_written(found.ino):
                await refuse_stranger(found, left, ctx, self._processes)
        if "mtime_ns" in changes:
            self._cache.carried.set_mtime(node, changes["mtime_ns"])
        if not changes and size is None:
            changes["mode"] = found.mode  # chown(2) to nobody: the time of change moves
        if changes:
            changes.setdefault("atime_ns", self._atimes.of(found))
            await self._namespace.set_attributes(node.ino, **changes)
            self._atimes.saved(self._inodes[node.ino])
            self._answers.refresh_other_nodes(node, node.ino)
        answer = self._answers.attributes(node, self._inodes[node.ino])
        self._coherence.changed(answer, node)
        return answer

    async def _truncate(self, inode: Inode, size: int, fh: int | None) -> None:
        refuse_other_than_file(inode)
        if not 0 <= size <= OFFSET_MAX:
            raise fail(errno.EINVAL)
        if size > self._store.size_max:
            raise fail(errno.EFBIG)
        handle = self._nodes.handles.get(fh) if fh is not None else None
        if handle is not None and handle.writing:
            await self._cache.carried.change(handle, lambda fd: os.ftruncate(fd, size))
        else:
            self._namespace.check_writable(inode.ino)
            inode = await self._coherence.bring(inode, content=size > 0)
            await self._cache.carried.truncate(inode, size)

    async def lose_privileges(
        self, ino: int, ctx: Caller, *, lose_set_ids: bool | None = None
    ) -> None:
        """Take the privileges of a file whose content is about to change (see privileges). `lose_set_ids`
        is None if the session does not say whether the caller may keep them."""
        found = self._inodes[ino]
        if not found.xattrs and not found.mode & SET_IDS:
            return
        await detach()
        if CAPABILITY in found.xattrs:
            await self._namespace.remove_xattr(ino, CAPABILITY)
        if found.mode & SET_IDS:
            lose = lose_set_ids
            if lose is None:
                lose = not await may_keep_set_ids(ctx, self._processes)
            mode = await mode_left(found, ctx, self._processes) if lose else found.mode
            if mode != found.mode:
                await self._namespace.set_attributes(ino, mode=mode)
                self._answers.refresh_other_nodes(None, ino)

    async def statfs(self, node_id: int = ROOT_INO) -> Space:
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
