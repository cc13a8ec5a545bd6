"""Store nodes that are nothing but a transport over a directory, in this process or their own.

Run as a program it is such a node. Where nodes are is told by files in a directory of addresses, so
that processes find each other.
"""

import errno
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import trio

from harness.processes import Program
from irdmafs.backend.model.records import NodeAddress, session_of
from irdmafs.backend.transport import Extent, Fenced, Target
from irdmafs.backend.transport.mover import Host, Mover, Serving
from irdmafs.backend.transport.movers import all_movers
from irdmafs.backend.transport.peers import Peers, open_peers
from irdmafs.backend.transport.rights import Peer
from irdmafs.backend.transport.server import Listener
from irdmafs.backend.transport.service import Service
from irdmafs.backend.transport.verbs.rdma import Choice, Rdma


@dataclass(frozen=True)
class OpenFile:
    path: str
    fd: int
    is_own: bool = True

    def lend(self) -> None:
        pass

    def close(self) -> None:
        os.close(self.fd)


class IncomingFile(OpenFile):
    """Closing it removes it, unless it was renamed."""

    def close(self) -> None:
        super().close()
        with suppress(FileNotFoundError):
            os.unlink(self.path)


class ExtentDirectory:
    """A Service that keeps extents as files, with what tests want to know and to set."""

    def __init__(self, directory: str, node: int) -> None:
        self.node = node
        self.directory = directory
        os.makedirs(f"{directory}/incoming", exist_ok=True)
        self.newest_config = 0
        # Keys of sessions, where that counts.
        self.owners: dict[int, bytes] = {}
        # Tests ask for random sizes, which must not fill the machine's memory.
        self.limit_bytes = 1 << 30
        self.created = 0
        self.sealed: list[Extent] = []
        self.aborted: list[int] = []
        self.suspected: list[tuple[int, int]] = []
        self.may_seal = trio.Event()
        self.may_seal.set()
        self._lock = threading.Lock()

    def path(self, extent: Extent) -> str:
        return f"{self.directory}/{extent.content:x}.{extent.stripe:x}"

    @property
    def leftovers(self) -> list[str]:
        """What is in incoming/."""
        return os.listdir(f"{self.directory}/incoming")

    async def check_owner(self, peer: Peer, content: int) -> None:
        if self.owners and self.owners.get(session_of(content)) != peer.session_key:
            raise PermissionError(errno.EACCES, f"content {content:x} is not of its session")

    async def admit(self, extent: Extent, target: Target) -> None:
        if target.config < self.newest_config:
            raise Fenced("the group has a newer configuration")

    def size(self, extent: Extent) -> int | None:
        try:
            return os.stat(self.path(extent)).st_size
        except FileNotFoundError:
            return None

    async def create(
        self, extent: Extent, length: int, allocated: int | None = None
    ) -> IncomingFile:
        if (length if allocated is None else allocated) > self.limit_bytes:
            raise OSError(28, "No space left on device")
        self.created += 1
        path = f"{self.directory}/incoming/_{self.created}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if allocated is not None and allocated < length:
                os.ftruncate(fd, length)
            elif length:
                os.posix_fallocate(fd, 0, length)
        except BaseException:
            os.close(fd)
            os.unlink(path)
            raise
        return IncomingFile(path, fd)

    async def adopt(self, extent: Extent, name: str) -> IncomingFile:
        path = f"{self.directory}/incoming/{os.path.basename(name)}"
        return IncomingFile(path, os.open(path, os.O_RDONLY))

    async def share(self, source: Extent, length: int) -> IncomingFile:
        if self.size(source) != length:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        self.created += 1
        path = f"{self.directory}/incoming/_{self.created}"
        os.link(self.path(source), path)
        return IncomingFile(path, os.open(path, os.O_RDONLY))

    async def seal(self, extent: Extent, incoming: IncomingFile) -> None:
        await self.may_seal.wait()
        os.rename(incoming.path, self.path(extent))
        self.sealed.append(extent)

    def hold(self, extent: Extent) -> OpenFile:
        return OpenFile(self.path(extent), os.open(self.path(extent), os.O_RDONLY))

    async def hold_own(self, extent: Extent) -> OpenFile:
        return self.hold(extent)

    def abort(self, content: int) -> None:
        self.aborted.append(content)

    async def suspect(self, group: int, node: int) -> bool:
        self.suspected.append((group, node))
        return True

    def doubt(self, extent: Extent) -> None:
        pass

    async def digest(self, extent: Extent) -> bytes:
        return b""

    def scrub(self) -> None:
        pass

    def status(self) -> dict[str, Any]:
        return {"node": f"{self.node:x}", "extents": len(self.sealed)}


def address_of(
    host: str,
    control_port: int,
    data_port: int,
    store: str = "",
    transports: Sequence[str] = ("tcp", "verbs"),
) -> NodeAddress:
    """A node that has no RDMA says so only when it is asked."""
    return NodeAddress(host, control_port, data_port, list(transports), host, store, 0, 0, "test")


def resolver(memory: Path) -> Callable[[int], NodeAddress | None]:
    """Looks nodes up in the directory of their addresses."""

    def resolve(node: int) -> NodeAddress | None:
        try:
            return address_of(*json.loads((memory / "addresses" / f"{node:x}").read_text()))
        except FileNotFoundError:
            return None

    return resolve


S = TypeVar("S", bound=Serving)


class Node(NamedTuple):
    service: Any
    listener: Listener
    peers: Peers

    def serving(self, kind: type[S]) -> S:
        """The node's end of a mover."""
        (found,) = (each for each in self.listener.host.servings.values() if isinstance(each, kind))
        return found


@asynccontextmanager
async def serving(
    memory: Path,
    node: int,
    host: str = "127.0.0.1",
    service: Service[Any] | None = None,
    *,
    movers: Sequence[Mover] | None = None,
    rdma: Rdma | None = None,
    encrypt_data: bool = False,
    is_gone: Callable[[Peer], bool] = lambda peer: False,
    **options: Any,
) -> AsyncIterator[Node]:
    """A node in this process, with all movers and an ExtentDirectory in `memory` unless told otherwise;
    `options` are those that open_peers and Host share."""
    directory, addresses = str(memory / str(node)), memory / "addresses"
    service = service or ExtentDirectory(directory, node)
    movers = movers or all_movers(rdma, encrypt_data=encrypt_data)
    async with (
        open_peers(resolver(memory), movers, name=f"{node:x}", role="node", **options) as peers,
        Listener(Host(service, peers.device, host, is_gone=is_gone, **options), movers) as listener,
    ):
        transports = sorted({"tcp", "verbs", *listener.ports})
        ports = (host, listener.control_port, listener.ports["tcp"], directory, transports)
        addresses.mkdir(exist_ok=True)
        (addresses / f"{node:x}.new").write_text(json.dumps(ports))
        (addresses / f"{node:x}.new").rename(addresses / f"{node:x}")
        yield Node(service, listener, peers)


class NodeProcess(Program):
    """A node in a process of its own, which may be killed or paused. It seals nothing while the
    file `hold` exists. `prefix` is put before the command (ip netns exec ...)."""

    def __init__(
        self,
        memory: Path,
        node: int,
        host: str = "127.0.0.1",
        *,
        prefix: tuple[str, ...] = (),
        hold: Path | None = None,
        rdma: bool = False,
        timeout_s: float = 5.0,
    ) -> None:
        self.node = node
        plan = json.dumps([str(memory), node, host, str(hold or ""), rdma, timeout_s])
        command = (*prefix, sys.executable, "-m", "harness.transport_nodes", plan)
        super().__init__(*command, cwd=Path(__file__).parents[1])

    def __enter__(self) -> Self:
        """Wait until it serves. Several are made first and waited for then, as they start together."""
        if self.stdout.readline() != "ready\n":
            self.__exit__()
            raise RuntimeError(f"node {self.node:x} did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        super().__exit__(None, None, None)

    def pause(self) -> None:
        self.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        super().kill()
        self.wait()


async def _serve(
    memory: str, node: int, host: str, hold: str, rdma: bool, timeout_s: float
) -> None:
    async with AsyncExitStack() as stack:
        device = stack.enter_context(Rdma(Choice())) if rdma else None
        served = await stack.enter_async_context(
            serving(Path(memory), node, host, timeout_s=timeout_s, rdma=device)
        )
        async with trio.open_nursery() as nursery:
            if hold:
                served.service.may_seal = trio.Event()
                nursery.start_soon(_let_go, Path(hold), served.service)
            print("ready", flush=True)
            # Ends with whoever started it.
            await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
            nursery.cancel_scope.cancel()


async def _let_go(hold: Path, service: ExtentDirectory) -> None:
    while hold.exists():
        await trio.sleep(0.01)
    service.may_seal.set()


if __name__ == "__main__":
    trio.run(_serve, *json.loads(sys.argv[1]))
