"""Figures of a store node, by the component that counts them."""

from dataclasses import dataclass

from ..observe.figures import count, gauge

__all__ = ["FileFigures"]


@dataclass(slots=True)
class FileFigures:
    """The files of extents."""

    created_files: int = count("Files made for extents")
    reused_files: int = count("Files of superseded extents that were used for new ones")
    store_bytes: int = gauge("Bytes of extents kept")
    store_free_bytes: int = gauge("Bytes free in the store directory")
    extents: int = gauge("Extents kept")
