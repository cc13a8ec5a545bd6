"""A signal that has a program do something once."""

import signal
from collections.abc import Callable

SIGNAL = signal.SIGUSR2


def told_once() -> Callable[[], bool]:
    """Handle SIGNAL. Return a function that tells, once each time that it came, that it did."""
    told = 0

    def tell(*_: object) -> None:
        nonlocal told
        told += 1

    def take() -> bool:
        nonlocal told
        was, told = told, max(0, told - 1)
        return was > 0

    signal.signal(SIGNAL, tell)
    return take
