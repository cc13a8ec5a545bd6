"""A base of what is used in a block and closed at its end."""

from typing import Self


class Closing:
    """A context manager, whose end is its `close`."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
