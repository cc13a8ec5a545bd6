"""Structs by which two ends of a connection describe their queue pairs and rails to each other."""

import msgspec

# The limit for one host. A port counts once for each network that it is on.
RAILS_MAX = 16


class QueueEnd(msgspec.Struct, array_like=True, frozen=True):
    """The attributes of a queue pair that the other end needs. `mtu` is in bytes; `reads` is how many READs
    of the peer it answers at once."""

    gid: bytes
    lid: int
    number: int
    psn: int
    mtu: int
    reads: int


class Rail(msgspec.Struct, array_like=True, frozen=True):
    """A port of a host and the network that it is on: the first `bits` of its GID. `name` is the host's own
    name for the port, `kind` the kind of the GID. `on_way`: the control connection goes through it."""

    name: str
    gid: bytes
    bits: int
    kind: str
    mbit_s: int
    is_soft: bool
    on_way: bool

    @property
    def network(self) -> tuple[str, int, int]:
        """Return a key that is equal for rails that reach each other."""
        return self.kind, self.bits, int.from_bytes(self.gid, "big") >> 128 - self.bits
