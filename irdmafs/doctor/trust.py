"""The doctor's checks of a cluster's certificates on this host, and of the protection of its etcd."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, get_args

import trio

from ..backend.cluster.config import ClusterConfig
from ..backend.model.values import ConfigError
from ..backend.trust.security import Credentials, CredentialsError, Role, identity_in
from . import Check

if TYPE_CHECKING:
    from ..backend.cluster.config_sections import ClusterSection

_ETCD_TIMEOUT_S = 3.0
_RENEW_DAYS = 30


def check_trust(config: ClusterConfig) -> list[Check]:
    """Return a check for each certificate on this host, and one for etcd."""
    section = config.cluster
    if not section.secured:
        found, remedy = "none: nodes and mounts do not know each other", "irdmafs cluster init"
        return [Check("certificates", "warn", found, remedy), _check_etcd(section, "mount")]
    # By certificate: all roles may have the same one.
    there: dict[str, tuple[Role, Credentials]] = {}
    for role in get_args(Role):
        files = section.files(role)
        if files is not None and os.path.exists(files.cert):
            there.setdefault(files.cert, (role, files))
    if not there:
        remedy = "copy those of this host's role here, or: irdmafs cluster cert NAME --role ROLE"
        return [Check("certificate", "fail", f"none is at {section.cert}", remedy)]
    path, (role, _) = next(iter(there.items()))
    with suppress(CredentialsError):
        if (shown := identity_in(path)) is not None:
            role = shown.role
    return [*(_check_certificate(one) for _, one in there.values()), _check_etcd(section, role)]


def _check_certificate(credentials: Credentials) -> Check:
    try:
        found = credentials.check()
        days = credentials.days_left()
    except CredentialsError as error:
        return Check("certificate", "fail", str(error), "")
    name = f"certificate of {found.role} {found.name!r}"
    more = ": mounts with it are read-only" if found.role == "reader" else ""
    if found.subvolume:
        more = ": mounts with it change what is below one directory alone"
    if days < _RENEW_DAYS:
        return Check(name, "warn", f"{credentials.cert} expires in {days:.0f} days{more}",
                     f"irdmafs cluster cert {found.name} --role {found.role}")  # fmt: skip
    return Check(name, "ok", f"{credentials.cert}, for {days:.0f} days{more}")


def _check_etcd(section: ClusterSection, role: Role) -> Check:
    async def ask() -> list[str]:
        async with section.engine(role, _ETCD_TIMEOUT_S) as engine:
            return await engine.admin.weaknesses()

    try:
        weaknesses = trio.run(ask, restrict_keyboard_interrupt_to_checkpoints=True)
    except (ConfigError, OSError) as error:
        text = error.strerror if isinstance(error, OSError) else str(error)
        return Check("etcd", "fail", text or str(error), "see docs/security.md, Setting etcd up")
    if weaknesses:
        return Check("etcd", "warn", "; ".join(weaknesses), "docs/security.md, Setting etcd up")
    if role == "reader":
        return Check("etcd", "ok", "is reached through store nodes, as a reader should")
    return Check("etcd", "ok", "speaks TLS, and checks what each certificate may change")
