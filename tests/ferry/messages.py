"""The messages about files on the pier, the directory that both ends see."""

from typing import Any

from irdmafs.backend.transport import Target
from irdmafs.backend.transport.codec import MessageSet
from irdmafs.backend.transport.frames import BadMessage
from irdmafs.backend.transport.messages import (
    NAME_MAX,
    AboutExtent,
    Answer,
    check_extent,
    check_range,
    check_target,
)
from irdmafs.backend.transport.rights import ANY, NONE, OWN


class Fetch(AboutExtent, tag=64):
    """Asks to lay a range of an extent on the pier."""

    start: int
    length: int


class Bring(AboutExtent, tag=65):
    """Asks to take an extent from the pier."""

    target: Target
    length: int
    name: str


class Laid(Answer, tag=66):
    name: str


def check(request: Any) -> None:
    """Raise BadMessage for what our own software never sends."""
    check_extent(request.extent)
    if isinstance(request, Fetch):
        check_range(request.start, request.length)
    else:
        check_target(request.target)
        check_range(0, request.length)
        if not request.name.isalnum() or len(request.name) > NAME_MAX:
            raise BadMessage(f"{request.name[:NAME_MAX]!r} cannot lie on the pier")


MESSAGES = MessageSet({Fetch: (ANY, ANY, ANY, NONE), Bring: (ANY, OWN, NONE, NONE)}, (Laid,), check)
