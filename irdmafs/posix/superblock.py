"""The objects that all operations of a mounted filesystem work on."""

from ..coherence.cache import Cache
from ..coherence.protocol import Coherence
from ..mount_options import MountOptions
from .atimes import Atimes
from .metadata import Metadata


class Superblock:
    """One mounted filesystem: its store, the contents that are open, what the kernel may believe, access
    times, and the attributes that nodes show."""

    def __init__(
        self, cache: Cache, coherence: Coherence, atimes: Atimes, options: MountOptions
    ) -> None:
        self.store = store = cache.host.store
        self.namespace = store.namespace
        self.inodes = store.namespace.inodes
        self.cache = cache
        self.nodes = cache.nodes
        self.processes = cache.processes
        self.kernel = cache.kernel
        self.coherence = coherence
        self.atimes = atimes
        self.options = options
        self.metadata = Metadata(cache, coherence, atimes, options)


class Part:
    """The base of the operations about one thing, on the objects of one mounted filesystem."""

    def __init__(self, block: Superblock) -> None:
        self._store = block.store
        self._namespace = block.namespace
        self._inodes = block.inodes
        self._cache = block.cache
        self._nodes = block.nodes
        self._processes = block.processes
        self._coherence = block.coherence
        self._metadata = block.metadata
        self._atimes = block.atimes
