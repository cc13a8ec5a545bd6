"""Errors about files of arrays."""

from __future__ import annotations


class FormatError(ValueError):
    """A file that should hold arrays does not: ``path`` names it, ``defect`` says what is wrong."""

    def __init__(self, path: str, defect: str) -> None:
        super().__init__(path, defect)
        self.path = path
        self.defect = defect

    def __str__(self) -> str:
        return f"{self.path}: {self.defect}"
