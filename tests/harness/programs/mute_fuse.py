"""A filesystem whose owner keeps whoever asks it waiting: a directory with two files.

`page` can be mapped, and reading it is never answered: whoever copies from or to a mapping of it waits in
the middle of a system call, with what that holds locked. `file` answers until it is first opened. Killing
the process ends all waiting.
"""

import errno
import os
import stat
import sys
from typing import Any, Self

import pyfuse3
import trio

# The program needs none of it, and would take longer to start than to run.
if __name__ != "__main__":
    from harness.network import run as run_checked
    from harness.processes import Program
    from harness.scratch import scratch_directory

_FILES = {2: b"file", 3: b"page"}


class MuteFuse:
    """One that is mounted, for everybody. A context manager."""

    def __init__(self) -> None:
        self.path = scratch_directory()
        self._process = Program(sys.executable, __file__, self.path)

    def __enter__(self) -> Self:
        assert self._process.stdout.readline() == "mounted\n"
        return self

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def __exit__(self, *_: object) -> None:
        self.kill()
        run_checked("umount", "-l", self.path)
        self.path.rmdir()


class _Operations(pyfuse3.Operations):
    def __init__(self) -> None:
        super().__init__()
        self._is_mute = False

    def _attributes(self, inode: int) -> pyfuse3.EntryAttributes:
        found = pyfuse3.EntryAttributes()
        found.st_ino = inode
        found.st_mode = stat.S_IFREG | 0o666 if inode in _FILES else stat.S_IFDIR | 0o755
        found.st_nlink = 1
        found.st_size = 4096
        found.entry_timeout = 60
        found.attr_timeout = 0
        return found

    async def getattr(self, inode: int, ctx: object) -> pyfuse3.EntryAttributes:
        if inode == 2 and self._is_mute:
            await trio.sleep_forever()
        return self._attributes(inode)

    async def lookup(self, parent: int, name: bytes, ctx: object) -> pyfuse3.EntryAttributes:
        for inode, known in _FILES.items():
            if name == known:
                return self._attributes(inode)
        raise pyfuse3.FUSEError(errno.ENOENT)

    async def open(self, inode: int, flags: int, ctx: object) -> pyfuse3.FileInfo:
        self._is_mute = self._is_mute or inode == 2
        return pyfuse3.FileInfo(fh=inode)

    async def read(self, fh: int, offset: int, size: int) -> bytes:
        return await trio.sleep_forever()

    async def flush(self, fh: int) -> None:
        if fh == 2:
            await trio.sleep_forever()


def _serve(path: str) -> None:
    options: set[Any] = {"allow_other", "fsname=mute"}
    pyfuse3.init(_Operations(), path, options)
    print("mounted", flush=True)
    trio.run(pyfuse3.main)


if __name__ == "__main__":
    _serve(os.fspath(sys.argv[1]))
