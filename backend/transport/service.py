"""The part of a store node that its transport calls: the protocol `Service`."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from enum import IntEnum
from typing import Any, Protocol, TypeAlias, TypeVar

from . import Extent, Target
from .messages import AskEtcd, EtcdSaid
from .rights import Asked, Peer, Row, Scope, denied, may


class Held(Protocol):
    """An open file of the store, which is not used for another extent before it is closed."""

    @property
    def fd(self) -> int: ...

    @property
    def is_own(self) -> bool:
        """Return whether no other process ever had it open for writing, so that it cannot be truncated."""

    def lend(self) -> None:
        """Note that its pages may stay referred to, by a socket for instance: it is not used again."""

    def close(self) -> None: ...


class Incoming(Held, Protocol):
    """A file that may become an extent. Closing it removes it, unless it was sealed."""


I = TypeVar("I", bound=Incoming)  # noqa: E741


class Service(Protocol[I]):
    """A store node as seen by its transport. All calls are made in the event loop, except `hold`.

    Errors that a method raises reach the caller: Fenced and Unreachable as such, any other OSError with
    its errno and text. An extent is received so: `begin`, then `seal`, and in any case the file is closed.
    The same extent may be on its way several times, with the same bytes.
    """

    node: int
    """The node's id."""

    async def check_owner(self, peer: Peer, content: int) -> None:
        """Raise OSError unless the content is of a session of the peer's: ECANCELED when the session is
        over, EACCES when it is another's, Unreachable when that is not known."""

    async def admit(self, extent: Extent, target: Target) -> None:
        """Raise OSError unless this extent may be stored here now: Fenced; Unreachable if the node must not
        serve, or lags behind; ECANCELED if the writer's session is over or has given the content up; EINVAL
        for a wrong target. A published version is copied from other members, not taken from its writer."""

    def size(self, extent: Extent) -> int | None:
        """Return the bytes of a sealed extent, which need not be stored again; None if it is not here."""

    async def create(self, extent: Extent, length: int, allocated: int | None = None) -> I:
        """Return a file of `length` bytes that is allocated, open for reading and writing; or one hole,
        with `allocated` bytes reserved. Raises OSError: ENOSPC, EFBIG."""

    async def adopt(self, extent: Extent, name: str) -> I:
        """Return the file incoming/NAME, open for reading. Raises OSError: ENOENT, EPERM."""

    async def share(self, source: Extent, length: int) -> I:
        """Return another name of the file of a sealed extent of `length` bytes, open for reading. Raises
        OSError ENOENT if that extent is not here."""

    async def seal(self, extent: Extent, incoming: I) -> None:
        """Make a complete file a readable extent, which survives a power loss if the store is on a disk. If
        it is here, the first copy is kept. Raises as `admit`, and EEXIST if that has another length."""

    def hold(self, extent: Extent) -> Held:
        """Open an extent for reading; the transport closes it. Called in threads, too. Raises OSError:
        ENOENT, also for a damaged extent, so that the caller asks another node; EMFILE."""

    async def hold_own(self, extent: Extent) -> Held:
        """Open an extent as `hold` does, in a file of the store's own if that can be: an extent in the file
        of an application is copied. Raises OSError: ENOENT."""

    def abort(self, content: int) -> None:
        """Note that this content will not be published."""

    async def suspect(self, group: int, node: int) -> bool:
        """Check a member that the caller cannot reach, and return whether the group has it no more."""

    def doubt(self, extent: Extent) -> None:
        """Check an extent: the caller says that it got wrong bytes."""

    async def digest(self, extent: Extent) -> bytes:
        """Return the digest of the bytes that are here (see store/digest.py). Raises OSError: ENOENT."""

    def scrub(self) -> None:
        """Check everything that is kept here."""

    def status(self) -> dict[str, Any]:
        """Return the node's report, of values that MessagePack has."""


# etcd as a store node lets readers use it. Returns etcd's answer. Raises OSError: EACCES for a request that
# readers may not make, EDQUOT for one beyond a limit.
EtcdForReaders: TypeAlias = Callable[[Peer, AskEtcd], Awaitable[EtcdSaid]]


async def begin(
    service: Service[I], extent: Extent, target: Target, length: int, allocated: int | None = None
) -> I | None:
    """Return a file to receive an extent, None if it is here. Raises as Service.admit and `create`."""
    await service.admit(extent, target)
    if service.size(extent) == length:
        return None
    return await service.create(extent, length, allocated)


async def check_right(
    service: Service[Any],
    rights: Mapping[Any, Row],
    peer: Peer,
    asked: Asked,
    contents: Collection[int],
) -> None:
    """Check the right to ask for something about contents. Raises EACCES, and as Service.check_owner."""
    role = peer.identity.role
    scope = may(rights, role, asked)
    if scope is Scope.NONE:
        name = asked.name if isinstance(asked, IntEnum) else asked.__name__
        raise denied(f"a {role} may not send {name.lower()} to a store node")
    if scope is Scope.OWN:
        for content in contents:
            await service.check_owner(peer, content)
