"""The list of movers (docs/contributing.md says how to add one)."""

from .mover import Mover
from .tcp.mover import Tcp
from .verbs.mover import Verbs
from .verbs.rdma import Choice, Rdma


def all_movers(
    rdma: Rdma | None = None, *, streams: int = 4, encrypt_data: bool = False, stages: bool = False
) -> tuple[Mover, ...]:
    """Return all movers, for one process's Peers and Listener; of two that are equally fast the first one
    is preferred. The arguments are those of Verbs and Tcp; without `rdma`, RDMA is switched off."""
    return (Verbs(rdma or Rdma(Choice("off")), stages=stages), Tcp(streams, encrypt_data))
