"""Leases of etcd: keys that are attached to a lease are deleted when it ends."""

import errno
import secrets

from . import etcd_pb2 as pb
from .calls import Calls
from .client import Uncertain, Unsent
from .rpc import GRANT, KEEP_ALIVE, RANGE, REVOKE, RpcError, Status

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
        request = pb.LeaseGrantRequest(TTL=ttl_s, ID=lease)
        await self._calls.tell(GRANT, request, unless=Status.FAILED_PRECONDITION)  # it exists
        return lease

    async def renew(self, lease: int, timeout_s: float) -> int:
        """Renew a lease, and return for how many seconds from the request it is sure to live; 0: it has
        ended. Raises OSError: NoAnswer if etcd did not answer in time, and may have renewed it."""
        calls = self._calls
        calls.check_trusted()
        request = pb.LeaseKeepAliveRequest(ID=lease)
        try:
            answer = await calls.client.attempt(KEEP_ALIVE, request, timeout_s)
        except RpcError as error:
            raise calls.failure(error) from None
        except (Unsent, Uncertain):
            raise calls.client.timed_out(timeout_s) from None
        return max(answer.TTL, 0)

    async def revoke(self, lease: int) -> None:
        """End a lease and delete its keys; do nothing if it has ended."""
        request = pb.LeaseRevokeRequest(ID=lease)
        await self._calls.tell(REVOKE, request, unless=Status.NOT_FOUND)

    async def used_in(self, start: bytes, end: bytes) -> dict[bytes, int]:
        """Return the keys with start <= key < end that are attached to a lease, with their leases."""
        prefix = self._calls.prefix
        request = pb.RangeRequest(key=prefix + start, range_end=prefix + end)
        answer = await self._calls.call(RANGE, request)
        return {one.key[len(prefix) :]: one.lease for one in answer.kvs if one.lease}
