"""The POSIX operations of a mount, which both sessions run.

Names and attributes are answered from the namespace's replica; contents are the cache's business.
Operations raise OSError. Those that pyfuse3 has no name for (fallocate, lseek, copy_file_range, locks,
tmpfile) only the kernel session asks for.
"""

import logging
from collections.abc import Callable
from typing import Any

from ..backend.store.api import Store
from ..coherence.cache import Cache
from ..coherence.protocol import Coherence
from ..mount.config import MountOptions
from .answers import Answers
from .atimes import Atimes
from .directories import Directories
from .files import OpenFiles
from .locking import Locking
from .lookups import Lookups
from .metadata import Metadata
from .names import Names
from .opens import Opens
from .since import Since
from .waits import Waits
from .xattrs import Xattrs

log = logging.getLogger(__name__)


class Operations:
    """One mounted filesystem: its parts, and each operation by the part that carries it out.

    `acls`: the session has the kernel check ACLs; otherwise there are none. `status`: what the attribute
    user.irdmafs.status tells.
    """

    def __init__(
        self,
        store: Store,
        cache: Cache,
        coherence: Coherence,
        locking: Locking,
        options: MountOptions,
        atimes: Atimes,
        status: Callable[[], dict[str, Any]],
        *,
        acls: bool,
    ) -> None:
        self._namespace = store.namespace
        self.processes = cache.processes
        self.kernel_locks = coherence.kernel_locks
        self.listings_stay = coherence.listings_stay and not options.strictatime
        self.atimes = atimes
        self.locking = locking
        answers = Answers(cache, coherence, options, atimes)

        waits = Waits(
            store.namespace, cache.processes, cache.kernel, shared=store.freshness is not None
        )
        self.end_waits = waits.end
        since = Since(store.namespace, cache.nodes, answers, waits, store.freshness, cache.kernel)

        # Bound here, so that a request passes through no frame of this class.
        lookups = Lookups(store.namespace, cache, coherence, answers, since)
        self.find, self.lookup, self.forget = lookups.find, lookups.lookup, lookups.forget

        names = Names(store, cache, coherence, answers, atimes, since)
        self.mknod, self.mkdir, self.symlink = names.mknod, names.mkdir, names.symlink
        self.link, self.unlink, self.rmdir = names.link, names.unlink, names.rmdir
        self.rename, self.readlink = names.rename, names.readlink

        metadata = Metadata(store, cache, coherence, answers, atimes)
        self.attributes, self.getattr = metadata.attributes, metadata.getattr
        self.setattr, self.statfs = metadata.setattr, metadata.statfs
        self.flags, self.set_flags = metadata.flags, metadata.set_flags
        self.birth_ns, self.has_set_ids = metadata.birth_ns, metadata.has_set_ids

        xattrs = Xattrs(store, cache, coherence, answers, status, waits, acls=acls)
        self.setxattr, self.getxattr = xattrs.setxattr, xattrs.getxattr
        self.listxattr, self.removexattr = xattrs.listxattr, xattrs.removexattr
        self.has_xattrs = xattrs.has_xattrs

        opens = Opens(store, cache, coherence, answers, metadata, locking, since)
        self.open, self.create, self.tmpfile = opens.open, opens.create, opens.tmpfile
        self.cancel_open = opens.cancel_open

        files = OpenFiles(store, cache, answers, metadata, locking, atimes, waits)
        self.read, self.write, self.lseek = files.read, files.write, files.lseek
        self.fallocate, self.copy_file_range = files.fallocate, files.copy_file_range
        self.fsync, self.poll, self.is_outdated = files.fsync, files.poll, files.is_outdated
        self.flush, self.close = files.flush, files.close
        self.release, self.release_locked = files.release, files.release_locked
        self.release_can_wait = files.release_can_wait
        self.lock, self.test_lock = files.lock, files.test_lock

        directories = Directories(store.namespace, cache, coherence, answers, atimes)
        self.opendir, self.releasedir = directories.opendir, directories.releasedir
        self.readdir, self.names = directories.readdir, directories.names
        self.fsyncdir = directories.fsyncdir

    async def idle(self) -> None:
        """Tidy up: no request came for a while."""
        await self._namespace.idle()

    async def ended(self) -> None:
        """Store, after the unmount, what was put off to a later change, if the store has room for it."""
        try:
            await self._namespace.note_reads(self.atimes.unsaved())
        except OSError as error:
            log.warning("the times of the last reads could not be stored: %s", error)
