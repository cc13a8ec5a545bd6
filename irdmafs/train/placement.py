"""Choose names of shards by the store nodes that keep them, and tell whether a file is on this host.

Files of one name below a directory with the placement `together` are on the same nodes. So a shard's name
decides where all that belongs to it is kept.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..client._files import look_up
from .layout import in_turns

_NODES = "user.irdmafs.nodes"
# Names that are tried: a node that is one of 25 is primary of none of them once in 200 times.
_CANDIDATES_MIN = 128
_CANDIDATES_PER_SHARD = 8
# One shard is reduced and pulled while the other is on its way. More, or smaller ones, do not pay.
_SHARDS_PER_NODE = 2
_SHARD_BYTES = 8 << 20
# A smaller shard costs a step more in transactions than it saves by another node's link. Smaller ones, if
# so many are asked for, are one part.
_SMALLEST_BYTES = 1 << 20
# The attribute is not there on one host, nor on another filesystem.
_UNKNOWN = (errno.ENODATA, errno.ENOTSUP, errno.ENOENT)


def choose(names: Mapping[str, str], shards: int) -> list[str]:
    """Choose `shards` of these names, each with its primary node, such that the nodes have as equal numbers
    as possible. Equal arguments give equal results. Raises ValueError if there are too few names."""
    if shards > len(names):
        raise ValueError(f"{len(names)} names are too few for {shards} shards")
    left: dict[str, list[str]] = {}
    for name, node in names.items():
        left.setdefault(node, []).append(name)
    return [*in_turns(left[node] for node in sorted(left))][:shards]


def shard_names(directory: Path, shards: int | None, size: int) -> tuple[list[str], int]:
    """Return names for shards whose files are below `directory`, which has the placement `together`; the
    number of parts: one for each shard, and at most one for each store node, if there are any; 0 if there
    are, and shards are so small that they are one. `size`: of all parameters, in bytes, by which shards are
    chosen without a number of them. Raises OSError."""
    tried = max(_CANDIDATES_MIN, _CANDIDATES_PER_SHARD * (shards or 0))
    names: dict[str, str] = {}
    below = Path(tempfile.mkdtemp(prefix=".places-", dir=directory))
    try:
        for name in map(str, range(tried)):
            os.close(os.open(below / name, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o600))
            nodes = _nodes_of(below / name)
            if nodes is None:
                return [str(number) for number in range(shards or 1)], shards or 1
            names[name] = str(nodes[0]["node"]) if nodes else ""
    finally:
        shutil.rmtree(below)
    nodes_there = len(set(names.values()))
    if not shards:
        is_worth_it = size >= nodes_there * _SHARDS_PER_NODE * _SHARD_BYTES
        most = min(len(names), max(1, size // _SMALLEST_BYTES))
        shards = min(nodes_there * (_SHARDS_PER_NODE if is_worth_it else 1), most)
    is_small = size < max(shards, 2) * _SMALLEST_BYTES
    return choose(names, shards), 0 if is_small else min(shards, nodes_there)


def host_of(path: Path) -> str | None:
    """Return the address of the host with the primary of a file's first stripe: "" if it is this host, None
    if that is not known."""
    nodes = _nodes_of(path)
    return None if not nodes else "" if nodes[0]["here"] else str(nodes[0]["host"])


def _nodes_of(path: Path) -> list[dict[str, Any]] | None:
    """Return the nodes that keep the first stripe of a file, the primary first; None if it is not known."""
    try:
        groups = json.loads(look_up(os.getxattr, path, _NODES))
    except OSError as error:
        if error.errno in _UNKNOWN:
            return None
        raise
    nodes: list[dict[str, Any]] = groups[0]["nodes"]
    return nodes
