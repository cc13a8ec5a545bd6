"""Errors of system calls that tests expect."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def fails_with(*numbers: int) -> Iterator[None]:
    """Expect an OSError whose number is one of these."""
    with pytest.raises(OSError) as caught:
        yield
    assert caught.value.errno in numbers


def error_of(call: Callable[..., object], *arguments: object) -> str:
    """The name of the error that a call ends with, or "ok"."""
    try:
        call(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "ok"
