"""The messages that all store nodes and mounts understand, with any mover.

A connection begins with Hello, answered with Welcome or Refused. Then the caller sends requests, as
many at once as it likes up to REQUESTS_AT_ONCE, each with a number that its answer repeats. A mover adds
messages of its own (mover.py).
"""

import errno
import os
from enum import IntEnum

import msgspec

from . import Extent, Fenced, Target, Unreachable
from .frames import BadMessage

# Both ends must speak the same version: nodes and mounts are upgraded together.
VERSION = 8

PUT_BYTES_MAX = 1 << 20
# An answer to Get ends when it is this long; the caller requests the rest again.
GET_BYTES_MAX = 8 << 20
GET_EXTENTS_MAX = 4096
REQUESTS_AT_ONCE = 64
# The limit, for one control connection at a time, of requests that are answered a second time, or grant a
# right that lasts. Less than that of requests, so that one more is refused and need not wait.
LASTING_MAX = 48
CHAIN_MAX = 8
TEXT_MAX = 240
NAME_MAX = 255
ETCD_REQUEST_BYTES_MAX = 256 << 10
EXTENT_BYTES_MAX = 1 << 40
# A receiver has a longer time-out than a sender, so that the sender reports the error.
RECEIVER_PATIENCE = 3

_UINT63_MAX = (1 << 63) - 1


class Message(msgspec.Struct, array_like=True):
    """The base of all messages; the tags are the protocol and must not change within a version."""


class Hello(Message, tag=1):
    """The first message of a caller. `role` and `name` count only where there are no certificates;
    `wanted` is the node that the caller expects. The digest of `session_key` is in the record of a mount's
    session."""

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
    id of the call that the request is made for, for log lines."""

    number: int = 0
    trace: str = ""

    @property
    def group(self) -> int:
        """Return the group whose configuration the request names, 0 if it names none."""
        return 0

    def check(self) -> None:
        """Raise BadMessage for values that our own software never sends."""


class AboutExtent(Request):
    """The base of requests about one extent."""

    extent: Extent

    def check(self) -> None:
        check_extent(self.extent)


class ToTarget(AboutExtent):
    """The base of requests that store an extent."""

    target: Target

    @property
    def group(self) -> int:
        return self.target.group

    def check(self) -> None:
        check_extent(self.extent)
        target = self.target
        if len(target.chain) > CHAIN_MAX:
            raise BadMessage(f"a chain of {len(target.chain)} nodes")
        check_numbers(target.group, target.config, *target.chain)


class Ping(Request, tag=10):
    pass


class Put(ToTarget, tag=11):
    data: bytes

    def check(self) -> None:
        ToTarget.check(self)
        if len(self.data) > PUT_BYTES_MAX:
            raise BadMessage(f"an extent of {len(self.data)} bytes in a message")


class Get(Request, tag=12):
    extents: list[Extent]
    limit: int

    def check(self) -> None:
        if len(self.extents) > GET_EXTENTS_MAX or self.limit > PUT_BYTES_MAX:
            raise BadMessage("more is asked for than a message can hold")
        for extent in self.extents:
            check_extent(extent)


class Adopt(ToTarget, tag=13):
    name: str

    def check(self) -> None:
        ToTarget.check(self)
        if len(self.name) > NAME_MAX:
            raise BadMessage(f"a file name of {len(self.name)} characters")


class Abort(Request, tag=14):
    content: int

    def check(self) -> None:
        check_numbers(self.content)


class Suspect(Request, tag=15):
    group: int
    node: int

    def check(self) -> None:
        check_numbers(self.group, self.node)


class Status(Request, tag=16):
    pass


class Share(ToTarget, tag=37):
    """Asks the node to make an extent of the bytes of another one, `source`, of `length` bytes, that it has
    already. Both keep them: sealed extents never change."""

    source: Extent
    length: int

    def check(self) -> None:
        ToTarget.check(self)
        check_extent(self.source)
        check_range(0, self.length)


class Doubt(AboutExtent, tag=33):
    """Says that the caller got wrong bytes of an extent. The node checks that by reading its copy again."""


class Digest(AboutExtent, tag=34):
    """Asks for the digest of the bytes that the node has of an extent."""


class Map(AboutExtent, tag=36):
    """Asks where the data of an extent is."""


class Scrub(Request, tag=35):
    """Asks the node to check everything it keeps, now."""


class AskEtcd(Request, tag=41):
    """Has the node ask etcd for a reader, which does not reach it: `method` is etcd's, `body` its
    request."""

    method: str
    body: bytes

    def check(self) -> None:
        if len(self.method) > NAME_MAX or len(self.body) > ETCD_REQUEST_BYTES_MAX:
            raise BadMessage(f"a request to etcd of {len(self.body)} bytes")


class Answer(Message, kw_only=True):
    """The base of answers; `number` is the request's."""

    number: int = 0


class Done(Answer, tag=20):
    pass


class Failed(Answer, tag=21):
    """An error at `node`, which may be further down the chain."""

    code: int
    node: int
    text: str


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


class Mapped(Answer, tag=40):
    """The starts and lengths of an extent's data."""

    segments: list[tuple[int, int]]


def check_extent(extent: Extent) -> None:
    """Raise BadMessage for numbers that no extent has."""
    check_numbers(extent.content)
    if not 0 <= extent.stripe < 1 << 32:
        raise BadMessage(f"stripe {extent.stripe} is out of range")


def check_range(start: int, length: int) -> None:
    """Raise BadMessage for a range that no extent can have."""
    if not (0 <= start <= _UINT63_MAX and 0 < length <= EXTENT_BYTES_MAX):
        raise BadMessage(f"{length} bytes from {start}")


def check_numbers(*numbers: int) -> None:
    """Raise BadMessage for a value that is no number of a node, a group, a content or a session."""
    for number in numbers:
        if not 0 <= number <= _UINT63_MAX:
            raise BadMessage(f"number {number} is out of range")


def failure_of(error: OSError, node: int) -> tuple[int, int, str]:
    """Return errno, node and text by which an error of `node` is sent to another process."""
    text = error.strerror or str(error) or type(error).__name__
    if isinstance(error, Unreachable):
        # The receiver's Unreachable adds the node again.
        return errno.ENOTCONN, error.node, text.partition(": ")[2][:TEXT_MAX]
    return error.errno or errno.EIO, node, text[:TEXT_MAX]


def error_of(code: int, node: int, text: str, group: int = 0) -> OSError:
    """Return the error for the values of `failure_of`."""
    if code == errno.ENOTCONN:
        return Unreachable(node, text)
    if code == errno.ESTALE and group:
        return Fenced(group)
    return OSError(code, f"store node {node:x}: {text or os.strerror(code)}")


def describe_version(version: int) -> str:
    """Return why a peer of another version is not served."""
    return (
        f"protocol version {version}, this node speaks {VERSION}: "
        "have the same version of irdmafs on both hosts"
    )
