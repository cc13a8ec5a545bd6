"""Administration of an etcd: users and roles, room and alarms, history, and how well it is protected.

A user is the CN of the certificate that etcd is shown. etcd raises the alarm NOSPACE when its file has
reached its quota, and CORRUPT when its members differ. It stays until it is taken back.
"""

import errno
import logging
import re
from collections.abc import Callable, Collection
from contextlib import closing
from typing import NamedTuple

import trio

from ..kv import end_of
from . import etcd_pb2 as pb
from . import rpc
from .calls import REPAIR, Calls
from .client import Client, DirectClient
from .rpc import Message, Method, R, RpcError, Status, method

log = logging.getLogger(__name__)

_USER_LIST = method("Auth/UserList", pb.AuthUserListResponse)
_ROLE_GET = method("Auth/RoleGet", pb.AuthRoleGetResponse)

# etcd's own role that may do everything; a user must have it before authentication is enabled.
ROOT = "root"
_NOBODY = "irdmafs nobody"
# The first etcd whose roles hold against holders of its certificates (docs/security.md).
_SOUND_VERSION = (3, 6, 11)
# The quota of an etcd that was given none.
_QUOTA_USUAL_BYTES = 2 << 30
_NEARLY_FULL_SHARE = 0.8
_FRAGMENTED_SHARE = 0.5
_ASK_S = 3.0
# A member answers nothing else while it defragments.
_DEFRAGMENT_S = 120.0
# A key after all keys that are watched.
_SPENT_KEY = b"\xff"
_SPENDING_AT_ONCE = 32

KeyRanges = Collection[tuple[bytes, bytes]]


class Auth:
    """Users, roles and authentication. Methods can be repeated, and raise RpcError and OSError."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def is_enabled(self) -> bool:
        """Return whether authentication is enabled. Needs no rights."""
        request = pb.AuthenticateRequest(name=_NOBODY, password="-")
        try:
            await self._call(rpc.AUTHENTICATE, request)
        except RpcError as error:
            return "not enabled" not in error.text
        return True

    async def enable(self) -> None:
        """Enable authentication. The caller's own user must have the role ROOT."""
        await self.add_user(ROOT, [ROOT])
        await self._tell("AuthEnable", pb.AuthEnableRequest())

    async def users(self) -> set[str]:
        answer = await self._call(_USER_LIST, pb.AuthUserListRequest())
        return set(answer.users)

    async def add_user(self, name: str, roles: Collection[str]) -> None:
        """Add a user that has a certificate instead of a password."""
        options = pb.UserAddOptions(no_password=True)
        await self._change("UserAdd", pb.AuthUserAddRequest(name=name, options=options))
        for role in roles:
            if role == ROOT:
                await self._change("RoleAdd", pb.AuthRoleAddRequest(name=ROOT))
            await self._tell("UserGrantRole", pb.AuthUserGrantRoleRequest(user=name, role=role))

    async def delete_user(self, name: str) -> None:
        await self._change("UserDelete", pb.AuthUserDeleteRequest(name=name))

    async def set_role(self, role: str, read: KeyRanges, write: KeyRanges) -> None:
        """Make a role that may read and write these ranges of keys (start, end), and no others."""
        await self._change("RoleAdd", pb.AuthRoleAddRequest(name=role))
        answer = await self._call(_ROLE_GET, pb.AuthRoleGetRequest(role=role))
        present = {(one.permType, one.key, one.range_end) for one in answer.perm}
        wanted = {(pb.Permission.READ, *one) for one in read}
        wanted |= {(pb.Permission.READWRITE, *one) for one in write}
        for _, start, end in present - wanted:
            revoke = pb.AuthRoleRevokePermissionRequest(role=role, key=start, range_end=end)
            await self._tell("RoleRevokePermission", revoke)
        for kind, start, end in sorted(wanted - present):
            permission = pb.Permission(permType=kind, key=start, range_end=end)
            grant = pb.AuthRoleGrantPermissionRequest(name=role, perm=permission)
            await self._tell("RoleGrantPermission", grant)

    async def delete_role(self, role: str) -> None:
        await self._change("RoleDelete", pb.AuthRoleDeleteRequest(role=role))

    async def _call(self, asked: Method[R], request: Message) -> R:
        return await self._calls.client.call(asked, request, timeout_s=self._calls.timeout_s)

    async def _tell(self, name: str, request: Message) -> None:
        await self._call(method(f"Auth/{name}", pb.Answer), request)

    async def _change(self, name: str, request: Message) -> None:
        """Add or delete something that may have been added or deleted already."""
        try:
            await self._tell(name, request)
        except RpcError as error:
            if "already exists" not in error.text and "not found" not in error.text:
                raise


class Room(NamedTuple):
    """The room of a member of etcd. `quota_bytes` is 0 where it is not known."""

    version: str
    file_bytes: int
    used_bytes: int
    quota_bytes: int
    alarms: tuple[str, ...]

    @property
    def fragmented(self) -> bool:
        """Return whether defragmenting would free much of the quota."""
        free = self.file_bytes - self.used_bytes
        return self.nearly_full and free > _FRAGMENTED_SHARE * self.file_bytes

    @property
    def nearly_full(self) -> bool:
        return 0 < _NEARLY_FULL_SHARE * self.quota_bytes <= self.file_bytes


def _room_of(answer: pb.StatusResponse) -> Room:
    # etcd tells its alarms here as text, and without asking the other members.
    raised = {name for name in ("NOSPACE", "CORRUPT") for told in answer.errors if name in told}
    quota_bytes = answer.db_size_quota
    if not quota_bytes and answer.db_size < _QUOTA_USUAL_BYTES:
        quota_bytes = _QUOTA_USUAL_BYTES
    return Room(
        answer.version, answer.db_size, answer.db_size_in_use, quota_bytes, tuple(sorted(raised))
    )


def remedy(room: Room) -> str:
    """Return the fault of etcd's room, with the remedy; "" for none."""
    if "CORRUPT" in room.alarms:
        return (
            "etcd says that its members have different data (alarm CORRUPT) and refuses all writes; "
            f"compare them, and take the alarm back if they agree, with: {REPAIR}"
        )
    file, used, quota = (n >> 20 for n in (room.file_bytes, room.used_bytes, room.quota_bytes))
    size = f"its file has {file} MiB, {used} MiB of it in use"
    if "NOSPACE" in room.alarms:
        return f"etcd refuses all writes (alarm NOSPACE; {size}); free its room with: {REPAIR}"
    if room.fragmented:
        return f"etcd's quota of {quota} MiB is nearly reached, but {size}; free the rest with: {REPAIR}"
    if room.nearly_full:
        return (
            f"etcd is nearly full: {size}, its quota is {quota} MiB; remove files, or start its "
            "members with a larger --quota-backend-bytes"
        )
    return ""


def roles_hold(version: str) -> bool:
    """Return whether an etcd of this version lets nobody do more than its roles say. Older ones check
    neither transactions within transactions nor alarms, and nothing at all during an alarm."""
    numbers = re.findall(r"\d+", version.partition("-")[0])
    return tuple(map(int, numbers)) >= _SOUND_VERSION


class EtcdAdmin:
    """The etcd that a cluster's keys are in. Methods raise OSError."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.auth = Auth(calls)

    @property
    def secure(self) -> bool:
        """Return whether etcd is used over TLS, and so can authenticate this process."""
        return self._calls.client.secure

    async def has_others(self) -> bool:
        """Return whether this etcd has keys of other applications or clusters."""
        prefix = self._calls.prefix
        for start, end in ((b"\0", prefix), (end_of(prefix), b"\0")):
            request = pb.RangeRequest(key=start, range_end=end, limit=1, keys_only=True)
            if (await self._calls.call(rpc.RANGE, request)).kvs:
                return True
        return False

    async def weaknesses(self) -> list[str]:
        """Return why processes that are no members, or any member, can change the cluster's keys."""
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
        version = (await self.room()).version
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
            await self._calls.ask(rpc.RANGE, pb.RangeRequest(key=b"\0", keys_only=True))
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
        await self._calls.call(rpc.DELETE, request)

    async def spend(self, count: int) -> None:
        """Raise etcd's revision by `count`, without changing anything else."""
        spent = pb.PutRequest(key=self._calls.prefix + _SPENT_KEY)
        request = pb.TxnRequest(success=[pb.RequestOp(request_put=spent)])
        left = iter(range(count))

        async def put() -> None:
            for _ in left:
                await self._calls.call(rpc.TXN, request)

        async with trio.open_nursery() as nursery:
            for _ in range(_SPENDING_AT_ONCE):
                nursery.start_soon(put)

    # -- room and alarms

    async def room(self) -> Room:
        """Return the room of the member that is in use."""
        return _room_of(await self._calls.call(rpc.STATUS, pb.StatusRequest(), _ASK_S))

    async def rooms(self) -> dict[str, Room | OSError]:
        """Return the room of each member that is configured, or why it is not known, by address."""
        found: dict[str, Room | OSError] = {}

        async def ask(client: Client) -> None:
            with closing(client):
                try:
                    answer = await self._ask(client, rpc.STATUS, pb.StatusRequest())
                    found[client.address] = _room_of(answer)
                except OSError as error:
                    found[client.address] = error

        async with trio.open_nursery() as nursery:
            for client in self._members():
                nursery.start_soon(ask, client)
        return found

    async def repair(self, tell: Callable[[str], None]) -> None:
        """Give etcd its free room back, and take its alarms back where the reason for them has gone.

        `tell` is given a line for each step. Needs an admin's rights.
        """
        alarms = list((await self._calls.call(rpc.ALARM, pb.AlarmRequest())).alarms)
        if any(alarm.alarm == pb.CORRUPT for alarm in alarms):
            await self._check_that_members_agree()
            tell("all members of etcd have the same data")
        if any(alarm.alarm == pb.NOSPACE for alarm in alarms):
            # Otherwise the store nodes compact, and leave the history that watches still need.
            status = await self._calls.call(rpc.STATUS, pb.StatusRequest())
            await self.compact(status.header.revision, at_once=True)
            tell("etcd's history is compacted")
        for client in self._members():
            try:
                before = _room_of(await self._ask(client, rpc.STATUS, pb.StatusRequest()))
                await self._ask(client, rpc.DEFRAGMENT, pb.DefragmentRequest(), _DEFRAGMENT_S)
                after = _room_of(await self._ask(client, rpc.STATUS, pb.StatusRequest()))
            except OSError as error:
                # The others need not wait for it. It raises its alarm again if it is full when it is back.
                tell(f"{client.address} is left out: {error.strerror or error}")
                continue
            finally:
                client.close()
            tell(
                f"{client.address} is defragmented: {before.file_bytes >> 20} MiB are now "
                f"{after.file_bytes >> 20} MiB"
            )
        for alarm in alarms:
            request = pb.AlarmRequest(
                action=pb.AlarmRequest.DEACTIVATE, memberID=alarm.memberID, alarm=alarm.alarm
            )
            await self._calls.call(rpc.ALARM, request)
            tell(f"the alarm {pb.AlarmType.Name(alarm.alarm)} is taken back")

    async def compact(self, revision: int, *, at_once: bool = False) -> None:
        """Have etcd compact its history before `revision`. `at_once`: return when its room is free."""
        request = pb.CompactionRequest(revision=revision, physical=at_once)
        await self._calls.tell(rpc.COMPACT, request, unless=Status.OUT_OF_RANGE)

    async def _check_that_members_agree(self) -> None:
        """Raise OSError unless all members of etcd have the same data."""
        members = (await self._calls.call(rpc.MEMBERS, pb.MemberListRequest())).members
        hashes: dict[int, tuple[int, int]] = {}
        revision = (await self._calls.call(rpc.STATUS, pb.StatusRequest())).header.revision
        for client in self._members():
            with closing(client):
                answer = await self._ask(client, rpc.HASH_KV, pb.HashKVRequest(revision=revision))
            hashes[answer.header.member_id] = answer.hash, answer.compact_revision
        unasked = {member.ID for member in members} - hashes.keys()
        if unasked:
            raise OSError(
                errno.EIO,
                f"the alarm CORRUPT stays: {len(unasked)} of {len(members)} members of etcd cannot be "
                "compared with the others; name all of them in cluster.toml (etcd = [...])",
            )
        if len(set(hashes.values())) > 1:
            told = ", ".join(f"{member:x} {told[0]:x}" for member, told in sorted(hashes.items()))
            raise OSError(
                errno.EIO,
                f"the alarm CORRUPT stays: the members of etcd have different data (hashes: {told}). "
                "Replace the one that differs, as etcd's documentation says, and give this command again",
            )

    def _members(self) -> list[Client]:
        """Return a client for each address of etcd. The caller closes it."""
        client = self._calls.client
        assert isinstance(client, DirectClient), "only admins ask for all members"
        return [client.only(endpoint) for endpoint in client.endpoints]

    async def _ask(
        self, client: Client, method: Method[R], request: Message, timeout_s: float = _ASK_S
    ) -> R:
        try:
            return await client.call(method, request, timeout_s=timeout_s, try_s=timeout_s)
        except RpcError as error:
            raise self._calls.failure(error) from None
