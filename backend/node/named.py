"""The contents that inodes name: which extents they have, and in which groups they are."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Self

from ..model.placement import group_of
from ..model.records import STRIPE_GROUPS_MAX, Layout
from ..namespace import ROOT_INO, Inode
from ..namespace.numbers import subvolume_of


class Named(NamedTuple):
    """A content that an inode names. `groups` are those of its first stripes, and in turn of the others."""

    ino: int
    content: int
    size: int
    layout: Layout
    digests: bytes
    blocks: int
    stripes: int
    groups: tuple[int, ...]

    @classmethod
    def by(cls, inode: Inode, buckets: int) -> Self:
        """Return the content that an inode names. `buckets` is the cluster's setting."""
        layout, size = inode.layout, inode.size
        stripes = layout.stripes(size)
        first = range(min(stripes, STRIPE_GROUPS_MAX))
        groups = tuple([group_of(layout, stripe, buckets) for stripe in first])
        return cls(
            inode.ino, inode.extent, size, layout, inode.digests, inode.blocks, stripes, groups
        )

    def length(self, stripe: int) -> int:
        """Return how many bytes a stripe should have, 0 if there is no such stripe."""
        return self.layout.span(self.size, stripe)[1] if stripe < self.stripes else 0

    def group(self, stripe: int) -> int:
        """Return the group of a stripe, 0 (which is none) if there is no such stripe."""
        return self.groups[stripe % STRIPE_GROUPS_MAX] if stripe < self.stripes else 0

    def stripes_in(self, group: int) -> Iterator[int]:
        for first, one in enumerate(self.groups):
            if one == group:
                yield from range(first, self.stripes, STRIPE_GROUPS_MAX)


class NamedContents(dict[int, Named]):
    """By content, what an inode names.

    Of several inodes that name one content the first counts. A mount may name what is another's: so one
    outside of subvolumes counts before those inside, which may be of a mount that is kept there, and of
    these one that fits the extents here (`fitting`). `also` are those that do not count, by content and
    inode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.also: dict[int, dict[int, Named]] = {}
        self.by_group: dict[int, set[int]] = {}  # group -> contents

    def clear(self) -> None:
        super().clear()
        self.also.clear()
        self.by_group.clear()

    def name(self, named: Named) -> Named:
        """Add what an inode names, and return the one of its content that counts."""
        known = self.get(named.content)
        if known is None:
            self._put(named)
            return named
        if subvolume_of(known.ino) != ROOT_INO == subvolume_of(named.ino):
            self._drop(known)
            self._put(named)
            known, named = named, known
        self.also.setdefault(named.content, {})[named.ino] = named
        return known

    def fitting(self, content: int, fits: Callable[[Named], bool]) -> Named:
        """Return the one that counts from now on: if the present one is in a subvolume, one that fits."""
        known = self[content]
        if subvolume_of(known.ino) != ROOT_INO and not fits(known):
            for named in filter(fits, self.also.get(content, {}).values()):
                del self.also[content][named.ino]
                self._drop(known)
                self._put(named)
                return self.name(known)
        return known

    def unname(self, named: Named) -> bool:
        """Remove what an inode names. Return whether no other names it."""
        also = self.also.pop(named.content, {})
        if self[named.content] is not named:
            del also[named.ino]
        else:
            self._drop(named)
            if also:
                self._put(also.pop(next(iter(also))))
        if also:
            self.also[named.content] = also
        return named.content not in self

    def _put(self, named: Named) -> None:
        self[named.content] = named
        for group in named.groups:
            self.by_group.setdefault(group, set()).add(named.content)

    def _drop(self, named: Named) -> None:
        del self[named.content]
        for group in {*named.groups}:
            contents = self.by_group[group]
            contents.discard(named.content)
            if not contents:
                del self.by_group[group]
