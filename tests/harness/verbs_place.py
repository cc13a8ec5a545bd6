"""Where tests of RDMA verbs take place: nodes in this process and a mount, with adapters."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import trio

from harness.rdma import need_way
from harness.transport_nodes import Node
from harness.transport_place import Place, in_cluster, until
from irdmafs.backend.transport.peers import Peers
from irdmafs.backend.transport.verbs.path import Path as VerbsPath
from irdmafs.backend.transport.verbs.queue import QueuePair
from irdmafs.backend.transport.verbs.rdma import Adapter, Choice, Rdma
from irdmafs.backend.transport.verbs.way import Lanes, VerbsWay


class VerbsPlace(Place):
    """`rdma` has the adapters of the mount, `of_nodes` those of the nodes."""

    def __init__(
        self, memory: Path, peers: Peers, nodes: dict[int, Node], rdma: Rdma, of_nodes: Rdma
    ) -> None:
        super().__init__(memory, peers, nodes)
        self.rdma = rdma
        self.of_nodes = of_nodes

    @property
    def adapter(self) -> Adapter:
        """The mount's only one."""
        (adapter,) = self.rdma.adapters
        return adapter


@asynccontextmanager
async def by_verbs(
    memory: Path,
    count: int = 2,
    choice: Choice = Choice(),  # noqa: B008
    *,
    of_nodes: Choice | None = None,
    address: str = "",
    mount: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> AsyncIterator[VerbsPlace]:
    """Nodes at an address, by default that of a device, the only one that is used then. The `choice` is the
    mount's; the nodes have the mount's adapters, or their own ones (`of_nodes`). `mount` and `options` are
    those of in_cluster."""
    if not address:
        device, _, _, address = need_way()
        choice = choice._replace(device=device)
        of_nodes = of_nodes and of_nodes._replace(device=device)
    with ExitStack() as stack:
        rdma = stack.enter_context(Rdma(choice))
        own = rdma if of_nodes is None else stack.enter_context(Rdma(of_nodes))
        async with in_cluster(
            memory, count, address, rdma=own, mount={"rdma": rdma, **mount}, **options
        ) as place:
            yield VerbsPlace(memory, place.peers, place.nodes, rdma, own)


async def lanes(peers: Peers, node: int = 1, count: int = 1) -> Lanes:
    """Return those to a node, when so many pairs of rails work."""
    way = peers.device(node).way(VerbsWay)
    await way.reach()
    found = way.lanes
    assert found is not None
    await until(lambda: len(found.usable) == count)
    return found


async def only_path(peers: Peers) -> VerbsPath:
    """Return the queue pair to node 1."""
    (lane,) = (await lanes(peers))._lanes
    assert lane.path is not None
    return lane.path


def when_posted(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    do: Callable[[QueuePair], object],
    is_meant: Callable[[QueuePair], bool] = lambda pair: True,
) -> trio.Event:
    """Have something happen as soon as so many batches were posted to the queue pairs that are meant."""
    post = QueuePair._post
    posted = 0
    happened = trio.Event()

    def posting(self: QueuePair, requests: list[Any]) -> Any:
        nonlocal posted
        batch = post(self, requests)
        posted += is_meant(self)
        if posted == count and not happened.is_set():
            happened.set()
            do(self)
        return batch

    monkeypatch.setattr(QueuePair, "_post", posting)
    return happened
