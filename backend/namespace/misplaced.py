"""Directories have one name each, and none lies below itself.

Hosts that follow the rules change no tree in another way. The records of one that does not are found here
before somebody walks up from a directory and never arrives (docs/security.md, "Sensible values").
"""

from collections.abc import Iterable, Iterator

from .inode import ROOT_INO
from .lookup import Names

_Name = tuple[int, bytes]  # number of a directory, and a name in it


def misplaced(tree: Names, linked: Iterable[int]) -> Iterator[tuple[int, _Name]]:
    """Yield, of the directories that were just given a name, those that have a second one, or lie below
    themselves, with that name. The caller has to remove it before it asks for the next one."""
    linked = dict.fromkeys(linked)
    for ino in linked:
        names = tree.names_of(ino)
        # The one that came first is the right one; of two in one transaction, whichever.
        names.sort(key=lambda name: (tree.name_revision(*name), name))
        for name in names[1:]:
            yield ino, name
    sound: set[int] = set()
    for ino in linked:
        if ino == ROOT_INO or (not tree.is_empty(ino) and _lies_below_itself(tree, ino, sound)):
            for name in tree.names_of(ino):
                yield ino, name


def _lies_below_itself(tree: Names, ino: int, sound: set[int]) -> bool:
    """`sound`: directories below which this was found not to be so. They get company."""
    passed = set()
    directory = ino
    while directory != ROOT_INO and directory not in sound:
        passed.add(directory)
        names = tree.names_of(directory)
        if not names:
            break  # it was removed
        directory = names[0][0]
        if directory == ino:
            return True
        if directory in passed:
            return False  # it lies below one that does
    sound |= passed
    return False
