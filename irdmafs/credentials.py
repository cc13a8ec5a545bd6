"""Who a caller is beyond the user and group that a request tells: groups and capabilities, from /proc.

Reading them takes some 20 us, so they are looked up only where a rule of POSIX turns on them.
"""

from collections.abc import Collection
from typing import Final

CAP_FSETID: Final = 4
CAP_SYS_ADMIN: Final = 21


def groups_of(pid: int) -> Collection[int]:
    """Return the supplementary groups of a thread; none when it cannot be seen or is gone."""
    return [int(word) for word in _field(pid, b"Groups:").split()]


def has_capability(pid: int, capability: int) -> bool:
    """Return whether a capability is effective in a thread; False when it cannot be seen or is gone."""
    return bool(int(_field(pid, b"CapEff:") or b"0", 16) >> capability & 1)


def _field(pid: int, name: bytes) -> bytes:
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            for line in status:
                if line.startswith(name):
                    return line[len(name) :].strip()
    except OSError:
        pass
    return b""
