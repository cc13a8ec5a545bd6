"""The messages by which data connections are asked for, and the rights of who uses them."""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from ..frames import MessageSet
from ..messages import Answer, Request
from ..rights import ANY, NONE, OWN, Row
from .wire import Op

TICKETS_MAX = 64


class Tickets(Request, tag=17):
    """Asks for the right to open `count` data connections."""

    count: Annotated[int, Meta(gt=0, le=TICKETS_MAX)]


class Granted(Answer, tag=24):
    tickets: list[bytes]


MESSAGES = MessageSet({Tickets: (ANY, ANY, ANY, NONE)}, (Granted,))

# The rights to requests on data connections.
RIGHTS: Mapping[Op, Row] = {Op.READ: (ANY, ANY, ANY, NONE), Op.WRITE: (ANY, OWN, NONE, NONE)}
