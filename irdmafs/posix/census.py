"""How much a mount has of everything: figures for `irdmafs status`."""

from ..backend.namespace import Namespace
from ..coherence.cache import Cache
from ..coherence.content import Content
from ..coherence.protocol import Coherence
from .locking import Locking


class Census:
    """Counts a mount's inodes, bytes, nodes, handles and locks when it is asked."""

    def __init__(
        self, namespace: Namespace, cache: Cache, coherence: Coherence, locking: Locking
    ) -> None:
        self._inodes = namespace.inodes
        self._cache = cache
        self._coherence = coherence
        self._locking = locking

    def count(self) -> dict[str, int]:
        totals = self._inodes.totals
        kept = totals.files
        working = 0
        seen: set[Content] = set()
        for handle in self._cache.nodes.handles.values():
            content = handle.content
            if content is None or content in seen:
                continue
            seen.add(content)
            if content.own:
                working += (
                    self._cache.looks.look_of(content, self._inodes[content.ino]).blocks * 512
                )
            elif content.state.ended and content.extent:
                kept += 1
        return {
            "inodes": totals.inodes + len(self._inodes.unrecorded()),
            "files": totals.files,
            "directories": totals.directories,
            "versions_kept": kept,
            "bytes_published": totals.blocks * 512,
            "bytes_working": working,
            "bytes_carried": self._cache.carried.bytes,
            "nodes": len(self._cache.nodes.by_id),
            "open_handles": len(self._cache.nodes.handles),
            "locks": self._locking.count(),
            **self._coherence.count(),
        }
