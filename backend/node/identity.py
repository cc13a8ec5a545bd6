"""The memory of a store node, kept in its directory for ever: who it is, and how far etcd was, by which it
notices that etcd was restored from a backup (history.py).

STORE/node.json     {"format": 1, "id": HEX, "cluster": ID, "admitted": whether it has been a member
                    of the cluster, "epoch": [number, nonce], "mark": [revision, HEX]: what it last
                    knew of etcd}

The mark is written a moment after etcd reported a transaction. If etcd was set back by less, nothing shows
it: then extents that the node would free go to quarantine.
"""

import errno
import logging
import secrets
import time
from typing import Literal

import msgspec
import trio

from ..cluster.history import History, read_epoch, read_reports
from ..cluster.lease import Removed
from ..cluster.membership import admit
from ..etcd.engine import EtcdEngine
from ..kv import Conflict, Damaged, Put, WentBack
from ..model.records import REPORT, Epoch, NodeRecord, Report, decode, encode, key_of
from ..observe.logs import log_failure
from .directory import StoreDirectory

log = logging.getLogger(__name__)

_NAME = "node.json"
_LOOK_AGAIN_S = 2.0
_MARK_PERIOD_S = 2.0


class _Saved(msgspec.Struct):
    format: Literal[1]
    id: str
    cluster: str
    admitted: bool = False
    epoch: tuple[int, str] = 0, ""
    mark: tuple[int, str] = 0, ""


class Identity:
    """The contents of node.json. `node` is the node's number, `cluster` the id of its cluster ("": none
    yet). `mark` is a revision and the transaction that etcd had there (0: none is known). `is_new`: there
    was no such file, and `save` makes one. Raises kv.Damaged if the file makes no sense.
    """

    def __init__(self, place: StoreDirectory) -> None:
        self._place = place
        self.node = 0
        self.cluster = ""
        self.admitted = False
        self.epoch = Epoch()
        self.mark: tuple[int, bytes] = 0, b""
        text = place.read(_NAME)
        self.is_new = text is None
        if text is None:
            self.node = secrets.randbelow((1 << 63) - 1) + 1
            return
        try:
            self._take(msgspec.json.decode(text, type=_Saved))
        except (msgspec.DecodeError, ValueError) as error:
            raise Damaged(
                f"{place.path}/{_NAME} is damaged ({error}); remove the store directory to begin as a new "
                "node"
            ) from None

    def _take(self, saved: _Saved) -> None:
        """Raise ValueError if it makes no sense."""
        self.node, self.cluster, self.admitted = int(saved.id, 16), saved.cluster, saved.admitted
        self.epoch = Epoch(*saved.epoch)
        self.mark = saved.mark[0], bytes.fromhex(saved.mark[1])
        if not 0 < self.node < 1 << 63:
            raise ValueError("the node id is out of range")

    def bind(self, cluster: str) -> None:
        """Make this a store of the cluster with this id. Raises OSError EINVAL for another cluster's."""
        if self.cluster == cluster:
            return
        if self.cluster:
            raise OSError(
                errno.EINVAL,
                f"the store belongs to cluster {self.cluster}, not to {cluster}: "
                "use another directory, or empty this one",
                self._place.path,
            )
        self.cluster = cluster
        self.save()

    async def register(self, engine: EtcdEngine, weight: float, labels: dict[str, str]) -> None:
        """Register the node; a known one keeps its state, up or draining. Raises Removed, OSError."""
        if not self.admitted:
            if await admit(engine, self.node, NodeRecord("up", weight, labels)):
                log.info("this store is new to the cluster")
            # If the cluster does not know this node one day, it was removed.
            self.admitted = True
            self.save()
        key = key_of(b"N", self.node)
        while (found := await engine.get(key)) is not None:
            try:
                known = decode(found.value, NodeRecord)
                record = NodeRecord(known.state, weight, labels)
                if record == known:
                    return
            except msgspec.DecodeError as error:
                log.error("the record of this node in etcd was damaged and is made anew: %s", error)
                record = NodeRecord("up", weight, labels)
            try:
                await engine.transact([(key, found.mod_revision)], [Put(key, encode(record))])
                return
            except Conflict:
                continue
        raise Removed(self.node)

    def save(self) -> None:
        """Write the file. For any thread, one at a time."""
        saved = _Saved(
            format=1,
            id=f"{self.node:x}",
            cluster=self.cluster,
            admitted=self.admitted,
            epoch=(self.epoch.number, self.epoch.nonce),
            mark=(self.mark[0], self.mark[1].hex()),
        )
        self._place.write(_NAME, msgspec.json.encode(saved), hardened=True)


class NodeHistory(History):
    """The history that a node knows: its mark, and the newest session that wrote an extent here."""

    def __init__(self, engine: EtcdEngine, identity: Identity, newest_session: int) -> None:
        super().__init__(engine)
        self._identity = identity
        self._newest_session = newest_session
        self._runs = False
        self._saving = trio.Lock()

    # -- at the start ----------------------------------------------------------------------------

    async def wait_trusted(self, *, patient: bool) -> None:
        """Return when etcd has everything that this store knows of, or its state was accepted. Raises
        OSError, and WentBack if not `patient`."""
        told = ""
        while True:
            self._engine.calls.trust()
            try:
                await self.check()
                return
            except WentBack as error:
                if not patient:
                    raise
                if error.strerror != told:
                    told = str(error.strerror)
                    log.error("%s. This node waits, and frees nothing", told)
            await trio.sleep(_LOOK_AGAIN_S)

    async def check(self) -> None:
        """Check that etcd has all that this store knows of; if not, report it, and raise WentBack."""
        epoch = await read_epoch(self._engine)
        reports = await read_reports(self._engine)
        what = await self._missed(epoch)
        if what:
            if self._identity.node not in reports:
                await self._report(epoch)
            raise WentBack(what)
        await super().check()
        if self._runs and epoch.number > self._identity.epoch.number:
            raise WentBack("a restored state was accepted while this node did not hear from it")
        self.epoch = epoch

    async def _missed(self, epoch: Epoch) -> str:
        """Return what this store knows of and etcd does not; "" if nothing."""
        known, seen = self._identity, self._seen()
        if epoch.number > known.epoch.number:
            if seen <= epoch.floor:
                return ""
            return f"this store knows revision {seen}, and it was lifted to {epoch.floor} only"
        if (epoch.number, epoch.nonce) != (known.epoch.number, known.epoch.nonce):
            return "this store knows of an accepted state that it does not"
        if not await self._engine.calls.has_transaction(*known.mark):
            return f"revision {known.mark[0]}, which this store knows, is not there"
        return ""

    def _seen(self) -> int:
        return max(self._identity.mark[0], self._newest_session)

    async def _report(self, epoch: Epoch) -> None:
        number = max(epoch.number, self._identity.epoch.number)
        report = Report(self._seen(), self._engine.revision, number, time.time())
        await self._engine.transact([], [Put(key_of(REPORT, self._identity.node), encode(report))])

    async def take_over(self) -> None:
        """Take over the accepted state, with which this store was compared. Raises OSError."""
        if self.epoch.number <= self._identity.epoch.number:
            return
        self._identity.admitted = False  # maybe this node was admitted after the backup was made
        log.warning("the restored state of etcd was accepted: this store follows it from now on")
        self._identity.epoch = self.epoch
        await self._save()

    # -- while the node runs ---------------------------------------------------------------------

    async def wait_resolved(self, error: WentBack) -> bool:
        """Raise the error: the node begins anew."""
        await self.remember()
        raise error

    async def run(self) -> None:
        """Remember etcd's transactions."""
        self._runs = True
        while True:
            await self.remember()
            await trio.sleep(_MARK_PERIOD_S)

    async def remember(self) -> None:
        """Write the newest transaction that etcd told into the store. A failure is only logged."""
        known = self._engine.calls.known
        if known is not None and known.mod_revision > self._identity.mark[0]:
            with log_failure(log.warning, "what etcd told cannot be remembered in the store"):
                await self._save()

    async def _save(self) -> None:
        async with self._saving:
            known = self._engine.calls.known
            if known is not None and known.mod_revision > self._identity.mark[0]:
                self._identity.mark = known.mod_revision, known.value
            await trio.to_thread.run_sync(self._identity.save)
