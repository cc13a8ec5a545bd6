"""The groups and capabilities of a caller, from its status: a request tells only the user and one group.

Finding out takes some 200 us, so it is done only where a rule of POSIX turns on them.
"""

from collections.abc import Collection
from typing import Final, NamedTuple

CAP_DAC_OVERRIDE: Final = 1
CAP_DAC_READ_SEARCH: Final = 2
CAP_FOWNER: Final = 3
CAP_FSETID: Final = 4
CAP_SYS_ADMIN: Final = 21


class Credentials(NamedTuple):
    """`groups` are the supplementary ones, `effective` a mask of capabilities."""

    groups: Collection[int]
    effective: int

    def has(self, capability: int) -> bool:
        """Return whether a capability is effective."""
        return bool(self.effective >> capability & 1)


# Taken for a thread that cannot be seen, or has ended.
NOTHING: Final = Credentials((), 0)
