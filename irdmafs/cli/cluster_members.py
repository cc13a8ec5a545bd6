"""The members of a cluster: the certificates that etcd knows, what each may write, and revocation."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ..backend.cluster.etcd_rights import Range, own_ranges, shared_ranges, subvolume_ranges
from ..backend.cluster.lease import MOUNT, NODE
from ..backend.etcd.admin import ROOT
from ..backend.etcd.calls import REPAIR
from ..backend.etcd.leases import LEASE_BITS
from ..backend.kv import Conflict, NoSpace, Put, end_of
from ..backend.model.records import (
    CertificateRecord,
    MountRecord,
    NodeAddress,
    certificate_key,
    decode,
    encode,
)
from ..backend.model.values import ConfigError
from ..backend.trust.security import Identity, Role, identity_in
from .cluster_admin import change_record

if TYPE_CHECKING:
    from ..backend.etcd.engine import EtcdEngine

# The roles of processes with keys of their own in etcd, and of those that are users of etcd.
_KEEPING_ROLES: tuple[Role, ...] = ("mount", "node", "reader")
_SHARED_ROLES: tuple[Role, ...] = ("mount", "node")


@dataclass(frozen=True, slots=True)
class Member:
    """A certificate that was issued, by its serial number."""

    serial: str
    record: CertificateRecord

    @property
    def state(self) -> str:
        if self.record.revoked_s:
            return "revoked"
        return "expired" if self.record.expires_s < time.time() else "valid"

    def to_json(self) -> dict[str, Any]:
        record = self.record
        return {
            "name": record.name,
            "role": record.role,
            "root": record.root,
            "state": self.state,
            "serial": self.serial,
            "issued": record.issued_s,
            "expires": record.expires_s,
            "revoked": record.revoked_s or None,
        }


@dataclass(frozen=True, slots=True)
class Use:
    """A process that is in the cluster with a certificate: a description for people, its key in etcd, and
    the lease of that key (0: none)."""

    what: str
    key: bytes
    lease: int


async def list_members(engine: EtcdEngine) -> list[Member]:
    """Return the certificates that were issued, by name, the newest first."""
    found = [
        Member(pair.key[1:].decode(errors="replace"), decode(pair.value, CertificateRecord))
        for pair in await engine.range(b"K", b"L")
    ]
    return sorted(found, key=lambda member: (member.record.name, -member.record.issued_s))


async def renewable(engine: EtcdEngine, name: str, role: Role) -> CertificateRecord:
    """Return the newest certificate of this name and role. Raises ConfigError if none is not revoked."""
    for member in await list_members(engine):
        record = member.record
        if (record.name, record.role) == (name, role) and record.owner and not record.revoked_s:
            return record
    raise ConfigError(f"{role} {name!r} has no certificate to renew; leave --renew out to make one")


async def register_all(engine: EtcdEngine, paths: Iterable[str], root: str = "") -> None:
    """Record certificates in etcd, and the rights of each if etcd authenticates its users. Records that
    exist stay. `root` is the path of the subvolume that they are kept to. Raises ConfigError when one of
    the certificates is revoked."""
    identities = {path: identity_in(path) for path in paths}
    if engine.admin.secure:
        await _set_shared_roles(engine, filter(None, identities.values()))
    known = {member.serial: member.record for member in await list_members(engine)}
    owners: dict[int, list[CertificateRecord]] = {}
    for record in known.values():
        owners.setdefault(record.owner, []).append(record)
    for path, identity in identities.items():
        if identity is None or identity.role == "etcd":
            continue
        if identity.serial in known:
            if known[identity.serial].revoked_s:
                raise ConfigError(
                    f"{path} is revoked; remove it and its key, and make another with: irdmafs "
                    f"cluster cert {identity.name} --role {identity.role}"
                )
            continue
        others = owners.setdefault(identity.owner, [])
        renewed = identity.name, identity.role, 0
        if any((one.name, one.role, one.revoked_s) != renewed for one in others):
            raise ConfigError(
                f"{path} has the same number in etcd as another certificate; remove it and its key, "
                "and issue it again"
            )
        record = CertificateRecord(
            identity.name, identity.role, identity.owner, int(time.time()), identity.expires_s,
            subvolume=identity.subvolume, root=root,
        )  # fmt: skip
        await _know(engine, identity.serial, record)
        others.append(record)


async def _know(engine: EtcdEngine, serial: str, record: CertificateRecord) -> None:
    if engine.admin.secure:
        await _add_user(engine, record)
    key = certificate_key(serial)
    with suppress(Conflict):
        await engine.transact([(key, 0)], [Put(key, encode(record))])


async def protect(engine: EtcdEngine) -> None:
    """Make etcd's roles and users, and enable its authentication. Can be repeated, and should be after an
    update of irdmafs. The caller's certificate must be an admin's.

    Raises ConfigError where etcd is not the cluster's own.
    """
    auth = engine.admin.auth
    is_enabled = await auth.is_enabled()
    if not is_enabled and await engine.admin.has_others():
        raise ConfigError(
            "this etcd has keys of others, too, who would be shut out: give the cluster an etcd of its own"
        )
    await _set_shared_roles(engine)
    for member in await list_members(engine):
        if not member.record.revoked_s:
            await _add_user(engine, member.record)
    if not is_enabled:
        await auth.enable()


async def _set_shared_roles(engine: EtcdEngine, more: Iterable[Identity] = ()) -> None:
    """Set the rights of nodes and of mounts. `more` are members who are not recorded yet."""
    everything = engine.prefix, end_of(engine.prefix)
    records = [member.record for member in await list_members(engine)]
    readers = {one.owner for one in records if one.role == "reader" and not one.revoked_s}
    readers |= {identity.owner for identity in more if identity.role == "reader"}
    of_readers = [keys for owner in readers for keys in own_ranges("reader", owner)]
    for role in _SHARED_ROLES:
        ranges = [_absolute(engine, one) for one in shared_ranges(role)]
        if role == "node":
            ranges += [_absolute(engine, one) for one in of_readers]
        await engine.admin.auth.set_role(_role_in_etcd(engine, role), [everything], ranges)


async def _add_user(engine: EtcdEngine, record: CertificateRecord) -> None:
    auth, user = engine.admin.auth, _user_of(record)
    if record.role == "admin":
        await auth.add_user(user, [ROOT])
        return
    if record.role == "reader":
        return  # it does not reach etcd
    role = _as_role(record.role)
    keys, read, roles = own_ranges(role, record.owner), [], [_role_in_etcd(engine, user)]
    if record.subvolume:
        keys += subvolume_ranges(record.subvolume)
        read.append((engine.prefix, end_of(engine.prefix)))
    else:
        roles.append(_role_in_etcd(engine, role))
    await auth.set_role(roles[0], read, [_absolute(engine, one) for one in keys])
    await auth.add_user(user, roles)


async def _remove_user(engine: EtcdEngine, record: CertificateRecord) -> None:
    user = _user_of(record)
    await engine.admin.auth.delete_user(user)
    await engine.admin.auth.delete_role(_role_in_etcd(engine, user))


async def uses_of(engine: EtcdEngine, name: str) -> list[Use]:
    """Return the processes in the cluster that use a certificate of this name: those that say so, and those
    whose lease in etcd begins with its number."""
    members = await list_members(engine)
    owners = {one.record.owner for one in members if one.record.name == name and one.record.owner}
    found = []
    for kind in (MOUNT, NODE):
        leases = await engine.leases.used_in(kind, end_of(kind))
        for pair in await engine.range(kind, end_of(kind)):
            lease = leases.get(pair.key, 0)
            what, said = _describe(pair.key, pair.value)
            if said == name or lease >> LEASE_BITS in owners:
                found.append(Use(what, pair.key, lease))
    return found


async def node_addresses(engine: EtcdEngine) -> list[str]:
    """Return the addresses of the store nodes that are up, HOST:PORT."""
    found = []
    for pair in await engine.range(NODE, end_of(NODE)):
        with suppress(msgspec.DecodeError):
            found.append(decode(pair.value, NodeAddress).endpoint)
    return found


def _describe(key: bytes, value: bytes) -> tuple[str, str]:
    """Return a description of a process for people, and the name that it says its certificate has."""
    try:
        if key.startswith(MOUNT):
            mount = decode(value, MountRecord)
            return f"the mount {mount.mountpoint} on {mount.host}", mount.name
        node = decode(value, NodeAddress)
        return f"store node {int.from_bytes(key[1:], 'big'):016x} on {node.host}", node.name
    except msgspec.DecodeError:
        return f"something with a damaged record ({key!r})", ""


async def revoke(engine: EtcdEngine, name: str) -> list[Member]:
    """Revoke all valid certificates of a name, end the sessions of processes that use them, and return the
    certificates. Can be repeated. Raises ConfigError when there is no such certificate."""
    members = [member for member in await list_members(engine) if member.record.name == name]
    if not members:
        raise ConfigError(f"no certificate was issued to {name!r}; see irdmafs cluster members")
    try:
        revoked = [member for member in members if not member.record.revoked_s]
        for member in revoked:
            key, now_s = certificate_key(member.serial), int(time.time())
            await change_record(engine, key, CertificateRecord, revoked_s=now_s)
    except NoSpace:
        # The member may be the one that filled etcd.
        await _shut_out(engine, name, members)
        raise ConfigError(
            f"etcd has no room to note that {name!r} is revoked; what {name!r} kept there is removed, and "
            f"etcd refuses its requests. Give these commands: {REPAIR}; irdmafs cluster revoke {name}"
        ) from None
    # Nodes and mounts have cut these processes off.
    await _shut_out(engine, name, members)
    if engine.admin.secure:
        await _set_shared_roles(engine)
    return revoked


async def _shut_out(engine: EtcdEngine, name: str, members: Sequence[Member]) -> None:
    """Have etcd refuse the requests of these certificates, all of this name, end their sessions, and remove
    their keys. Needs no room in etcd."""
    for member in members:
        if engine.admin.secure:
            await _remove_user(engine, member.record)
    for use in await uses_of(engine, name):
        if use.lease:
            await engine.leases.revoke(use.lease)
        else:
            await engine.admin.remove(use.key, use.key + b"\0")
    for member in members:
        # Some of its keys may have no lease, or one that is kept alive.
        if member.record.owner and member.record.role in _KEEPING_ROLES:
            for start, end in own_ranges(_as_role(member.record.role), member.record.owner):
                await engine.admin.remove(start, end)


def certificates_in(directory: str) -> list[str]:
    """Return the certificates in a directory except those of the CA and of etcd."""
    return sorted(
        os.path.join(directory, name)
        for name in os.listdir(directory)
        if name.endswith(".pem") and name not in ("ca.pem", "etcd.pem")
    )


def _user_of(record: CertificateRecord) -> str:
    return Identity(_as_role(record.role), record.name, record.owner).user


def _as_role(text: str) -> Role:
    roles: dict[str, Role] = {role: role for role in ("node", "mount", "reader", "admin", "etcd")}
    if text not in roles:
        raise ConfigError(f"{text!r} is no role that this version knows")
    return roles[text]


def _role_in_etcd(engine: EtcdEngine, owner: str) -> str:
    """Return the name of etcd's role with the rights of a role of the cluster, or of one user."""
    return f"{engine.prefix.decode().strip('/')} {owner}"


def _absolute(engine: EtcdEngine, keys: Range) -> tuple[bytes, bytes]:
    return engine.prefix + keys.start, engine.prefix + keys.end
