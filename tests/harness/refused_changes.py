"""Calls that change what is in a directory, each in another way, and how they end."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from harness.errors import error_of

Call = tuple[Callable[..., object], tuple[object, ...]]


def changes_in(directory: Path) -> list[Call]:
    """Calls for a directory that has the file `small`."""
    file, new = directory / "small", directory / "new"
    return [
        (file.write_bytes, (b"x",)),
        (new.write_bytes, (b"x",)),
        (os.open, (file, os.O_RDWR)),
        (os.open, (file, os.O_WRONLY | os.O_APPEND)),
        (os.open, (directory, os.O_TMPFILE | os.O_RDWR)),
        (os.truncate, (file, 0)),
        (os.mkdir, (new,)),
        (os.rmdir, (directory,)),
        (os.unlink, (file,)),
        (os.rename, (file, new)),
        (os.link, (file, new)),
        (os.symlink, ("small", new)),
        (os.mknod, (new,)),
        (os.chmod, (file, 0o600)),
        (os.chown, (file, 1, 1)),
        (os.utime, (file, (0, 0))),
        (os.setxattr, (file, "user.a", b"x")),
        (os.setxattr, (directory, "user.irdmafs.placement", b"zone=a")),
    ]


def outcomes(calls: Iterable[Call]) -> dict[str, str]:
    return {call.__name__: error_of(call, *arguments) for call, arguments in calls}
