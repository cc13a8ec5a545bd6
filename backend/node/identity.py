"""The identity of a store node, kept in its directory for ever.

STORE/node.json     {"format": 1, "id": HEX, "cluster": ID, "admitted": whether it has been a member
                    of the cluster, "epoch": [number, nonce], "mark": [revision, HEX]: what it last
                    knew of etcd (see history.py)}
"""

import errno
import json
import logging
import os
import secrets
from typing import Any

import msgspec

from ..cluster.lease import Removed
from ..cluster.membership import admit
from ..kv import Conflict, Damaged, Put, SharedEngine
from ..model.records import Epoch, NodeRecord, decode, encode, key_of

__all__ = ["Identity"]

log = logging.getLogger(__name__)

_FORMAT = 1
_NAME = "node.json"


class Identity:
    """The contents of node.json. `node` is the node's number, `cluster` the id of its cluster ("": none
    yet). `mark` is a revision and the transaction that etcd had there (0: none is known). `is_new`: there
    was no such file, and `save` makes one.

    `dir_fd` is the directory's, and must stay open. Raises kv.Damaged if the file makes no sense.
    """

    def __init__(self, directory: str, dir_fd: int) -> None:
        self._directory = directory
        self._dir_fd = dir_fd
        self.node = 0
        self.cluster = ""
        self.admitted = False
        self.epoch = Epoch()
        self.mark: tuple[int, bytes] = 0, b""
        path = f"{directory}/{_NAME}"
        try:
            with open(path, "rb") as file:
                text = file.read(4096)
        except FileNotFoundError:
            self.node = secrets.randbelow((1 << 63) - 1) + 1
            self.is_new = True
            return
        self.is_new = False
        try:
            self._read(json.loads(text))
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(
                f"{path} is damaged ({error}); remove the store directory to begin as a new node"
            ) from None

    def _read(self, record: dict[str, Any]) -> None:
        """Raise KeyError, TypeError or ValueError if it makes no sense."""
        if record["format"] != _FORMAT:
            raise ValueError(f"format {record['format']} is not known to this version")
        self.node, self.cluster = int(record["id"], 16), str(record["cluster"])
        self.admitted = bool(record.get("admitted", False))
        self.epoch = Epoch(*_pair(record.get("epoch", [0, ""])))
        revision, transaction = _pair(record.get("mark", [0, ""]))
        self.mark = revision, bytes.fromhex(transaction)
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
                self._directory,
            )
        self.cluster = cluster
        self.save()

    async def register(self, engine: SharedEngine, weight: float, labels: dict[str, str]) -> None:
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
        record = {
            "format": _FORMAT,
            "id": f"{self.node:x}",
            "cluster": self.cluster,
            "admitted": self.admitted,
            "epoch": [self.epoch.number, self.epoch.nonce],
            "mark": [self.mark[0], self.mark[1].hex()],
        }
        draft = f"{_NAME}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        fd = os.open(draft, flags, 0o600, dir_fd=self._dir_fd)
        try:
            os.write(fd, json.dumps(record).encode() + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(draft, _NAME, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)
        os.fsync(self._dir_fd)


def _pair(value: object) -> tuple[int, str]:
    """Return a pair read from JSON. Raises ValueError."""
    match value:
        case [int(number), str(text)]:
            return number, text
    raise ValueError(f"{value!r} is not a number and a text")
