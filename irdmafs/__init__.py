"""A FUSE-mounted parameter filesystem for distributed deep learning."""

from ._version import __version__

__all__ = ["__version__"]
