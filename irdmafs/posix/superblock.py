"""The objects that all operations of a mounted filesystem work on."""

from ..coherence.cache import Cache
from ..coherence.protocol import Coherence
from ..mount_options import MountOptions
from .atimes import Atimes
from .metadata import Metadata, Operations


class Superblock:
    """One mounted filesystem: its contents, what the kernel may believe, access times, and the attributes
    that nodes show."""

    def __init__(
        self, cache: Cache, coherence: Coherence, atimes: Atimes, options: MountOptions
    ) -> None:
        self.cache = cache
        self.coherence = coherence
        self.atimes = atimes
        self.options = options
        self.metadata = Metadata(cache, coherence, atimes, options)


class Part(Operations):
    """The operations about one thing, which show the attributes of nodes."""

    def __init__(self, block: Superblock) -> None:
        super().__init__(block.cache, block.coherence, block.atimes, block.options)
        self._metadata = block.metadata
