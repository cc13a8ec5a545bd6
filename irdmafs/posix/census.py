"""How much a mount has of everything: figures for `irdmafs status`."""

from ..backend.namespace import Namespace
from ..coherence.cache import Cache
from ..coherence.content import Content
from ..coherence.protocol import Coherence
from .locking import Locking


def census(
    namespace: Namespace, cache: Cache, coherence: Coherence, locking: Locking
) -> dict[str, int]:
    """Count a mount's inodes, bytes, nodes, handles and locks."""
    inodes, handles = namespace.inodes, cache.nodes.handles
    totals = inodes.totals
    kept = totals.files
    working = 0
    contents: set[Content | None] = {handle.content for handle in handles.values()}
    for content in contents - {None}:
        assert content is not None
        if content.own:
            working += cache.looks.look_of(content, inodes[content.ino]).blocks * 512
        elif content.state.ended and content.extent:
            kept += 1
    return {
        "inodes": totals.inodes + len(inodes.unrecorded()),
        "files": totals.files,
        "directories": totals.directories,
        "versions_kept": kept,
        "bytes_published": totals.blocks * 512,
        "bytes_working": working,
        "bytes_carried": cache.carried.bytes,
        "nodes": len(cache.nodes.by_id),
        "open_handles": len(handles),
        "files_to_store": len(cache.put_off.handles),
        "locks": locking.count(),
        **coherence.count(),
    }
