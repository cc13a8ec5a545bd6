"""Make the directory that mounts are to be kept to."""

from __future__ import annotations

import os
import stat
import time
from typing import TYPE_CHECKING

import trio

from ..backend.kv import Compare, Conflict, Exists, Put, end_of
from ..backend.model.clock import now_ns
from ..backend.model.placement import pool_of
from ..backend.model.records import (
    NEXT_INO_OF,
    SETTINGS_KEY,
    Settings,
    claim_key,
    decode,
    pool_key,
    wish_key,
)
from ..backend.model.values import ConfigError
from ..backend.namespace.inode import NAME_MAX, ROOT_INO, Inode, inode_key, name_key, time_key
from ..backend.namespace.numbers import SUBVOLUMES, next_ino_key

if TYPE_CHECKING:
    from ..backend.etcd.engine import EtcdEngine

_RETRIES = 10
_LOOK_AGAIN_S = 0.05


async def subvolume_at(engine: EtcdEngine, path: str) -> int:
    """Return the number of the subvolume at a path of the cluster, which is made if nothing is there.
    Raises ConfigError."""
    if not engine.admin.secure:
        raise ConfigError(
            "etcd checks nobody's rights here, so no mount can be kept to a directory"
        )
    *above, name = [os.fsencode(part) for part in path.split("/") if part] or [b""]
    if not name or any(part in (b".", b"..") or len(part) > NAME_MAX for part in (*above, name)):
        raise ConfigError(f"{path!r} is no path of a directory below the root of the cluster")
    found_settings = await engine.get(SETTINGS_KEY)
    if found_settings is None:
        raise ConfigError("there is no cluster of this name in etcd")
    settings = decode(found_settings.value, Settings)
    for _ in range(_RETRIES):
        parent = ROOT_INO
        for part in above:
            parent = await _behind(engine, parent, part)
            if not parent:
                raise ConfigError(f"{path}: there is no {os.fsdecode(part)!r}; make it on a mount")
        found = await _behind(engine, parent, name)
        if found in SUBVOLUMES:
            return found
        if found:
            raise ConfigError(
                f"{path} is no directory that mounts can be kept to, as its files have numbers like all "
                "others; move it away, give this command again, and move the files into the new one"
            )
        if parent >= SUBVOLUMES.start:
            raise ConfigError(f"{path} lies in a directory that mounts are kept to; choose another")
        try:
            return await _make(engine, settings, parent, name)
        except Conflict as conflict:
            if conflict.key == claim_key(parent):
                await _recall(engine, settings, parent)
    raise ConfigError(f"others change the directory of {path} all the time; try again")


async def _behind(engine: EtcdEngine, directory: int, name: bytes) -> int:
    """Return the inode that a name leads to, 0: there is none."""
    found = await engine.get(name_key(directory, name))
    return int.from_bytes(found.value, "big") if found is not None else 0


async def _make(engine: EtcdEngine, settings: Settings, parent: int, name: bytes) -> int:
    """Make a directory that is a subvolume. Raises Conflict, ConfigError."""
    there = {record.key for record in await engine.range(NEXT_INO_OF, end_of(NEXT_INO_OF))}
    # Numbers are not used again: certificates for a subvolume may be there after it was removed.
    numbers = (number for number in SUBVOLUMES if next_ino_key(number) not in there)
    subvolume = next(numbers, 0)
    if not subvolume:
        raise ConfigError(f"a cluster has {len(SUBVOLUMES)} of these directories at most")
    now = now_ns()
    inodes = [Inode(subvolume, stat.S_IFDIR | 0o755, 0, 0, now)]
    conditions: list[Compare] = [
        (claim_key(parent), 0),
        (name_key(parent, name), 0),
        (next_ino_key(subvolume), 0),
    ]
    if parent == ROOT_INO and await engine.get(inode_key(ROOT_INO)) is None:
        inodes.append(Inode(ROOT_INO, stat.S_IFDIR | 0o755, 0, 0, now))  # it was never mounted
        conditions.append((inode_key(ROOT_INO), 0))
    else:
        conditions.append(Exists(inode_key(parent)))
    puts = [Put(inode_key(inode.ino), inode.encode()) for inode in inodes]
    puts += [
        Put(name_key(parent, name), subvolume.to_bytes(8, "big")),
        Put(time_key(parent), now.to_bytes(8, "big")),
        Put(next_ino_key(subvolume), (subvolume + 1).to_bytes(8, "big")),
        # A mount that is kept to the directory may not ask for the groups that its files need.
        Put(pool_key(pool_of(settings.replicas)), b""),
    ]
    await engine.transact(conditions, puts)
    return subvolume


async def _recall(engine: EtcdEngine, settings: Settings, directory: int) -> None:
    """Have the mount that has the claim of a directory give it up. Raises ConfigError."""
    patience_s = 2 * settings.lease_ttl_s
    lease = await engine.leases.grant(patience_s)
    await engine.transact((), [Put(wish_key(directory, lease), b"", lease)])
    until = time.monotonic() + patience_s
    while await engine.get(claim_key(directory)) is not None:
        if time.monotonic() > until:
            raise ConfigError(
                "the mount that works in the directory above does not answer; try again"
            )
        await trio.sleep(_LOOK_AGAIN_S)
