"""How long a promise to those who change a directory binds both sides (see leases).

Who follows a directory believes what it knows only for as long as it is sure to know everything: it asks
etcd how far it is, again and again, and each answer is good for `patience` from when it was asked for.
So who changes something need not wait longer than that for a follower that does not answer, whether it
is stuck or means harm: an honest one has stopped believing by then. It is not waited for again before it
has acknowledged what it missed, which an honest one does before it believes anything again.
"""

import logging
from collections.abc import Callable, Iterable

import trio

from ...cluster.lease import now_s
from ...cluster.membership import Members

log = logging.getLogger(__name__)

# Kernels use what they were told, and answers on their way, for so long after the belief here has ended.
_AFTERGLOW_S = 1.5
# Clocks run at slightly different rates.
_MARGIN_SHARE = 0.1


class Sureness:
    """Until when what is known here is sure to be all that could be known."""

    def __init__(self) -> None:
        self.until_s = 0.0  # by now_s()

    def left_s(self) -> float:
        return max(0.0, self.until_s - now_s())

    def confirmed(self, asked_s: float, patience_s: float) -> None:
        """Everything that was there when `asked_s` (by now_s()) was asked is known here."""
        self.until_s = max(self.until_s, asked_s + patience_s * (1 - _MARGIN_SHARE))


class Followers:
    """The followers to wait for when something changes."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._late: dict[int, int] = {}  # leases, and what they should have acknowledged

    async def wait(
        self, followers: Callable[[], Iterable[int]], revision: int, patience_s: float
    ) -> None:
        """Return when all of them have seen the revision, or believe nothing that is older."""
        members = self._members

        def awaited() -> set[int]:
            return {
                lease for lease in followers() if members.acked(lease) >= self._late.get(lease, 0)
            }

        with trio.move_on_after(patience_s + _AFTERGLOW_S):
            await members.wait_acked(awaited, revision)
            return
        self._late = {
            lease: missed for lease, missed in self._late.items() if members.session_of(lease)
        }
        for lease in awaited():
            if members.acked(lease) < revision:
                self._late[lease] = revision
                log.warning("%s", self._describe(lease, patience_s + _AFTERGLOW_S))

    def _describe(self, lease: int, waited_s: float) -> str:
        session = self._members.session_of(lease)
        record = self._members.sessions.get(session or 0)
        who = "a mount"
        if record is not None:
            who = f"the mount {record.mountpoint} on {record.host}"
            if record.name:
                who += f" (certificate {record.name!r})"
        return f"{who} follows a directory and has acknowledged nothing for {waited_s:g} s: not waited for"
