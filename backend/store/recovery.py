"""Repair of an embedded store whose journal is damaged, without giving up anything that is there.

Every sound record is kept, also those behind the damage. As changes in between are lost, names may lead to
nothing and files may have lost their name. Names that lead to nothing are removed, and files without a name
get one in the directory lost+found: files and directories by their inode's number, contents without a known
inode by their own number.
"""

import os
import stat
import time
from typing import NamedTuple

import msgspec

from ..kv import Damaged, Delete, Put
from ..kv.journal import Broken, Journal, survey
from ..kv.sqlite import SQLiteEngine
from ..namespace.inode import ROOT_INO, Inode, inode_key, name_key
from .extents import ExtentStore
from .storedir import in_memory, lock_directory

__all__ = ["Recovered", "recover"]

LOST_AND_FOUND = b"lost+found"


class Recovered(NamedTuple):
    """The result of a recovery. `records` of the journal were sound. The file `kept` is a copy of the
    damaged journal, `broken` are its damaged ranges. `dropped` names led to nothing. `found` are the names
    in lost+found."""

    records: int
    broken: tuple[Broken, ...]
    kept: str
    dropped: int
    found: tuple[str, ...]


async def recover(directory: str) -> Recovered | None:
    """Repair the store in a directory. Returns None if there is nothing to repair. Raises StoreInUse,
    Damaged if more than the journal is damaged, OSError."""
    path = f"{directory}/kv.sqlite"
    if not os.path.exists(path):
        raise Damaged(f"{directory} is not the store of an irdmafs mount: it has no kv.sqlite")
    lock = lock_directory(directory, "store is in use by another daemon")
    try:
        power_safe = not in_memory(directory)
        journal = f"{path}-redo"
        with open(journal, "rb") as file:
            data = file.read()
        found = survey(data, power_safe=power_safe)
        if not found.broken:
            return None
        kept = _kept(journal, data)
        _write_anew(journal, found.payloads, power_safe)
        engine = SQLiteEngine(path, power_safe=power_safe)
        extents = ExtentStore(f"{directory}/extents")
        try:
            dropped, names = await _Repair(engine, extents).carry_out()
        finally:
            extents.close()
            await engine.close()
        return Recovered(len(found.payloads), tuple(found.broken), kept, dropped, names)
    finally:
        os.close(lock)


def _kept(journal: str, data: bytes) -> str:
    """Write a copy of the damaged journal beside it, and return its name."""
    number = 1
    while True:
        copy = f"{journal}-damaged-{number}"
        try:
            with open(copy, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            return copy
        except FileExistsError:
            number += 1


def _write_anew(path: str, payloads: list[bytes], power_safe: bool) -> None:
    draft = f"{path}-new"
    if os.path.lexists(draft):
        os.unlink(draft)
    journal = Journal(draft, power_safe=power_safe)
    try:
        for payload in payloads:
            journal.append(payload)
    finally:
        journal.close()
    os.rename(draft, path)


class _Repair:
    def __init__(self, engine: SQLiteEngine, extents: ExtentStore) -> None:
        self._engine = engine
        self._extents = extents
        self._operations: list[Put | Delete] = []
        self._inodes: dict[int, Inode] = {}
        self._now = time.time_ns()

    async def carry_out(self) -> tuple[int, tuple[str, ...]]:
        """Repair names and contents. Return how many names were dropped, and the names in lost+found."""
        for record in await self._engine.range(b"i", b"j"):
            ino = int.from_bytes(record.key[1:9], "big")
            try:
                self._inodes[ino] = Inode.decode(ino, record.value, record.mod_revision)
            except msgspec.DecodeError:
                self._operations.append(Delete(record.key))
        if ROOT_INO not in self._inodes:
            self._make(ROOT_INO, stat.S_IFDIR | 0o755)
        named, dropped, lost = await self._check_names()
        found: dict[bytes, int] = {}
        for ino, inode in self._inodes.items():
            if ino not in named and ino != ROOT_INO and (inode.version or not inode.is_file):
                found[b"#%d" % ino] = ino
        next_ino = max(self._inodes) + 1
        contents = {inode.extent for inode in self._inodes.values()}
        for extent in sorted(set(self._extents) - contents):
            status = self._extents.stat(extent)
            inode = self._make(next_ino, stat.S_IFREG | 0o600)
            inode.size, inode.blocks = status.st_size, status.st_blocks
            inode.extent, inode.version = extent, 1
            self._operations[-1] = Put(inode_key(next_ino), inode.encode())
            found[b"content-%x" % extent] = next_ino
            next_ino += 1
        if found and not lost:
            lost = next_ino
            self._make(lost, stat.S_IFDIR | 0o700)
            self._name(ROOT_INO, LOST_AND_FOUND, lost)
        for name, ino in found.items():
            self._name(lost, name, ino)
        await self._engine.transact(self._operations)
        return dropped, tuple(os.fsdecode(name) for name in found)

    async def _check_names(self) -> tuple[set[int], int, int]:
        """Return which inodes have a name, how many names lead to nothing, and the directory lost+found (0:
        none)."""
        named: set[int] = set()
        dropped = lost = 0
        for record in await self._engine.range(b"d", b"e"):
            parent = self._inodes.get(int.from_bytes(record.key[1:9], "big"))
            ino = int.from_bytes(record.value, "big")
            if parent is None or not parent.is_dir or ino not in self._inodes:
                self._operations.append(Delete(record.key))
                dropped += 1
                continue
            named.add(ino)
            if record.key == name_key(ROOT_INO, LOST_AND_FOUND) and self._inodes[ino].is_dir:
                lost = ino
        return named, dropped, lost

    def _make(self, ino: int, mode: int) -> Inode:
        inode = self._inodes[ino] = Inode(ino, mode, os.getuid(), os.getgid(), self._now)
        self._operations.append(Put(inode_key(ino), inode.encode()))
        return inode

    def _name(self, parent: int, name: bytes, ino: int) -> None:
        self._operations.append(Put(name_key(parent, name), ino.to_bytes(8, "big")))
