"""When bytes become a version: close, fsync, rename, and what must not become one.

docs/sharing.md, "When a version is published", has the rules that this module carries out.
"""

import errno
import logging
import os
from collections.abc import Collection
from contextlib import ExitStack

import trio

from ..backend.namespace import Inode, Joint, NewVersion, Outdated, fail
from ..callers.processes import Processes
from ..inline import detach
from .content import Content, Stamp, State
from .host import Host, OnHost
from .in_place import InPlace
from .kernel_cache import Name
from .nodes import Handle
from .put_off import PutOff
from .table import changed_ns, stamp_of

log = logging.getLogger(__name__)


class Publisher(OnHost):
    """Decides what is published when, and publishes it."""

    def __init__(
        self, host: Host, in_place: InPlace, put_off: PutOff, processes: Processes
    ) -> None:
        super().__init__(host)
        self._in_place = in_place
        self._put_off = put_off
        self._tree = host.store.namespace.tree
        self._processes = processes
        self._turns: dict[int, trio.Lock] = {}  # by inode, while one is being published

    # -- close -----------------------------------------------------------------------------------

    async def flush(self, handle: Handle, pid: int) -> None:
        """Carry out close(2) of one descriptor. Return when everything written is published."""
        content = handle.content
        if content is None or not handle.writing:
            return
        inode = self._inodes[content.ino]
        if not (inode.nlink or inode.maker):
            return
        if pid != handle.pid:
            others = await self._processes.may_still_write(pid, handle.pid)
            if others and await self._processes.hold(others, content.ino):
                return  # half-written files are not published
        if content.is_busy:
            await detach()
            async with content.locked():
                pass
        handle.aborted = self._table.is_given_up(handle, content)
        if handle.aborted or (content.state.ended and not self._table.is_written(content)):
            return
        if content.whole or content.seen is None:
            process = await self._processes.of(pid)
            if content.whole and process.killed_by_signal():
                handle.aborted = handle.killed = True
                if process.tell_once():
                    where = self._store.namespace.describe(content.ino)
                    text = (
                        "%s: pid %d died writing it; it is not published, as is all that it wrote"
                    )
                    log.info(text, where, pid)
                return
        status = self._table.stat(content) if content.extent else None
        if content.seen is None and not self._table.is_written(content, status):
            if await self._has_duplicate(pid, content.ino):
                return
            status = None  # others may have run
        changed = self._table.is_changed(handle, content, status)
        if not changed and not self._is_to_be_compared(content):
            if inode.maker and not (await self._processes.of(pid)).killed_by_signal():
                await self.show_name(content.ino)
            return
        if self._tree.has_drafts and self._put_off.takes(handle, content, inode):
            return
        try:
            stays = content.writers > 1
            if self._store.sends and not stays:
                stays = await self._stays(handle, content, pid)
            await self.publish(content, stays=stays, changed=changed, pid=pid, status=status)
        except OSError as error:
            # The closing program gets the error, and may write the file anew: this must not overwrite that.
            # Later writes through a mapping were not refused.
            handle.aborted = not content.mapped
            where = self._store.namespace.describe(content.ino)
            log.error("%s: what pid %d wrote could not be published: %s", where, pid, error)
            raise

    async def _stays(self, handle: Handle, content: Content, pid: int) -> bool:
        """Return whether a content that leaves this host may be written on by its only writer: a copy is
        published then."""
        # The bytes are hashed while they are sent; a program that maps them may store meanwhile.
        if content.mapped:
            return True
        if not self._store.hands_over(content.extent):
            return False
        # The store adopts the very file: other descriptors of it would not see later writes, and would keep
        # it locked while they write.
        if content.holds > 1 or pid != handle.pid or not handle.trusted:
            return True
        return await self._has_duplicate(pid, content.ino)

    async def _has_duplicate(self, pid: int, ino: int) -> bool:
        """Return whether the process has another descriptor of the file with a number used by
        redirections."""
        process = await self._processes.of(pid)
        return not process.is_in_exec() and await self._processes.holds_low(pid, ino)

    async def last_release(self, handle: Handle, content: Content) -> None:
        """Publish the rest when the last descriptor of the only writer, and its mappings, are gone.

        A file without a name may still be given one, or opened, through descriptors that never opened it
        (O_PATH), except in a cluster.
        """
        inode = self._inodes[content.ino]
        while (
            not (handle.aborted or content.state is State.GIVEN_UP)
            and (bool(inode.nlink) or self._store.freshness is None)
            and not (content.state.ended and not self._table.is_written(content))
            and content.writers == 1
        ):
            changed = self._table.is_changed(handle, content)
            if changed or (not content.state.ended and self._is_to_be_compared(content)):
                await self.publish(content, stays=False, changed=changed)
            if not changed:
                return
            inode = self._inodes[content.ino]

    def give_up(self, handle: Handle) -> bool:
        """Publish nothing through this handle any more. Return whether there was anything to publish."""
        content = handle.content
        unpublished = handle.writing and content is not None and self._table.is_written(content)
        handle.aborted |= unpublished
        return unpublished

    # -- other occasions -------------------------------------------------------------------------

    async def fsync(self, handle: Handle) -> None:
        """Carry out fsync(2): publish everything written so far; the descriptor stays open."""
        content = handle.content
        if content is None or not handle.writing or self._table.is_given_up(handle, content):
            return
        inode = self._inodes[content.ino]
        if self._store.sends and not (inode.nlink or inode.maker):
            return  # nobody else can open it
        if content.state.ended and not self._table.is_written(content):
            return
        changed = self._table.is_changed(handle, content)
        if not self._store.sends:
            # There is no other copy, but processes that wait for versions must be told of this one.
            was_written = content.seen != content.begun
            changed = changed or (was_written and self._table.may_hide_writes(content))
        if changed and self._tree.has_drafts and self._put_off.takes(handle, content, inode):
            return
        if changed or self._is_to_be_compared(content):
            await self.publish(content, stays=True, changed=changed, pid=handle.pid)
        else:
            await self.show_name(content.ino)

    async def show_name(self, ino: int) -> None:
        """Let other hosts see the name of a new file that is empty, or is about to be locked."""
        if ino in self._put_off.handles:
            await self.publish_now(ino)
        if self._inodes[ino].maker:
            for name in self._store.namespace.names_of(ino):
                await self._store.namespace.show(*name)

    def is_changed_in_place(self, ino: int) -> bool:
        """Return whether anybody wrote the file in place since it was published, as far as stat can
        tell."""
        content = self._table.current.get(ino)
        return content is not None and content.is_changing and self._table.is_written(content)

    async def publish_in_place(self, ino: int, *, begun: bool, pid: int = 0) -> None:
        """Publish everything written in place so far, before another host may lock the file. `begun`: also
        a new file whose writers all began with an empty one, which is else left to their closes. `pid`: the
        process that unlocks it."""
        content = self._table.current.get(ino)
        if (
            content is not None
            and content.is_changing
            and (begun or not content.whole)
            and self._inodes[ino].nlink
        ):
            with self._host.held(content):
                await self._in_place.forget_pages(content)
                changed = self._table.is_written(content)
                if content.extent and (changed or self._is_to_be_compared(content)):
                    await self.publish(content, stays=True, changed=changed, pid=pid)

    async def set_aside(self, ino: int) -> None:
        """Keep what was written in place and not published in a file beside it, and show the newest
        version: it was written by a process that had lost its lock. Raises OSError."""
        content = self._table.current.get(ino)
        if content is None or not content.state.writable:
            return
        with self._host.held(content):
            await detach()
            await self._in_place.forget_pages(content)
            async with content.locked():
                if not content.state.writable or not self._table.is_written(content, surely=True):
                    return
                status = self._table.stat(content)
                version = NewVersion.of_file(ino, content.extent, status, status.st_mtime_ns)
                await self._save_aside(content, version, status)

    async def show_newest(self, ino: int) -> None:
        """Show the newest version, before a lock of the file is granted; what is open stays if the file was
        removed. Raises OSError ESTALE if something else was written in place here; that is in a file beside
        it now."""
        try:
            await self._in_place.refresh(ino)
        except OSError as error:
            if error.errno != errno.ESTALE or self._inodes[ino].nlink:
                raise
        inode = self._inodes.get(ino)
        if inode is not None and self._in_place.is_behind(inode):
            await self.publish_in_place(ino, begun=True)

    async def publish_now(self, ino: int, name: Name | None = None) -> bool:
        """Publish the content being written to an inode whose name is about to lead to another inode, or
        that gets a `name` with it, also after its writer has gone. Return whether it got that."""
        is_named = False
        with ExitStack() as held:
            contents = list(self._table.private.get(ino, ()))
            current = self._table.current.get(ino)
            if current and (current.writers or (name and current.state is State.LEFT)):
                contents.insert(0, current)
            for content in contents:
                held.enter_context(self._host.held(content))
            for content in contents:
                if not (self._table.stamp(content)[0] and self._table.is_written(content)):
                    continue
                done = await self.publish(content, stays=True, name=None if is_named else name)
                is_named |= done and name is not None
        return is_named

    # -- publishing ------------------------------------------------------------------------------

    async def publish(
        self,
        content: Content,
        *,
        stays: bool,
        changed: bool = True,
        name: Name | None = None,
        pid: int = 0,
        status: os.stat_result | None = None,
    ) -> bool:
        """Publish a content, and return whether there was one; if it is not `changed`, only if a comparison
        finds it changed. `name` and `pid` as for NewVersion. `status`: its extent's stat, if known: what is
        written later is found to be written since."""
        lock = None
        if self._store.waits or content.is_busy or (stays and self._copies(content)):
            await detach()
            seen, lock, status = content.seen, content.locked(), None
            # A lock that is free is taken without letting other tasks go first.
            if lock.locked():
                await lock.acquire()
            else:
                lock.acquire_nowait()
        try:
            if lock is not None:
                # Another task may have published it meanwhile.
                certain = changed and content.seen == seen
                if not (certain or await self._is_found_changed(content)):
                    return False
                content.leaves = not stays and self._store.hands_over(content.extent)
                if content.leaves and content.holds > 1:
                    content.leaves, stays = False, True  # it was opened meanwhile
            if not content.extent:
                return False
            stays = stays or content.writers > 1  # others may have opened it meanwhile
            status = status or self._table.stat(content)
            copies = stays and bool(status.st_size) and self._copies(content)
            version = self.version_of(content, status, name, pid)
            try:
                if copies:
                    version = version.with_bytes_of(*await self._in_place.copied(content))
                inode = await self._store_version(content, version)
            except Outdated as outdated:
                inode = self._inodes[content.ino]
                # Two hosts that only emptied the file, as programs do with lock files, do not conflict.
                if status.st_size or inode.size:
                    raise await self._conflict(content, version, status, outdated) from outdated
            except BaseException:
                if version.extent != content.extent:
                    self._store.extents.free(version.extent)
                raise
            if version.extent not in (content.extent, inode.extent):
                self._store.retire(version.extent)  # the copy was published under another number
            self._become_version(content, inode, stamp_of(status), by_copy=copies)
        finally:
            if lock is not None:
                content.leaves = False
                lock.release()
        if self._nodes.has_siblings(inode.ino):
            self._announce(inode, content)
        return True

    async def publish_together(
        self, contents: Collection[Content], joint: Joint | None = None
    ) -> None:
        """Publish contents of new files, of which no descriptor is open, in one transaction; those that
        nobody uses. If these are all, `joint` may be in it. Raises OSError, Conflict: see
        Store.publish_together."""
        with ExitStack() as ending:
            stats: dict[Content, os.stat_result] = {}
            for content in contents:
                leaves = self._store.hands_over(content.extent)
                is_held = leaves and content.holds > 1
                if not (is_held or content.is_busy or content.ino in self._turns):
                    content.leaves = leaves
                    ending.callback(setattr, content, "leaves", False)
                    content.locked().acquire_nowait()
                    ending.callback(content.locked().release)
                    ending.callback(self._end_turn, content.ino, self._begin_turn(content))
                    stats[content] = self._table.stat(content)
            if not stats:
                return
            versions = [self.version_of(each, status) for each, status in stats.items()]
            is_all = len(stats) == len(contents)
            inodes = await self._store.publish_together(versions, joint if is_all else None)
            for (content, status), inode in zip(stats.items(), inodes, strict=True):
                self._table.published[content.ino] = inode.version
                self._become_version(content, inode, stamp_of(status), by_copy=False)
                if self._nodes.has_siblings(inode.ino):
                    self._announce(inode, content)

    async def _is_found_changed(self, content: Content) -> bool:
        """Return whether the content was written since it was published, as far as a comparison of bytes
        with the version can tell."""
        if self._table.is_written(content, surely=True):
            return True
        if not self._is_to_be_compared(content):
            return False
        same = await self._store.is_same(content.base, content.extent)
        # Somebody may have truncated the file meanwhile.
        return not same or self._table.is_written(content, surely=True)

    def _is_to_be_compared(self, content: Content) -> bool:
        """Return whether its bytes have to be compared with those that other hosts have."""
        return self._store.sends and self._table.may_hide_writes(content)

    def _copies(self, content: Content) -> bool:
        """Return whether a copy is published while the content is written on. Readers of a private content
        need a copy, as they see whole versions only. So does everything that leaves this host."""
        return content.state is State.REPLACING or self._store.sends

    def version_of(
        self, content: Content, status: os.stat_result, name: Name | None = None, pid: int = 0
    ) -> NewVersion:
        """Return the version that the content would be now; `status` is its extent's stat."""
        replaces = content.state is State.REPLACING
        written = replaces or self._table.is_written(content, status)
        ctime_ns = changed_ns(content, status) if written else 0
        # A writer that replaces a file does so even if others published meanwhile. On one host the last
        # close wins.
        base = None if replaces or content.whole else content.base.version
        return NewVersion(
            content.ino, content.extent, status.st_size, status.st_blocks, status.st_mtime_ns,
            ctime_ns, base, content.mapped, name=name, pid=pid,
        )  # fmt: skip

    async def _store_version(self, content: Content, version: NewVersion) -> Inode:
        """Have a content made the file's next version. Raises Outdated if another host has published since
        the version's base."""
        ino = content.ino
        turn = self._turns.get(ino)
        if turn is not None:
            await turn.acquire()
            self._table.publishing[ino] = content
        elif self._store.waits:
            turn = self._begin_turn(content)
        is_whole = content.state is State.REPLACING
        self._store.extents.filled -= is_whole
        try:
            while True:
                try:
                    inode = await self._store.publish(version)
                    break
                except Outdated:
                    newest = self._inodes[ino]
                    if newest.version == version.base or not self._is_own(newest):
                        raise
                    # On one host the last close wins.
                    version = version._replace(base=newest.version)
        finally:
            self._store.extents.filled += is_whole
            if turn is not None:
                self._end_turn(ino, turn)
        self._table.published[ino] = inode.version
        return inode

    def _begin_turn(self, content: Content) -> trio.Lock:
        """Begin to publish a content of a file of which no other one is being published. While one is on
        its way, nobody could tell that the newest version is this host's own."""
        turn = self._turns[content.ino] = trio.Lock()
        turn.acquire_nowait()
        self._table.publishing[content.ino] = content
        return turn

    def _end_turn(self, ino: int, turn: trio.Lock) -> None:
        del self._table.publishing[ino]
        turn.release()
        if not turn.locked():
            del self._turns[ino]

    def _is_own(self, inode: Inode) -> bool:
        """Return whether this host has published the newest version, whether or not it was told so."""
        return inode.version == self._table.published.get(
            inode.ino
        ) or self._store.may_have_published(inode.extent)

    def _become_version(
        self, content: Content, inode: Inode, stamp: Stamp, *, by_copy: bool
    ) -> None:
        """Note that the bytes which the content had at `stamp` are a version now, and choose the content
        that opens of it share; only one may have the version's extent. That is `content`, unless a copy was
        published, and an open has begun a content with that copy already."""
        relied_on = self._store.sends and not by_copy and self._hand_over(content, inode)
        content.be_published(inode, stamp, by_copy=by_copy, relied_on=relied_on)
        current = self._table.current.get(inode.ino)
        if current is content:
            return
        is_begun = current is not None and current.base.version == inode.version
        if by_copy and is_begun:
            if content.state is not State.REPLACING:
                self._table.supersede(content)  # its descriptors go on with it
        elif content.state is not State.REPLACING:
            self._table.make_current(content)  # even if others have joined it meanwhile
        elif current is not None:
            self._table.supersede(current)

    def _hand_over(self, content: Content, inode: Inode) -> bool:
        """Note that the version of a cluster names the content's very file, maybe under another number.
        Return whether that must not be written any more."""
        if not inode.extent:
            return False
        try:
            if inode.extent != content.extent:
                self._table.give_extent(content, inode.extent, frees=content.own)
            elif content.leaves:
                self._table.lend(content, content.extent)
        except OSError:
            return False  # another host has published since, and the store node here has freed the file
        return True

    async def _conflict(
        self, content: Content, version: NewVersion, status: os.stat_result, outdated: Outdated
    ) -> OSError:
        """Return the error of a file that others published while it was written in place here. The bytes
        written are kept in a file beside it, and its descriptors go on with the newest version."""
        where, base = self._store.namespace.describe(content.ino), content.base.version
        name = await self._save_aside(content, version, status)
        return fail(
            errno.ESTALE,
            f"{where}: version {outdated.version} was published while version {base} "
            f"was written in place here; what was written is in {name}",
        )

    async def _save_aside(
        self, content: Content, version: NewVersion, status: os.stat_result
    ) -> str:
        """Keep bytes of the content, which may be a copy already, in a file beside its own, and show the
        newest version; `status` is the content's stat. Return the file's name."""
        try:
            if version.extent == content.extent:
                version = version.with_bytes_of(*await self._in_place.copied(content))
            name = await self._store.save_aside(version)
        except BaseException:
            if version.extent != content.extent:
                self._store.extents.free(version.extent)
            raise
        where = self._store.namespace.describe(content.ino)
        log.warning("%s: what was written in place and not published is in %s", where, name)
        content.be_set_aside(stamp_of(status))
        await self._in_place.show_after_conflict(content)
        return name

    def _announce(self, inode: Inode, content: Content) -> None:
        """Announce a published version: other nodes and names of the file may still show the one before."""
        for node in self._nodes.of(inode.ino):
            if not node.is_bound and node.backing_extent != inode.extent:
                self._kernel.drop_backing(node)
            if node.content is not content:
                self._kernel.invalidate_attributes(node)
        if inode.nlink > 1:
            # Until the kernel looks them up, opens by these names are led to the right node.
            self._kernel.expire_names(self._store.namespace.names_of(inode.ino), only=True)
