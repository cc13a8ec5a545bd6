"""A store node's memory of etcd, by which it notices that etcd was restored from a backup (history.py).

The mark is written into the store a moment after etcd reported a transaction. If etcd was set back by less,
nothing shows it: then extents that the node would free go to quarantine.
"""

import logging
import time

import trio

from ..cluster.history import History, read_epoch, read_reports, report_key
from ..etcd.engine import EtcdEngine
from ..kv import Put, WentBack
from ..model.records import Epoch, Report, encode, session_of
from .files import Files

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 2.0
_MARK_PERIOD_S = 2.0


class NodeHistory(History):
    """The history that the node with the store `files` knows."""

    def __init__(self, engine: EtcdEngine, files: Files) -> None:
        super().__init__(engine)
        self._identity = files.identity
        self._node = files.node
        self._newest_session = max(
            (session_of(extent.content) for kept in (files, files.quarantine) for extent in kept),
            default=0,
        )
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
        """Check that etcd has everything that this store knows of. Raises WentBack, and reports it, if
        not."""
        epoch = await read_epoch(self._engine)
        reports = await read_reports(self._engine)
        what = await self._missed(epoch)
        if what:
            if self._node not in reports:
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
        await self._engine.transact([], [Put(report_key(self._node), encode(report))])

    async def take_over(self) -> None:
        """Take over the accepted state after this store's contents were compared with it. Raises
        OSError."""
        if self.epoch.number <= self._identity.epoch.number:
            return
        self._identity.admitted = False  # maybe this node was admitted after the backup was made
        log.warning("the restored state of etcd was accepted: this store follows it from now on")
        self._identity.epoch = self.epoch
        await self._save()

    # -- while the node runs ---------------------------------------------------------------------

    async def wait_resolved(self, error: WentBack) -> bool:
        """Raise the error: the node begins anew."""
        self._engine.calls.doubt(error)
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
            try:
                await self._save()
            except OSError as error:
                log.warning("what etcd told cannot be remembered in the store: %s", error)

    async def _save(self) -> None:
        async with self._saving:
            known = self._engine.calls.known
            if known is not None and known.mod_revision > self._identity.mark[0]:
                self._identity.mark = known.mod_revision, known.value
            await trio.to_thread.run_sync(self._identity.save)
