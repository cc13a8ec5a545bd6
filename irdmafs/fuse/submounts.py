"""Filesystems that are mounted on directories of a mount.

When the kernel finds that a directory's name was forgotten by a new epoch, it unmounts the filesystem
mounted there, in every mount namespace. So while there is such a filesystem, names are forgotten one by
one.
"""

import os
import re
import select
from operator import itemgetter
from typing import Final

_TABLE: Final = "/proc/self/mountinfo"
# Id, id of the mount below, device.
_LINE: Final = re.compile(rb"^(\d+) (\d+) (\S+)", re.MULTILINE)


class Submounts:
    """The filesystems below the mount with this device number ("0:37") that this process can see: there was
    any, or not, when it was last asked to `look`. To be done again when poll tells of `changes`."""

    def __init__(self, device: str) -> None:
        self._device = device.encode()
        self._fd = os.open(_TABLE, os.O_RDONLY | os.O_CLOEXEC)
        # The kernel tells by POLLPRI that the table changed since the last question.
        self.changes = select.poll()
        self.changes.register(self._fd, select.POLLPRI)
        self.look()

    def close(self) -> None:
        os.close(self._fd)

    def look(self) -> None:
        """Find out whether there is any."""
        with open(_TABLE, "rb") as file:
            table = _LINE.findall(file.read())
        ours = {mount for mount, _, device in table if device == self._device}
        self.exist = not ours.isdisjoint(map(itemgetter(1), table))
