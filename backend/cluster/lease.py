"""A process's session: an etcd lease kept alive, and the key registered under it.

The cluster considers a process alive as long as that key exists. The process itself must stop earlier. etcd
extends the lease when it handles a keepalive, which is after the keepalive was sent. So "sent + ttl, less
a margin", by a clock that also runs while the machine sleeps, is over before etcd deletes the key. In
between, `valid()` is false, and nothing that needs the session may be done. But nothing is lost either: if
etcd answers again and still has the lease (etcd prolongs all leases when it elects a leader), the session
goes on. The session is lost only when etcd says that the lease or the key is gone.
"""

import errno
import logging
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import msgspec
import trio

from ..etcd.engine import EtcdEngine
from ..etcd.leases import LeaseEnded
from ..etcd.rpc import NoAnswer
from ..kv import Compare, Conflict, Exists, Put, WentBack
from ..model.records import MountRecord, NodeAddress, decode, encode, key_of
from ..observe.logs import log_failure
from ..pauses import Pauses

log = logging.getLogger(__name__)

MOUNT = b"m"
NODE = b"n"

# Share of the ttl by which a session is given up before etcd ends it: clocks run at slightly different
# rates, and operations that began while the session was valid take a moment to finish.
MARGIN_SHARE = 0.1
RETRY_FIRST_S = 0.1
RETRY_MAX_S = 5.0
_RENEWAL_PAUSES_S = (0.02, 0.5)
_RENEWAL_TRY_S_MIN = 0.5


class Removed(OSError):
    """EPERM: a node's record is gone: the node was removed for good."""

    def __init__(self, node: int) -> None:
        super().__init__(
            errno.EPERM,
            f"node {node:016x} was removed from the cluster; begin as a new node with an empty store "
            f"directory, or have this one back, with what it keeps: irdmafs cluster admit {node:016x}",
        )


class SessionEnded(OSError):
    """ESHUTDOWN: the session was released."""

    def __init__(self) -> None:
        super().__init__(errno.ESHUTDOWN, "the session has been ended")


# The time, in seconds, of the clock for sessions: monotonic, and it runs in suspend, too.
now_s: Final = partial(time.clock_gettime, time.CLOCK_BOOTTIME)


class Session:
    """The lease of a store node, or of a mount (`node` 0). `update` may give `record` before `run`."""

    def __init__(
        self,
        engine: EtcdEngine,
        record: MountRecord | NodeAddress | None,
        ttl_s: int,
        *,
        node: int = 0,
    ) -> None:
        self._engine = engine
        self._node = node
        self.record = record
        self.ttl_s = ttl_s
        self.lease = 0
        self.key = key_of(NODE if node else MOUNT, node)
        self.number = 0  # mod_revision of the key; of a mount: the session in its content ids
        self.valid_until = 0.0  # by now_s()
        self.released = False
        self._why = ""  # what went wrong last
        self._keeping: trio.CancelScope | None = None
        # Woken whenever the session begins, goes on or ends.
        self._changed = trio.lowlevel.ParkingLot()
        self._writing = trio.Lock()

    def compare(self) -> tuple[bytes, int]:
        """Return the compare for a transaction that must succeed only within this session."""
        return self.key, self.number

    def valid(self) -> bool:
        """Return whether the cluster is sure to consider this process alive."""
        return now_s() < self.valid_until

    def left_s(self) -> float:
        """Return for how many seconds the session is sure to be valid."""
        return max(0.0, self.valid_until - now_s())

    async def wait_valid(self, within_s: float = math.inf) -> int:
        """Wait until the session is valid; return its number. Raises SessionEnded, ETIMEDOUT, WentBack."""
        if self.valid():
            return self.number
        with trio.move_on_after(within_s):
            while not self.valid():
                if self.released:
                    raise SessionEnded
                await self._changed.park()
            return self.number
        self._engine.calls.check_trusted()
        raise OSError(
            errno.ETIMEDOUT,
            f"this {'node' if self._node else 'mount'} has had no session for {within_s:g} s: "
            f"{self._why or 'etcd does not answer'}",
        )

    async def run(
        self,
        verify: Callable[[], Awaitable[None]] | None = None,
        on_lost: Callable[[], None] = lambda: None,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Register, keep the lease, and register anew whenever it is lost; until `release`.

        `verify` is awaited before each registration: a store node must not count as alive before it has
        checked what it keeps. After an OSError it is called again. `on_lost`: the session is gone.

        Raises OSError only if the very first registration fails, and Removed.
        """
        await self._register(verify)
        task_status.started()
        while not self.released:
            with trio.CancelScope() as self._keeping:
                await self._keep()
            self.doubt()
            if not self.released:
                log.warning("session %d is lost: registering anew", self.number)
                on_lost()
                await self._register_again(verify)

    async def release(self) -> None:
        """End the session for good: keys of its lease are deleted at once, not after the ttl."""
        self.released = True
        self.lose()
        if self.lease:
            with log_failure(log.warning, "the lease could not be given back and will expire"):
                await self._engine.leases.revoke(self.lease)

    async def update(self, record: NodeAddress) -> None:
        """Change the record of a store node's key (free space, address), or, before it is registered, the
        record that it will have; the session's number changes with it. While the session is not valid the
        record stays as it is, as `record` shows.

        Raises OSError when etcd cannot be reached.
        """
        assert self._node, "a mount's number is in its content ids and must not change"
        async with self._writing:
            if not self.lease:
                self.record = record
                return
            if not self.valid():
                return
            try:
                put = Put(self.key, encode(record), self.lease)
                self.number = await self._engine.transact([self.compare()], [put])
            except (Conflict, LeaseEnded):
                self.lose()
            else:
                self.record = record

    def lose(self) -> None:
        """Note that the key is gone, whether or not the lease lives."""
        self.doubt()
        if self._keeping is not None:
            self._keeping.cancel()

    def doubt(self) -> None:
        """Make the session invalid until the lease has been renewed once more."""
        self.valid_until = 0.0
        self._changed.unpark_all()

    def _extend(self, sent_s: float, ttl_s: float) -> None:
        if self._keeping is not None and self._keeping.cancel_called:
            return  # lost or released while the answer was on its way
        self.valid_until = max(self.valid_until, sent_s + ttl_s * (1 - MARGIN_SHARE))
        self._why = ""
        self._changed.unpark_all()

    async def _register_again(self, verify: Callable[[], Awaitable[None]] | None) -> None:
        pauses = Pauses(RETRY_FIRST_S, RETRY_MAX_S)
        while not self.released:
            try:
                # The old lease may live on if only its key was lost.
                await self._engine.leases.revoke(self.lease)
                await self._register(verify)
                return
            except Removed:
                raise
            except OSError as error:
                self._why = str(error)
                log.warning("registering again in %.1f s: %s", pauses.next_s, error)
            await pauses.wait()

    async def _register(self, verify: Callable[[], Awaitable[None]] | None) -> None:
        if verify is not None:
            await verify()
        async with self._writing:
            lease, sent_s = await self._put_with_lease()
        if self.released:  # meanwhile
            await self._engine.leases.revoke(lease)
            return
        self._keeping = None
        self._extend(sent_s, self.ttl_s)

    async def _put_with_lease(self) -> tuple[int, float]:
        """Return the lease of the key that was put, and when it was requested."""
        while True:
            sent_s = now_s()
            lease = self.lease = await self._engine.leases.grant(self.ttl_s)
            if not self._node:
                self.key = key_of(MOUNT, lease)
            try:
                self.number = await self._put_key(lease)
                return lease, sent_s
            except LeaseEnded:
                if self.released:
                    raise
            log.warning(
                "the lease ended before it was registered (this process, or etcd, stood still)"
            )

    async def _put_key(self, lease: int) -> int:
        """Put the key, and return its revision. Raises Removed, OSError."""
        assert self.record is not None, "a node tells it before it registers"
        put = Put(self.key, encode(self.record), lease)
        while True:
            compares: list[Compare] = [(self.key, await self._revision_to_replace())]
            if self._node:
                compares.append(Exists(key_of(b"N", self._node)))
            try:
                return await self._engine.transact(compares, [put])
            except Conflict as conflict:
                if conflict.key != self.key:
                    raise Removed(self._node) from None
                # The key of an earlier process was deleted with its lease between our read and our write.

    async def _revision_to_replace(self) -> int:
        """Return the revision of the key that an earlier process of this very store left behind, or 0."""
        found = await self._engine.get(self.key)
        if found is None:
            return 0
        try:
            other: NodeAddress | None = decode(found.value, NodeAddress)
        except msgspec.DecodeError:
            other = None  # damaged: it is about our node id, and ours is right
        mine = self.record
        if (
            other is not None
            and isinstance(mine, NodeAddress)
            and (other.host, other.store) != (mine.host, mine.store)
        ):
            raise OSError(
                errno.EADDRINUSE,
                f"store node {self._node:x} is alive at {other.address} with store {other.store}"
                f" on host {other.host}; was the store directory copied?",
            )
        return found.mod_revision

    async def _keep(self) -> None:
        """Renew the lease about three times in its life, and return when etcd says that it has ended."""
        pauses = Pauses(*_RENEWAL_PAUSES_S)
        third_s = self.ttl_s / 3
        try_s = max(third_s, _RENEWAL_TRY_S_MIN)
        while True:
            sent_s = now_s()
            try:
                ttl_s = await self._engine.leases.renew(self.lease, try_s)
            except (WentBack, NoAnswer):
                pass  # others log it
            except OSError as error:
                self._why = str(error)
                log.warning("the lease is not kept alive now: %s", error)
            else:
                if not ttl_s:
                    return
                self._extend(sent_s, ttl_s)
                pauses.begin_anew()
                # A process that was stopped, or is busy, may be late.
                await trio.sleep(max(0.0, sent_s + third_s - now_s()))
                continue
            await pauses.wait()
