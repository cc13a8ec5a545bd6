"""Pins: what keeps a content although its file moves on to another version."""

from collections.abc import Iterator
from contextlib import contextmanager


class Pinned:
    """A store whose contents are freed, by `_free`, once no version names them and nothing pins them.

    Contents are numbers; 0 stands for an empty one, which needs no keeping.
    """

    def __init__(self) -> None:
        self._pins: dict[int, int] = {}
        self._retired: set[int] = set()

    def _free(self, extent: int) -> None:
        raise NotImplementedError

    def pin(self, extent: int) -> None:
        """Keep a content although its file moves on to another version."""
        if extent:
            self._pins[extent] = self._pins.get(extent, 0) + 1

    def unpin(self, extent: int) -> None:
        if not extent:
            return
        left = self._pins[extent] - 1
        if left:
            self._pins[extent] = left
            return
        del self._pins[extent]
        if extent in self._retired:
            self._retired.remove(extent)
            self._free(extent)

    @contextmanager
    def pinned(self, extent: int) -> Iterator[None]:
        """Pin a content for a while."""
        self.pin(extent)
        try:
            yield
        finally:
            self.unpin(extent)

    def retire(self, extent: int) -> None:
        """No version names this content any more: free it as soon as nothing pins it."""
        if not extent:
            return
        if extent in self._pins:
            self._retired.add(extent)
        else:
            self._free(extent)
