"""Find out whether an etcd still has the history that this process knew.

An etcd that was restored from a backup must not be taken for the one that was known before. It shows in an
answer whose revision is lower than one that was received before the request was sent (answers are
linearizable), and, whenever a watch begins again, in the key "s": at the newest known revision it must have
the known value. If it has not, only harmless calls are made from then on (`doubt`).
"""

from ..kv import KeyValue, WentBack
from . import etcd_pb2 as pb
from .calls import LAST_KEY, Calls
from .errors import RpcError, Status
from .methods import RANGE


class EtcdPast:
    """Tells whether etcd continues from what this process knew. `known` is the newest transaction that came
    by a snapshot or a watch: the key "s" as it was then."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.known: KeyValue | None = None

    async def is_continued(self, timeout_s: float | None = None) -> bool:
        """Return whether etcd continues from `known`, as far as its history goes back."""
        if self.known is None:
            return True
        return await self.has_transaction(self.known.mod_revision, self.known.value, timeout_s)

    async def has_transaction(
        self, revision: int, last_id: bytes, timeout_s: float | None = None
    ) -> bool:
        """Return whether the key "s" was put with this value at that revision. True if the history does not
        go back so far, and there is a later revision. Revision 0 stands for an empty history."""
        if not revision:
            return True
        calls, key = self._calls, self._calls.prefix + LAST_KEY
        try:
            answer = await calls.ask(RANGE, pb.RangeRequest(key=key, revision=revision), timeout_s)
        except RpcError as error:
            if error.code != Status.OUT_OF_RANGE:
                raise calls.failure(error) from None
            if "future" in error.text:
                return False
            answer = await calls.call(RANGE, pb.RangeRequest(key=key))
            return answer.header.revision >= revision
        return any((found.mod_revision, found.value) == (revision, last_id) for found in answer.kvs)

    def doubt(self, error: WentBack) -> None:
        """Have every call except `get` and `range` raise this error from now on."""
        self._calls.doubt(error)

    def trust(self) -> None:
        """Accept etcd's state from now on, whatever was known before."""
        self._calls.trust()

    async def check(self, timeout_s: float | None = None) -> None:
        """Doubt an etcd that does not continue from `known`. Raises WentBack, OSError."""
        if self._calls.trusted and not await self.is_continued(timeout_s):
            assert self.known is not None
            missing = self.known.mod_revision
            self.doubt(WentBack(f"revision {missing}, which this process knew, is not there"))
        self._calls.check_trusted()

    def learn(self, last: KeyValue) -> None:
        """Remember the key "s" if it is newer than the known one."""
        if self.known is None or last.mod_revision > self.known.mod_revision:
            self.known = last
