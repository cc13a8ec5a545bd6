"""Files of drafts: closed, and stored a moment later, many at a time.

In a draft (backend/namespace/drafts) close() and fsync() of a new file return before it is stored, as long
as no other host looks there without asking this one. Its handle stays, as if the program still had it open
for writing, until the file is stored: soon; before another host looks into the directory; before a
directory above gets another name; at umount.
"""

import errno
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator

import trio

from ..backend.kv import Conflict
from ..backend.namespace import ROOT_INO, Joint
from ..backend.pauses import Pauses
from ..backend.store.api import TOGETHER_DIRECTORIES_MAX, TOGETHER_MAX
from ..inline import detach
from .content import State
from .host import Host, OnHost
from .nodes import Handle
from .publishing import Publisher
from .put_off import PutOff

log = logging.getLogger(__name__)

# Files that wait are looked at so often.
_LOOK_S = 0.5
_AT_ONCE = 4
_RETRY_FIRST_S = 0.1
_RETRY_MAX_S = 5.0


class Drafts(OnHost):
    """Stores what was put off. `release` carries the release of a handle out."""

    def __init__(
        self,
        host: Host,
        put_off: PutOff,
        publisher: Publisher,
        release: Callable[[int], Awaitable[None]],
    ) -> None:
        super().__init__(host)
        self._put_off = put_off
        self._publisher = publisher
        self._release = release
        self._storing = trio.Lock()

    def send_ahead(self, handle: Handle) -> None:
        """Have a file whose last descriptor is closed sent to its nodes while others are gathered."""
        content = handle.content
        assert content is not None
        if content.writers == 1 and not content.mapped:
            version = self._publisher.version_of(content, self._table.stat(content))
            self._store.send_ahead(version, self._table.grain_s)

    async def run(self) -> None:
        """Store what is put off, soon after it was."""
        put_off, pauses = self._put_off, Pauses(_RETRY_FIRST_S, _RETRY_MAX_S)
        while True:
            await put_off.any.wait()
            with trio.move_on_after(_LOOK_S):
                await put_off.many.wait()
            try:
                await self._store_these(put_off.due())
                pauses.begin_anew()
            except OSError as error:
                log.warning("%d files of drafts are not stored: %s", len(put_off.handles), error)
                await pauses.wait()

    async def store(self, below: int = ROOT_INO, joint: Joint | None = None) -> None:
        """Store the files below a directory, or a file; what is `joint`, a rename, is done with the last of
        them, if that can be, and without it none of a directory is stored that waits for one. Raises the
        first OSError, unless it is done; what could not be stored stays put off."""
        handles = self._put_off.handles.items()
        found = [
            each
            for ino, each in handles
            if self._is_below(ino, below) and (joint or ino == below or not each.waits_for_rename)
        ]
        await self._store_these(found, joint)

    async def _store_these(self, wanted: Collection[Handle], joint: Joint | None = None) -> None:
        put_off = self._put_off
        if not wanted:
            return
        await detach()
        async with self._storing:
            wanted = [each for each in wanted if put_off.handles.get(each.node.ino) is each]
            together = dict.fromkeys(filter(self._goes_with_others, wanted))
            for some in self._batches(together):
                others = (each for each in wanted if each not in some)
                are_last = not any(map(self._has_to_be_stored, others))
                await self._store_together(some, joint if are_last else None)
            errors: list[OSError] = []
            limit = trio.CapacityLimiter(_AT_ONCE)
            async with trio.open_nursery() as nursery:
                for handle in wanted:
                    if handle in together and not self._has_to_be_stored(handle):
                        await self._end(handle)
                    else:
                        nursery.start_soon(self._store_one, handle, limit, errors)
        if errors and (joint is None or joint.done is None):
            raise errors[0]

    def unfinished(self, directory: int) -> int:
        """Return the inode of a file below a directory that a program has written and not closed, or 0."""
        for handle in self._nodes.handles.values():
            content = handle.content
            if content is None or not handle.writing or handle.aborted:
                continue
            if (
                self._is_below(content.ino, directory)
                and not self._put_off.has_all(handle, content)
                and (
                    content.state in (State.NEW, State.REPLACING)
                    or self._table.is_written(content, surely=True)
                )
            ):
                return content.ino
        return 0

    def _is_below(self, ino: int, directory: int) -> bool:
        """Return whether a file is below a directory, or is the file `directory` itself."""
        while ino not in (directory, ROOT_INO):
            inode = self._inodes.get(ino)
            if inode is None or not inode.parent:
                return directory == ROOT_INO  # it has lost its name
            ino = inode.parent
        return directory in (ino, ROOT_INO)

    def _goes_with_others(self, handle: Handle) -> bool:
        """Return whether a file may be stored with others."""
        content = handle.content
        return (
            content is not None
            and handle in self._put_off.released
            and content.writers == 1
            and self._has_to_be_stored(handle)
            and not self._store.namespace.quotas.of(content.ino)
        )

    def _batches(self, handles: Iterable[Handle]) -> Iterator[Collection[Handle]]:
        """Split files into as many as are stored together."""
        some, directories = dict[Handle, None](), set[int]()
        for handle in handles:
            directories.add(self._inodes[handle.node.ino].parent)
            if len(some) == TOGETHER_MAX or len(directories) > TOGETHER_DIRECTORIES_MAX:
                yield some
                some, directories = {}, {self._inodes[handle.node.ino].parent}
            some[handle] = None
        yield some

    def _has_to_be_stored(self, handle: Handle) -> bool:
        content = handle.content
        assert content is not None
        return (
            bool(self._inodes[content.ino].nlink)
            and not content.state.ended
            and self._table.is_written(content)
        )

    async def _store_together(self, handles: Iterable[Handle], joint: Joint | None) -> None:
        contents = [handle.content for handle in handles if handle.content is not None]
        try:
            await self._publisher.publish_together(contents, joint)
        except (OSError, Conflict) as error:
            if isinstance(error, TimeoutError):
                raise  # each file would wait as long
            log.info("%d files of drafts are stored one by one: %s", len(contents), error)

    async def _store_one(
        self, handle: Handle, limit: trio.CapacityLimiter, errors: list[OSError]
    ) -> None:
        content = handle.content
        assert content is not None
        try:
            async with limit:
                if any(isinstance(error, TimeoutError) for error in errors):
                    return  # it would wait as long
                if self._has_to_be_stored(handle):
                    stays = handle not in self._put_off.released
                    await self._publisher.publish(content, stays=stays)
        except OSError as error:
            errors.append(error)
            if error.errno != errno.ESTALE:
                return
            # Another host has the name, or a newer version.
            handle.aborted = True
            where = self._store.namespace.describe(content.ino)
            log.error("%s: it was closed, and is lost: %s", where, error)
        await self._end(handle)

    async def _end(self, handle: Handle) -> None:
        """Carry out what was put off of a file that is stored."""
        self._put_off.end(handle)
        if handle in self._put_off.released:
            self._put_off.released.discard(handle)
            await self._release(handle.fh)
