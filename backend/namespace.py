"""The directory tree: names and inodes in a key-value engine, with a replica in memory.

Reads are answered by the replica alone (tree). A mutation looks at the replica, plans the new records
and commits them in one transaction (commit); so one that fails leaves no trace.

On a shared engine a transaction compares as little as is needed, so that hosts that work in one
directory are not in each other's way: a name that is made or removed, the inode whose link count
changes, that a directory in which a name is made exists (and, for a new inode, has the attributes that
it hands down), that one which is removed is empty. Moving a directory compares all above its new
place: two moves at once could otherwise make a circle.
"""

import errno
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence

import trio

from . import acl
from .commit import Commit, Hub
from .inheritance import Inherited, inherited_from
from .inode import NAME_MAX, NO_LAYOUT, ROOT_INO, Dentry, Inode, fail, nearest_time
from .kv import Compare, Engine
from .loading import LoadedTree
from .protection import refuse_change, refuse_lost_name, refuse_new_name
from .records import Layout

__all__ = [
    "NAME_MAX",
    "RENAME_EXCHANGE",
    "RENAME_NOREPLACE",
    "ROOT_INO",
    "XATTR_SIZE_MAX",
    "Dentry",
    "Hub",
    "Inode",
    "Namespace",
    "Outdated",
    "fail",
]

XATTR_SIZE_MAX = 64 * 1024
_XATTRS_TOTAL_MAX = 1024 * 1024

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2


class Outdated(OSError):
    """A version was to be made of one that is not the newest any more; `version` is."""

    def __init__(self, version: int) -> None:
        super().__init__(errno.ESTALE, f"version {version} was published meanwhile")
        self.version = version


class Namespace(LoadedTree):
    """The tree. Methods raise OSError with the errno POSIX gives the call; on a shared engine also
    EBUSY (others changed the same things all the time) and ETIMEDOUT (no answer: it may or may not
    have happened).
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        # Local orphans that are getting a name: until they have it, their local state stays as it is.
        self._linking: dict[int, trio.Event] = {}

    # -- names -----------------------------------------------------------------------------------

    async def create(
        self,
        parent: int,
        name: bytes,
        mode: int,
        uid: int,
        gid: int,
        *,
        rdev: int = 0,
        target: bytes = b"",
        version: int = 0,
        durable: bool = True,
        layout: Layout = NO_LAYOUT,
        umask: int = 0,
    ) -> Inode:
        """Make an inode of any type under a new name.

        Another host may have removed it by the time this returns: then it is a local orphan.
        """

        def plan() -> Commit:
            if self.lookup(parent, name) is not None:
                raise fail(errno.EEXIST)
            directory = self.inodes[parent]
            if directory.nlink == 0:
                raise fail(errno.ENOENT)  # removed while somebody stands in it
            refuse_new_name(directory)
            now = time.time_ns()
            inode = self._new(inherited_from(directory, mode, gid, umask), uid, now)
            inode.rdev, inode.target, inode.version, inode.layout = rdev, target, version, layout
            inode.size = len(target)
            commit = Commit()
            commit.inode, commit.inodes = inode, (inode,)
            commit.new = inode
            commit.names = ((parent, name, inode.ino),)
            commit.times = ((parent, now),)
            commit.fixed = (directory,)  # its group, ACL and flags may be handed down
            commit.durable = durable
            if self.quotas.in_use:
                commit.charge = self.quotas.admit(inode.ino, self.quotas.above(parent), 0)
            return commit

        made = await self._carry_out(plan)
        assert made is not None
        return made

    def orphan(
        self, mode: int, uid: int, gid: int, *, directory: int = ROOT_INO, umask: int = 0
    ) -> Inode:
        """A file without a name (O_TMPFILE), with what a directory hands down. It lives in the replica
        until link() names it."""
        inherited = inherited_from(self.inode(directory), mode, gid, umask)
        inode = self._new(inherited, uid, time.time_ns())
        inode.nlink = 0
        self.inodes[inode.ino] = inode
        return inode

    def _new(self, inherited: Inherited, uid: int, now_ns: int) -> Inode:
        inode = Inode(self._new_ino(), inherited.mode, uid, inherited.gid, now_ns)
        inode.xattrs, inode.flags = inherited.xattrs, inherited.flags
        return inode

    async def link(self, ino: int, parent: int, name: bytes) -> Inode:
        def plan() -> Commit:
            if self.lookup(parent, name) is not None:
                raise fail(errno.EEXIST)
            inode = self.inode(ino).copy()
            if inode.is_dir:
                raise fail(errno.EPERM)
            if self.inodes[parent].nlink == 0:
                raise fail(errno.ENOENT)
            refuse_new_name(self.inodes[parent])
            refuse_change(inode)
            now = time.time_ns()
            inode.nlink += 1
            inode.ctime_ns = now
            commit = Commit()
            commit.inode, commit.inodes = inode, (inode,)
            commit.names = ((parent, name, ino),)
            commit.times = ((parent, now),)
            commit.within = (parent,)
            if self.quotas.in_use:
                if inode.nlink > 1:
                    self.quotas.refuse_to_enter(self.quotas.of(ino), parent)
                else:
                    above = self.quotas.above(parent)
                    commit.charge = self.quotas.admit(ino, above, inode.blocks)
            return commit

        if self._linking:
            await self._wait_while_linking(ino)
        self._linking[ino] = trio.Event()
        try:
            linked = await self._carry_out(plan)
        finally:
            self._linking.pop(ino).set()
        assert linked is not None
        return linked

    async def unlink(self, parent: int, name: bytes, *, in_use: bool) -> Inode:
        """Remove a name that is not a directory's. Returns the inode as it is afterwards.

        With nlink 0 its record is gone, and so is it itself unless `in_use` or held(): then it stays
        without a name until drop(). On a shared engine the inode may be another one than the caller
        had found behind the name; `in_use` is not meant for that one.
        """
        expected = self._ino_behind(parent, name) if in_use else 0

        def plan() -> Commit:
            found = self._existing(parent, name)
            refuse_lost_name(self.inodes[parent], found)
            if found.is_dir:
                raise fail(errno.EISDIR)
            return _without_name(parent, name, found, found.ino == expected)

        inode = await self._carry_out(plan)
        assert inode is not None
        return inode

    async def unlink_if(
        self, parent: int, name: bytes, wanted: Callable[[Inode], bool]
    ) -> Inode | None:
        """As unlink, if the inode behind the name is a wanted one when it happens; None: it is not, or
        there is no such name."""

        def plan() -> Commit | None:
            found = self.inodes.get(self._ino_behind(parent, name))
            if found is None or found.is_dir or not wanted(found):
                return None
            return _without_name(parent, name, found, False)

        return await self._carry_out(plan)

    async def rmdir(self, parent: int, name: bytes, *, in_use: bool) -> Inode:
        """Remove an empty directory; `in_use` as for unlink."""
        expected = self._ino_behind(parent, name) if in_use else 0

        def plan() -> Commit:
            found = self._existing(parent, name)
            refuse_lost_name(self.inodes[parent], found)
            if not found.is_dir:
                raise fail(errno.ENOTDIR)
            if self._children[found.ino]:
                raise fail(errno.ENOTEMPTY)
            return _without_name(parent, name, found, found.ino == expected)

        inode = await self._carry_out(plan)
        assert inode is not None
        return inode

    async def rename(
        self,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        flags: int,
        *,
        in_use: bool,
    ) -> Inode | None:
        """Rename with renameat2(2)'s flags. Returns the inode that lost its name, if one did.

        `in_use` as for unlink, and for that inode. Raises ENAMETOOLONG when a directory of a shared
        engine would be moved below more than a hundred others.
        """
        if flags not in (0, RENAME_NOREPLACE, RENAME_EXCHANGE):
            raise fail(errno.EINVAL)
        expected = self._ino_behind(new_parent, new_name) if in_use else 0

        def plan() -> Commit | None:
            moved, replaced = self._existing(parent, name), self.lookup(new_parent, new_name)
            if flags & RENAME_NOREPLACE and replaced is not None:
                raise fail(errno.EEXIST)
            if new_name in (b".", b".."):
                raise fail(errno.EBUSY)
            if flags & RENAME_EXCHANGE and replaced is None:
                raise fail(errno.ENOENT)
            if replaced is not None and replaced.ino == moved.ino:
                return None  # two names of one inode: POSIX says nothing happens
            if self.inodes[new_parent].nlink == 0:
                raise fail(errno.ENOENT)
            refuse_lost_name(self.inodes[parent], moved)
            if replaced is None:
                refuse_new_name(self.inodes[new_parent])
            else:
                refuse_lost_name(self.inodes[new_parent], replaced)
            if self.quotas.in_use:
                self.quotas.refuse_to_enter(self.quotas.of(moved.ino), new_parent)
                if flags & RENAME_EXCHANGE and replaced is not None:
                    self.quotas.refuse_to_enter(self.quotas.of(replaced.ino), parent)
            commit, now = Commit(), time.time_ns()
            changed = moved.copy()
            changed.ctime_ns = now
            commit.inodes = [changed]
            commit.names = [(new_parent, new_name, moved.ino), (parent, name, 0)]
            commit.times = [(ino, now) for ino in {parent, new_parent}]
            commit.within = (new_parent,)
            commit.fixed = self._above(moved, parent, new_parent)
            if flags & RENAME_EXCHANGE:
                assert replaced is not None
                other = replaced.copy()
                other.ctime_ns = now
                commit.inodes.append(other)
                commit.names[1] = (parent, name, other.ino)
                commit.fixed += self._above(replaced, new_parent, parent)
            elif replaced is not None:
                self._refuse_to_replace(moved, replaced)
                _unname(commit, replaced, now)
                commit.urgent = True
                commit.keep = replaced.ino == expected
            return commit

        return await self._carry_out(plan)

    def _above(self, moved: Inode, source: int, target: int) -> list[Inode]:
        """All directories from `target` up, if moving a directory there could make a circle.

        Raises EINVAL if it does.
        """
        found: list[Inode] = []
        if moved.is_dir and source != target:
            while target != ROOT_INO:
                if target == moved.ino:
                    raise fail(errno.EINVAL)
                found.append(self.inodes[target])
                target = found[-1].parent
        return found

    def _refuse_to_replace(self, moved: Inode, replaced: Inode) -> None:
        if moved.is_dir and not replaced.is_dir:
            raise fail(errno.ENOTDIR)
        if replaced.is_dir and not moved.is_dir:
            raise fail(errno.EISDIR)
        if replaced.is_dir and self._children[replaced.ino]:
            raise fail(errno.ENOTEMPTY)

    def _existing(self, parent: int, name: bytes) -> Inode:
        children = self._children.get(parent)
        dentry = children.get(name) if children is not None else None
        if dentry is None:
            self.lookup(parent, name)  # there may be a better reason than ENOENT
            raise fail(errno.ENOENT)
        return self.inodes[dentry.ino]

    # -- inodes ----------------------------------------------------------------------------------

    async def publish(
        self,
        ino: int,
        extent: int,
        size: int,
        blocks: int,
        mtime_ns: int,
        *,
        ctime_ns: int | None = None,
        base: int | None = None,
        layout: Layout | None = None,
        digests: bytes = b"",
        guards: Sequence[Compare] = (),
        within_quotas: bool = True,
    ) -> Inode:
        """Make an extent the file's next version. Acknowledged: it survives a crash.

        Returns the inode as committed. Whoever published meanwhile on another host gets this version
        on top, unless `base` says which version it was made of: raises Outdated if that is not the
        newest. `ctime_ns`: when the content changed, None: now, 0: not at all. `guards` must hold,
        too: raises kv.Conflict when one of them does not. The last name may have gone: then nlink is
        0 and the version is known here only. Raises OSError EDQUOT where a quota has no room for it,
        unless `within_quotas` is false: then it is only charged.
        """

        def plan() -> Commit:
            found = self.inode(ino)
            if base is not None and found.version != base:
                raise Outdated(found.version)
            inode = found.copy()
            inode.version += 1
            inode.extent, inode.size, inode.blocks = extent, size, blocks
            inode.digests = digests
            inode.mtime_ns = nearest_time(mtime_ns)
            if ctime_ns != 0:
                inode.ctime_ns = max(inode.ctime_ns + 1, ctime_ns or time.time_ns())
            if layout is not None:
                inode.layout = layout
            commit = Commit()
            commit.inode, commit.inodes = inode, (inode,)
            if not inode.nlink:
                commit.local = True
            # A file that could not be written whole has to stay, cut, on a full store.
            commit.urgent = size < found.size or not found.version
            if self.quotas.in_use and within_quotas:
                commit.charge = self.quotas.admit(ino, self.quotas.of(ino), blocks)
            return commit

        if self._linking:
            await self._wait_while_linking(ino)
        published = await self._carry_out(plan, guards)
        assert published is not None
        return published

    async def check_room(self, ino: int, blocks: int) -> None:
        """Raise OSError EDQUOT when quotas have no room for a version of so many blocks, before anything is
        sent for it."""
        quotas = self.quotas
        if not quotas.in_use:
            return
        try:
            quotas.admit(ino, quotas.of(ino), blocks)
        except OSError:
            if not self._shared:
                raise
            await self.hub.barrier()
            quotas.admit(ino, quotas.of(ino), blocks)

    async def set_attributes(
        self,
        ino: int,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        atime_ns: int | None = None,
        mtime_ns: int | None = None,
        flags: int | None = None,
        asked_for: bool = True,
    ) -> Inode:
        """`asked_for`: by chmod(2) and the like, not what follows from another call; chattr(1) may forbid
        it."""

        def change(inode: Inode) -> None:
            if asked_for and flags is None:
                refuse_change(inode)
            if flags is not None:
                inode.flags = flags
            if mode is not None:
                inode.mode = stat.S_IFMT(inode.mode) | stat.S_IMODE(mode)
                acl.follow_chmod(inode)
            if uid is not None:
                inode.uid = uid
            if gid is not None:
                inode.gid = gid
            if atime_ns is not None:
                inode.atime_ns = nearest_time(atime_ns)
            if mtime_ns is not None:
                inode.mtime_ns = nearest_time(mtime_ns)

        return await self._change(ino, change, sets_mtime=mtime_ns is not None)

    async def note_reads(self, atimes: Mapping[int, int]) -> None:
        """Keep when inodes were last read (ns), by number; nothing else of them changes."""

        def plan() -> Commit:
            commit = Commit()
            commit.inodes = []
            for ino, atime_ns in atimes.items():
                found = self.inodes.get(ino)
                if found is not None and found.nlink and found.atime_ns != atime_ns:
                    inode = found.copy()
                    inode.atime_ns = nearest_time(atime_ns)
                    commit.inodes.append(inode)
            return commit

        await self._carry_out(plan)

    async def set_xattr(
        self, ino: int, name: bytes, value: bytes, flags: int = 0, *, drop_set_gid: bool = False
    ) -> Inode:
        """`flags` are setxattr(2)'s XATTR_CREATE and XATTR_REPLACE; `drop_set_gid`: who sets an ACL may not
        keep set-group-id."""

        def change(inode: Inode) -> None:
            refuse_change(inode)
            if flags & os.XATTR_CREATE and name in inode.xattrs:
                raise fail(errno.EEXIST)
            if flags & os.XATTR_REPLACE and name not in inode.xattrs:
                raise fail(errno.ENODATA)
            if len(name) > NAME_MAX:
                raise fail(errno.ERANGE)
            if len(value) > XATTR_SIZE_MAX:
                raise fail(errno.E2BIG)
            if name in acl.NAMES:
                acl.put(inode, name, value, drop_set_gid=drop_set_gid)
            else:
                inode.xattrs = {**inode.xattrs, name: value}
            if sum(len(key) + len(data) for key, data in inode.xattrs.items()) > _XATTRS_TOTAL_MAX:
                raise fail(errno.ENOSPC)

        return await self._change(ino, change)

    async def remove_xattr(self, ino: int, name: bytes) -> Inode:
        def change(inode: Inode) -> None:
            refuse_change(inode)
            if name not in inode.xattrs and name not in acl.NAMES:
                raise fail(errno.ENODATA)
            inode.xattrs = {key: data for key, data in inode.xattrs.items() if key != name}

        return await self._change(ino, change)

    async def _change(
        self,
        ino: int,
        change: Callable[[Inode], None],
        *,
        sets_mtime: bool = False,
    ) -> Inode:
        """Change an inode's record, or a local orphan."""

        def plan() -> Commit:
            inode = self.inode(ino).copy()
            change(inode)
            inode.ctime_ns = time.time_ns()
            commit = Commit()
            commit.inode, commit.inodes = inode, (inode,)
            commit.local = inode.nlink == 0
            if sets_mtime and inode.is_dir:
                commit.times = ((ino, None),)
            return commit

        if self._linking:
            await self._wait_while_linking(ino)
        changed = await self._carry_out(plan)
        assert changed is not None
        return changed

    async def _wait_while_linking(self, ino: int) -> None:
        while ino in self._linking:
            await self._linking[ino].wait()

    async def drop(self, ino: int) -> None:
        """Forget an inode without a name, now that nobody holds it."""
        inode = self.inodes.get(ino)
        if inode is not None and inode.nlink == 0:
            del self.inodes[ino]
            self._children.pop(ino, None)

    async def flush(self) -> None:
        """Make everything done so far survive a crash."""
        await self._engine.flush()

    async def idle(self) -> None:
        await self._engine.idle()


def _without_name(parent: int, name: bytes, found: Inode, keep: bool) -> Commit:
    """Take a name away."""
    commit, now = Commit(), time.time_ns()
    commit.names = ((parent, name, 0),)
    commit.times = ((parent, now),)
    commit.urgent = True
    commit.keep = keep
    _unname(commit, found, now)
    return commit


def _unname(commit: Commit, found: Inode, now_ns: int) -> None:
    """An inode loses a name, and with the last one its record."""
    inode = found.copy()
    inode.nlink = 0 if inode.is_dir else inode.nlink - 1
    inode.ctime_ns = now_ns
    commit.inode = inode
    if inode.nlink:
        commit.inodes = [*commit.inodes, inode]
    else:
        commit.gone = (inode,)
