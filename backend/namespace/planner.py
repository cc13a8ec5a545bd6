"""Decide mutations of the directory tree: their conditions, and the record changes that they make.

A decision reads the tree and changes nothing. It raises OSError with the errno that POSIX gives the call,
and may be made again (see shared): it returns None when there is nothing to do.

On a shared engine a transaction compares as little as is needed, so that hosts that work in one
directory do not conflict: a name that is made or removed, the inode whose link count changes, that a
directory in which a name is made exists (and, for a new inode, has the attributes that it hands down),
that a directory which is removed is empty. Moving a directory compares all directories above its new
place: two moves at once could otherwise make a cycle.
"""

import errno
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from ..model.clock import now_ns
from ..model.records import ContentId, Layout
from . import acl
from .clones import NewClone
from .commit import Commit
from .inode import FIRST_VIRTUAL_INO, NO_LAYOUT, ROOT_INO, Inode, fail, nearest_time
from .numbers import belongs
from .tree import Tree

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
RENAME_WHITEOUT = 4

# Inodes that names, each of a directory, are known to lead to.
Known = Mapping[tuple[int, bytes], int]
NOTHING_KNOWN: Final[Known] = MappingProxyType({})


class NewVersion(NamedTuple):
    """A file's next version: `extent` has its bytes. `size` is in bytes, `blocks` in 512-byte units, times
    in nanoseconds.

    `ctime_ns`: the time of the change, None: now, 0: no change. `base`: the version that it was made of, if
    that must still be the newest one. `mapped`: programs may have its file mapped, and change it without a
    trace. `layout`: where its bytes are, None: where the file's are; `digests`: of its bytes. `in_quotas`:
    it is refused if a quota has no room for it, and not only charged. `name`: a directory, and what the
    file is called there from then on, too. `pid`: the process (or thread) that publishes it, 0: the mount
    by itself.
    """

    ino: int
    extent: ContentId
    size: int
    blocks: int
    mtime_ns: int
    ctime_ns: int | None = None
    base: int | None = None
    mapped: bool = False
    layout: Layout | None = None
    digests: bytes = b""
    in_quotas: bool = True
    name: tuple[int, bytes] | None = None
    pid: int = 0

    @classmethod
    def of_file(
        cls, ino: int, extent: ContentId, status: os.stat_result, mtime_ns: int
    ) -> "NewVersion":
        """Return the version whose bytes are an extent; `status` is its stat."""
        return cls(ino, extent, status.st_size, status.st_blocks, mtime_ns)

    def with_bytes_of(self, extent: ContentId, status: os.stat_result) -> "NewVersion":
        """Return it with the bytes in another extent; `status` is that one's stat."""
        return self._replace(
            extent=extent, size=status.st_size, blocks=status.st_blocks, mapped=False
        )


class Outdated(OSError):
    """The base of a version is not the newest any more; `version` is the newest."""

    def __init__(self, version: int) -> None:
        super().__init__(errno.ESTALE, f"version {version} was published meanwhile")
        self.version = version


def root_of(tree: Tree) -> Commit | None:
    """Return the commit that makes the root directory, None if there is one."""
    if ROOT_INO in tree.inodes:
        return None
    root = Inode(ROOT_INO, stat.S_IFDIR | 0o755, os.getuid(), os.getgid(), now_ns())
    commit = Commit()
    commit.inode, commit.inodes = root, (root,)
    return commit


class Planner:
    """Decides mutations of a tree. new_ino(directory) returns a number that no inode ever had."""

    def __init__(self, tree: Tree, new_ino: Callable[[int], int]) -> None:
        self._tree = tree
        self._quotas = tree.quotas
        self._new_ino = new_ino

    def create(
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
        seen: bool = False,
    ) -> Commit:
        """Make an inode of any type under a new name. Unless `seen`, only this mount sees the name of a
        file before its first version, or `show`, or another name. durable=False: a crash may lose it until
        a durable transaction follows; a shared engine stores it at once."""
        commit = self._new_name(parent, name)
        directory = self._tree.inodes[parent]
        if directory.nlink == 0:
            raise fail(errno.ENOENT)  # removed while it is a working directory
        now = now_ns()
        inode = self._new_inode(directory, mode, uid, gid, umask, now)
        inode.rdev, inode.target, inode.version, inode.layout = rdev, target, version, layout
        inode.size = len(target)
        if not (seen or version) and stat.S_ISREG(mode):
            inode.maker = self._tree.maker
        commit.inode, commit.inodes = inode, (inode,)
        commit.new = inode
        commit.names = ((parent, name, inode.ino),)
        commit.times = ((parent, now),)
        commit.fixed = (directory,)  # its group and ACL may be handed down
        commit.durable = durable
        commit.may_wait = True
        if self._quotas.in_use:
            commit.charge = self._quotas.admit(inode.ino, self._quotas.above(parent), 0)
        return commit

    def _new_name(self, parent: int, name: bytes) -> Commit:
        """Return a commit in which the name is free. Raises EEXIST."""
        commit, taken = Commit(), self._tree.taken(parent, name)
        if taken is not None:
            if not self._tree.is_abandoned(taken):
                raise fail(errno.EEXIST)
            self._unname(commit, taken, now_ns())
        return commit

    def show(self, parent: int, name: bytes, *, left: bool | None) -> Commit | None:
        """Return the commit of Namespace.show; None if every mount sees the name."""
        taken = self._tree.taken(parent, name)
        if taken is None or not taken.maker:
            return None
        commit, shown = Commit(), taken.copy()
        shown.maker = 0 if left is None else -abs(taken.maker) if left else abs(taken.maker)
        commit.inode, commit.inodes = shown, (shown,)
        commit.may_wait = True
        return commit

    def orphan(self, directory: int, mode: int, uid: int, gid: int, *, umask: int) -> Commit:
        """Make a file without a name, with the attributes that the directory hands down."""
        commit = Commit()
        inode = self._new_inode(self._tree.inode(directory), mode, uid, gid, umask, now_ns())
        inode.nlink = 0
        commit.inode, commit.inodes, commit.local = inode, (inode,), True
        return commit

    def _new_inode(
        self, directory: Inode, mode: int, uid: int, gid: int, umask: int, now_ns: int
    ) -> Inode:
        """Return an inode without a name, with the group and ACL that the directory hands down."""
        inode = Inode(self._new_ino(directory.ino), mode, uid, gid, now_ns)
        if directory.mode & stat.S_ISGID:
            inode.gid = directory.gid
        if not stat.S_ISLNK(mode):
            default = directory.xattrs.get(acl.DEFAULT)
            if default is None:
                inode.mode &= ~(umask & 0o777)  # never the type, whatever the umask says
            else:
                inode.mode, inode.xattrs = acl.inherited(default, mode)
        if inode.is_dir:
            inode.mode |= directory.mode & stat.S_ISGID
        return inode

    def link(self, ino: int, parent: int, name: bytes) -> Commit:
        """Give an inode another name, or its first. Raises ESTALE if store nodes do not keep its content,
        as they did not see it named: its next version has to name it."""
        inode = self._tree.inode(ino).copy()
        commit = self._named(inode, parent, name)
        if not self._tree.inodes[ino].nlink and inode.extent and inode.layout.replicas:
            raise fail(errno.ESTALE)
        return commit

    def _named(self, inode: Inode, parent: int, name: bytes) -> Commit:
        """Return the commit that gives an inode, which it changes, a name."""
        commit, ino = self._new_name(parent, name), inode.ino
        if inode.is_dir or ino >= FIRST_VIRTUAL_INO:
            raise fail(errno.EPERM)
        if self._tree.inodes[parent].nlink == 0:
            raise fail(errno.ENOENT)
        _refuse_to_leave(ino, parent)
        now = now_ns()
        inode.nlink += 1
        inode.ctime_ns = now
        inode.maker = 0
        commit.inode, commit.inodes = inode, (inode,)
        commit.names = ((parent, name, ino),)
        commit.times = ((parent, now),)
        commit.within = (parent,)
        if self._quotas.in_use:
            if inode.nlink > 1:
                self._quotas.refuse_to_enter(self._quotas.of(ino), parent)
            else:
                above = self._quotas.above(parent)
                commit.charge = self._quotas.admit(ino, above, inode.blocks)
        return commit

    def unlink(self, parent: int, name: bytes) -> Commit:
        """Remove a name that is not a directory's."""
        found = self._tree.existing(parent, name)
        if found.is_dir:
            raise fail(errno.EISDIR)
        return self._without_name(parent, name, found)

    def unlink_if(self, parent: int, name: bytes, wanted: Callable[[Inode], bool]) -> Commit | None:
        """Remove a name if its inode is `wanted`."""
        found = self._tree.inodes.get(self._tree.ino_behind(parent, name))
        if found is None or found.is_dir or not wanted(found):
            return None
        return self._without_name(parent, name, found)

    def _refuse_others(self, known: Known) -> None:
        """Raise OSError ESTALE unless each name leads to its inode."""
        for (parent, name), ino in known.items():
            if self._tree.ino_behind(parent, name) != ino:
                raise fail(errno.ESTALE)

    def rmdir(self, parent: int, name: bytes, known: Known) -> Commit:
        """Remove an empty directory. Raises ESTALE if a `known` name leads elsewhere."""
        self._refuse_others(known)
        found = self._tree.existing(parent, name)
        if not found.is_dir:
            raise fail(errno.ENOTDIR)
        if not self._tree.is_empty(found.ino):
            raise fail(errno.ENOTEMPTY)
        return self._without_name(parent, name, found)

    def rename(
        self,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        flags: int,
        *,
        owner: tuple[int, int] = (0, 0),
        known: Known = NOTHING_KNOWN,
    ) -> Commit | None:
        """Rename with renameat2(2)'s flags. `owner`: user and group of a whiteout; `known` as for
        rmdir."""
        self._refuse_others(known)
        moved, replaced = self._tree.existing(parent, name), self._tree.taken(new_parent, new_name)
        if flags & RENAME_NOREPLACE and replaced is not None:
            self._new_name(new_parent, new_name)
        if new_name in (b".", b".."):
            raise fail(errno.EBUSY)
        if flags & RENAME_EXCHANGE and (replaced is None or replaced.ino in self._tree.unseen):
            raise fail(errno.ENOENT)
        if replaced is not None and replaced.ino == moved.ino:
            return None  # two names of one inode: POSIX demands that nothing happens
        if self._tree.inodes[new_parent].nlink == 0:
            raise fail(errno.ENOENT)
        _refuse_to_leave(moved.ino, new_parent)
        if flags & RENAME_EXCHANGE and replaced is not None:
            _refuse_to_leave(replaced.ino, parent)
        if self._quotas.in_use:
            self._quotas.refuse_to_enter(self._quotas.of(moved.ino), new_parent)
            if flags & RENAME_EXCHANGE and replaced is not None:
                self._quotas.refuse_to_enter(self._quotas.of(replaced.ino), parent)
        commit, now = Commit(), now_ns()
        changed = self._tree.inode(moved.ino).copy()
        changed.ctime_ns = now
        changed.maker = 0
        commit.inodes = [changed]
        commit.names = [(new_parent, new_name, moved.ino), (parent, name, 0)]
        commit.times = [(ino, now) for ino in {parent, new_parent}]
        commit.within = (new_parent,)
        commit.fixed = self._above(moved, parent, new_parent)
        if flags & RENAME_EXCHANGE:
            assert replaced is not None
            other = self._tree.inode(replaced.ino).copy()
            other.ctime_ns = now
            commit.inodes.append(other)
            commit.names[1] = (parent, name, other.ino)
            commit.fixed += self._above(replaced, new_parent, parent)
        elif replaced is not None:
            self._refuse_to_replace(moved, replaced)
            self._unname(commit, replaced, now)
            commit.urgent = True
        if flags & RENAME_WHITEOUT:
            self._whiteout(commit, parent, name, owner)
        return commit

    def _whiteout(self, commit: Commit, parent: int, name: bytes, owner: tuple[int, int]) -> None:
        """Put a whiteout, a character device 0:0 (overlayfs), in the place of the old name."""
        directory = self._tree.inodes[parent]
        whiteout = self._new_inode(directory, stat.S_IFCHR, *owner, 0, now_ns())
        whiteout.version = 1
        commit.inodes = [*commit.inodes, whiteout]
        commit.names = [commit.names[0], (parent, name, whiteout.ino)]
        commit.fixed = [*commit.fixed, directory]
        if self._quotas.in_use:
            self._quotas.admit(whiteout.ino, self._quotas.above(parent), 0)

    def _above(self, moved: Inode, source: int, target: int) -> list[Inode]:
        """Return all directories from `target` up, if moving a directory there could make a cycle.

        Raises EINVAL if it does.
        """
        found: list[Inode] = []
        if moved.is_dir and source != target:
            while target != ROOT_INO:
                if target == moved.ino:
                    raise fail(errno.EINVAL)
                found.append(self._tree.inodes[target])
                target = found[-1].parent
        return found

    def _refuse_to_replace(self, moved: Inode, replaced: Inode) -> None:
        if moved.is_dir and not replaced.is_dir and not self._tree.is_abandoned(replaced):
            raise fail(errno.ENOTDIR)
        if replaced.is_dir and not moved.is_dir:
            raise fail(errno.EISDIR)
        if replaced.is_dir and not self._tree.is_empty(replaced.ino):
            raise fail(errno.ENOTEMPTY)

    def _without_name(self, parent: int, name: bytes, found: Inode) -> Commit:
        """Remove a name."""
        commit, now = Commit(), now_ns()
        commit.names = ((parent, name, 0),)
        commit.times = ((parent, now),)
        commit.urgent = commit.may_wait = True
        self._unname(commit, found, now)
        return commit

    def _unname(self, commit: Commit, found: Inode, now_ns: int) -> None:
        """Take a name from an inode, and with the last one its record."""
        inode = found.copy()
        is_damaged = found.ino in self._tree.damaged
        inode.nlink = 0 if inode.is_dir or is_damaged else inode.nlink - 1
        inode.ctime_ns = now_ns
        commit.inode = inode
        if inode.nlink:
            commit.inodes = [*commit.inodes, inode]
        elif not is_damaged or (inode.revision and len(self._tree.names_of(inode.ino)) == 1):
            commit.gone = (inode,)

    def publish(self, version: NewVersion) -> Commit:
        """Make an extent the file's next version. Raises Outdated, and ESTALE if another mount has taken
        the name of a file that only this one saw."""
        ino, size, blocks = version.ino, version.size, version.blocks
        found = self._tree.inode(ino)
        if found.maker and not found.nlink:
            raise fail(errno.ESTALE, "another host has taken its name, before the first version")
        if version.base is not None and found.version != version.base:
            raise Outdated(found.version)
        inode = found.copy()
        inode.version += 1
        inode.extent, inode.size, inode.blocks = version.extent, size, blocks
        inode.digests, inode.origin = version.digests, 0
        inode.mtime_ns = nearest_time(version.mtime_ns)
        if version.ctime_ns != 0:
            inode.ctime_ns = nearest_time(max(inode.ctime_ns + 1, version.ctime_ns or now_ns()))
        if version.layout is not None:
            inode.layout = version.layout
        if version.name is not None:
            commit = self._named(inode, *version.name)
        else:
            commit, inode.maker = Commit(), 0
            commit.inode, commit.inodes = inode, (inode,)
            commit.local = not inode.nlink
        # A file that could not be written completely has to be truncated, also on a full store.
        commit.urgent = size < found.size or not found.version
        if self._quotas.in_use and version.in_quotas and commit.charge is None:
            commit.charge = self._quotas.admit(ino, self._quotas.of(ino), blocks)
        return commit

    def publish_together(self, versions: Sequence[NewVersion]) -> Commit:
        """Make extents the next versions of several files that have names. Raises as `publish` does."""
        commit = Commit()
        commit.inodes = [self.publish(version).inodes[0] for version in versions]
        if not all(inode.nlink for inode in commit.inodes):
            raise fail(errno.ESTALE, "a file has lost its name")
        commit.urgent = True
        return commit

    def clone(self, parent: int, wanted: Sequence[NewClone], *, shares: bool) -> Commit:
        """Make files with the contents of others, whose times they get. `shares`: they name the very
        content. Raises ESTALE if one has another version; EXDEV if it is of another subvolume; E2BIG for
        several at a time where quotas count each."""
        commit, directory, now = Commit(), self._tree.inode(parent), now_ns()
        if directory.nlink == 0:
            raise fail(errno.ENOENT)
        inodes, names, gone, sources = list[Inode](), [], list[Inode](), list[Inode]()
        for name, source, made in wanted:
            found, inode = self._tree.inode(source.ino), made.copy()
            if found.version != source.version or not found.nlink:
                raise fail(errno.ESTALE, "it has another version by now")
            _refuse_to_leave(found.ino, parent)
            gone += self._new_name(parent, name).gone
            inode.ino, inode.nlink, inode.version, inode.revision = self._new_ino(parent), 1, 1, 0
            inode.parent, inode.name, inode.more = 0, b"", 0
            inode.ctime_ns = inode.birth_ns = now
            if shares and inode.extent:
                inode.origin = found.origin or found.ino
                self._tree.clones.in_use = True
                sources.append(found)
            inodes.append(inode)
            names.append((parent, name, inode.ino))
        commit.inode, commit.inodes, commit.names, commit.gone = inodes[0], inodes, names, gone
        commit.fixed, commit.sources, commit.times = (directory,), sources, ((parent, now),)
        if self._quotas.in_use and (above := self._quotas.above(parent)):
            if len(wanted) > 1:
                raise fail(errno.E2BIG, "quotas count one file at a time")
            commit.charge = self._quotas.admit(inodes[0].ino, above, inodes[0].blocks)
        return commit

    def move(self, ino: int, extent: ContentId) -> Commit:
        """Have a file's version in another extent, which has the same bytes."""
        commit, inode = Commit(), self._tree.inode(ino).copy()
        inode.extent = extent
        commit.inode, commit.inodes, commit.local = inode, (inode,), not inode.nlink
        return commit

    def change(
        self, ino: int, change: Callable[[Inode], None], *, sets_mtime: bool = False
    ) -> Commit:
        """Change an inode's record, or a local orphan."""
        if ino >= FIRST_VIRTUAL_INO:
            raise fail(errno.EPERM)
        inode = self._tree.inode(ino).copy()
        change(inode)
        inode.ctime_ns = now_ns()
        commit = Commit()
        commit.inode, commit.inodes = inode, (inode,)
        commit.local = inode.nlink == 0
        commit.may_wait = True
        if sets_mtime and inode.is_dir:
            commit.times = ((ino, None),)
        return commit

    def note_reads(self, atimes: Mapping[int, int]) -> Commit | None:
        """Set when inodes were last read."""
        commit = Commit()
        commit.inodes = []
        commit.may_wait = True
        for ino, atime_ns in atimes.items():
            found = self._tree.inodes.get(ino)
            if found is not None and found.nlink and found.atime_ns < atime_ns:
                inode = found.copy()
                inode.atime_ns = nearest_time(atime_ns)
                commit.inodes.append(inode)
        return commit if commit.inodes else None


def _refuse_to_leave(ino: int, directory: int) -> None:
    """Raise OSError EXDEV if an inode would leave its subvolume, or enter one, by a name in a directory."""
    if not belongs(ino, directory):
        raise fail(errno.EXDEV)
