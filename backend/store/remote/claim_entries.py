"""The claims of all mounts as etcd has them, kept up to date through the replica hub."""

from typing import NamedTuple

from ...cluster.record_keeper import RecordKeeper
from ...kv.faults import Faults
from ...model.records import CLAIM, FOLLOWED, WISH

# Follows a lease in the value of an exclusive claim.
EXCLUSIVE = b"x"


class Claim(NamedTuple):
    lease: int
    revision: int


class ClaimEntries(RecordKeeper):
    """The claims of all mounts, and who waits for them to be given up. It
    comes after `Members`, which has the followers of directories."""

    prefixes: tuple[bytes, ...] = (CLAIM, WISH, FOLLOWED)

    def __init__(self, faults: Faults) -> None:
        super().__init__(faults)
        self.claims: dict[int, Claim] = {}
        self.exclusive: dict[int, int] = {}  # directory -> lease
        self.wishes: dict[int, set[int]] = {}  # directory -> leases
        self.touched: set[int] = set()  # directories about which something changed
        self.is_followed_anew = False  # a directory, and with it all that is below

    def take(self, key: bytes, value: bytes | None, revision: int) -> None:
        if key.startswith(FOLLOWED):
            self.is_followed_anew = True
            return
        directory = int.from_bytes(key[1:9], "big")
        self.touched.add(directory)
        if key.startswith(WISH):
            wishes, lease = self.wishes.setdefault(directory, set()), int.from_bytes(key[9:], "big")
            wishes.discard(lease) if value is None else wishes.add(lease)
            if not wishes:
                del self.wishes[directory]
            return
        self.exclusive.pop(directory, None)
        if value is None:
            self.claims.pop(directory, None)
        else:
            if len(value) < 8 or value[8:] not in (b"", EXCLUSIVE):
                self.faults.add(key, "it is no lease")  # and so nobody's claim: others delete it
            lease = int.from_bytes(value[:8], "big")
            self.claims[directory] = Claim(lease, revision)
            if value[8:] == EXCLUSIVE:
                self.exclusive[directory] = lease
