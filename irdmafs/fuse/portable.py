"""The portable session: pyfuse3 and libfuse carry the requests.

For unprivileged users and kernels without passthrough. Every byte goes through this process, and
what pyfuse3 does not carry (locks, fallocate, lseek, copy_file_range) the kernel does by itself or
refuses. Locks are then the kernel's own, kept by node: two openers of different versions of a file
do not see each other's.
"""

import errno
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

import pyfuse3
import trio

from ..backend.cluster.records import ContentId
from ..coherence.kernel_cache import KernelCache, Name
from ..coherence.nodes import Node
from ..posix.calls import Attributes, OpenInfo, Space
from ..posix.operations import Operations
from .counts import Counts
from .session import Session
from .tasks import Tasks
from .wire import Opcode

log = logging.getLogger(__name__)

# The kernel has nothing to forget, or is gone itself.
_GONE = frozenset({errno.ENOENT, errno.ENODEV, errno.ENOTDIR})

_REQUESTS = (
    "lookup", "getattr", "setattr", "readlink", "mknod", "mkdir", "unlink", "rmdir", "symlink",
    "rename", "link", "open", "read", "write", "flush", "release", "fsync", "opendir", "releasedir",
    "fsyncdir", "statfs", "setxattr", "getxattr", "listxattr", "removexattr", "create", "forget",
)  # fmt: skip

# The kernel locks directories while it changes names in them: which arguments of a request they are.
_LOCKED = {
    **dict.fromkeys(("mknod", "mkdir", "symlink", "unlink", "rmdir", "create"), (0,)),
    "link": (1,),
    "rename": (0, 2),
}

_ATTRIBUTES = [name for name in Attributes.__annotations__ if name != "ino"]


class PortableSession(Session):
    """Serves one mount through pyfuse3, which can serve one per process. The constructor mounts; it raises
    RuntimeError when libfuse cannot, which says why on stderr."""

    name = "pyfuse3"

    def __init__(
        self,
        operations: Operations,
        tasks: Tasks,
        counts: Counts,
        mountpoint: str,
        options: set[str],
    ) -> None:
        self._tasks = tasks
        self._end_waits = operations.end_waits
        pyfuse3.init(_adapted(operations, counts), mountpoint, options)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tasks.run)
            await pyfuse3.main()
            self._tasks.stop()
            nursery.cancel_scope.cancel()

    def stop(self) -> None:
        self._end_waits()
        pyfuse3.terminate()

    def close(self) -> None:
        self._tasks.close()
        pyfuse3.close(unmount=False)


class PortableNotices(KernelCache):
    """The kernel's memory of a mount with this session."""

    can_forget = False
    tells_of_signals = False

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks

    def forget_attributes(self, node: Node) -> bool:
        if not self._tasks.ended:
            try:
                pyfuse3.invalidate_inode(node.id, attr_only=True)  # takes no lock
            except OSError as error:
                if error.errno == errno.ENOENT:
                    return False
                if error.errno not in _GONE:
                    log.warning("notifying the kernel failed: %s", error)
        return True

    async def expire_names(self, names: list[Name]) -> None:
        for parent, name in names:
            await self._in_thread(pyfuse3.invalidate_entry, parent, name)

    def forget(self, nodes: Iterable[int], *, names: bool) -> None:
        """Do nothing: the kernel believes nothing that it cannot be made to forget."""

    async def forget_content(self, node: Node) -> None:
        await self._in_thread(pyfuse3.invalidate_inode, node.id, False)

    def prune(self, nodes: Sequence[int]) -> None:
        """Do nothing: libfuse 3.14 cannot prune."""

    async def _in_thread(self, notify: Callable[..., None], *args: Any) -> None:
        # The kernel may wait for a lock that a caller of ours holds until we answer.
        try:
            await trio.to_thread.run_sync(notify, *args)
        except OSError as error:
            if error.errno not in _GONE:
                log.warning("notifying the kernel failed: %s", error)

    async def caught_up(self) -> None:
        """Do nothing: the kernel keeps locks by itself."""

    def start_soon(self, telling: Callable[..., Awaitable[None]], *args: Any) -> bool:
        return self._tasks.start_soon(telling, *args)

    async def wake_poll(self, handle: int) -> None:
        """Do nothing: pyfuse3's poll is not used."""

    def move_backing(self, node: Node, extent: ContentId) -> None:
        """Do nothing: there is no passthrough."""

    def drop_backing(self, node: Node) -> None:
        """Do nothing: there is no passthrough."""

    def backed_by(self, extent: ContentId) -> list[Node]:
        return []


def _adapted(operations: Operations, counts: Counts) -> pyfuse3.Operations:
    """Return the operations as pyfuse3 wants them: counted, errors as FUSEError, inode numbers its way.

    pyfuse3 has one number for the node id and for stat(2). Where they differ (a second node of an
    inode) the kernel must not keep the attributes of a lookup, and getattr, whose answer has no
    node id, returns the inode's number. Listings have the node that has the inode's number.
    """

    def wrap(name: str, method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        kind = Opcode[name.upper()]
        locked = _LOCKED.get(name, ())

        @functools.wraps(method)
        async def wrapped(*args: Any) -> Any:
            counts.by_opcode[kind] += 1
            try:
                with operations.kernel_locks.hold(*(args[at] for at in locked)):
                    result = await method(*args)
            except (OSError, KeyError) as error:
                code = (error.errno or errno.EIO) if isinstance(error, OSError) else errno.EBADF
                if code in (errno.EIO, errno.ENOSPC, errno.EMFILE):
                    log.error("%s: %s", kind.name, error)
                counts.failed(code)
                raise pyfuse3.FUSEError(code) from error
            if isinstance(result, Attributes):
                return _numbered(result, shown=name in ("getattr", "setattr"))
            if isinstance(result, OpenInfo):
                return _opened(result)
            if isinstance(result, Space):
                return _space(result)
            if name == "create":
                return _opened(result[0]), _numbered(result[1], shown=False)
            return result

        return wrapped

    async def readdir(fh: int, start_id: int, token: Any) -> None:
        def add(name: bytes, entry: Attributes, next_id: int) -> bool:
            return pyfuse3.readdir_reply(token, name, _numbered(entry, shown=False), next_id)

        await operations.readdir(fh, start_id, add, one_number=True)

    adapted = pyfuse3.Operations()
    methods = {name: getattr(operations, name) for name in _REQUESTS}
    for name, method in {**methods, "readdir": readdir}.items():
        setattr(adapted, name, wrap(name, method))
    return adapted


def _numbered(entry: Attributes, *, shown: bool) -> pyfuse3.EntryAttributes:
    answer = pyfuse3.EntryAttributes()
    for name in _ATTRIBUTES:
        setattr(answer, name, getattr(entry, name))
    if shown:
        answer.st_ino = entry.ino
    elif entry.ino != entry.st_ino:
        answer.attr_timeout = 0
    return answer


def _opened(info: OpenInfo) -> pyfuse3.FileInfo:
    return pyfuse3.FileInfo(fh=info.handle.fh, keep_cache=info.keep_cache)


def _space(space: Space) -> pyfuse3.StatvfsData:
    answer = pyfuse3.StatvfsData()
    for name in Space.__slots__:
        setattr(answer, name, getattr(space, name))
    return answer
