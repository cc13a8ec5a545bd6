"""Descriptors that a block closes at its end, and a base of classes that close themselves then."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self


@contextmanager
def descriptor(fd: int) -> Iterator[int]:
    """Give an open file's descriptor, and close it at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)


class Closing:
    """A context manager, whose end is its `close`."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
