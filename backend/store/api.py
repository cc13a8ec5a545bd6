"""The interface between a mount and its store, which is this host's own or a cluster's, and the parts that
both stores have."""

import errno
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import trio

from ..files.extents import ExtentStore, copy_contents, when_unlocked
from ..model.records import ContentId, Layout
from ..namespace import NAME_MAX, Inode, Joint, Namespace, NewClone, NewVersion, Unread, fail

if TYPE_CHECKING:
    from .remote.locks import SharedLocks
    from .remote.versions import Freshness

# A transaction has two operations for each file, and compares the claims of their directories.
TOGETHER_MAX = 500
TOGETHER_DIRECTORIES_MAX = 40
_TRIES_MAX = 100


class Store(Protocol):
    """Contents by number and the namespace that names them. Methods raise OSError. Those that matter to
    stores of several hosts only have the answer of a store of one host."""

    namespace: Namespace
    # The contents that are on this host, as files.
    extents: ExtentStore
    # Bytes. Larger files are refused with EFBIG.
    size_max: int
    # Publishing waits for a disk or for the network.
    waits: bool
    # Publishing sends the bytes to other hosts, to which they can be compared later (`is_same`). The file
    # of a version must not be written then; on one host it is written in place. And files may not be on
    # this host, so `read_into` reads them.
    sends: bool = False
    # So many bytes of files that are closed may wait to be published: there is room for others beside them.
    may_wait_bytes: int = 0
    # The locks that other hosts see, too; None where there are no others.
    locks: "SharedLocks | None" = None
    # Tells how far the namespace may be believed; None where nobody else changes it.
    freshness: "Freshness | None" = None

    def pin(self, extent: ContentId) -> None:
        """Keep a content although its file moves on to another version."""

    def unpin(self, extent: ContentId) -> None:
        """Take one `pin` back."""

    def lend(self, extent: ContentId) -> None:
        """Note that a program may keep references to pages of a pinned content after it has closed it: its
        file must never hold other bytes."""
        return

    def retire(self, extent: ContentId) -> None:
        """Free a content that no version names any more, as soon as nothing pins it."""

    def resting(self) -> AbstractAsyncContextManager[None]:
        """Have nobody look at the namespace meanwhile. Then it has again all that was acknowledged before,
        if that can be found out."""
        return nullcontext()

    async def learn(self, unread: Unread) -> None:
        """Have the namespace know names that somebody asked for. Raises OSError."""
        raise unread

    def layout(self, parent: int, name: bytes) -> Layout:
        """Return where the contents of a file created under this name are to be kept."""

    async def nodes_of(self, inode: Inode) -> list[dict[str, Any]]:
        """Return, for each stripe group of a file, the group and the store nodes that keep it, the primary
        first. Raises OSError ENODATA where there are no store nodes."""
        raise fail(errno.ENODATA, "it is on this host")

    def allocate(self, inode: Inode) -> tuple[ContentId, int]:
        """Make an empty working copy for a file. Return its number and a read-write descriptor that the
        caller closes. Raises OSError (ENOSPC, EMFILE)."""

    async def publish(self, version: NewVersion) -> Inode:
        """Make a content the file's next version, which survives a crash when this returns. An empty
        content is not kept.

        Raises OSError ENOSPC and EDQUOT, and the present version stays; Outdated."""

    async def publish_together(
        self, versions: Sequence[NewVersion], joint: Joint | None = None
    ) -> list[Inode]:
        """Do as `publish` does, all at once, with contents of files that have their names and no version,
        TOGETHER_MAX at most; and with them, if it can be, what is `joint`. Raises OSError, or kv.Conflict:
        then none of them is known to be a version."""
        raise fail(errno.EOPNOTSUPP)

    def send_ahead(self, version: NewVersion, after_s: float) -> None:
        """Begin to bring to its nodes what `publish_together` will publish soon, unless it is small.
        `after_s`: when a write to it since would have moved its times."""
        return

    def holds_alone(self, directory: int) -> bool:
        """Return whether no other host looks into a directory before `before_looks` has returned."""
        return False

    def showing(self, directory: int) -> AbstractContextManager[None]:
        """Hold a directory alone no more while it gets a name where other hosts look, and from then on."""
        return nullcontext()

    def before_looks(self, store: Callable[[int], Awaitable[None]]) -> None:
        """Have `store` awaited, with its number, before other hosts may look into a directory that this
        host held alone."""
        return

    def may_have_published(self, extent: ContentId) -> bool:
        """Return whether `publish` of this content failed, although it may have become a version."""
        return False

    async def clone(self, directory: int, wanted: Sequence[NewClone]) -> None:
        """Make files in a directory with the contents of others, all of them, or none, without a copy of
        their bytes. Nobody may be writing these in place. Raises OSError ETXTBSY if a program may have one
        of them mapped for writing, and as Planner.clone does."""

    async def save_aside(self, version: NewVersion) -> str:
        """Publish a version that cannot become the file's next one as a new file beside it, and return that
        one's name. Raises OSError."""

    async def begin_in_place(self, inode: Inode, extent: ContentId) -> ContentId:
        """Make the content of a version one that may be written, and return its number from now on. It may
        be a copy. Raises OSError (ENOSPC)."""
        return extent

    def end_in_place(self, inode: Inode, extent: ContentId) -> bool:
        """Give back what `begin_in_place` returned, if it holds what it did then. Return whether it stands
        for the inode's version again. A copy does not."""
        return False

    def is_as_left(self, extent: ContentId) -> bool:
        """Return whether the file of a version is still the one that was written on this host."""
        return True

    def note_mapped(self, extent: ContentId) -> None:
        """Note that a program may have a content mapped for writing, also when it has closed it."""
        return

    def is_lent(self, extent: ContentId) -> bool:
        """Return whether the file of a version must not be written, as a store node on this host has it, or
        other versions."""
        return False

    def hands_over(self, extent: ContentId) -> bool:
        """Return whether publishing this content gives its very file to a store node on this host."""
        return False

    async def is_same(self, inode: Inode, extent: ContentId) -> bool:
        """Return whether the content holds the bytes of the inode's version. False if that cannot be
        known."""
        return False

    async def forget(self, inode: Inode) -> None:
        """Drop an inode that has no name and no holder, and its content."""

    async def bring(self, ino: int) -> Inode:
        """Bring the file's current version to this host. Return the inode as it then is. A content that is
        not here afterwards (`is_here`) is too large to be kept here: use `read`."""
        return self.namespace.inode(ino)

    async def read_into(self, ino: int, memory: int, lifeline: int) -> Inode:
        """Read the file's current version, whole, to the start of memory that a program lends, by two
        descriptors that are the store's from now on. Return the inode as it was then. Raises OSError
        EOPNOTSUPP, with the reason, if the file should be opened instead; EFBIG, EINVAL."""
        os.close(memory)
        os.close(lifeline)
        raise fail(errno.EOPNOTSUPP, "it is on this host")

    def is_here(self, extent: ContentId) -> bool:
        """Return whether a content is on this host."""
        return True

    def count_open(self, extent: ContentId) -> None:
        """Count an open that gets this content as one that found it here or had it fetched."""
        return

    async def read(self, inode: Inode, extent: ContentId, offset: int, size: int) -> bytes:
        """Return some bytes of a content that is not on this host."""
        raise fail(errno.EIO, "it is on this host")

    def statvfs(self) -> os.statvfs_result:
        """Return the space for contents, as statvfs(3) does."""
        return self.extents.statvfs()

    async def prepare_attribute(self, inode: Inode, name: bytes, value: bytes, root: bool) -> None:
        """Prepare for an attribute about to be set; `root`: by who may set quotas. Raises OSError."""
        return

    def figures(self) -> list[Any]:
        """Return dataclasses of figures (figures.py)."""
        return []

    def status(self) -> dict[str, Any]:
        """Return figures of its own for `irdmafs status`."""
        return {}


async def copy_of(
    store: Store, inode: Inode, extent: ContentId, *, syncs: bool = False
) -> ContentId:
    """Return a working copy of a content on this host, which programs may be writing. `syncs`: it survives
    a power loss. Raises OSError (ENOSPC)."""
    copy, fd = store.allocate(inode)
    try:
        with store.extents.opened(extent) as source:
            await when_unlocked(copy_contents, source, fd)
        if syncs:
            await trio.to_thread.run_sync(store.extents.sync, copy)
    except BaseException:
        store.retire(copy)
        raise
    finally:
        os.close(fd)
    return copy


async def make_aside(
    namespace: Namespace, ino: int, host: str, layout: Callable[[int, bytes], Layout]
) -> tuple[Inode, str]:
    """Make an empty file NAME.conflict-HOST-N beside the file, with its owner and mode; returns it and
    its path. Raises OSError: ESTALE when the file has no name."""
    names = namespace.names_of(ino)
    if not names:
        raise OSError(errno.ESTALE, "others have replaced and removed it; what was written is lost")
    parent, name = names[0]
    inode = namespace.inode(ino)
    for number in range(1, _TRIES_MAX + 1):
        suffix = os.fsencode(f".conflict-{host}-{number}")
        aside = name[: NAME_MAX - len(suffix)] + suffix
        if namespace.lookup(parent, aside) is not None:
            continue
        try:
            made = await namespace.create(
                parent, aside, inode.mode, inode.uid, inode.gid, layout=layout(parent, aside)
            )
        except FileExistsError:
            continue
        return made, namespace.describe(made.ino)
    raise OSError(errno.EEXIST, f"{_TRIES_MAX} files keep what could not be published already")


async def save_aside(store: Store, version: NewVersion, host: str) -> str:
    """Do as `Store.save_aside`; `host` wrote the version."""
    made, name = await make_aside(store.namespace, version.ino, host, store.layout)
    aside = version._replace(ino=made.ino, base=None, ctime_ns=None, name=None)
    published = await store.publish(aside)
    if published.extent != version.extent:
        store.retire(version.extent)
    return name
