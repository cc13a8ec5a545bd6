"""The certificates that a cluster has issued, and which of them are revoked.

An admin writes them into etcd; nodes and mounts watch them there, refuse peers that show a revoked one, and
close the connections of peers that use it. A revoked certificate stays in the list by its serial number, so
another one can be issued under the same name.
"""

import logging
from collections.abc import Callable, Sequence

from ..kv import Event, KeyValue
from ..kv.faults import Faults
from ..model.records import CertificateRecord

log = logging.getLogger(__name__)


class Certificates:
    """The records of certificates in etcd, by serial number (hexadecimal). `own` returns the number of
    this process's certificate."""

    prefixes = (b"K",)

    def __init__(self, own: Callable[[], str] = str, faults: Faults | None = None) -> None:
        self._own = own
        self._faults = faults or Faults()
        self._loaded = False
        self.records: dict[str, CertificateRecord] = {}
        # Called with the serial number of a certificate that was revoked.
        self.revoked: list[Callable[[str], None]] = []

    def is_revoked(self, serial: str) -> bool:
        found = self.records.get(serial)
        return found is not None and found.revoked_s > 0

    def load(self, records: Sequence[KeyValue], revision: int) -> None:
        # A removed record changes nothing: a revoked certificate stays revoked while this process lives.
        for record in records:
            self._take(record.key, record.value)
        self._loaded = True

    def apply(self, revision: int, events: Sequence[Event]) -> None:
        for event in events:
            self._take(event.key, event.value)

    def _take(self, key: bytes, value: bytes | None) -> None:
        serial = key[1:].decode(errors="replace")
        record = self._faults.sound(key, value, CertificateRecord)
        if record is None:
            return
        before = self.is_revoked(serial)
        if before and not record.revoked_s:
            log.error("certificate %s is revoked in etcd no more: it stays so here", serial)
            return
        self.records[serial] = record
        if record.revoked_s and not before:
            self._tell(serial, record)
            for listener in self.revoked:
                listener(serial)

    def _tell(self, serial: str, record: CertificateRecord) -> None:
        if serial == self._own():
            log.error(
                "our certificate was revoked: etcd and store nodes refuse us from now on; end this, and "
                "start it with another one (irdmafs cluster cert %s --role %s)",
                record.name, record.role,
            )  # fmt: skip
        elif self._loaded:
            log.warning("the certificate of %s %r is revoked", record.role, record.name)
