"""Errors of system calls that tests expect."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def fails_with(*numbers: int) -> Iterator[None]:
    """Expect an OSError whose number is one of these."""
    with pytest.raises(OSError) as caught:
        yield
    assert caught.value.errno in numbers
