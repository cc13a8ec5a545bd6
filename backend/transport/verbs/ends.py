"""What the two ends of a connection tell each other of their queue pairs, and of the ways between them."""

import msgspec

# Of a host; each can be on several networks, which count.
RAILS_MAX = 16


class QueueEnd(msgspec.Struct, array_like=True, frozen=True):
    """What the other end has to know of a queue pair. `mtu` is in bytes; `reads` is how many READs of
    the peer it answers at once."""

    gid: bytes
    lid: int
    number: int
    psn: int
    mtu: int
    reads: int


class Rail(msgspec.Struct, array_like=True, frozen=True):
    """A port of a host and the network that it is on: the first `bits` of its GID. `name` is the host's
    own for the port, `kind` that of the GID. `on_way`: the control connection goes through it."""

    name: str
    gid: bytes
    bits: int
    kind: str
    mbit_s: int
    is_soft: bool
    on_way: bool

    @property
    def network(self) -> tuple[str, int, int]:
        """Equal on rails that reach each other."""
        return self.kind, self.bits, int.from_bytes(self.gid, "big") >> 128 - self.bits
