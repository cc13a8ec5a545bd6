"""Leases of etcd: keys that are attached to a lease are deleted when it ends."""

import errno
import secrets
import time
from collections.abc import AsyncIterator

import trio

from ..pauses import Pauses
from . import etcd_pb2 as pb
from .calls import Calls
from .client import PAUSES_S, Uncertain, Unsent
from .errors import RpcError, Status
from .methods import GRANT, KEEP_ALIVE, RANGE, REVOKE

__all__ = ["LEASE_BITS", "OWNER_BYTES", "EtcdLeases", "LeaseEnded"]

# A lease, 63 bits, begins with its owner: the number of a certificate.
OWNER_BYTES = 3
LEASE_BITS = 63 - 8 * OWNER_BYTES


class LeaseEnded(OSError):
    """ESTALE: the lease that a key was to be attached to does not exist any more."""

    def __init__(self) -> None:
        super().__init__(errno.ESTALE, "the lease has ended")


class EtcdLeases:
    """Leases whose numbers begin with the number `owner`."""

    def __init__(self, calls: Calls, owner: int) -> None:
        self._calls = calls
        self.owner = owner

    async def grant(self, ttl_s: int) -> int:
        """Return a new lease that ends `ttl_s` seconds after it was last kept alive, or a little later."""
        self._calls.check_trusted()
        # This process chooses the number, so a repeated request grants no second lease.
        lease = self.owner << LEASE_BITS | (secrets.randbits(LEASE_BITS) or 1)
        try:
            await self._calls.ask(GRANT, pb.LeaseGrantRequest(TTL=ttl_s, ID=lease))
        except RpcError as error:
            if error.code != Status.FAILED_PRECONDITION:  # it exists: an answer was lost
                raise self._calls.failure(error) from None
        return lease

    async def keep_alive(self, lease: int) -> AsyncIterator[tuple[float, float]]:
        """Renew a lease until it has ended, about three times in its life.

        Yields, after each renewal, the time at which it was requested (time.monotonic(), seconds) and
        for how long from then the lease is sure to live (seconds). Keeps trying while etcd cannot be
        reached: the caller has to watch the clock. Raises OSError when etcd refuses.
        """
        calls = self._calls
        request = pb.LeaseKeepAliveRequest(ID=lease)
        pauses = Pauses(*PAUSES_S)
        ttl_s = 1.0
        while True:
            calls.check_open()
            calls.check_trusted()
            sent = time.monotonic()
            try:
                answer = await calls.client.attempt(KEEP_ALIVE, request, max(ttl_s / 3, 0.5))
            except RpcError as error:
                raise calls.failure(error) from None
            except (Unsent, Uncertain):
                await pauses.wait()
                continue
            if answer.TTL <= 0:
                return
            pauses.begin_anew()
            ttl_s = float(answer.TTL)
            yield sent, ttl_s
            # A process that was stopped, or is busy, may be late.
            await trio.sleep(max(0.0, sent + ttl_s / 3 - time.monotonic()))

    async def revoke(self, lease: int) -> None:
        """End a lease and delete its keys; do nothing if it has ended."""
        try:
            await self._calls.ask(REVOKE, pb.LeaseRevokeRequest(ID=lease))
        except RpcError as error:
            if error.code != Status.NOT_FOUND:
                raise self._calls.failure(error) from None

    async def used_in(self, start: bytes, end: bytes) -> dict[bytes, int]:
        """Return the keys with start <= key < end that are attached to a lease, with their leases."""
        prefix = self._calls.prefix
        request = pb.RangeRequest(key=prefix + start, range_end=prefix + end)
        answer = await self._calls.call(RANGE, request)
        return {one.key[len(prefix) :]: one.lease for one in answer.kvs if one.lease}
