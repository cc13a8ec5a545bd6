"""What the two ends of a connection tell each other of their queue pairs."""

import msgspec


class QueueEnd(msgspec.Struct, array_like=True, frozen=True):
    """What the other end has to know of a queue pair. `mtu` is in bytes; `reads` is how many READs of
    the peer it answers at once."""

    gid: bytes
    lid: int
    number: int
    psn: int
    mtu: int
    reads: int
