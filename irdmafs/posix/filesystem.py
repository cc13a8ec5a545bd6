"""The POSIX operations of a mount, which both sessions ask for.

Names and attributes are answered from the namespace's replica; contents are the cache's business.
Operations raise OSError. Their arguments have the order of the kernel's messages. Only the kernel session
asks for fallocate, lseek, copy_file_range, locks and tmpfile: pyfuse3 has no names for them.
"""

from .clones import Clones
from .files import Files
from .locking import Locking
from .metadata import Superblock
from .names import Names
from .since import Since
from .waits import Waits
from .xattrs import Status, Xattrs


class Filesystem:
    """The parts of one mounted filesystem, each of which carries out the requests about one thing.

    `acls`: the session has the kernel check ACLs; otherwise there are none. `status`: the value of the
    attribute user.irdmafs.status.
    """

    def __init__(self, block: Superblock, locking: Locking, status: Status, *, acls: bool) -> None:
        self.cache = cache = block.cache
        self._namespace = cache.host.store.namespace
        self.processes = cache.processes
        self.coherence = block.coherence
        self.atimes = block.atimes
        self.locking = locking
        self.tells_pollers = block.options.poll
        self.waits = Waits(self._namespace, cache.processes, cache.kernel)
        since = Since(block, self.waits)
        self.names = Names(block, since, locking)
        self.metadata = block.metadata
        self.xattrs = Xattrs(block, self.waits, Clones(block, since), status, acls=acls)
        self.files = Files(block, locking, self.waits, since)

    def census(self) -> dict[str, int]:
        """Count inodes, bytes, nodes, handles and locks, for `irdmafs status`."""
        inodes, nodes = self._namespace.inodes, self.cache.nodes
        totals = inodes.totals
        kept = totals.files
        working = 0
        for content in {one.content for one in nodes.handles.values() if one.content is not None}:
            if content.own:
                working += self.cache.host.look_of(content, inodes[content.ino]).blocks * 512
            elif content.state.ended and content.extent:
                kept += 1
        return {
            "inodes": totals.inodes + len(inodes.unrecorded()),
            "files": totals.files,
            "directories": totals.directories,
            "versions_kept": kept,
            "bytes_published": totals.blocks * 512,
            "bytes_working": working,
            "bytes_carried": self.cache.carried.bytes,
            "nodes": len(nodes.by_id),
            "open_handles": len(nodes.handles),
            "files_to_store": len(self.cache.put_off.handles),
            "locks": self.locking.posix.count() + self.locking.flocks.count(),
            **self.coherence.count(),
        }
