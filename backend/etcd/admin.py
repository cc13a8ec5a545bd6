"""Administration of an etcd: its users, its history, and how well it is protected."""

import logging
import re

import trio

from ..kv import end_of
from . import etcd_pb2 as pb
from .auth import Auth
from .calls import Calls
from .errors import RpcError, Status
from .methods import DELETE, RANGE, TXN
from .room import EtcdRoom

log = logging.getLogger(__name__)

# A key after all keys that are watched.
_SPENT_KEY = b"\xff"
_SPENDING_AT_ONCE = 32
# The first etcd whose roles hold against holders of its certificates (docs/security.md).
_SOUND_VERSION = (3, 6, 11)


def roles_hold(version: str) -> bool:
    """Return whether an etcd of this version lets nobody do more than its roles say. Older ones check
    neither transactions within transactions nor alarms, and nothing at all during an alarm."""
    numbers = re.findall(r"\d+", version.partition("-")[0])
    return tuple(map(int, numbers)) >= _SOUND_VERSION


class EtcdAdmin:
    """The etcd that a cluster's keys are in. Methods raise OSError."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.room = EtcdRoom(calls)

    @property
    def auth(self) -> Auth:
        """Return the users and roles."""
        return Auth(self._calls.client, self._calls.timeout_s)

    @property
    def secure(self) -> bool:
        """Return whether etcd is used over TLS, and so can authenticate this process."""
        return self._calls.client.secure

    async def has_others(self) -> bool:
        """Return whether this etcd has keys of other applications or clusters."""
        prefix = self._calls.prefix
        for start, end in ((b"\0", prefix), (end_of(prefix), b"\0")):
            request = pb.RangeRequest(key=start, range_end=end, limit=1, keys_only=True)
            if (await self._calls.call(RANGE, request)).kvs:
                return True
        return False

    async def weaknesses(self) -> list[str]:
        """Return why processes that are not members, or every member alike, can change the cluster's
        keys."""
        client = self._calls.client
        if client.is_relayed:
            return []  # this process cannot ask etcd; store nodes and admins can
        where = ", ".join(map(str, client.endpoints))
        if not client.secure:
            return [
                f"etcd ({where}) is spoken to in clear: whoever reaches it can read and change everything;"
                " irdmafs cluster init makes certificates for it"
            ]
        if not await self._is_restricted() and not await self.auth.is_enabled():
            return [
                f"etcd ({where}) does not check what a certificate may do: any member of the cluster can"
                " change everything; irdmafs cluster protect has it checked"
            ]
        version = (await self.room.here()).version
        if not roles_hold(version):
            return [
                f"etcd ({where}) is {version}, whose roles do not hold: whoever has a mount's or a node's"
                " certificate can change and stop everything; update it to"
                f" {'.'.join(map(str, _SOUND_VERSION))} or newer"
            ]
        return []

    async def _is_restricted(self) -> bool:
        """Return whether etcd denies this process the keys of others; it does not to admins."""
        try:
            await self._calls.ask(RANGE, pb.RangeRequest(key=b"\0", keys_only=True))
        except RpcError as error:
            return error.code == Status.PERMISSION_DENIED
        return False

    async def warn(self) -> None:
        """Log the weaknesses. Errors of etcd are ignored."""
        try:
            for weakness in await self.weaknesses():
                log.warning("%s", weakness)
        except (OSError, RpcError) as error:
            log.info("whether etcd checks who asks is not known: %s", error)

    async def remove(self, start: bytes, end: bytes) -> None:
        """Remove the keys with start <= key < end, also from an etcd that has no room for a transaction,
        which would put a key of its own. Nobody has to wait for it, as for keys whose lease ends."""
        prefix = self._calls.prefix
        request = pb.DeleteRangeRequest(key=prefix + start, range_end=prefix + end)
        await self._calls.call(DELETE, request)

    async def spend(self, count: int) -> None:
        """Raise etcd's revision by `count`, without changing anything else."""
        request = pb.TxnRequest(
            success=[pb.RequestOp(request_put=pb.PutRequest(key=self._calls.prefix + _SPENT_KEY))]
        )
        left = iter(range(count))

        async def put() -> None:
            for _ in left:
                await self._calls.call(TXN, request)

        async with trio.open_nursery() as nursery:
            for _ in range(_SPENDING_AT_ONCE):
                nursery.start_soon(put)
