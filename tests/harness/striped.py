"""Files with stripes of 1 MiB on a cluster of the test's module, and nodes that damage them."""

import itertools

from harness.clusters import MIB, StoreNode
from harness.patterns import pattern

_contents = itertools.count(1)


def new_content(size: int) -> bytes:
    return pattern(next(_contents), size)


def damage(node: StoreNode, content: bytes) -> int:
    """Flip a bit of every stripe that a node keeps of a content, behind its back; how many."""
    damaged = 0
    stripes = {content[at : at + MIB] for at in range(0, len(content), MIB)}
    for path in (node.store / "extents").iterdir():
        data = path.read_bytes()
        if data in stripes:
            with path.open("r+b") as file:
                file.seek(len(data) // 2)
                file.write(bytes([data[len(data) // 2] ^ 0x40]))
            damaged += 1
    return damaged
