"""The room that etcd has, the alarms with which it stops writes, and the repair of both.

etcd raises the alarm NOSPACE when its file has reached its quota, and CORRUPT when its members differ. An
alarm stays until it is taken back, also where there is room again.
"""

import errno
from collections.abc import Callable
from typing import NamedTuple

import trio

from . import etcd_pb2 as pb
from .calls import REPAIR, Calls
from .client import Client
from .errors import RpcError, Status
from .methods import ALARM, COMPACT, DEFRAGMENT, HASH_KV, MEMBERS, STATUS, Message, Method, Response

# The quota of an etcd that was given none.
_QUOTA_USUAL_BYTES = 2 << 30
_NEARLY_FULL_SHARE = 0.8
_FRAGMENTED_SHARE = 0.5
_ASK_S = 3.0
# A member answers nothing else while it defragments.
_DEFRAGMENT_S = 120.0


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


class EtcdRoom:
    """Room and alarms of the etcd that these calls are for. Methods raise OSError."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def here(self) -> Room:
        """Return the room of the member that is in use."""
        return _room_of(await self._calls.call(STATUS, pb.StatusRequest(), _ASK_S))

    async def everywhere(self) -> dict[str, Room | OSError]:
        """Return the room of each member that is configured, or why it is not known, by address."""
        found: dict[str, Room | OSError] = {}

        async def ask(client: Client) -> None:
            try:
                found[client.address] = _room_of(
                    await self._ask(client, STATUS, pb.StatusRequest())
                )
            except OSError as error:
                found[client.address] = error
            finally:
                client.close()

        async with trio.open_nursery() as nursery:
            for client in self._members():
                nursery.start_soon(ask, client)
        return found

    async def repair(self, tell: Callable[[str], None]) -> None:
        """Give etcd its free room back, and take its alarms back where the reason for them has gone.

        `tell` is given a line for each step. Needs an admin's rights.
        """
        alarms = list((await self._calls.call(ALARM, pb.AlarmRequest())).alarms)
        if any(alarm.alarm == pb.CORRUPT for alarm in alarms):
            await self._check_that_members_agree()
            tell("all members of etcd have the same data")
        if any(alarm.alarm == pb.NOSPACE for alarm in alarms):
            # Otherwise the store nodes compact, and leave the history that watches still need.
            status = await self._calls.call(STATUS, pb.StatusRequest())
            await self.compact(status.header.revision, at_once=True)
            tell("etcd's history is compacted")
        for client in self._members():
            try:
                before = _room_of(await self._ask(client, STATUS, pb.StatusRequest()))
                await self._ask(client, DEFRAGMENT, pb.DefragmentRequest(), _DEFRAGMENT_S)
                after = _room_of(await self._ask(client, STATUS, pb.StatusRequest()))
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
            await self._calls.call(ALARM, request)
            tell(f"the alarm {pb.AlarmType.Name(alarm.alarm)} is taken back")

    async def compact(self, revision: int, *, at_once: bool = False) -> None:
        """Have etcd compact the history before `revision`, for all its users. `at_once`: return when its
        room is free."""
        request = pb.CompactionRequest(revision=revision, physical=at_once)
        try:
            await self._calls.ask(COMPACT, request)
        except RpcError as error:
            if error.code != Status.OUT_OF_RANGE:  # it is compacted already
                raise self._calls.failure(error) from None

    async def _check_that_members_agree(self) -> None:
        """Raise OSError unless all members of etcd have the same data."""
        members = (await self._calls.call(MEMBERS, pb.MemberListRequest())).members
        hashes: dict[int, tuple[int, int]] = {}
        revision = (await self._calls.call(STATUS, pb.StatusRequest())).header.revision
        for client in self._members():
            try:
                answer = await self._ask(client, HASH_KV, pb.HashKVRequest(revision=revision))
                hashes[answer.header.member_id] = answer.hash, answer.compact_revision
            finally:
                client.close()
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
        return [client.only(endpoint) for endpoint in client.endpoints]

    async def _ask(
        self, client: Client, method: Method[Response], request: Message, timeout_s: float = _ASK_S
    ) -> Response:
        try:
            return await client.call(method, request, timeout_s=timeout_s, try_s=timeout_s)
        except RpcError as error:
            raise self._calls.failure(error) from None


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
    file, used, quota = (
        size >> 20 for size in (room.file_bytes, room.used_bytes, room.quota_bytes)
    )
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
