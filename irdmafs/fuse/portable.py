"""The portable session: pyfuse3 and libfuse carry the requests.

For unprivileged users and kernels without passthrough. Every byte goes through this process, and
what pyfuse3 does not carry (locks, fallocate, lseek, copy_file_range) the kernel does by itself or
refuses. Locks are then the kernel's own, kept by node: two openers of different versions of a file
do not see each other's.
"""

import errno
import functools
import logging
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pyfuse3
import trio

from ..backend.namespace import answered
from ..coherence.kernel_cache import KernelCache
from ..coherence.nodes import Handle, Node, NodeTable
from ..posix.calls import Attributes, Caller, Space
from ..posix.filesystem import Filesystem
from .counts import Counts
from .tasks import Tasks
from .wire import Opcode

log = logging.getLogger(__name__)

# The kernel has nothing to forget, or is gone itself.
_GONE = frozenset({errno.ENOENT, errno.ENODEV, errno.ENOTDIR})

# The longest time that a release waits behind reads.
_RELEASE_S = 1.0

# The kernel locks directories while it changes names in them: which arguments of a request they are.
_LOCKED = {
    **dict.fromkeys(("mknod", "mkdir", "symlink", "unlink", "rmdir", "create"), (0,)),
    "link": (1,),
    "rename": (0, 2),
}

# The most that is told of what libfuse says when it mounts.
_WORDS_MAX_BYTES = 4096

_ATTRIBUTES = [name for name in Attributes.__annotations__ if name != "ino"]


@contextmanager
def _errors_of_libfuse() -> Iterator[None]:
    """Raise a RuntimeError of the block with the words that libfuse and its helper wrote to stderr."""
    stderr, said = os.dup(2), os.memfd_create("libfuse")
    os.dup2(said, 2)
    try:
        yield
    except RuntimeError as error:
        words = os.pread(said, _WORDS_MAX_BYTES, 0).decode(errors="replace").split()
        raise RuntimeError(" ".join(words) or str(error)) from error
    finally:
        os.dup2(stderr, 2)
        os.write(2, os.pread(said, _WORDS_MAX_BYTES, 0))
        os.close(said)
        os.close(stderr)


class PortableSession:
    """Serves one mount through pyfuse3, which can serve one per process. The constructor mounts; it raises
    RuntimeError with libfuse's words when that cannot."""

    name = "pyfuse3"

    def __init__(
        self, filesystem: Filesystem, tasks: Tasks, counts: Counts, mountpoint: str, words: set[str]
    ) -> None:
        self._tasks = tasks
        self._waits = filesystem.waits
        with _errors_of_libfuse():
            pyfuse3.init(_adapted(filesystem, counts), mountpoint, words)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tasks.run)
            await pyfuse3.main()
            self._tasks.stop()
            nursery.cancel_scope.cancel()

    def stop(self) -> None:
        self._waits.end()
        pyfuse3.terminate()

    def close(self) -> None:
        pyfuse3.close(unmount=False)


def _tell(notify: Callable[..., None], *args: Any) -> bool:
    """Notify the kernel. Return False if it does not know what this is about."""
    try:
        notify(*args)
    except OSError as error:
        if error.errno not in _GONE:
            log.warning("notifying the kernel failed: %s", error)
        return error.errno != errno.ENOENT
    return True


class PortableNotices(KernelCache):
    """The kernel's memory of a mount with this session: there is no passthrough, and the kernel believes
    nothing that it cannot be made to forget."""

    def __init__(self, tasks: Tasks) -> None:
        super().__init__(tasks.start_soon)
        self._tasks = tasks

    def forget_attributes(self, node: Node) -> bool:
        return self._tasks.ended or _tell(pyfuse3.invalidate_inode, node.id, True)  # takes no lock

    async def expire_name(self, parent: int, name: bytes) -> None:
        await self._in_thread(pyfuse3.invalidate_entry, parent, name)

    async def forget_content(self, node: Node) -> None:
        await self._in_thread(pyfuse3.invalidate_inode, node.id, False)

    async def _in_thread(self, notify: Callable[..., None], *args: Any) -> None:
        # The kernel may wait for a lock that a caller of ours holds until we answer.
        await trio.to_thread.run_sync(_tell, notify, *args)


class _LeavingWriters:
    """Handles for writing of which a descriptor was closed, maybe the last one, and nothing written since.

    The kernel tells of the last one by a release, which has to wait while too many pages are being read
    ahead (libfuse does not let pyfuse3 raise that limit), and an open overtakes it. The open would take the
    writer for one who is still there, and empty the version that it published under its readers.
    """

    def __init__(self, nodes: NodeTable) -> None:
        self._handles = nodes.handles
        self._of: dict[int, trio.Event] = {}

    def flushed(self, fh: int) -> None:
        handle = self._handles.get(fh)
        if handle is not None and handle.writing:
            self._of.setdefault(fh, trio.Event())

    def settle(self, fh: int) -> None:
        """Note that a handle was released, or has another descriptor."""
        if fh in self._of:
            self._of.pop(fh).set()

    async def wait(self, ino: int) -> None:
        """Return when those of a file are released, or it is clear that they have another descriptor."""
        for fh, event in list(self._of.items()):
            handle = self._handles.get(fh)
            if handle is not None and handle.node.ino == ino:
                with trio.move_on_after(_RELEASE_S):
                    await event.wait()
                self.settle(fh)


def _operations(filesystem: Filesystem) -> dict[str, Callable[..., Coroutine[Any, Any, Any]]]:
    """Return the operations that pyfuse3 carries, by its names, with its arguments."""
    names, files = filesystem.names, filesystem.files
    metadata, xattrs = filesystem.metadata, filesystem.xattrs
    nodes = filesystem.cache.nodes
    leaving = _LeavingWriters(nodes)

    async def attributes(inode: int, ctx: Caller) -> Attributes:
        return metadata.attributes(inode)

    async def change(inode: int, attr: Any, fields: Any, fh: int | None, ctx: Caller) -> Attributes:
        changes = {
            name: getattr(attr, f"st_{name}")
            for name in ("mode", "uid", "gid", "atime_ns", "mtime_ns")
            if getattr(fields, f"update_{name.removesuffix('_ns')}")
        }
        size = attr.st_size if fields.update_size else None
        return await metadata.change(inode, changes, ctx, size=size, fh=fh)

    async def open_file(inode: int, flags: int, ctx: Caller) -> Handle:
        if flags & os.O_TRUNC:
            await leaving.wait(nodes.inode_of(inode).ino)
        return await files.open(inode, flags, ctx)

    async def write(fh: int, offset: int, data: bytes) -> int:
        leaving.settle(fh)
        return await files.write(fh, offset, data)

    async def flush(fh: int) -> None:
        try:
            handle = nodes.handles[fh]
            await files.close(handle, handle.pid, 0)
        finally:
            leaving.flushed(fh)

    async def release(fh: int) -> None:
        await filesystem.cache.release(fh)
        leaving.settle(fh)

    async def list_names(fh: int, start_id: int, token: Any) -> None:
        def add(name: bytes, ino: int, mode: int, entry: Attributes | None, next_id: int) -> bool:
            if entry is None:
                entry = Attributes()
                entry.ino = entry.st_ino = ino
                entry.st_mode = mode
            return pyfuse3.readdir_reply(token, name, _numbered(entry, shown=False), next_id)

        await names.readdir(fh, start_id, add, one_number=True)

    return {
        "lookup": names.lookup,
        "forget": names.forget,
        "mknod": lambda parent, name, mode, rdev, ctx: names.mknod(
            parent, mode, rdev, ctx.umask, name, ctx
        ),
        "mkdir": lambda parent, name, mode, ctx: names.mkdir(parent, mode, ctx.umask, name, ctx),
        "symlink": names.symlink,
        "link": lambda inode, parent, name, ctx: names.link(parent, inode, name, ctx),
        "unlink": names.unlink,
        "rmdir": names.rmdir,
        "rename": lambda old, name, new, new_name, flags, ctx: names.rename(
            old, new, flags, name, new_name, ctx
        ),
        "readlink": names.readlink,
        "getattr": attributes,
        "setattr": change,
        "statfs": lambda ctx: metadata.statfs(),
        "setxattr": xattrs.setxattr,
        "getxattr": xattrs.getxattr,
        "listxattr": xattrs.listxattr,
        "removexattr": xattrs.removexattr,
        "open": open_file,
        "create": lambda parent, name, mode, flags, ctx: files.create(
            parent, flags, mode, ctx.umask, name, ctx
        ),
        "read": files.read,
        "write": write,
        "flush": flush,
        "release": release,
        "fsync": lambda fh, datasync: files.fsync(fh),
        "opendir": names.opendir,
        "readdir": list_names,
        "releasedir": names.releasedir,
        "fsyncdir": lambda fh, datasync: names.sync(),
    }


def _adapted(filesystem: Filesystem, counts: Counts) -> pyfuse3.Operations:
    """Return the operations as pyfuse3 wants them: counted, errors as FUSEError, inode numbers its way.

    pyfuse3 has one number for the node id and for stat(2). Where they differ (a second node of an
    inode) the kernel must not keep the attributes of a lookup, and getattr, whose answer has no
    node id, returns the inode's number. Listings have the node that has the inode's number.
    """
    locks, learn = filesystem.coherence.kernel_locks, filesystem.cache.host.store.learn

    def wrap(name: str, method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        kind = Opcode[name.upper()]
        locked = _LOCKED.get(name, ())

        @functools.wraps(method)
        async def wrapped(*args: Any) -> Any:
            counts.by_opcode[kind] += 1
            try:
                held = (args[at] for at in locked)
                with nullcontext() if locks is None else locks.hold(*held):
                    result = await answered(partial(method, *args), learn)
            except Exception as error:
                raise pyfuse3.FUSEError(counts.failed(kind.name, error)) from error
            if isinstance(result, Attributes):
                return _numbered(result, shown=name in ("getattr", "setattr"))
            if isinstance(result, Handle):
                return _opened(result)
            if isinstance(result, Space):
                space = pyfuse3.StatvfsData()
                for field in Space.__slots__:
                    setattr(space, field, getattr(result, field))
                return space
            if name == "create":
                return _opened(result[0]), _numbered(result[1], shown=False)
            return result

        return wrapped

    adapted = pyfuse3.Operations()
    for name, method in _operations(filesystem).items():
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


def _opened(handle: Handle) -> pyfuse3.FileInfo:
    return pyfuse3.FileInfo(fh=handle.fh, keep_cache=handle.keeps_cache)
