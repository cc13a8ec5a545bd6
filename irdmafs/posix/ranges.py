"""Sets of byte ranges, kept sorted so that looking one up takes the logarithm of their number."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Span = tuple[int, int]  # first and last byte, inclusive


class Change(NamedTuple):
    """Replace the spans `first` to before `last` of a set by `after`."""

    first: int
    last: int
    after: Sequence[Span]

    @property
    def growth(self) -> int:
        """Return by how many spans the set grows."""
        return len(self.after) - (self.last - self.first)


class _Spans:
    """The first bytes of spans, in order, and the last ones, in order."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def count(self, start: int, end: int) -> int:
        """Return how many spans overlap a range: those begun before its end, less those ended before it."""
        return bisect_right(self._starts, end) - bisect_left(self._ends, start)


class Ranges(_Spans):
    """Spans that neither overlap nor touch, in order."""

    __slots__ = ()

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Span]:
        return zip(self._starts, self._ends, strict=True)

    def first(self, start: int, end: int) -> Span | None:
        """Return the first span that overlaps a range."""
        at = bisect_left(self._ends, start)
        if at == len(self._starts) or self._starts[at] > end:
            return None
        return self._starts[at], self._ends[at]

    def adding(self, start: int, end: int) -> Change:
        """Return the change that adds a range, joined with what it overlaps or touches."""
        first = bisect_left(self._ends, start - 1)
        last = bisect_right(self._starts, end + 1)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        return Change(first, last, ((start, end),))

    def removing(self, start: int, end: int) -> Change:
        """Return the change that removes a range, and may cut a span in two."""
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        after: list[Span] = []
        if first < last:
            if self._starts[first] < start:
                after.append((self._starts[first], start - 1))
            if self._ends[last - 1] > end:
                after.append((end + 1, self._ends[last - 1]))
        return Change(first, last, after)

    def apply(self, change: Change) -> list[Span]:
        """Make a change; return the spans that it replaced."""
        part = slice(change.first, change.last)
        before = list(zip(self._starts[part], self._ends[part], strict=True))
        self._starts[part] = [start for start, _ in change.after]
        self._ends[part] = [end for _, end in change.after]
        return before


class Overlaps(_Spans):
    """Counts the spans of many owners, which may overlap each other."""

    __slots__ = ()

    def replace(self, before: Sequence[Span], after: Sequence[Span]) -> None:
        for start, end in before:
            del self._starts[bisect_left(self._starts, start)]
            del self._ends[bisect_left(self._ends, end)]
        for start, end in after:
            self._starts.insert(bisect_left(self._starts, start), start)
            self._ends.insert(bisect_left(self._ends, end), end)
