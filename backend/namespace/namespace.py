"""The directory tree that programs change: names and inodes.

Reads are answered by the tree alone (tree). A mutation is decided on it (planner) and committed in one
transaction (local on one host, shared in a cluster; both have the same methods); so one that fails leaves
no trace.
"""

import errno
import os
import stat
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import trio

from ...inline import detach
from ..kv import Compare
from ..model.records import ContentId
from . import acl
from .clones import NewClone
from .commit import Commit, Joint
from .inode import FIRST_VIRTUAL_INO, NAME_MAX, ROOT_INO, Inode, fail, nearest_time
from .local import LocalCommitter
from .planner import (
    NOTHING_KNOWN,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    RENAME_WHITEOUT,
    Known,
    NewVersion,
    Planner,
    root_of,
)
from .shared import SharedCommitter
from .tree import Tree

XATTR_SIZE_MAX = 64 * 1024
_XATTRS_TOTAL_MAX = 1024 * 1024


class Namespace:
    """Names and inodes. Methods raise OSError with the errno POSIX gives the call; on a shared engine also
    EBUSY (conflicting changes of others at every try) and ETIMEDOUT (no answer: the change may or may
    not have been applied). `inodes` is for reading only.
    """

    def __init__(self, tree: Tree, committer: LocalCommitter | SharedCommitter) -> None:
        self.tree = tree
        self.writable = committer.writable
        self._committer = committer
        # Returns what the commit of a plan has as its inode, None if the plan is.
        self._carry_out: Callable[..., Coroutine[Any, Any, Any]] = committer.carry_out
        self._planner = Planner(tree, committer.new_ino)
        # Local orphans that are being linked: until they have a name, their local state is not changed.
        self._linking: dict[int, trio.Event] = {}
        # The tree answers by itself: each lookup and open asks it.
        self.inodes = tree.inodes
        self.damaged = tree.damaged
        self.holders = tree.holders
        self.quotas = tree.quotas
        self.watches = tree.watches
        self.inode = tree.inode
        self.lookup = tree.lookup
        self.leads_to = tree.leads_to
        self.parent_of = tree.parent_of
        self.children = tree.children
        self.parents_of = tree.parents_of
        self.names_of = tree.names_of
        self.path_of = tree.path_of
        self.describe = tree.describe

    def check_writable(self, ino: int) -> None:
        """Raise OSError EROFS if this mount may not change an inode."""
        if ino not in self.writable and ino < FIRST_VIRTUAL_INO:
            raise fail(errno.EROFS)

    async def ensure_root(self) -> None:
        """Make the root directory unless there is one, and be ready to make more."""
        await self._carry_out(partial(root_of, self.tree))

    # -- names -----------------------------------------------------------------------------------

    def create(
        self, parent: int, name: bytes, mode: int, uid: int, gid: int, **what: Any
    ) -> Coroutine[Any, Any, Inode]:
        """Make an inode of any type under a new name; `what` else it is as for Planner.create. If another
        host has removed it when this returns, it is a local orphan."""
        return self._carry_out(partial(self._planner.create, parent, name, mode, uid, gid, **what))

    async def show(self, parent: int, name: bytes, *, left: bool | None = None) -> None:
        """Let every mount see a name, also if its file has no version yet. `left`, if it is given: they do
        not see it, and who removes the directory may remove it if nobody writes the file any more."""
        await self._carry_out(partial(self._planner.show, parent, name, left=left))

    async def remove_abandoned(self) -> None:
        """Remove the names that nobody sees, of files that ended mounts made and never published."""
        tree, is_gone = self.tree, self.tree.is_abandoned
        gone = [ino for ino in tree.unseen if ino in self.writable and is_gone(tree.inodes[ino])]
        for parent, name in chain.from_iterable(map(tree.names_of, gone)):
            await self.unlink_if(parent, name, is_gone)

    async def _with_empty(self, plan: Callable[[], Commit | None], parent: int, name: bytes) -> Any:
        """Carry out a plan for which a directory is to be empty. Names that nobody needs are removed."""
        try:
            return await self._carry_out(plan)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            directory = self.tree.ino_behind(parent, name)
            if directory not in self.writable:
                raise
            if (left := self.tree.left_in(directory)) is None:
                raise
        for one in left:
            await self.unlink_if(directory, one, self.tree.is_left)
        return await self._carry_out(plan)

    def orphan(
        self, mode: int, uid: int, gid: int, *, directory: int = ROOT_INO, umask: int = 0
    ) -> Coroutine[Any, Any, Inode]:
        """Return a file without a name (O_TMPFILE), with the attributes that a directory hands down. It
        exists in the tree only, until link() names it."""
        return self._carry_out(
            partial(self._planner.orphan, directory, mode, uid, gid, umask=umask)
        )

    def add_virtual(self, inode: Inode) -> None:
        """Put a made-up inode into the tree, until Tree.drop()."""
        assert inode.ino >= FIRST_VIRTUAL_INO
        self.inodes[inode.ino] = inode

    def link(self, ino: int, parent: int, name: bytes) -> Coroutine[Any, Any, Inode]:
        """Give an inode another name, or its first."""
        return self._link(ino, partial(self._planner.link, ino, parent, name))

    async def _link(
        self, ino: int, plan: Callable[[], Commit], guards: Sequence[Compare] = ()
    ) -> Inode:
        if self._linking:
            await self._wait_while_linking(ino)
        self._linking[ino] = trio.Event()
        try:
            linked: Inode = await self._carry_out(plan, guards)
            return linked
        finally:
            self._linking.pop(ino).set()

    def unlink(self, parent: int, name: bytes) -> Coroutine[Any, Any, Inode]:
        """Remove a name that is not a directory's, and return the inode as it is afterwards.

        With nlink 0 its record is removed, and the inode with it unless one of `holders` has it open:
        then it stays without a name until Tree.drop().
        """
        return self._carry_out(partial(self._planner.unlink, parent, name))

    def unlink_if(
        self, parent: int, name: bytes, wanted: Callable[[Inode], bool]
    ) -> Coroutine[Any, Any, Inode | None]:
        """Unlink a name if its inode is `wanted` at that moment; return None if it is not, or there is no
        such name."""
        return self._carry_out(partial(self._planner.unlink_if, parent, name, wanted))

    def rmdir(
        self, parent: int, name: bytes, *, known: Known = NOTHING_KNOWN
    ) -> Coroutine[Any, Any, Inode]:
        """Remove an empty directory, as `unlink` does. Raises ESTALE if one of the names in `known` does
        not lead to its inode at that moment."""
        return self._with_empty(partial(self._planner.rmdir, parent, name, known), parent, name)

    async def rename(
        self,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        flags: int,
        *,
        before: Callable[[Joint], Awaitable[None]] | None = None,
        **what: Any,
    ) -> Inode | None:
        """Rename with renameat2(2)'s flags, and return the inode that lost its name, if any; `what` else
        there is to know as for Planner.rename. `before` is awaited first, and may have done it.

        That inode goes as with `unlink`. Raises ENAMETOOLONG when a directory of a shared engine would be
        moved below more than a hundred others.
        """
        if flags & ~RENAME_WHITEOUT not in (0, RENAME_NOREPLACE) and flags != RENAME_EXCHANGE:
            raise fail(errno.EINVAL)
        plan = partial(self._planner.rename, parent, name, new_parent, new_name, flags, **what)
        if before is not None:
            joint = Joint(plan)
            await before(joint)
            if joint.done is not None:
                return joint.done.inode
        renamed: Inode | None = await self._with_empty(plan, new_parent, new_name)
        return renamed

    # -- inodes ----------------------------------------------------------------------------------

    def publish(
        self, version: NewVersion, guards: Sequence[Compare] = ()
    ) -> Coroutine[Any, Any, Inode]:
        """Make an extent the file's next version; it survives a crash when this returns.

        Returns the inode as committed. A version that another host published meanwhile is superseded,
        unless the version has a base: then raises Outdated if that is not the newest. `guards` must hold,
        too: raises kv.Conflict when one of them does not. If the last name was removed, nlink is
        0 and the version is known here only. Raises OSError EDQUOT if a quota has no room for it.
        """
        plan = partial(self._planner.publish, version)
        if version.name is not None:
            return self._link(version.ino, plan, guards)
        return self._change(version.ino, plan, guards)

    async def publish_together(
        self, versions: Sequence[NewVersion], guards: Sequence[Compare], joint: Joint | None = None
    ) -> list[Inode]:
        """Do as `publish` does for several files, in one transaction: all of them, or none."""
        committer, published = self._committer, list[Inode]()
        assert isinstance(committer, SharedCommitter)

        def plan() -> Commit:
            commit = self._planner.publish_together(versions)
            published[:] = commit.inodes
            return commit if joint is None else joint.added_to(commit, committer.may_join)

        await committer.carry_out(plan, guards)
        if joint is not None:
            joint.done = joint.planned
        return published

    async def clone(self, parent: int, wanted: Sequence[NewClone], *, shares: bool) -> None:
        """Make files with the contents of others, all of them, or none. `shares`: they name the very
        content, as nodes admit. Raises OSError as Planner.clone does, and EEXIST."""
        await self._carry_out(partial(self._planner.clone, parent, wanted, shares=shares))

    async def move(self, ino: int, extent: ContentId) -> None:
        """Have a file's version in another extent of this host, which has the same bytes."""
        await self._change(ino, partial(self._planner.move, ino, extent))

    async def check_room(self, ino: int, blocks: int) -> None:
        """Raise OSError EDQUOT if quotas have no room for a version of so many blocks. Called before it is
        sent."""

        def admit() -> None:
            self.quotas.admit(ino, self.quotas.of(ino), blocks)

        try:
            admit()
        except OSError:
            await self._carry_out(admit)  # with all that others did, and all names that count

    def set_attributes(self, ino: int, **values: int) -> Coroutine[Any, Any, Inode]:
        """Set some of `mode` (without the type), `uid`, `gid`, `atime_ns`, `mtime_ns`."""
        sets_mtime = "mtime_ns" in values
        change = partial(_set_attributes, values=values)
        return self._change(ino, partial(self._planner.change, ino, change, sets_mtime=sets_mtime))

    async def note_reads(self, atimes: Mapping[int, int]) -> None:
        """Set when inodes were last read (ns), by number, unless they are gone or may not be changed;
        nothing else of them changes."""
        ours = {ino: atime_ns for ino, atime_ns in atimes.items() if ino in self.writable}
        if ours:
            await self._carry_out(partial(self._planner.note_reads, ours))

    def set_xattr(
        self, ino: int, name: bytes, value: bytes, flags: int = 0, *, drop_set_gid: bool = False
    ) -> Coroutine[Any, Any, Inode]:
        """Set an extended attribute. `flags` are setxattr(2)'s XATTR_CREATE and XATTR_REPLACE;
        `drop_set_gid`: the caller may not keep set-group-id when an ACL is set."""
        change = partial(_set_xattr, name=name, value=value, flags=flags, drop_set_gid=drop_set_gid)
        return self._change(ino, partial(self._planner.change, ino, change))

    def remove_xattr(self, ino: int, name: bytes) -> Coroutine[Any, Any, Inode]:
        change = partial(_remove_xattr, name=name)
        return self._change(ino, partial(self._planner.change, ino, change))

    def _change(
        self, ino: int, plan: Callable[[], Commit], guards: Sequence[Compare] = ()
    ) -> Coroutine[Any, Any, Inode]:
        """Change an inode, when it is not being linked."""
        if self._linking:
            return self._change_after_linking(ino, plan, guards)
        return self._carry_out(plan, guards)

    async def _change_after_linking(
        self, ino: int, plan: Callable[[], Commit], guards: Sequence[Compare]
    ) -> Inode:
        await self._wait_while_linking(ino)
        changed: Inode = await self._carry_out(plan, guards)
        return changed

    async def _wait_while_linking(self, ino: int) -> None:
        while (linking := self._linking.get(ino)) is not None:
            await detach()
            await linking.wait()

    async def flush(self) -> None:
        """Make everything done so far survive a crash."""
        await self._committer.flush()


def _set_attributes(inode: Inode, *, values: Mapping[str, int]) -> None:
    """Set attributes of an inode, a copy that may be changed (see Namespace.set_attributes)."""
    for name, value in values.items():
        if name == "mode":
            value = stat.S_IFMT(inode.mode) | stat.S_IMODE(value)
        elif name.endswith("_ns"):
            value = nearest_time(value)
        setattr(inode, name, value)
    if "mode" in values:
        acl.follow_chmod(inode)


def _set_xattr(inode: Inode, *, name: bytes, value: bytes, flags: int, drop_set_gid: bool) -> None:
    """Set an extended attribute of an inode (see Namespace.set_xattr). Raises OSError."""
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


def _remove_xattr(inode: Inode, *, name: bytes) -> None:
    """Remove an extended attribute of an inode. Raises OSError ENODATA."""
    if name not in inode.xattrs and name not in acl.NAMES:
        raise fail(errno.ENODATA)
    acl.remove(inode, name)
