"""How long a promise to hosts that change a directory binds both sides (see leases).

A follower of a directory believes its replica only while it is sure to know everything: it asks etcd again
and again how far it is, and each answer is good for `patience` from when it was asked for. So a host that
changes something need not wait longer than that for a follower that does not answer, stuck or malicious: an
honest one has stopped believing by then. It is not waited for again until it has acknowledged what it
missed, which an honest follower does before it believes anything again.
"""

import logging
from collections.abc import Callable, Collection

import trio

from ...cluster.membership import Members

log = logging.getLogger(__name__)

# A kernel goes on using what it was told, and answers on their way, for so long after the belief has ended.
_AFTERGLOW_S = 1.5


class Followers:
    """The followers that a host waits for when it changes something."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._late: dict[int, int] = {}  # lease -> the revision that it should have acknowledged

    async def wait(
        self, followers: Callable[[], Collection[int]], revision: int, patience_s: float
    ) -> None:
        """Return when every follower has seen the revision, or believes nothing older."""
        members = self._members

        def awaited() -> Collection[int]:
            late, found = self._late, followers()
            if not late:
                return found
            return {lease for lease in found if members.acked(lease) >= late.get(lease, 0)}

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
