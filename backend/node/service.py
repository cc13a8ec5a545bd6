"""A store node's answers to its peers: `Service` of the transport (backend/transport/service.py).

It decides which peer may store which extent, and when it counts as stored; the transport moves bytes.
"""

import errno
import hmac
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import trio

from ..model.records import SIZE_MAX, session_of
from ..observe.logs import log_failure
from ..transport import Extent, Fenced, Target, Unreachable
from ..transport.rights import Peer, denied, session_digest
from ..transport.service import Service
from .agent import Agent
from .catalog import Catalog
from .files import Held, Incoming
from .resync import Resync
from .scrub import Scrub
from .state import ClusterState

log = logging.getLogger(__name__)

# How long this node may take to catch up with a writer before it counts as unreachable.
_CATCH_UP_S = 5.0
# The errors of opening a file that is gone, or that lies on a damaged disk.
_DAMAGE = (errno.ENOENT, errno.EIO, errno.EUCLEAN, errno.EBADMSG)


class NodeService(Service[Incoming]):
    """One store node; Service says what each method promises. `figures` returns more for `status`.

    After `close` nothing is received any more; extents that are here can still be read.
    """

    def __init__(
        self,
        cluster: ClusterState,
        catalog: Catalog,
        agent: Agent,
        resync: Resync,
        scrub: Scrub,
        figures: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self.node = cluster.node
        self._cluster = cluster
        self._files = catalog.files
        self._catalog = catalog
        self._agent = agent
        self._figures = figures
        self._resync = resync
        self._scrub = scrub
        self._started = time.monotonic()
        self._closed = False
        self._receiving = 0
        self._draining = trio.lowlevel.ParkingLot()

    # -- taking in -------------------------------------------------------------------------------

    async def check_owner(self, peer: Peer, content: int) -> None:
        """Do as Service says: the peer has the key of the session, the same for all of its process."""
        number = session_of(content)
        if number == peer.owned and number in self._cluster.members.sessions:
            return
        await self._catch_up(number)
        record = self._cluster.members.sessions.get(number)
        if record is None:
            raise OSError(errno.ECANCELED, f"content {content:x}: its writer's session is over")
        if not hmac.compare_digest(record.key_digest, session_digest(peer.session_key)):
            raise denied(f"it does not have the key of session {number}")
        who = peer.identity
        if who.serial and (record.name, record.role) != (who.name, who.role):
            raise denied(f"session {number} is of {record.role} {record.name!r}")
        peer.owned = number

    async def admit(self, extent: Extent, target: Target) -> None:
        self._check_serving()
        session = session_of(extent.content)
        await self._catch_up(max(target.config, session))
        config, revision = self._cluster.groups.get(target.group)
        if not revision:
            raise OSError(errno.EINVAL, f"there is no group {target.group:#x}")
        if revision != target.config:
            raise Fenced(f"group {target.group:#x} has a newer configuration")
        if self.node not in config.members:
            raise OSError(
                errno.EINVAL, f"node {self.node:x} is not a member of group {target.group:#x}"
            )
        self._check_wanted(extent)
        if extent not in self._files and self._catalog.is_published(extent.content):
            raise Unreachable(self.node, f"it is about to copy content {extent.content:x}")

    async def create(self, extent: Extent, length: int, allocated: int | None = None) -> Incoming:
        if length > SIZE_MAX:
            raise OSError(errno.EFBIG, f"no file has {length} bytes")
        allocated = length if allocated is None else allocated
        return self._begin(await self._catalog.make_file(length, allocated, self._learn))

    async def adopt(self, extent: Extent, name: str) -> Incoming:
        return self._begin(self._files.incoming.take_over(name, extent.content))

    async def share(self, source: Extent, length: int) -> Incoming:
        return self._begin(self._files.share(source, length))

    async def seal(self, extent: Extent, incoming: Incoming) -> None:
        await self._files.harden(incoming)
        # The lease and the session may have ended while the bytes were arriving.
        self._check_serving()
        self._check_wanted(extent)
        if not self._is_here(extent, incoming):
            self._files.seal(incoming, extent)
            self._catalog.sealed(extent)
        await self._files.settle()

    def _is_here(self, extent: Extent, incoming: Incoming) -> bool:
        """Return whether the extent is here. Raises OSError EEXIST if that one differs in length."""
        size = self._files.size(extent)
        if size is None:
            return False
        if size != os.fstat(incoming.fd).st_size:
            text = f"extent {extent.content:x}.{extent.stripe:x} is here, with {size} bytes"
            raise FileExistsError(errno.EEXIST, text)
        return True

    def abort(self, content: int) -> None:
        self._catalog.give_up(content)

    # -- giving out ------------------------------------------------------------------------------

    def size(self, extent: Extent) -> int | None:
        return self._files.size(extent)

    def hold(self, extent: Extent) -> Held:
        try:
            return self._files.hold(extent)
        except OSError as error:
            if error.errno not in _DAMAGE:
                raise
        # An extent that was freed a moment ago is gone from the files, and not damaged.
        if self._files.size(extent) is not None:
            self._resync.report(extent)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(extent))

    async def hold_own(self, extent: Extent) -> Held:
        await self._files.make_own(extent)
        return self.hold(extent)

    # -- the rest --------------------------------------------------------------------------------

    async def suspect(self, group: int, node: int) -> bool:
        self._check_serving()
        return await self._agent.evict(group, node)

    def doubt(self, extent: Extent) -> None:
        self._scrub.doubt(extent)

    async def digest(self, extent: Extent) -> bytes:
        return await self._files.digest(extent)

    def scrub(self) -> None:
        self._scrub.begin()

    def status(self) -> dict[str, Any]:
        space = self._files.space()
        return {
            "node": f"{self.node:016x}",
            "store": self._files.directory,
            "power_safe": self._files.power_safe,
            "uptime_s": round(time.monotonic() - self._started, 1),
            "session": self._cluster.session.number,
            "revision": self._cluster.replica.applied,
            "bytes": space.used,
            "total_bytes": space.total,
            "free_bytes": space.free,
            "receiving": self._receiving,
            "closing": self._closed,
            **self._scrub.status(),
            **self._figures(),
        }

    def close(self) -> None:
        """Receive nothing from now on."""
        self._closed = True

    async def drained(self) -> None:
        """Wait until nothing is being received, after `close`."""
        while self._receiving:
            await self._draining.park()

    def _check_serving(self) -> None:
        if self._closed:
            raise Unreachable(self.node, "it is being stopped")
        if not self._cluster.session.valid():
            raise Unreachable(self.node, "its lease is over")

    def _check_wanted(self, extent: Extent) -> None:
        if not self._catalog.may_store(extent.content):
            raise OSError(
                errno.ECANCELED,
                f"content {extent.content:x} has no use: its writer's session is over, or gave it up",
            )

    async def _catch_up(self, revision: int) -> None:
        if self._cluster.replica.applied >= revision:
            return
        with trio.move_on_after(_CATCH_UP_S):
            await self._cluster.replica.wait_applied(revision)
        if self._cluster.replica.applied < revision:
            raise Unreachable(self.node, "it does not hear from etcd")

    async def _learn(self) -> None:
        """Wait until the replica knows what was superseded a moment ago."""
        unknown = log_failure(log.info, "the store is full, and what can go is not known")
        with trio.move_on_after(_CATCH_UP_S), unknown:
            await self._cluster.replica.barrier()

    def _begin(self, incoming: Incoming) -> Incoming:
        self._receiving += 1
        incoming.closed = self._end
        return incoming

    def _end(self) -> None:
        self._receiving -= 1
        if self._closed:
            self._draining.unpark_all()
