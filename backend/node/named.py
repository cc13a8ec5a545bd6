"""A named content: which extents it has, and in which groups they are."""

from collections.abc import Iterator
from typing import NamedTuple, Self

from ..model.placement import group_of
from ..model.records import STRIPE_GROUPS_MAX, Layout
from ..namespace import Inode


class Named(NamedTuple):
    """A content that an inode names. `buckets` of its methods is the cluster's setting."""

    ino: int
    content: int
    size: int
    layout: Layout
    digests: bytes
    blocks: int
    stripes: int

    @classmethod
    def by(cls, inode: Inode) -> Self:
        """Return the content that an inode names."""
        layout, size = inode.layout, inode.size
        return cls(
            inode.ino, inode.extent, size, layout, inode.digests, inode.blocks, layout.stripes(size)
        )

    def length(self, stripe: int) -> int:
        """Return how many bytes a stripe should have, 0 if there is no such stripe."""
        return self.layout.span(self.size, stripe)[1] if stripe < self.stripes else 0

    def group(self, stripe: int, buckets: int) -> int:
        return group_of(self.layout, stripe, buckets)

    def stripes_in(self, group: int, buckets: int) -> Iterator[int]:
        stripes = self.stripes
        for first in range(min(stripes, STRIPE_GROUPS_MAX)):
            if self.group(first, buckets) == group:
                yield from range(first, stripes, STRIPE_GROUPS_MAX)

    def groups(self, buckets: int) -> dict[int, int]:
        """Return the groups of the content, and how many of its bytes each keeps."""
        stripes, size = self.stripes, self.size
        if stripes == 1:
            return {self.group(0, buckets): size}
        found: dict[int, int] = {}
        for stripe in range(min(stripes, STRIPE_GROUPS_MAX)):
            group = self.group(stripe, buckets)
            # All stripes are full except the last, which counts as full here.
            count = -(-(stripes - stripe) // STRIPE_GROUPS_MAX)
            found[group] = found.get(group, 0) + count * self.layout.stripe_bytes
        found[self.group(stripes - 1, buckets)] -= stripes * self.layout.stripe_bytes - size
        return found
