"""The POSIX operations of a mount, which both sessions ask for.

Names and attributes are answered from the namespace's replica; contents are the cache's business.
Operations raise OSError. Only the kernel session asks for fallocate, lseek, copy_file_range, locks and
tmpfile: pyfuse3 has no names for them.
"""

from collections.abc import Callable
from typing import Any

from .files import Files
from .locking import Locking
from .names import Names
from .since import Since
from .superblock import Superblock
from .waits import Waits
from .xattrs import Xattrs


class Filesystem:
    """The parts of one mounted filesystem, each of which carries out the requests about one thing.

    `acls`: the session has the kernel check ACLs; otherwise there are none. `status`: the value of the
    attribute user.irdmafs.status.
    """

    def __init__(
        self,
        block: Superblock,
        locking: Locking,
        status: Callable[[], dict[str, Any]],
        *,
        acls: bool,
    ) -> None:
        store = block.store
        self.processes = block.processes
        self.coherence = block.coherence
        self.atimes = block.atimes
        self.cache = block.cache
        self.locking = locking
        shared = store.freshness is not None
        self.waits = Waits(store.namespace, block.processes, block.kernel, shared=shared)
        since = Since(block, self.waits)
        self.names = Names(block, since)
        self.metadata = block.metadata
        self.xattrs = Xattrs(block, self.waits, status, acls=acls)
        self.files = Files(block, locking, self.waits, since)
