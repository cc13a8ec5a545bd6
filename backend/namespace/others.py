"""Protocols of the parts that deal with other mounts, as the committer of a shared engine uses them."""

from contextlib import AbstractContextManager
from typing import Protocol

from ..kv import Compare, Delete, Put
from .commit import Commit
from .inode import Unread


class Hub(Protocol):
    """The source of changes to a shared engine in this process (see replica). The replica has everything up
    to the revision `applied`."""

    applied: int

    async def wait_applied(self, revision: int) -> None:
        """Return when the replica has everything up to a revision."""

    async def barrier(self) -> None:
        """Return when the replica has every change that was acknowledged before this call."""

    async def reload(self) -> None:
        """Have the tree loaded anew."""

    async def learn(self, unread: Unread) -> None:
        """Have the tree know names that somebody asked for. Raises OSError."""


class Claims(Protocol):
    """The directories in which one mount alone puts names and nobody changes the directory's record (see
    store/remote/claims)."""

    def is_ours(self, directory: int) -> bool:
        """Return whether this mount may keep new files in the directory to itself."""

    def revision(self, directory: int) -> int:
        """Return the revision of this mount's claim of the directory, 0: it has none."""

    def is_of_another(self, directory: int) -> bool:
        """Return whether another mount has the claim of the directory."""

    async def recall(self, directory: int) -> None:
        """Return when no other mount has the claim of the directory."""

    def is_exclusive(self, directory: int) -> bool:
        """Return whether this mount may defer changes in the directory: no other looks there."""

    def is_exclusive_elsewhere(self, directory: int) -> bool:
        """Return whether another mount may have deferred changes in the directory."""

    async def look(self, directory: int) -> None:
        """Return when no other mount has deferred changes in the directory."""

    def making(self, directory: int, parent: int) -> list[Put]:
        """Return what is stored with a directory that this mount makes, so that it has the claim of it."""

    def removing(self, directory: int) -> list[Delete]:
        """Return what is stored with the removal of a directory of which this mount has the claim."""

    def taking(
        self, commit: Commit
    ) -> AbstractContextManager[tuple[list[Compare], list[Put | Delete]]]:
        """Give what the transaction of a commit compares, so that claims are as they are known here, and
        what it changes besides, so that this mount has the claims of directories that it changes often, or
        makes, and of none that it removes. The block carries the transaction out. Raises Conflict if the
        claims are refused."""
