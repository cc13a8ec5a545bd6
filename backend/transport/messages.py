"""The messages that all store nodes and mounts understand, with any mover.

A connection begins with Hello, answered with Welcome or Refused. Then the caller sends requests, as
many at once as it likes up to REQUESTS_AT_ONCE, each with a number that its answer repeats. A mover adds
messages of its own (mover.py). The types of fields exclude values that our own software never sends: a peer
that sends one loses its connection.
"""

import errno
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import IntEnum
from typing import Annotated, ClassVar, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from ..model.records import SIZE_MAX
from . import Extent, Fenced, Number, Target, Unreachable

T = TypeVar("T")

# Both ends must speak the same version: nodes and mounts are upgraded together.
VERSION = 11

PUT_BYTES_MAX = 1 << 20
PUTS_MAX, PUTS_BYTES_MAX = 64, 4 << 20
# An answer to Get ends when it is this long; the caller requests the rest again.
GET_BYTES_MAX = 8 << 20
GET_EXTENTS_MAX = 4096
REQUESTS_AT_ONCE = 64
# The limit, for one control connection at a time, of requests that are answered a second time, or grant a
# right that lasts. Less than that of requests, so that one more is refused and need not wait.
LASTING_MAX = 48
TEXT_MAX = 240
NAME_MAX = 255
ETCD_REQUEST_BYTES_MAX = 256 << 10
# A receiver has a longer time-out than a sender, so that the sender reports the error.
RECEIVER_PATIENCE = 3

Length: TypeAlias = Annotated[int, Meta(gt=0, le=SIZE_MAX)]
# Linux has no larger one.
Errno: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 12)]
Name: TypeAlias = Annotated[str, Meta(max_length=NAME_MAX)]


class Message(msgspec.Struct, array_like=True):
    """The base of all messages; the tags are the protocol and must not change within a version."""


class Hello(Message, tag=1):
    """The first message of a caller. `role` and `name` count only where there are no certificates;
    `wanted` is the expected node. The digest of `session_key` is in the record of a mount's session."""

    version: int
    role: str
    name: str
    session: int
    wanted: int
    session_key: bytes = b""


class Welcome(Message, tag=2):
    version: int
    node: int


class Refused(Message, tag=3):
    """The last message of a connection that is refused. `for_good`: another try will fail, too."""

    text: str
    for_good: bool = False


class Renewed(Message, tag=4):
    """The caller has another session from now on. Has no answer."""

    session: int


class Request(Message, kw_only=True):
    """A message that is answered. The connection sets `number` when it sends the request, and `trace`, the
    id of the call that the request is made for, for log lines. No answer takes longer than `limit_s`: a
    node waits for other nodes with shorter limits."""

    limit_s: ClassVar[float] = 300.0
    number: int = 0
    trace: Name = ""

    def check(self) -> None:
        """Raise BadMessage for values of several fields that do not fit each other."""


class AboutContents(Request):
    """The base of requests about contents, to which a peer may have a right for its own ones only."""

    @property
    def contents(self) -> Collection[int]:
        raise NotImplementedError


class AboutExtent(AboutContents):
    """The base of requests about one extent."""

    extent: Extent

    @property
    def contents(self) -> Collection[int]:
        return (self.extent.content,)


class ToTarget(AboutExtent):
    """The base of requests that store an extent."""

    target: Target


class Prompt(Request):
    """The base of requests for which a node waits for no other one, and that are about little data."""

    limit_s = 30.0


class Ping(Prompt, tag=10):
    pass


class Parcel(msgspec.Struct, array_like=True, frozen=True):
    """A small extent, which is stored on one node only: it is not handed on."""

    extent: Extent
    target: Target
    data: Annotated[bytes, Meta(max_length=PUT_BYTES_MAX)]


class Put(AboutContents, Prompt, tag=11):
    """Stores small extents, each on its own; the first error is the answer."""

    parcels: Annotated[list[Parcel], Meta(max_length=PUTS_MAX)]

    @property
    def contents(self) -> Collection[int]:
        return {parcel.extent.content for parcel in self.parcels}


class Get(Prompt, tag=12):
    extents: Annotated[list[Extent], Meta(max_length=GET_EXTENTS_MAX)]
    limit: Annotated[int, Meta(ge=0, le=PUT_BYTES_MAX)]


class Adopt(ToTarget, tag=13):
    name: Name


class Abort(AboutContents, tag=14):
    content: Number

    @property
    def contents(self) -> Collection[int]:
        return (self.content,)


class Suspect(Request, tag=15):
    group: Number
    node: Number


class Status(Request, tag=16):
    pass


class Share(ToTarget, tag=37):
    """Asks the node to make an extent of the bytes of another one, `source`, of `length` bytes, that it has
    already. Both keep them: sealed extents never change."""

    source: Extent
    length: Length


class Doubt(AboutExtent, tag=33):
    """Says that the caller got wrong bytes of an extent. The node checks that by reading its copy again."""


class Digest(AboutExtent, tag=34):
    """Asks for the digest of the bytes that the node has of an extent."""


class Scrub(Request, tag=35):
    """Asks the node to check everything it keeps, now."""


class AskEtcd(Request, tag=41):
    """Has the node ask etcd for a reader, which cannot: `method` is etcd's, `body` its request."""

    method: Name
    body: Annotated[bytes, Meta(max_length=ETCD_REQUEST_BYTES_MAX)]


class Answer(Message, kw_only=True):
    """The base of answers; `number` is the request's."""

    number: int = 0


class Done(Answer, tag=20):
    pass


class Failed(Answer, tag=21):
    """An error at `node`, which may be further down the chain."""

    code: Errno
    node: Number
    text: Annotated[str, Meta(max_length=TEXT_MAX)]


class Contents(Answer, tag=22):
    """The contents of the first extents of a Get, at least one."""

    data: list[bytes | None]


class Report(Answer, tag=23):
    status: dict[str, object]


class Verdict(Answer, tag=25):
    yes: bool


class Digested(Answer, tag=29):
    digest: bytes


class EtcdSaid(Answer, tag=42):
    """etcd's answer: `body`, or how the call failed (see EtcdOutcome), with the code of gRPC and a text."""

    outcome: int
    body: bytes = b""
    code: int = 0
    text: str = ""


class EtcdOutcome(IntEnum):
    ANSWERED = 0
    REFUSED = 1
    UNSENT = 2  # etcd did not get the request
    UNCERTAIN = 3  # etcd may have got the request


def failure_of(error: OSError, node: int) -> tuple[int, int, str]:
    """Return errno, node and text by which an error of `node` is sent to another process."""
    if isinstance(error, Unreachable):
        return errno.ENOTCONN, error.node, error.reason[:TEXT_MAX]
    text = error.strerror or str(error) or type(error).__name__
    return error.errno or errno.EIO, node, text[:TEXT_MAX]


def error_of(code: int, node: int, text: str) -> OSError:
    """Return the error for the values of `failure_of`."""
    if code == errno.ENOTCONN:
        return Unreachable(node, text)
    told = f"store node {node:x}: {text or os.strerror(code)}"
    return Fenced(told) if code == errno.ESTALE else OSError(code, told)


def describe_version(version: int) -> str:
    """Return why a peer of another version is not served."""
    return (
        f"protocol version {version}, this node speaks {VERSION}: "
        "have the same version of irdmafs on both hosts"
    )


def in_batches(
    items: Iterable[T], size_of: Callable[[T], int], most: int, most_bytes: int
) -> Iterator[list[T]]:
    """Yield the items in lists of at most so many, and so many bytes; a larger one by itself."""
    batch: list[T] = []
    size = 0
    for item in items:
        length = size_of(item)
        if batch and (len(batch) == most or size + length > most_bytes):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += length
    if batch:
        yield batch
