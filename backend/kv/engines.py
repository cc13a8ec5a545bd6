"""The choice of the engine that the namespace of one host is kept on."""

from typing import Protocol

from . import OwnEngine
from .sqlite import SQLiteEngine

__all__ = ["OpenEngine", "open_engine"]


class OpenEngine(Protocol):
    """A way to open the engine of a store directory."""

    def __call__(self, directory: str, *, power_safe: bool) -> OwnEngine:
        """Return the engine. `power_safe`: what is durable survives a power loss, too. Raises Damaged,
        NoSpace and OSError."""
        ...


def open_engine(directory: str, *, power_safe: bool) -> OwnEngine:
    """Open the engine that stores have unless they are given another one (see OpenEngine)."""
    return SQLiteEngine(f"{directory}/kv.sqlite", power_safe=power_safe)
