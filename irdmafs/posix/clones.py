"""Clones: files with the very contents of other files' versions, without a copy of their bytes.

A program reads a file's attribute `user.irdmafs.clone`, for which the kernel demands the right to read it.
The answer is a ticket for its present version. Setting that attribute of a directory, for which it demands
the right to write there, to a JSON list of `[name, ticket]` makes these files, all or none: in a cluster in
one transaction. A ticket is worth what an open descriptor is: it names inode and version, with a code that
only this mount can make. A program that is refused (whatever the error) copies the bytes.
"""

import errno
import json
import os
import secrets
import stat
from hashlib import blake2b
from typing import Final

from ..backend.namespace import Inode, NewClone, acl, fail
from ..backend.namespace.inode import is_name
from ..callers.processes import CAP_CHOWN, Credentials
from ..inline import detach
from .calls import Caller
from .metadata import Part, Superblock
from .permissions import SEARCH, SET_IDS, refuse_access
from .since import Since

_CODE_BYTES: Final = 16
_FILES_MAX: Final = 500


class Clones(Part):
    """Hands tickets out, and makes files of them."""

    def __init__(self, block: Superblock, since: Since) -> None:
        super().__init__(block)
        self._since = since
        self._key = secrets.token_bytes(32)

    async def ticket(self, node_id: int, ctx: Caller) -> bytes:
        """Return a ticket for the version of a file that an open would get. Raises OSError ETXTBSY if that
        is written in place, or nothing is published."""
        _, found = await self._coherence.settle_names(node_id, ctx.pid, by_name=True)
        if self._cache.put_off.handles:
            await self._cache.drafts.store(found.ino)
        found = self._inodes[found.ino]
        self._source(found.ino, found.version)
        return self._signed(f"{found.ino}.{found.version}")

    def _signed(self, what: str) -> bytes:
        code = blake2b(what.encode(), key=self._key, digest_size=_CODE_BYTES).hexdigest()
        return f"{what}.{code}".encode()

    def _source(self, ino: int, version: int) -> Inode:
        found = self._namespace.inode(ino)
        if found.version != version:
            raise fail(errno.ESTALE, "it has another version by now")
        if not self._cache.sharing.may_be_cloned(found):
            raise fail(errno.ETXTBSY, "it is being written, or has no version")
        return found

    async def make(self, directory: Inode, value: bytes, ctx: Caller) -> None:
        """Make the files of a list of names and tickets in a directory. Raises OSError: EINVAL for anything
        else, ESTALE for the ticket of an earlier version, and those of Store.clone."""
        self._namespace.check_writable(directory.ino)
        await refuse_access(directory, SEARCH, ctx, self._processes, self._options)
        await detach()
        who = await self._processes.credentials(ctx.pid)
        wanted = []
        for name, ino, version in self._read(value):
            if directory.xattrs:
                self._since.refuse(directory, name)
            source = self._source(ino, version)
            if not self._store.sends:
                self._cache.host.drop_idle_backings(ino)
            wanted.append(NewClone(name, source, _made_of(source, directory, ctx, who)))
        await self._store.clone(directory.ino, wanted)
        # The kernel did not make these names itself.
        kernel = self._cache.kernel
        kernel.expire_names([(directory.ino, one.name) for one in wanted])
        for node in self._nodes.of(directory.ino):
            kernel.invalidate_attributes(node)

    def _read(self, value: bytes) -> list[tuple[bytes, int, int]]:
        found = []
        try:
            for name, ticket in json.loads(value):
                what, ino, version = ticket.rpartition(".")[0], *map(int, ticket.split(".")[:2])
                if not secrets.compare_digest(self._signed(what), ticket.encode()):
                    raise fail(errno.EINVAL, "the ticket is not of this mount")
                found.append((os.fsencode(name), ino, version))
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise fail(errno.EINVAL, "it is no list of names and tickets") from None
        names = {name for name, *_ in found if is_name(name)}
        if not 0 < len(found) == len(names) <= _FILES_MAX:
            raise fail(errno.EINVAL, f"it is no list of 1 to {_FILES_MAX} names")
        return found


def _made_of(source: Inode, directory: Inode, ctx: Caller, who: Credentials) -> Inode:
    """Return a copy of an inode with the owner, mode and attributes that `cp -a` would give it."""
    made = source.copy()
    if ctx.uid or not who.has(CAP_CHOWN):
        made.uid = ctx.uid
        if made.gid not in (ctx.gid, *who.groups):
            made.gid = directory.gid if directory.mode & stat.S_ISGID else ctx.gid
        if (made.uid, made.gid) != (source.uid, source.gid):
            made.mode &= ~SET_IDS
        kept = source.xattrs.items()
        made.xattrs = {
            key: data for key, data in kept if key == acl.ACCESS or key.startswith(b"user.")
        }
    return made
