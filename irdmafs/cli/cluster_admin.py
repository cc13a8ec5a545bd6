"""Write what the commands of a cluster change: its first files and records, the state of nodes, and the
directories that mounts are kept to."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import trio

from ..backend.cluster.config import ClusterConfig
from ..backend.cluster.config_sections import ETCD_PORT
from ..backend.cluster.membership import read_settings
from ..backend.kv import Compare, Conflict, Delete, Exists, Put, end_of
from ..backend.model.clock import now_ns
from ..backend.model.placement import pool_of
from ..backend.model.records import (
    NEXT_INO_OF,
    SETTINGS_KEY,
    NodeRecord,
    Settings,
    claim_key,
    decode,
    encode,
    key_of,
    pool_key,
    wish_key,
)
from ..backend.model.values import ConfigError, split_host_port
from ..backend.namespace.inode import NAME_MAX, ROOT_INO, Inode, inode_key, name_key, time_key
from ..backend.namespace.numbers import SUBVOLUMES, next_ino_key
from ..backend.trust.authority import REVOKED_FILE, alone_in, issue, list_revoked, make_ca
from ..backend.trust.security import Role

if TYPE_CHECKING:
    from ..backend.etcd.engine import EtcdEngine

Record = TypeVar("Record", bound=msgspec.Struct)

_CHANGE_RETRIES = 10
_LOOK_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True)
class Plan:
    """The cluster that `irdmafs cluster init` is asked to make. `etcd_options` are keys of [cluster]."""

    name: str
    etcd: tuple[str, ...]
    etcd_options: Mapping[str, str]
    etcd_hosts: tuple[str, ...]
    tls: bool


@contextmanager
def made_files(directory: str, plan: Plan) -> Iterator[str]:
    """Write cluster.toml and the certificates, unless an earlier run left those of the same cluster, and
    yield the path of cluster.toml. Files that are new are removed again when the body fails, or is
    interrupted.

    Raises ConfigError when the files that exist are another cluster's, or when they cannot be written, or
    another command changes them.
    """
    path = os.path.join(directory, "cluster.toml")
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        with alone_in(directory):
            there = os.listdir(directory)
            try:
                _write_files(directory, path, plan)
                yield path
            except BaseException:
                for name in {*os.listdir(directory)}.difference(there):
                    if name.endswith(("cluster.toml", ".pem", ".key", ".crl")):
                        os.unlink(os.path.join(directory, name))
                raise
    except OSError as error:
        raise ConfigError(
            f"cannot make {path}: {error.strerror}; choose another directory with --out"
        ) from error


def _write_files(directory: str, path: str, plan: Plan) -> None:
    text = _config_text(plan)
    if os.path.exists(path):
        if Path(path).read_text() != text:
            raise ConfigError(
                f"{path} describes a cluster already; choose another directory with --out, or remove it"
            )
        return
    if plan.tls:
        make_ca(directory, plan.name)
        list_revoked(directory, ())
        roles: tuple[Role, ...] = ("node", "mount", "reader", "admin")
        for role in roles:
            issue(directory, role, role)
        if plan.etcd_hosts:
            issue(directory, "etcd", "etcd", plan.etcd_hosts)
    # Written last: its presence says that the other files are complete.
    with open(path, "x") as file:
        file.write(text)


def _config_text(plan: Plan) -> str:
    values: dict[str, object] = {"name": plan.name, "etcd": list(plan.etcd)}
    options = dict(plan.etcd_options)
    if plan.etcd_hosts:
        options |= {"etcd_ca": "ca.pem", "etcd_cert": "{role}.pem", "etcd_key": "{role}.key"}
    for key, value in options.items():
        # Flags are relative to the working directory, keys of the file to the file's directory.
        values[key] = value if plan.etcd_hosts else os.path.abspath(value)
    if plan.tls:
        values |= {"ca": "ca.pem", "cert": "{role}.pem", "key": "{role}.key"}
    # A JSON string, or array of strings, is also valid TOML.
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    return "\n".join(["[cluster]", *lines, "", "[node]", "", "[mount]", ""])


def hosts_of(endpoints: Iterable[str]) -> tuple[str, ...]:
    """Return the hosts of endpoints HOST:PORT. Raises ConfigError."""
    try:
        found = (split_host_port(endpoint, ETCD_PORT)[0] for endpoint in endpoints)
        return tuple(dict.fromkeys(found))
    except ValueError as error:
        raise ConfigError(f"--etcd: {error}") from None


def etcd_arguments(directory: str) -> list[str]:
    """Return the arguments with which etcd shows its certificate, and accepts only certificates of the
    cluster that are not revoked. With them etcd also keeps its leader when a member that was cut off comes
    back (as from etcd 3.5 on), and compacts its history: newer versions let no store node do it."""
    ca, cert, key = (os.path.join(directory, name) for name in ("ca.pem", "etcd.pem", "etcd.key"))
    return [
        f"--cert-file={cert}",
        f"--key-file={key}",
        f"--trusted-ca-file={ca}",
        "--client-cert-auth",
        f"--client-crl-file={os.path.join(directory, REVOKED_FILE)}",
        "--enable-grpc-gateway=false",
        "--auto-compaction-mode=periodic",
        "--auto-compaction-retention=15m",
        f"--peer-cert-file={cert}",
        f"--peer-key-file={key}",
        f"--peer-trusted-ca-file={ca}",
        "--peer-client-cert-auth",
        "--peer-cert-allowed-cn=etcd",
        "--pre-vote",
    ]


async def refuse_existing(engine: EtcdEngine, config: ClusterConfig) -> None:
    """Raise ConfigError if there is a cluster of this name."""
    if await engine.get(SETTINGS_KEY) is not None:
        raise _exists(config)


def _exists(config: ClusterConfig) -> ConfigError:
    return ConfigError(
        f"etcd at {', '.join(config.cluster.etcd)} has a cluster named {config.cluster.name!r} "
        "already; choose another --name"
    )


async def register(engine: EtcdEngine, config: ClusterConfig, settings: Settings) -> None:
    """Put the cluster's settings into etcd. Raises ConfigError if there is a cluster of this name."""
    try:
        await engine.transact([(SETTINGS_KEY, 0)], [Put(SETTINGS_KEY, encode(settings))])
    except Conflict:
        raise _exists(config) from None


async def set_node_state(engine: EtcdEngine, node: int, state: str) -> None:
    """Set a node's state to "up" or "draining". Raises ConfigError if the node is not known any more."""
    if await change_record(engine, key_of(b"N", node), NodeRecord, state=state) is None:
        raise ConfigError(f"node {node:016x} was never admitted to the cluster, or removed")


async def change_record(
    engine: EtcdEngine, key: bytes, kind: type[Record], **changes: object
) -> Record | None:
    """Change fields of a record that other processes may change at the same time. Return the record as it
    was before, None if it does not exist. Raises ConfigError."""
    for _ in range(_CHANGE_RETRIES):
        found = await engine.get(key)
        if found is None:
            return None
        record = decode(found.value, kind)
        changed = msgspec.structs.replace(record, **changes)
        try:
            if changed != record:
                await engine.transact([(key, found.mod_revision)], [Put(key, encode(changed))])
            return record
        except Conflict:
            continue
    raise ConfigError(f"the record {key!r} in etcd changes all the time; try again")


async def forget_node(engine: EtcdEngine, node: int) -> None:
    """Remove a dead node's record. Raises ConfigError if the node has come back."""
    key = key_of(b"N", node)
    alive = key_of(b"n", node)
    try:
        await engine.transact([(alive, 0)], [Delete(key)])
    except Conflict:
        raise ConfigError(f"node {node:016x} is up again; drain it first") from None


# -- directories that mounts are kept to -------------------------------------------------------------


async def subvolume_at(engine: EtcdEngine, config: ClusterConfig, path: str) -> int:
    """Return the number of the subvolume at a path of the cluster, made if missing. Raises ConfigError."""
    if not engine.admin.secure:
        raise ConfigError("etcd checks nobody's rights, so no mount can be kept to a directory")
    *above, name = [os.fsencode(part) for part in path.split("/") if part] or [b""]
    if not name or any(part in (b".", b"..") or len(part) > NAME_MAX for part in (*above, name)):
        raise ConfigError(f"{path!r} is no path of a directory below the root of the cluster")
    settings = await read_settings(engine, config)
    for _ in range(_CHANGE_RETRIES):
        parent = ROOT_INO
        for part in above:
            parent = await _inode_behind(engine, parent, part)
            if not parent:
                raise ConfigError(f"{path}: there is no {os.fsdecode(part)!r}; make it on a mount")
        found = await _inode_behind(engine, parent, name)
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
            return await _make_subvolume(engine, settings, parent, name)
        except Conflict as conflict:
            if conflict.key == claim_key(parent):
                await _recall_claim(engine, settings, parent)
    raise ConfigError(f"others change the directory of {path} all the time; try again")


async def _inode_behind(engine: EtcdEngine, directory: int, name: bytes) -> int:
    """Return the inode that a name leads to, 0: there is none."""
    found = await engine.get(name_key(directory, name))
    return int.from_bytes(found.value, "big") if found is not None else 0


async def _make_subvolume(engine: EtcdEngine, settings: Settings, parent: int, name: bytes) -> int:
    """Make a directory that is a subvolume. Raises Conflict, ConfigError."""
    there = {record.key for record in await engine.range(NEXT_INO_OF, end_of(NEXT_INO_OF))}
    # Numbers are not used again: certificates for a subvolume may be there after it was removed.
    numbers = (number for number in SUBVOLUMES if next_ino_key(number) not in there)
    subvolume = next(numbers, 0)
    if not subvolume:
        raise ConfigError(f"a cluster has {len(SUBVOLUMES)} of these directories at most")
    now = now_ns()
    inodes = [Inode(subvolume, stat.S_IFDIR | 0o755, 0, 0, now)]
    absent = claim_key(parent), name_key(parent, name), next_ino_key(subvolume)
    conditions: list[Compare] = [(key, 0) for key in absent]
    if parent == ROOT_INO and await engine.get(inode_key(ROOT_INO)) is None:
        inodes.append(Inode(ROOT_INO, stat.S_IFDIR | 0o755, 0, 0, now))  # it was never mounted
        conditions.append((inode_key(ROOT_INO), 0))
    else:
        conditions.append(Exists(inode_key(parent)))
    places = {subvolume: parent}
    puts = [Put(inode_key(one.ino), one.encode(places.get(one.ino, 0))) for one in inodes]
    puts += [
        Put(name_key(parent, name), subvolume.to_bytes(8, "big")),
        Put(time_key(parent), now.to_bytes(8, "big")),
        Put(next_ino_key(subvolume), (subvolume + 1).to_bytes(8, "big")),
        # A mount that is kept to the directory may not ask for the groups that its files need.
        Put(pool_key(pool_of(settings.replicas)), b""),
    ]
    await engine.transact(conditions, puts)
    return subvolume


async def _recall_claim(engine: EtcdEngine, settings: Settings, directory: int) -> None:
    """Have the mount that has the claim of a directory give it up. Raises ConfigError."""
    patience_s = 2 * settings.lease_ttl_s
    lease = await engine.leases.grant(patience_s)
    await engine.transact((), [Put(wish_key(directory, lease), b"", lease)])
    until = time.monotonic() + patience_s
    while await engine.get(claim_key(directory)) is not None:
        if time.monotonic() > until:
            raise ConfigError("the mount at work in the directory above does not answer; try again")
        await trio.sleep(_LOOK_AGAIN_S)
