"""A file that is being received: it becomes an extent, or nothing is left of it."""

from collections.abc import Callable
from typing import Generic, Protocol, Self, TypeVar

__all__ = ["Intake"]


class Incoming(Protocol):
    """A file that may become an extent."""

    @property
    def fd(self) -> int: ...

    def close(self) -> None: ...


I = TypeVar("I", bound=Incoming)  # noqa: E741


class Intake(Generic[I]):
    """One incoming file. As a context manager it closes the file at its end, and drops it with `drop`
    unless it was taken."""

    def __init__(self, incoming: I, drop: Callable[[I], None]) -> None:
        self.incoming = incoming
        self._drop = drop
        self._is_taken = False

    @property
    def fd(self) -> int:
        return self.incoming.fd

    def take(self) -> I:
        """Return the file to a caller that seals it, or drops it if that fails."""
        self._is_taken = True
        return self.incoming

    def close(self) -> None:
        try:
            if not self._is_taken:
                self._is_taken = True
                self._drop(self.incoming)
        finally:
            self.incoming.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
