"""Space kept back on a storage, so that a full one can still be told to free something."""

import os

BALLAST_BYTES = 4 * 1024 * 1024


class Ballast:
    """A file of BALLAST_BYTES at `path`, taken when there is room and given up on demand.

    It stays behind when the process ends and is taken over by the next one.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.held = False
        self.take()

    def take(self) -> None:
        """Take the space if it is there, and as much again: the last free bytes are not ours."""
        room = os.statvfs(os.path.dirname(self._path) or ".")
        # f_blocks is 0 on a tmpfs without a limit.
        scarce = room.f_blocks and room.f_bavail * room.f_frsize < 2 * BALLAST_BYTES
        if scarce and not os.path.exists(self._path):
            return
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, BALLAST_BYTES)
            finally:
                os.close(fd)
        except OSError:
            self.give_up()
        else:
            self.held = True

    def give_up(self) -> bool:
        """Returns whether there was space to give."""
        held, self.held = self.held, False
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            pass
        return held
