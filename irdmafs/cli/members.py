"""Commands about the members of a cluster: cert, members, revoke, rotate-ca, protect."""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from ..mount_options import MountError
from .cluster import cluster, config_option, consent, json_option, print_json, say, with_etcd
from .status import print_table

if TYPE_CHECKING:
    from ..backend.cluster.config import ClusterConfig

__all__ = ["cluster"]


@cluster.command()
@click.argument("name")
@click.option("--role", type=click.Choice(["node", "mount", "reader", "admin", "etcd"]), required=True,
              help="What its holder is, and may do (docs/security.md).")  # fmt: skip
@click.option("--host", "hosts", multiple=True, metavar="NAME",
              help="A name or address that the certificate carries (etcd's needs them).")  # fmt: skip
@click.option("--days", type=click.IntRange(1, 3650), default=825, show_default=True,
              help="How long the certificate is valid.")  # fmt: skip
@click.option("--renew", is_flag=True, help="Replace a member's certificate and stay the same user of "
              "etcd: running processes read it by themselves. Files in DIR are replaced.")  # fmt: skip
@click.option("--root", metavar="DIRECTORY", help="A mount with it changes what is below this directory of "
              "the cluster alone; it is made if it is not there.")  # fmt: skip
@click.option("--out", "directory", metavar="DIR", help="Where they go  [default: where ca.pem is]")
@config_option
def cert(
    name: str,
    role: Any,
    hosts: tuple[str, ...],
    days: int,
    renew: bool,
    root: str | None,
    directory: str | None,
    config: ClusterConfig,
) -> None:
    """Make one more certificate, signed by the cluster's CA; the CA's key must be beside its certificate.

    The certificate and its rights are recorded in etcd, so that it can be revoked.
    """
    from ..backend.trust.authority import issue
    from .cluster_admin import subvolume_at
    from .cluster_members import node_addresses, register_all, renewable

    authority = _authority(config)
    target, owner, subvolume, kept_to = directory or authority, 0, 0, root or ""
    if root is not None:
        if role != "mount" or renew:
            raise click.UsageError("--root is for new certificates of mounts")
        subvolume = with_etcd(config, lambda engine: subvolume_at(engine, config, root))
    if renew and role != "etcd":
        renewed = with_etcd(config, lambda engine: renewable(engine, name, role))
        owner, subvolume, kept_to = renewed.owner, renewed.subvolume, renewed.root
    os.makedirs(target, mode=0o700, exist_ok=True)
    drafted = (
        tempfile.TemporaryDirectory(prefix=".renewed-", dir=target)
        if renew
        else nullcontext(target)
    )
    with drafted as drafts:
        made = issue(drafts, name, role, hosts, days, authority, owner, subvolume)
        try:
            if role != "etcd":
                with_etcd(config, lambda engine: register_all(engine, [made.cert], kept_to))
        except BaseException:
            # A certificate that etcd does not know cannot be revoked.
            os.unlink(made.cert)
            os.unlink(made.key)
            raise
        cert, key = (os.path.join(target, os.path.basename(one)) for one in (made.cert, made.key))
        os.replace(made.key, key)
        os.replace(made.cert, cert)
    say(f"made {cert} and {key}")
    if subvolume:
        say(f"a mount with it reads all, and changes what is below /{kept_to.strip('/')} alone")
    if role == "reader":
        nodes = json.dumps(with_etcd(config, node_addresses))
        say(f"its cluster.toml has to name store nodes: nodes = {nodes} in [cluster]")


@cluster.command()
@json_option
@config_option
def members(as_json: bool, config: ClusterConfig) -> None:
    """List the certificates that were issued, and which of them are revoked."""
    from .cluster_members import list_members

    _authority(config)
    found = with_etcd(config, list_members)
    if as_json:
        print_json([member.to_json() for member in found])
        return
    rows = []
    for member in found:
        record = member.record
        role = f"{record.role} {record.root}".rstrip()
        times_s = record.issued_s, record.expires_s, record.revoked_s
        days = [time.strftime("%Y-%m-%d", time.gmtime(at_s)) if at_s else "-" for at_s in times_s]
        rows.append((record.name, role, member.state, *days, member.serial[:16]))
    columns = ("name", "role", "state", "issued", "expires", "revoked", "serial number")
    print_table(columns, rows)


@cluster.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask before processes that use it are cut off.")
@config_option
def revoke(name: str, yes: bool, config: ClusterConfig) -> None:
    """Shut out all holders of a certificate of this NAME, and end their connections and sessions.

    Nodes and mounts refuse the certificate from now on. What its holders wrote and had not published is
    lost. Another certificate can be issued under the same name afterwards.
    """
    from .cluster_members import revoke as revoke_name
    from .cluster_members import uses_of

    directory = _authority(config)
    uses = with_etcd(config, lambda engine: uses_of(engine, name))
    if uses:
        say(f"with a certificate of {name!r} are in the cluster, and are cut off:", err=True)
        for use in uses:
            click.echo(f"  {use.what}", err=True)
        consent("Cut them off?", "agrees to cutting them off", yes)
    revoked = with_etcd(config, lambda engine: revoke_name(engine, name))
    if not revoked:
        raise MountError(f"all certificates of {name!r} were revoked already")
    for member in revoked:
        serial = f"serial number {member.serial[:16]}..."
        say(f"the certificate of {member.record.role} {name!r} is revoked ({serial})")
    _tell_etcd(config, directory)
    say(f"to let it in again: irdmafs cluster cert {name} --role {revoked[0].record.role}")


def _tell_etcd(config: ClusterConfig, directory: str) -> None:
    """Write the list of revoked certificates that etcd reads."""
    from ..backend.trust.authority import list_revoked
    from ..backend.trust.security import CredentialsError
    from .cluster_members import list_members

    found = with_etcd(config, list_members)
    revoked = [int(member.serial, 16) for member in found if member.record.revoked_s]
    try:
        path = list_revoked(directory, revoked)
    except CredentialsError as error:
        say(f"WARNING: etcd's list of revoked certificates stays as it is: {error}", err=True)
        return
    say(f"copy {path} to the hosts of etcd, which reads it at each connection")


@cluster.command("rotate-ca")
@click.option("--finish", is_flag=True, help="Stop trusting the older CA, when everybody has a certificate "
              "of the newer one.")  # fmt: skip
@config_option
def rotate_ca(finish: bool, config: ClusterConfig) -> None:
    """Replace the cluster's certificate authority, without an interruption.

    Makes a new one, which signs from now on; ca.pem then holds both. docs/security.md has the steps.
    """
    from ..backend.trust.authority import begin_ca_change, finish_ca_change

    directory = _authority(config)
    if finish:
        finish_ca_change(directory)
        say(f"{config.cluster.ca} holds the newer CA only: copy it to all hosts, and restart etcd")
        return
    begin_ca_change(directory, config.cluster.name)
    say(
        f"{config.cluster.ca} holds both CAs: copy it to all hosts, and restart etcd; then give everybody "
        "a new certificate (irdmafs cluster cert), and finish with: irdmafs cluster rotate-ca --finish"
    )


@cluster.command("protect")
@config_option
def protect_command(config: ClusterConfig) -> None:
    """Have etcd check what each certificate may change.

    `cluster init` does so. Give it again after an update of irdmafs, which may have other keys.
    """
    from .cluster_members import certificates_in, protect, register_all

    directory = _authority(config)

    async def work(engine: Any) -> None:
        if not engine.admin.secure:
            raise MountError(
                "etcd knows nobody by a certificate: it is spoken to in clear "
                "(etcd_ca, etcd_cert, etcd_key in [cluster])"
            )
        await register_all(engine, certificates_in(directory))
        await protect(engine)

    with_etcd(config, work)
    _tell_etcd(config, directory)
    say("etcd checks what each certificate may change")


def _authority(config: ClusterConfig) -> str:
    """Return the directory of the CA. Raises MountError if the cluster has none."""
    if config.cluster.ca is None:
        raise MountError(f"cluster {config.cluster.name!r} has no CA; it was made with --no-tls")
    return os.path.dirname(config.cluster.ca)
