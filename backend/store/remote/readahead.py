"""Choosing the files to read ahead when a directory's files are opened one after the other."""

import time
from collections.abc import Iterator

from ...namespace import Inode, Namespace

_WINDOW_MAX = 128
_DIRECTORIES_MAX = 64
_FORGET_AFTER_S = 5.0


class _Listing:
    """A directory's files in the order of their names when reading ahead began, and each one's position."""

    def __init__(self, inos: list[int]) -> None:
        self.inos = inos
        self.at = {ino: index for index, ino in enumerate(inos)}
        self.window = 1
        self.used = time.monotonic()


class ReadAhead:
    """The window doubles with every miss, as the kernel's does for pages."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._listings: dict[int, _Listing] = {}

    def after(self, inode: Inode) -> Iterator[Inode]:
        """Return files that follow this one, whose content was not here, in its directory."""
        directory, now = inode.parent, time.monotonic()
        if not directory:
            return
        listing = self._listings.get(directory)
        if listing is None or now - listing.used > _FORGET_AFTER_S or inode.ino not in listing.at:
            if len(self._listings) >= _DIRECTORIES_MAX:
                self._listings.clear()
            try:
                names = sorted(self._namespace.children(directory))
            except KeyError:
                return
            listing = self._listings[directory] = _Listing([ino for _, ino in names])
        listing.used = now
        start = listing.at.get(inode.ino, len(listing.inos)) + 1
        window = listing.inos[start : start + listing.window]
        listing.window = min(2 * listing.window, _WINDOW_MAX)
        for ino in window:
            found = self._namespace.inodes.get(ino)
            if found is not None and found.is_file and found.extent:
                yield found
