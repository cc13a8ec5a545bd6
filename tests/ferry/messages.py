"""The messages about files on the pier, the directory that both ends see."""

from irdmafs.backend.transport.codec import MessageSet
from irdmafs.backend.transport.frames import BadMessage
from irdmafs.backend.transport.messages import (
    NAME_MAX,
    AboutExtent,
    Answer,
    ToTarget,
    check_extent,
    check_range,
)
from irdmafs.backend.transport.rights import ANY, NONE, OWN


class Fetch(AboutExtent, tag=64):
    """Asks to lay a range of an extent on the pier."""

    start: int
    length: int

    def check(self) -> None:
        check_extent(self.extent)
        check_range(self.start, self.length)


class Bring(ToTarget, tag=65):
    """Asks to take an extent from the pier."""

    length: int
    name: str

    def check(self) -> None:
        ToTarget.check(self)
        check_range(0, self.length)
        if not self.name.isalnum() or len(self.name) > NAME_MAX:
            raise BadMessage(f"{self.name[:NAME_MAX]!r} cannot lie on the pier")


class Laid(Answer, tag=66):
    name: str


MESSAGES = MessageSet({Fetch: (ANY, ANY, ANY, NONE), Bring: (ANY, OWN, NONE, NONE)}, (Laid,))
