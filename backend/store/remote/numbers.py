"""Numbers of contents: the session that writes one, and a counter."""

import errno

from ...cluster.lease import Session
from ...model.records import CONTENT_NUMBER_BITS, ContentId
from ...namespace import fail

_NUMBERS = 1 << CONTENT_NUMBER_BITS


class ContentNumbers:
    """The content numbers that a mount gives."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._last = 0
        self._last_of = 0

    def new(self) -> ContentId:
        """Return a new number. Raises OSError ENOSPC if the session has none left."""
        session = self._session.number
        if session != self._last_of:
            self._last_of, self._last = session, 0
        self._last += 1
        if self._last >= _NUMBERS:
            raise fail(errno.ENOSPC, "this session has no content numbers left; mount again")
        return ContentId(session << CONTENT_NUMBER_BITS | self._last)
