"""Names of arrays, and the files they lie in."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ._files import look_up

NPY = ".npy"
SAFETENSORS = ".safetensors"


def check_name(name: str) -> list[str]:
    """Return the components of a name. Raises ValueError for one that is no name of an array."""
    parts = name.split("/")
    if not name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(
            f"{name!r} is not a name: names are components joined by '/', "
            "without empty ones, '.' and '..'"
        )
    return parts


def split_name(name: str) -> tuple[str, str | None]:
    """Return the file's name and, for a name inside a .safetensors file, the tensor's."""
    parts = check_name(name)
    for index, part in enumerate(parts[:-1], start=1):
        if part.endswith(SAFETENSORS):
            return "/".join(parts[:index]), "/".join(parts[index:])
    return name, None


def is_addressable(tensor: str) -> bool:
    """Return whether a tensor's own name can be part of a name."""
    try:
        check_name(tensor)
    except ValueError:
        return False
    return True


def walk(root: str, prefix: str) -> Iterator[str]:
    """Yield the path from ``root`` of every file of arrays below ``root``/``prefix``, in no order.
    Symbolic links to directories are not followed.

    Raises OSError where a directory cannot be read; one that vanishes meanwhile is passed over.
    """
    try:
        entries = look_up(os.scandir, os.path.join(root, prefix))
    except FileNotFoundError:
        return
    with entries:
        for entry in entries:
            path = f"{prefix}/{entry.name}" if prefix else entry.name
            is_array = entry.name.endswith((NPY, SAFETENSORS))
            if entry.is_dir(follow_symlinks=False):
                if not entry.name.endswith(SAFETENSORS):
                    yield from walk(root, path)
            elif is_array and entry.is_file() and _size(entry):
                yield path


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError:
        return 0
