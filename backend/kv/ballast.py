"""Space reserved on a storage, so that a full one has room for transactions that free space."""

import os
from typing import Final

BALLAST_BYTES: Final = 4 * 1024 * 1024
# The size that is taken if less is free than was given up.
_PARTS: Final = tuple(BALLAST_BYTES >> shift for shift in range(7))
# With less than this, only transactions that free space are accepted.
_LOW_BYTES: Final = BALLAST_BYTES // 2


class Ballast:
    """A file of BALLAST_BYTES at `path`, taken when there is room and given up on demand.

    The file stays when the process ends, and the next one takes it over. `whole`: all of it is held.
    `low`: so little is left of it that only changes which free space are accepted. A storage that never
    had room for it is not low."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._was_held = os.path.exists(path)
        self.whole = self.low = False
        self.take()

    def take(self) -> None:
        """Take the space if it is there, and as much again: the last free bytes are not ours. If it was
        held before, take as much of it as there is."""
        room = os.statvfs(os.path.dirname(self._path) or ".")
        # f_blocks is 0 on a tmpfs without a limit.
        free = room.f_bavail * room.f_frsize if room.f_blocks else 2 * BALLAST_BYTES
        if not self._was_held and free < 2 * BALLAST_BYTES:
            return
        self._hold(self._grow(free))

    def give_up(self) -> bool:
        """Truncate the file, and return whether that freed space."""
        try:
            held = _allocated(self._path)
            os.unlink(self._path)
        except FileNotFoundError:
            held = 0
        self._hold(0)
        return held > 0

    def _grow(self, free: int) -> int:
        """Allocate the file, and return its length then."""
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return 0
        try:
            have = _allocated(fd)
            for wanted in _PARTS:
                if wanted <= have:
                    break
                if wanted - have > free:
                    continue
                try:
                    os.posix_fallocate(fd, 0, wanted)
                    break
                except OSError:
                    continue
            return _allocated(fd)
        finally:
            os.close(fd)

    def _hold(self, size: int) -> None:
        self._was_held |= size > 0
        self.whole = size >= BALLAST_BYTES
        self.low = self._was_held and size < _LOW_BYTES


def _allocated(file: str | int) -> int:
    return os.stat(file).st_blocks * 512
