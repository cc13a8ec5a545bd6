"""A signal that has a program do something once."""

import signal
from collections.abc import Callable

SIGNAL = signal.SIGUSR2


def told_once() -> Callable[[], bool]:
    """Handle SIGNAL. Return a function that tells, once after it came, that it did."""
    told = False

    def tell(*_: object) -> None:
        nonlocal told
        told = True

    def take() -> bool:
        nonlocal told
        was, told = told, False
        return was

    signal.signal(SIGNAL, tell)
    return take
