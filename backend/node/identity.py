"""The identity of a store node, kept in its directory for ever.

STORE/node.json     {"format": 1, "id": HEX, "cluster": ID, "admitted": whether it has been a member
                    of the cluster, "epoch": [number, nonce], "mark": [revision, HEX]: what it last
                    knew of etcd (see mark.py)}
"""

import errno
import logging
import secrets
from typing import Literal

import msgspec

from ..cluster.lease import Removed
from ..cluster.membership import admit
from ..etcd.engine import EtcdEngine
from ..kv import Conflict, Damaged, Put
from ..model.records import Epoch, NodeRecord, decode, encode, key_of
from .directory import StoreDirectory

log = logging.getLogger(__name__)

_NAME = "node.json"


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
        """Make this a store of the cluster with this id. Raises OSError EINVAL if it is another
        cluster's."""
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
        """Register the node with this weight and these labels; a known one keeps its state, up or draining.
        Raises Removed, and OSError."""
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
