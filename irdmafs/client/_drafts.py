"""A directory, or a file, that appears whole."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator

from ._files import RENAME_EXCHANGE, StrPath, rename

_DRAFTS_XATTR = "user.irdmafs.drafts"


@contextlib.contextmanager
def draft(path: StrPath) -> Iterator[str]:
    """Give a new directory to fill, which is at ``path`` when the block ends, whole: one change, on every
    host. A directory that is there goes, and who has its files open keeps them. After an exception nothing
    has changed.

    On a mount in a cluster files are closed without waiting for the store nodes, and stored together;
    anywhere else it is a directory with another name. Raises OSError: NotADirectoryError if a file is at
    ``path``; EINVAL for a path that ends in no name, such as "", which would be where the program is.
    """
    with aside(path) as place:
        os.mkdir(place)
        yield place


@contextlib.contextmanager
def aside(path: StrPath) -> Iterator[str]:
    """Give a path at which something is to be made, which is at ``path`` when the block ends."""
    parent, name = os.path.split(os.fspath(path).rstrip("/"))
    if name in ("", os.curdir, os.pardir):
        raise OSError(errno.EINVAL, "It names no directory to make", path)
    path = os.path.join(os.path.abspath(parent), name)
    place = tempfile.mkdtemp(prefix=".draft-", dir=os.path.dirname(path))
    try:
        store_together(place)
        inside = os.path.join(place, name)
        yield inside
        try:
            rename(inside, path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            rename(inside, path, RENAME_EXCHANGE)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def store_together(directory: str) -> None:
    """Make all directories below a directory drafts, whose files are closed before they are stored."""
    with contextlib.suppress(OSError):  # it is not on a mount, or that cannot change attributes
        os.setxattr(directory, _DRAFTS_XATTR, b"*")
