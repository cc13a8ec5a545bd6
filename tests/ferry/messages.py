"""The messages about files on the pier, the directory that both ends see."""

from typing import Annotated

from msgspec import Meta

from irdmafs.backend.transport import Number
from irdmafs.backend.transport.frames import MessageSet
from irdmafs.backend.transport.messages import NAME_MAX, AboutExtent, Answer, Length, ToTarget
from irdmafs.backend.transport.rights import ANY, NONE, OWN


class Fetch(AboutExtent, tag=64):
    """Asks to lay a range of an extent on the pier."""

    start: Number
    length: Length


class Bring(ToTarget, tag=65):
    """Asks to take an extent from the pier."""

    length: Length
    name: Annotated[str, Meta(pattern="^[0-9A-Za-z]+$", max_length=NAME_MAX)]


class Laid(Answer, tag=66):
    name: str


MESSAGES = MessageSet({Fetch: (ANY, ANY, ANY, NONE), Bring: (ANY, OWN, NONE, NONE)}, (Laid,))
