"""Extended attributes: those that are kept, and our own (user.irdmafs.…), which tell or do something.

Some of our own are kept with an inode, and some report. The rest are requests of programs (docs/mount.md
says why these are attributes): `changes.N.S` and `tree.N.S` wait, `read_into.M.L` reads into memory whose
descriptors the mount takes from the caller, `keeps_no_pages` announces an open, setting `discard` gives a
written content up, `unmapped` says that it is not mapped any more, and `with_rename` that it waits for one.
"""

import errno
import json
import logging
import math
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from ..backend.namespace import ROOT_INO, Inode, Namespace, acl, fail
from ..backend.namespace.attributes import AWAITS, AWAITS_TIMEOUT, FOLLOW, ISOLATION, NAMES, check
from ..backend.namespace.drafts import DRAFTS
from ..backend.namespace.quotas import QUOTA_NAMES
from ..callers.processes import CAP_SYS_ADMIN, ids_of, open_thread
from ..coherence.content import Content
from ..coherence.nodes import Node
from ..inline import detach
from . import quotas
from .calls import Caller
from .clones import Clones
from .metadata import Part, Superblock
from .permissions import privileges_of
from .quotas import USED_BYTES, USED_INODES
from .waits import Waits

log = logging.getLogger(__name__)

PREFIX: Final = b"user.irdmafs."
# The counter of changes below a directory; followed by ".N" or ".N.SECONDS", once it is not N.
CHANGES: Final = PREFIX + b"changes"
# All that is below a directory; followed as CHANGES is, once its counter is not N. A program that waits for
# changes would otherwise look at each name by requests of its own, and in a cluster ask etcd for each. This
# is what the mount has been told so far, at one revision, with the counter that belongs to it: a program
# that waits for another counter misses nothing.
TREE: Final = PREFIX + b"tree"
DISCARD: Final = PREFIX + b"discard"
UNMAPPED: Final = PREFIX + b"unmapped"
WITH_RENAME: Final = PREFIX + b"with_rename"
# Reading it announces an open for reading that keeps no reference to pages (coherence/references.py).
KEEPS_NO_PAGES: Final = PREFIX + b"keeps_no_pages"
# Followed by the numbers of two descriptors of the caller: ".5.6".
READ_INTO: Final = PREFIX + b"read_into"
STATUS: Final = PREFIX + b"status"
# Which store nodes keep a file, in a cluster.
NODES: Final = PREFIX + b"nodes"
# The number of a file below a directory that a program has written and not closed; 0 if there is none.
UNFINISHED: Final = PREFIX + b"unfinished"
VERSION: Final = PREFIX + b"version"
# Reading it of a file gives a ticket for its version; setting it on a directory makes clones (clones.py).
CLONE: Final = PREFIX + b"clone"
VERSIONS: Final = PREFIX + b"versions"

_TELLING = {CHANGES, TREE, STATUS, NODES, VERSION, VERSIONS, USED_BYTES, USED_INODES}
_OF_DIRECTORIES = {FOLLOW, ISOLATION, DRAFTS, AWAITS, AWAITS_TIMEOUT, *NAMES, *QUOTA_NAMES}
# The attributes of array files (irdmafs.client), and those by which a directory rules everything below it.
_KEPT = {PREFIX + b"dtype", PREFIX + b"shape", *_OF_DIRECTORIES}
_SETTABLE = {DISCARD, UNMAPPED, WITH_RENAME, *_KEPT}
_REFUSALS_MAX: Final = 4
_TOLD_FOR_S: Final = 600
_SHOWN_BYTES: Final = 64
_CHANGED_SINCE: Final = re.compile(rb"\.([0-9]{1,20})(?:\.([0-9]+(?:\.[0-9]+)?))?")
_DESCRIPTOR_MAX: Final = 2**31 - 1
_WHY_MAX: Final = 96
_TRUSTED: Final = b"trusted."
_XATTR_NAMESPACES: Final = (b"user.", _TRUSTED, b"security.")
# The largest value of an attribute that Linux takes.
_VALUE_MAX: Final = 65536
# What an entry needs at least beside its name: '"":[1],'.
_ENTRY_BYTES: Final = 7
# Each is two more that whoever reads the answer as JSON has to go down.
_LEVELS_MAX: Final = 64
_ALL: Final = stat.S_IROTH | stat.S_IXOTH
Status = Callable[[], dict[str, Any]]


class Xattrs(Part):
    """Sets, shows and removes extended attributes. `status`: what user.irdmafs.status tells; `acls`: the
    session has the kernel check ACLs, otherwise there are none."""

    def __init__(
        self, block: Superblock, waits: Waits, clones: Clones, status: Status, *, acls: bool
    ) -> None:
        super().__init__(block)
        self._waits = waits
        self._clones = clones
        self._status = status
        self._acls = acls
        self._refusals = _Refusals(self._namespace)
        sharing = self._cache.sharing
        self._of_contents: dict[bytes, Callable[[Node], None]] = {
            DISCARD: sharing.discard,
            UNMAPPED: sharing.believe_unmapped,
            WITH_RENAME: sharing.leave_to_rename,
        }

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
        if name == CLONE and found.is_dir:
            await self._clones.make(self._nodes.directory(inode), value, ctx)
            return
        if name.startswith(PREFIX):
            with self._refusals.saying_why(found, name, value, ctx.pid):
                if name in self._of_contents:
                    self._of_contents[name](self._nodes.get(inode)[0])
                    return
                self._namespace.check_writable(found.ino)
                _refuse_nonsense(found, name, value)
                is_root = await quotas.may_set(ctx.uid, ctx.pid, self._processes)
                if name in QUOTA_NAMES and not is_root:
                    raise fail(errno.EPERM, "only root sets quotas")
                await self._store.prepare_attribute(found, name, value, is_root)
        await self._namespace.set_xattr(found.ino, name, value, flags, drop_set_gid=drop_set_gid)
        self._metadata.refresh_several(found.ino)
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
        if name in acl.NAMES:
            self._nodes.by_id[inode].shown = True
        value = found.xattrs.get(name)
        if value is not None:
            return value
        if name == VERSION and found.is_file:
            node, _ = self._nodes.get(inode)
            return b"%d" % self._cache.host.version_of(node, found)
        if name == CLONE and found.is_file:
            return await self._clones.ticket(inode, ctx)
        if name == VERSIONS and found.is_file:
            return json.dumps(self._versions(found)).encode()
        if name == KEEPS_NO_PAGES and found.is_file:
            return b"%d" % self._cache.references.announce(ctx.pid, found.ino, ctx.uid)
        if name.startswith(CHANGES) and found.is_dir:
            return b"%d" % await self._count(found.ino, name, CHANGES, ctx)
        if name.startswith(TREE) and found.is_dir:
            counter = await self._count(found.ino, name, TREE, ctx)
            found = self._namespace.inode(found.ino)
            return _tree_below(self._namespace, found, counter, ctx.uid)
        if name == UNFINISHED and found.is_dir:
            return b"%d" % self._cache.drafts.unfinished(found.ino)
        if name == STATUS and found.ino == ROOT_INO:
            status = self._status()
            status["warnings"] += self._refusals.warnings()
            return json.dumps(status).encode()
        if name == NODES and found.is_file:
            return await self._nodes_of(found)
        if name in (USED_BYTES, USED_INODES):
            await self._coherence.freshen(found)
            return quotas.used(self._namespace, found.ino, name)
        if name.startswith(READ_INTO) and found.is_file and self._store.sends:
            try:
                answer = await self._read_into(inode, name, ctx)
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:
                    raise
                answer = {"why_not": str(error.strerror)[:_WHY_MAX]}
            return json.dumps(answer).encode()
        raise fail(errno.ENODATA)

    def _versions(self, inode: Inode) -> dict[str, Any]:
        """Return every content of a file that is kept, newest first, and who keeps it."""
        openers: dict[Content | None, set[int]] = {None: set()}  # None: the current one
        for handle in self._nodes.handles.values():
            content = handle.content
            if content is not None and handle.node.ino == inode.ino:
                is_current = not content.is_changing and not content.state.ended
                openers.setdefault(None if is_current else content, set()).add(handle.pid)
        found = []
        for content, pids in openers.items():
            version, size, mtime_ns, state = inode.version, inode.size, inode.mtime_ns, "current"
            if content is not None:
                size, _, mtime_ns, _ = self._cache.host.look_of(content, inode)
                version, state = content.base.version, "open"
            row = {"version": version, "size": size, "mtime_ns": mtime_ns, "state": state}
            if content is not None and content.is_changing:
                row |= {"version": None, "state": "working"}
            found.append({**row, "openers": sorted(pids)})
        found.sort(key=lambda row: (row["version"] is None, row["version"]), reverse=True)
        return {"ino": inode.ino, "versions": found}

    async def _nodes_of(self, inode: Inode) -> bytes:
        await self._coherence.freshen(inode)
        if self._store.sends:
            await detach()
        found = await self._store.nodes_of(self._namespace.inode(inode.ino))
        return json.dumps(found, separators=(",", ":")).encode()

    async def _count(self, directory: int, name: bytes, attribute: bytes, ctx: Caller) -> int:
        """Return the counter of changes below a directory, after a wait if a name that begins with CHANGES
        or TREE asks for one. Raises OSError EINVAL."""
        if asked := name.removeprefix(attribute):
            found = _CHANGED_SINCE.fullmatch(asked)
            if found is None:
                raise fail(errno.EINVAL)
            seconds = math.inf if found[2] is None else float(found[2])
            await self._waits.changed(directory, int(found[1]), seconds, ctx)
        return self._waits.count(directory)

    async def _read_into(self, node_id: int, name: bytes, ctx: Caller) -> dict[str, Any]:
        """Read a file's current version, as an open would find it, into memory that the caller lends. An
        answer fits the buffer of a first getxattr(2) call. Raises OSError EOPNOTSUPP, with the reason, if
        the file should be opened instead."""
        _, *numbers = name.removeprefix(READ_INTO).split(b".")
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
        if name in QUOTA_NAMES and not await quotas.may_set(ctx.uid, ctx.pid, self._processes):
            raise fail(errno.EPERM, "only root takes quotas")
        await self._namespace.remove_xattr(found.ino, name)
        self._metadata.refresh_several(found.ino)


class _Refusals:
    """The attributes that were refused lately. Callers get only an error code; the log and the warnings of
    the mount say which value is wrong, and what is allowed."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        # The newest ones, with the time at which each came, in seconds of time.monotonic().
        self._newest: deque[tuple[float, str]] = deque(maxlen=_REFUSALS_MAX)

    @contextmanager
    def saying_why(self, inode: Inode, name: bytes, value: bytes, pid: int) -> Iterator[None]:
        """Note why an attribute is refused, if it is."""
        try:
            yield
        except OSError as error:
            shown = os.fsdecode(value[:_SHOWN_BYTES])
            what = f"{os.fsdecode(name)!r} is refused: {error.strerror}"
            where = self._namespace.describe(inode.ino)
            log.info("%s: %s (process %d gave %r)", where, what, pid, shown)
            self._newest.append((time.monotonic(), f"{what} (process {pid} gave {shown!r}"))
            raise

    def warnings(self) -> list[str]:
        """Return a line for each of the last minutes. They name no directory: everybody may read them."""
        now = time.monotonic()
        return [
            f"{what} {now - then:.0f} s ago; the log names the directory)"
            for then, what in self._newest
            if now - then < _TOLD_FOR_S
        ]


def _refuse_nonsense(inode: Inode, name: bytes, value: bytes) -> None:
    """Raise OSError EINVAL or EPERM for an unknown attribute or value: typing errors are not stored."""
    if name in _TELLING:
        raise fail(errno.EPERM, "it tells something, and cannot be set")
    if name not in _KEPT:
        known = ", ".join(sorted(map(os.fsdecode, _SETTABLE)))
        raise fail(errno.EINVAL, f"it means nothing; there are {known}")
    if name in _OF_DIRECTORIES:
        if not inode.is_dir:
            raise fail(errno.EINVAL, "only directories have it, for what is below")
        try:
            check(name, value)
        except ValueError as error:
            raise fail(errno.EINVAL, str(error)) from None


def _tree_below(namespace: Namespace, directory: Inode, counter: int, uid: int) -> bytes:
    """Return what a user may see below a directory as JSON: the counter and its entries, by name. Of a file
    [ino, ctime_ns, size, version, nlink], as published; of a directory [ino, entries], or [ino, null] if
    it is not sure that the user may look there; of anything else [ino]. Raises OSError EACCES for the
    directory itself, and E2BIG if there is too much for an attribute."""
    if not _may_look(directory, uid):
        raise fail(errno.EACCES, "only its owner, or everybody, may ask for all that is below it")
    room = _VALUE_MAX

    def entries(ino: int, levels: int) -> dict[str, Any]:
        nonlocal room
        if not levels:
            raise _too_much()
        found = {}
        for name, child in namespace.children(ino):
            room -= len(name) + _ENTRY_BYTES
            if room < 0:
                raise _too_much()
            inode = namespace.inodes.get(child)
            if inode is not None:
                found[os.fsdecode(name)] = entry(inode, levels - 1)
        return found

    def entry(inode: Inode, levels: int) -> list[Any]:
        if inode.is_file:
            return [inode.ino, inode.ctime_ns, inode.size, inode.version, inode.nlink]
        if inode.is_dir:
            return [inode.ino, entries(inode.ino, levels) if _may_look(inode, uid) else None]
        return [inode.ino]

    found = entries(directory.ino, _LEVELS_MAX)
    answer = json.dumps([counter, found], separators=(",", ":")).encode()
    if len(answer) > _VALUE_MAX:
        raise _too_much()
    return answer


def _may_look(directory: Inode, uid: int) -> bool:
    """Return whether a user may surely list a directory and see its files' status. Who is in a group, and
    what ACLs and capabilities allow, is left to the kernel."""
    mode = directory.mode
    if uid == directory.uid:
        return mode >> 6 & _ALL == _ALL
    return acl.ACCESS not in directory.xattrs and mode & mode >> 3 & _ALL == _ALL


def _too_much() -> OSError:
    return fail(errno.E2BIG, "there is too much below it for one answer")
