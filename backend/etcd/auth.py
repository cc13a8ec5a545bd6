"""Users and roles of an etcd. A user is the CN of the certificate that etcd is shown."""

from collections.abc import Collection
from typing import TypeVar

from . import etcd_pb2 as pb
from .client import Client
from .errors import RpcError
from .methods import AUTHENTICATE, Message, Method, method

_USER_LIST = method("Auth/UserList", pb.AuthUserListResponse)
_ROLE_GET = method("Auth/RoleGet", pb.AuthRoleGetResponse)

# etcd's own role that may do everything; a user must have it before authentication is enabled.
ROOT = "root"
_NOBODY = "irdmafs nobody"

KeyRange = tuple[bytes, bytes]
_Response = TypeVar("_Response")


class Auth:
    """Users, roles and authentication. Methods can be repeated: users and roles that exist stay. They raise
    RpcError and OSError."""

    def __init__(self, client: Client, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    async def is_enabled(self) -> bool:
        """Return whether authentication is enabled. Needs no rights."""
        request = pb.AuthenticateRequest(name=_NOBODY, password="-")
        try:
            await self._call(AUTHENTICATE, request)
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

    async def set_role(
        self, role: str, read: Collection[KeyRange], write: Collection[KeyRange]
    ) -> None:
        """Make a role that may read and write these ranges of keys (start, end), and no others."""
        await self._change("RoleAdd", pb.AuthRoleAddRequest(name=role))
        answer = await self._call(_ROLE_GET, pb.AuthRoleGetRequest(role=role))
        present = {(one.permType, one.key, one.range_end) for one in answer.perm}
        wanted = {(pb.Permission.READ, *one) for one in read}
        wanted |= {(pb.Permission.READWRITE, *one) for one in write}
        for _, start, end in present - wanted:
            request = pb.AuthRoleRevokePermissionRequest(role=role, key=start, range_end=end)
            await self._tell("RoleRevokePermission", request)
        for kind, start, end in sorted(wanted - present):
            permission = pb.Permission(permType=kind, key=start, range_end=end)
            await self._tell(
                "RoleGrantPermission", pb.AuthRoleGrantPermissionRequest(name=role, perm=permission)
            )

    async def delete_role(self, role: str) -> None:
        await self._change("RoleDelete", pb.AuthRoleDeleteRequest(role=role))

    async def _call(self, asked: Method[_Response], request: Message) -> _Response:
        return await self._client.call(asked, request, timeout_s=self._timeout_s)

    async def _tell(self, name: str, request: Message) -> None:
        await self._call(method(f"Auth/{name}", pb.AuthResponse), request)

    async def _change(self, name: str, request: Message) -> None:
        """Add or delete something that may have been added or deleted already."""
        try:
            await self._tell(name, request)
        except RpcError as error:
            if "already exists" not in error.text and "not found" not in error.text:
                raise
