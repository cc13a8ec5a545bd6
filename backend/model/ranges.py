"""Ranges of bytes, of which a record or message holds a limited number."""

from collections.abc import Sequence

# The start and the end.
Range = tuple[int, int]


def fewer(ranges: Sequence[Range], most: int) -> list[Range]:
    """Return at most so many ranges that include these, in order: the smallest gaps between them go."""
    gaps = sorted(range(1, len(ranges)), key=lambda at: ranges[at][0] - ranges[at - 1][1])
    closed = set(gaps[: max(0, len(ranges) - most)])
    result: list[Range] = []
    for at, (start, end) in enumerate(ranges):
        if at in closed:
            result[-1] = result[-1][0], end
        else:
            result.append((start, end))
    return result
