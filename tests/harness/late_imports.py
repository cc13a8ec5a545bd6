"""Modules that take seconds to import, imported when a test uses them: each worker collects all tests."""

from importlib import import_module
from typing import Any


class _Late:
    """A module by name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        # pytest asks everything in a module of tests for attributes like these.
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)


torch: Any = _Late("torch")
optimizers: Any = _Late("irdmafs.train.torch")
