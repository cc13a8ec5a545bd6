"""A place for what was written to a file in place while others published a newer version of it."""

import errno
import os
from collections.abc import Callable

from ..model.records import Layout
from ..namespace import Namespace
from ..namespace.inode import NAME_MAX, Inode

_TRIES_MAX = 100


async def make_aside(
    namespace: Namespace, ino: int, host: str, layout: Callable[[int, bytes], Layout]
) -> tuple[Inode, str]:
    """Make an empty file NAME.conflict-HOST-N beside the file, with its owner and mode; returns it and
    its path. Raises OSError: ESTALE when the file has no name."""
    names = namespace.names_of(ino)
    if not names:
        raise OSError(errno.ESTALE, "others have replaced and removed it; what was written is lost")
    parent, name = names[0]
    inode = namespace.inode(ino)
    for number in range(1, _TRIES_MAX + 1):
        suffix = os.fsencode(f".conflict-{host}-{number}")
        aside = name[: NAME_MAX - len(suffix)] + suffix
        if namespace.lookup(parent, aside) is not None:
            continue
        try:
            made = await namespace.create(
                parent, aside, inode.mode, inode.uid, inode.gid, layout=layout(parent, aside)
            )
        except FileExistsError:
            continue
        return made, namespace.describe(made.ino)
    raise OSError(errno.EEXIST, f"{_TRIES_MAX} files keep what could not be published already")
