"""The messages of control connections in bytes: those of operations, and those that movers add."""

from collections.abc import Iterable, Mapping
from functools import reduce
from operator import or_
from typing import Any, NamedTuple, TypeVar

import msgspec

from .frames import BadMessage
from .messages import Abort, AboutExtent, Answer, Hello, Message, Refused, Welcome
from .rights import OWN, Row

T = TypeVar("T")


class MessageSet(NamedTuple):
    """The messages of one part of the transport. `rights` has a row for each message to a node; a message
    that is no Request has no answer, and a Request that only the owner of a content may make is
    AboutExtent."""

    rights: Mapping[type[Message], Row]
    answers: tuple[type[Answer], ...]


class Codec:
    """Encodes and decodes the messages of `sets`. Each message has a tag of its own."""

    def __init__(self, sets: Iterable[MessageSet]) -> None:
        every = tuple(sets)
        self.rights = {kind: row for each in every for kind, row in each.rights.items()}
        for kind, row in self.rights.items():
            if OWN in row and not issubclass(kind, (AboutExtent, Abort)):
                raise TypeError(f"nobody owns what {kind.__name__} is about")
        self._asked: msgspec.msgpack.Decoder[Message] = _decoder(self.rights)
        self._answers: msgspec.msgpack.Decoder[Answer] = _decoder(
            kind for each in every for kind in each.answers
        )

    def decode(self, body: bytes) -> Message:
        """Return a message to a node. Raises BadMessage."""
        return _decoded(self._asked, body)

    def decode_answer(self, body: bytes) -> Answer:
        """Return a node's answer. Raises BadMessage."""
        return _decoded(self._answers, body)


_hello_decoder = msgspec.msgpack.Decoder(Hello)
_welcome_decoder: msgspec.msgpack.Decoder[Welcome | Refused] = msgspec.msgpack.Decoder(
    Welcome | Refused
)


def decode_hello(body: bytes) -> Hello:
    """Return the first message of a caller. Raises BadMessage."""
    return _decoded(_hello_decoder, body)


def decode_welcome(body: bytes) -> Welcome | Refused:
    """Return the first message of a node. Raises BadMessage."""
    return _decoded(_welcome_decoder, body)


def _decoder(kinds: Iterable[Any]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(reduce(or_, kinds))


def _decoded(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadMessage(f"not a message of this protocol: {error}") from None
