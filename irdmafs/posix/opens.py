"""Opens of files: by a name that is there, by one that is created, and without one."""

import errno
import os
import stat
from typing import Final

from ..backend.namespace import Inode, fail
from ..coherence.kernel_cache import Name
from ..coherence.nodes import Handle
from .calls import Attributes, Caller, refuse_other_than_file
from .metadata import Metadata
from .since import Since
from .superblock import Part, Superblock

# Others may remove a name and make it again each time that it is found taken.
_CREATES_MAX: Final = 20
# Flags of opens that change the file, or may.
_CHANGES: Final = os.O_ACCMODE | os.O_TRUNC


class Opens(Part):
    """Opens files, each on the content that the cache decides on."""

    def __init__(self, block: Superblock, metadata: Metadata, since: Since) -> None:
        super().__init__(block)
        self._metadata = metadata
        self._since = since

    async def open(
        self, inode: int, flags: int, ctx: Caller, *, lose_set_ids: bool | None = None
    ) -> Handle:
        node, found, name = await self._coherence.settle(inode, flags, ctx.pid)
        if not stat.S_ISREG(found.mode):
            refuse_other_than_file(found)
        if flags & _CHANGES:
            self._namespace.check_writable(found.ino)
        if flags & os.O_TRUNC:
            await self._metadata.lose_privileges(found.ino, ctx, lose_set_ids=lose_set_ids)
            found = self._inodes[found.ino]
        if self._store.sends:
            self._cache.references.opens(ctx.pid, found.ino, ctx.uid)
        handle = await self._cache.open(found, node, flags, ctx.pid, name)
        handle.name = name
        return handle

    async def create(
        self, parent_inode: int, name: bytes, mode: int, umask: int, flags: int, ctx: Caller
    ) -> tuple[Handle, Attributes]:
        directory = self._nodes.directory(parent_inode)
        if directory.xattrs:
            self._since.refuse(directory, name)
        writing = flags & os.O_ACCMODE != os.O_RDONLY
        for _ in range(_CREATES_MAX):
            # A file nobody writes is published as it is: empty. Else the name is made durable
            # together with the first version; a crash before that leaves neither.
            try:
                inode = await self._namespace.create(
                    directory.ino, name, mode & 0o7777 | stat.S_IFREG, ctx.uid, ctx.gid,
                    version=0 if writing else 1, durable=not writing, umask=umask,
                    layout=self._store.layout(directory.ino, name),
                    seen=not (self._store.sends and self._cache.sharing.isolates_below(directory.ino)),
                )  # fmt: skip
                return self._created(inode, flags, ctx, (directory.ino, name))
            except FileExistsError:
                if flags & os.O_EXCL:
                    raise
            # Another host may be making the file: two that open it share it.
            await self._namespace.show(directory.ino, name)
            found = self._namespace.lookup(directory.ino, name)
            if found is not None:
                return await self._open_found(found, flags, ctx, (directory.ino, name))
        raise fail(errno.EEXIST)

    async def _open_found(
        self, found: Inode, flags: int, ctx: Caller, name: Name
    ) -> tuple[Handle, Attributes]:
        """Open the file that a name led to by the time that it was to be created."""
        refuse_other_than_file(self._namespace.inode(found.ino))
        if flags & _CHANGES:
            self._namespace.check_writable(found.ino)
        found = await self._coherence.bring(found, content=not flags & os.O_TRUNC, opens=True)
        handle = await self._cache.open_any(found, flags, ctx.pid)
        handle.name = name
        handle.node.lookups += 1
        answer = self._answers.attributes(handle.node, found)
        self._coherence.changed(answer, handle.node)
        return handle, answer

    async def tmpfile(
        self, parent_inode: int, mode: int, umask: int, flags: int, ctx: Caller
    ) -> tuple[Handle, Attributes]:
        """Open a file without a name (O_TMPFILE). linkat(2) may give it one."""
        directory = self._nodes.directory(parent_inode)
        mode = mode & 0o7777 | stat.S_IFREG
        inode = await self._namespace.orphan(
            mode, ctx.uid, ctx.gid, directory=directory.ino, umask=umask
        )
        return self._created(inode, flags, ctx)

    def _created(
        self, inode: Inode, flags: int, ctx: Caller, name: Name | None = None
    ) -> tuple[Handle, Attributes]:
        handle = self._cache.create(inode, flags, ctx.pid)
        handle.name = name
        node = handle.node
        node.lookups += 1
        answer = self._answers.attributes(node, inode, is_new=True)
        if name is not None:
            self._coherence.made(answer, *name, node, inode)
        else:
            self._coherence.changed(answer, node)
        return handle, answer

    async def cancel_open(self, handle: Handle) -> None:
        """Close an open file whose open cannot be answered: nobody will release it."""
        handle.aborted = True
        await self._cache.release(handle.fh)
