"""A store node's memory of etcd, by which it notices that etcd was restored from a backup (history.py).

The mark is written into the store a moment after etcd reported a transaction. The witness is written into
etcd less often, as every process follows those keys. Both may lag: if etcd was set back only a little,
neither shows it. Extents that the node would free then go to quarantine.
"""

import errno
import logging
import secrets
import time
from collections.abc import Callable, Sequence

import msgspec
import trio

from ..cluster.history import History, read_epoch, read_reports, report_key
from ..cluster.lease import Session
from ..cluster.records import (
    EPOCH_KEY,
    REPORT,
    WITNESS,
    Epoch,
    Report,
    Witness,
    decode,
    encode,
    key_of,
    session_of,
)
from ..kv import Conflict, Event, Put, SharedEngine, WentBack
from .files import Files

__all__ = ["NodeHistory"]

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 2.0
_MARK_PERIOD_S = 2.0
_WITNESS_PERIOD_S = 10.0
# The limit of witnesses that all nodes together put per second.
_WITNESSES_PER_S = 10.0


class NodeHistory(History):
    """The history that the node with the store `files` knows. Each change of an inode may change what is
    here."""

    prefixes = (EPOCH_KEY, REPORT, b"i")

    def __init__(self, engine: SharedEngine, files: Files) -> None:
        super().__init__(engine)
        self._identity = files.identity
        self._node = files.node
        self._newest_session = max(
            (session_of(extent.content) for kept in (files, files.quarantine) for extent in kept),
            default=0,
        )
        self._changed = True
        self._runs = False
        self._saving = trio.Lock()

    # -- at the start ----------------------------------------------------------------------------

    async def wait_trusted(self, *, patient: bool) -> None:
        """Return when etcd has everything that this store knows of, or its state was accepted. Raises
        OSError, and WentBack if not `patient`."""
        told = ""
        while True:
            self._engine.past.trust()
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
        witness = await self._witness()
        if witness.number < known.witness.number:
            return f"it lacks what this node put into it at revision {known.mark[0]}"
        if witness.number == known.witness.number and witness.nonce != known.witness.nonce:
            return "its history is another than that which this store knows"
        if witness.number > known.witness.number and known.witness.number:
            log.warning(
                "this store is older than what etcd knows of it: was a copy of it put back? What it lacks "
                "comes from other nodes"
            )
        if not await self._engine.past.has_transaction(*known.mark):
            return f"revision {known.mark[0]}, which this store knows, is not there"
        return ""

    def _seen(self) -> int:
        return max(self._identity.mark[0], self._newest_session)

    async def _witness(self) -> Witness:
        found = await self._engine.get(key_of(WITNESS, self._node))
        try:
            return decode(found.value, Witness) if found is not None else Witness()
        except msgspec.DecodeError as error:
            raise OSError(errno.EIO, f"this node's witness in etcd is damaged: {error}") from None

    async def _report(self, epoch: Epoch) -> None:
        number = max(epoch.number, self._identity.epoch.number)
        report = Report(self._seen(), self._engine.revision, number, time.time())
        await self._engine.transact([], [Put(report_key(self._node), encode(report))])

    @property
    def is_accepted(self) -> bool:
        """Return whether a state of etcd was accepted that this store has not taken over yet."""
        return self.epoch.number > self._identity.epoch.number

    async def take_over(self) -> None:
        """Take over the accepted state after this store's contents were compared with it. Raises
        OSError."""
        if not self.is_accepted:
            return
        witness = await self._witness()
        if witness.number < self._identity.witness.number:
            # It may have been admitted after the backup was made.
            self._identity.admitted = False
        log.warning("the restored state of etcd was accepted: this store follows it from now on")
        self._identity.epoch = self.epoch
        self._identity.witness = witness
        await self._save()

    # -- while the node runs ---------------------------------------------------------------------

    async def wait_resolved(self, error: WentBack) -> bool:
        """Raise the error: the node begins anew."""
        self._engine.past.doubt(error)
        try:
            await self._save()
        except OSError as failure:
            log.warning("what etcd told cannot be remembered in the store: %s", failure)
        raise error

    async def run(self, session: Session, nodes: Callable[[], int]) -> None:
        """Remember etcd's transactions. `nodes` returns the number of nodes."""
        self._runs = True
        due = 0.0
        while True:
            if trio.current_time() >= due and self._changed:
                await self.put(session)
                due = trio.current_time() + max(_WITNESS_PERIOD_S, nodes() / _WITNESSES_PER_S)
            if self._engine.past.known is not None and (
                self._engine.past.known.mod_revision > self._identity.mark[0]
            ):
                try:
                    await self._save()
                except OSError as error:
                    log.warning("what etcd told cannot be remembered in the store: %s", error)
            await trio.sleep(_MARK_PERIOD_S)

    async def put(self, session: Session) -> None:
        """Put the next witness, if the session goes on. A failure is only logged."""
        if not session.valid():
            return
        self._changed = False
        try:
            number = max((await self._witness()).number, self._identity.witness.number) + 1
            witness = Witness(number, secrets.token_hex(8))
            await self._engine.transact(
                [session.compare()], [Put(key_of(WITNESS, self._node), encode(witness))]
            )
            self._identity.witness = witness
            await self._save()
        except (OSError, Conflict) as error:
            self._changed = True
            log.info("this node's witness could not be put into etcd: %s", error)

    async def _save(self) -> None:
        async with self._saving:
            known = self._engine.past.known
            if known is not None and known.mod_revision > self._identity.mark[0]:
                self._identity.mark = known.mod_revision, known.value
            await trio.to_thread.run_sync(self._identity.save)

    # -- consumer of the replica -----------------------------------------------------------------

    def apply(self, revision: int, events: Sequence[Event]) -> None:
        for event in events:
            if event.key.startswith(b"i"):
                self._changed = True
            else:
                self._take(event.key, event.value)
