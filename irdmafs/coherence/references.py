"""Which programs may keep references to the pages of a file that they have closed.

Reads and maps pass through to the file itself. With splice(2), sendfile(2), vmsplice(2) or MSG_ZEROCOPY
its pages get into pipes and sockets, where they may stay after the file was closed; nobody can find that
out. So the file of a store node on this host that was opened here is never used for another version. A
program that uses none of these calls says so before it opens a file, and the node may use the file again
once it is closed and unmapped, as the kernel tells.

Whoever kept references in spite of that would see what the file is used for next, a version of any file.
So only root is believed, and the user who runs the daemon: they may read everything that it has.
"""

import os
import time

# The limit of announced opens, and how long one is waited for.
_ANNOUNCED_MAX = 256
_WAIT_S = 2.0


class References:
    """Opens that were announced to keep no references, each by a thread for a file."""

    def __init__(self) -> None:
        # Until when each is waited for, the oldest first. Opens check whether it is empty without a call.
        self.announced: dict[tuple[int, int], float] = {}
        self.believed = {0, os.geteuid()}

    def announce(self, thread: int, ino: int, uid: int) -> bool:
        """Note that the thread's next open of this file keeps none; return whether its user is
        believed."""
        if uid not in self.believed:
            return False
        self.announced.pop((thread, ino), None)
        while len(self.announced) >= _ANNOUNCED_MAX:
            del self.announced[next(iter(self.announced))]
        self.announced[thread, ino] = time.monotonic() + _WAIT_S
        return True

    def opens(self, thread: int, ino: int, uid: int) -> None:
        """Note who the thread is that opens a file: another one may have had its number."""
        if uid not in self.believed:
            self.announced.pop((thread, ino), None)

    def may_stay(self, thread: int, ino: int) -> bool:
        """Return whether an open that is made now may keep references; this ends what was announced."""
        return time.monotonic() > self.announced.pop((thread, ino), 0.0)
