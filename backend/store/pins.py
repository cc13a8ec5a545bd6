"""Pins keep a content when its file moves on to another version."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from ..model.records import ContentId


class Pinned(ABC):
    """Contents that are freed, by `free`, once no version names them and nothing pins them.

    Contents are numbers; 0 stands for an empty one, which needs no pin. `counts` tells how often each is
    pinned; it is read-only.
    """

    def __init__(self) -> None:
        self.counts: dict[ContentId, int] = {}
        self._retired: set[ContentId] = set()

    @abstractmethod
    def free(self, extent: ContentId) -> None:
        """Remove a content."""

    def pin(self, extent: ContentId) -> None:
        """Keep a content although its file moves on to another version."""
        if extent:
            self.counts[extent] = self.counts.get(extent, 0) + 1

    def unpin(self, extent: ContentId) -> None:
        if not extent:
            return
        left = self.counts[extent] - 1
        if left:
            self.counts[extent] = left
            return
        del self.counts[extent]
        if extent in self._retired:
            self._retired.remove(extent)
            self.free(extent)
        self._unpinned(extent)

    def _unpinned(self, extent: ContentId) -> None:
        """Note that nothing pins a content any more."""
        return

    @contextmanager
    def pinned(self, extent: ContentId) -> Iterator[None]:
        """Pin a content for a while."""
        self.pin(extent)
        try:
            yield
        finally:
            self.unpin(extent)

    def named(self, extent: ContentId) -> None:
        """Note that a version names this content, which may have been retired before."""
        self._retired.discard(extent)

    def retire(self, extent: ContentId) -> None:
        """Note that no version names this content any more: it is freed as soon as nothing pins it."""
        if not extent:
            return
        if extent in self.counts:
            self._retired.add(extent)
        else:
            self.free(extent)
