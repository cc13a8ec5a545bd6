"""The commands of a cluster: `irdmafs cluster ...`.

Libraries other than click are imported when a command runs. Exit codes are those of the other commands, and
for `cluster status`: 0 all is well, 1 degraded, 2 unavailable.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..backend.model.values import ConfigError
from ..mount import background, mounting
from ..mount_options import MountError
from . import status

if TYPE_CHECKING:
    from ..backend.cluster.config import ClusterConfig
    from ..backend.cluster.overview import Cluster
    from ..backend.etcd.engine import EtcdEngine
    from ..backend.model.records import Epoch, Report
    from ..backend.transport.verbs.rdma import Choice

T = TypeVar("T")

# How long a command keeps trying to reach etcd.
_ETCD_TIMEOUT_S = 5.0
WATCH_PERIOD_S = 1.0
_FORMAT = 1  # of a cluster's records
_EXIT_CODES = {"ok": 0, "degraded": 1, "unavailable": 2}

_cluster_option = partial(
    click.option, "--cluster", "--config", metavar="FILE",
    help="The cluster's file  [default: $IRDMAFS_CONFIG, /etc/irdmafs/cluster.toml]",
)  # fmt: skip
file_option = _cluster_option("config_path")
# Gives the command what the file says.
config_option = _cluster_option("config", callback=lambda ctx, option, path: load(path))
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def rdma_wanted(path: str | None, flags: dict[str, dict[str, Any]]) -> tuple[Choice, str | None]:
    """Return the choice of RDMA devices that a mount with these flags would make, and a host of the
    cluster, if there is a file of one."""
    from ..backend.cluster.config import ClusterConfig, find_config
    from ..backend.cluster.config_sections import ClusterSection

    if find_config(path) is None:
        given = {name: value for name, value in flags["cluster"].items() if value is not None}
        try:
            section = ClusterSection(**given)
        except ValueError as error:
            raise MountError(str(error)) from None
        return section.rdma_choice(encrypt_data=False), None
    config = ClusterConfig.load(path, flags)
    return config.cluster.rdma_choice(config.mount.encrypt_data), config.cluster.endpoints[0][0]


def say(text: str, err: bool = False) -> None:
    click.echo(f"irdmafs: {status.printable(text)}", err=err)


def print_json(value: object) -> None:
    click.echo(status.printable(json.dumps(value, indent=2, ensure_ascii=True)))


def consent(question: str, consequence: str, yes: bool) -> None:
    """Ask for consent, unless --yes was given. Raises MountError without it."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise MountError(f"nothing was changed; --yes {consequence}")
    if not click.confirm(question, err=True):
        raise MountError("nothing was changed")


def mount_of(path: str) -> mounting.Mount:
    """Return the mount that a path is on. Raises MountError if it is none of irdmafs."""
    found = mounting.containing_mount(path)
    if found is None or found.fstype != mounting.FSTYPE:
        here = os.path.lexists(path)
        raise MountError(f"{path} is not " + ("on an irdmafs mount" if here else "there"))
    return found


class Lacking(MountError):
    """Nothing at this path has such an attribute."""


def ask(path: str, attribute: str, purpose: str, otherwise: str) -> bytes:
    """Return an attribute that a mount gives what is at a path. Raises MountError, which names the purpose;
    Lacking if it has none, with what it is `otherwise`."""
    mount_of(path)
    try:
        return mounting.ask_mount(os.path.abspath(path), attribute)
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.ENODATA, errno.EINVAL):
            raise Lacking(f"cannot {purpose} {path}: {otherwise}") from error
        raise MountError(f"cannot {purpose} {path}: {mounting.reason(error)}") from error


def load(path: str | None, overrides: dict[str, dict[str, Any]] | None = None) -> ClusterConfig:
    from ..backend.cluster.config import ClusterConfig

    return ClusterConfig.load(path if path is None else mounting.named(path), overrides)


def with_etcd(config: ClusterConfig, task: Callable[[EtcdEngine], Awaitable[T]]) -> T:
    """Run a task with the cluster's engine. Raises MountError where etcd cannot be used."""
    import trio

    from ..backend.etcd.rpc import RpcError

    async def run() -> T:
        async with config.cluster.engine("admin", _ETCD_TIMEOUT_S) as engine:
            return await task(engine)

    try:
        # Ctrl-C in the middle of trio's own work (start_soon) would be lost.
        return trio.run(run, restrict_keyboard_interrupt_to_checkpoints=True)
    except RpcError as error:
        where = f"etcd at {', '.join(config.cluster.etcd)}"
        raise MountError(f"{where} refuses: {error.text}") from error
    except BrokenPipeError:
        raise  # of the command's output: etcd's connections raise other errors
    except OSError as error:
        raise MountError(error.strerror or str(error)) from error


async def read_state(config: ClusterConfig, engine: EtcdEngine) -> Cluster:
    from ..backend.cluster.membership import no_such_cluster
    from ..backend.cluster.overview import read_cluster

    found = await read_cluster(engine, config.node.rebalance_rate)
    if found.members.known_settings is None:
        raise no_such_cluster(config)
    return found


@click.group()
@click.pass_context
def cluster(ctx: click.Context) -> None:
    """Make a cluster, look at it and change it."""
    ctx.with_resource(background.ended_as_by_ctrl_c())


@cluster.command()
@click.option("--etcd", required=True, metavar="HOST:PORT[,...]", help="Where etcd listens.")
@click.option("--name", default="default", show_default=True, help="Several may share one etcd.")
@click.option("--replicas", type=click.IntRange(1, 8), default=2, show_default=True,
              help="How many store nodes keep each file.")  # fmt: skip
@click.option("--buckets", type=click.IntRange(1, 65535), help="Placement groups  [default: 1024]")
@click.option("--stripe", default="1G", show_default=True, metavar="SIZE",
              help="Larger files are divided into pieces of this size; 0: never.")  # fmt: skip
@click.option("--lease-ttl", type=click.IntRange(2, 600), default=5, show_default=True,
              metavar="SECONDS", help="A node or mount that is silent for longer is dead.")  # fmt: skip
@click.option("--out", "directory", default="/etc/irdmafs", show_default=True, metavar="DIR",
              help="Where cluster.toml and the certificates go.")  # fmt: skip
@click.option("--no-tls", is_flag=True, help="Make no certificates: nodes listen on loopback only.")
@click.option("--prepare", is_flag=True, help="Make the files and end: etcd can then be started with "
              "its certificate.")  # fmt: skip
@click.option("--etcd-host", "etcd_hosts", multiple=True, metavar="NAME", help="Name or address in etcd's "
              "certificate; may be repeated  [default: the hosts of --etcd]")  # fmt: skip
@click.option("--etcd-plain", is_flag=True, help="Talk to etcd without TLS: everybody who reaches it may "
              "change everything.")  # fmt: skip
@click.option("--etcd-ca", metavar="FILE", help="CA of etcd's certificate: talk TLS to it.")
@click.option("--etcd-cert", metavar="FILE", help="Our certificate for etcd.")
@click.option("--etcd-key", metavar="FILE", help="The key of that certificate.")
def init(
    etcd: str,
    name: str,
    replicas: int,
    buckets: int | None,
    stripe: str,
    lease_ttl: int,
    directory: str,
    no_tls: bool,
    prepare: bool,
    etcd_hosts: tuple[str, ...],
    etcd_plain: bool,
    **etcd_options: str | None,
) -> None:
    """Make a new cluster: its entry in etcd, a file for nodes and mounts, and certificates.

    Nothing that exists is overwritten. Files of an earlier run that did not finish are used again.
    Without --no-tls, --etcd-plain or certificates of etcd's own, etcd has to run with the certificate that
    is made for it: --prepare makes the files first, and says how.
    """
    import uuid

    from ..backend.model.placement import BUCKETS
    from ..backend.model.records import Settings
    from ..backend.namespace.attributes import STRIPE_MIN_BYTES
    from .cluster_admin import Plan, etcd_arguments, hosts_of, made_files, refuse_existing, register
    from .cluster_members import certificates_in, protect, register_all

    if etcd_hosts and (no_tls or etcd_plain):
        other = "--no-tls" if no_tls else "--etcd-plain"
        raise click.UsageError(f"--etcd-host cannot be used with {other}")
    if etcd_hosts and (etcd_options["etcd_ca"] or etcd_options["etcd_cert"]):
        raise click.UsageError("--etcd-host makes what --etcd-ca and --etcd-cert would give")
    endpoints = tuple(part.strip() for part in etcd.split(",") if part.strip())
    if not endpoints:
        raise click.UsageError("--etcd names no HOST:PORT")
    options = {key: value for key, value in etcd_options.items() if value}
    if not (no_tls or etcd_plain or options):
        etcd_hosts = etcd_hosts or hosts_of(endpoints)
    plan = Plan(name, endpoints, options, etcd_hosts, tls=not no_tls)
    stripe_bytes = 0 if stripe == "0" else size_of("--stripe", stripe, STRIPE_MIN_BYTES)
    groups = buckets or BUCKETS
    settings = Settings(_FORMAT, str(uuid.uuid4()), replicas, groups, stripe_bytes, lease_ttl)
    directory = os.path.abspath(directory)
    refused: MountError | None = None
    with made_files(directory, plan) as path:
        config = load(path)

        async def make(engine: EtcdEngine) -> list[str]:
            await refuse_existing(engine, config)
            if plan.tls:
                await register_all(engine, certificates_in(directory))
            if etcd_hosts:
                await protect(engine)
            await register(engine, config, settings)
            return await engine.admin.weaknesses()

        try:
            weaknesses = [] if prepare else with_etcd(config, make)
        except MountError as error:
            if not etcd_hosts or not isinstance(error.__cause__, OSError):
                raise
            refused = error  # the files stay: etcd needs them
    if refused is not None:
        raise MountError(
            f"{refused}; the files in {directory} stay: irdmafs cluster init --prepare says how etcd is "
            "started with its certificate, then give the same command again (or, for an etcd in clear, "
            "--etcd-plain)"
        ) from refused
    if prepare:
        if etcd_hosts:
            say(
                f"start etcd on {', '.join(etcd_hosts)} with ca.pem, revoked.crl, etcd.pem and etcd.key of "
                f"{directory}; besides its usual arguments:\n  {' '.join(etcd_arguments(directory))}"
            )
        say("then give the same command again, without --prepare")
        return
    say(f"cluster {name!r} is made; {path} describes it")
    if plan.tls:
        say(
            f"copy {path}, ca.pem and node.pem, node.key to the store nodes, and with mount.pem, "
            "mount.key (or reader.pem, reader.key: they can change nothing) to the workers; better, make "
            "one for each: irdmafs cluster cert NAME --role mount; ca.key signs new ones: keep it safe"
        )
    for weakness in weaknesses:
        say(f"WARNING: {weakness}", err=True)
    say(f"next, on each store node: irdmafs serve STORE --cluster {path}")


def size_of(flag: str, text: str, least: int = 1) -> int:
    """Return the bytes that a flag asks for. Raises MountError."""
    from ..backend.model.values import human_bytes, parse_size

    try:
        size = parse_size(text)
    except ValueError as error:
        raise MountError(f"{flag}: {error}") from error
    if size < least:
        raise MountError(f"{flag}: {text!r} is too little; give {human_bytes(least)} or more")
    return size


@cluster.command("status")
@json_option
@file_option
@click.pass_context
def status_command(ctx: click.Context, as_json: bool, config_path: str | None) -> None:
    """Show nodes, groups and mounts, problems, and data being moved."""
    from ..backend.cluster.overview import ask_nodes, name_files
    from ..backend.cluster.report import report_of
    from .cluster_status import print_cluster

    async def look(engine: EtcdEngine) -> dict[str, Any]:
        found = await read_state(config, engine)
        await ask_nodes(found, config)
        await name_files(found, engine)
        found.etcd_room = await engine.admin.rooms()
        return {
            "cluster": config.cluster.name,
            "etcd": list(config.cluster.etcd),
            **report_of(found),
            "warnings": await engine.admin.weaknesses(),
        }

    try:
        config = load(config_path)
        data = with_etcd(config, look)
    except ConfigError as error:
        # The exit code is that of a cluster whose nodes are all gone.
        say(str(error), err=True)
        ctx.exit(_EXIT_CODES["unavailable"])
    (print_json if as_json else print_cluster)(data)
    ctx.exit(_EXIT_CODES[data["health"]])


@cluster.command("accept-restore")
@click.option("--above", type=click.IntRange(0), default=0, metavar="REVISION",
              help="A revision of etcd that was seen elsewhere, in a log for example.")  # fmt: skip
@click.option("--yes", is_flag=True, help="Do not ask.")
@config_option
def accept_restore(above: int, yes: bool, config: ClusterConfig) -> None:
    """Go on with an etcd that was restored from a backup, as its newest data are lost.

    Files are again as they were when the backup was made. What is newer stays in the nodes' quarantine
    for a while. A file whose content was replaced or removed since cannot be read.
    """
    from ..backend.cluster.history import accept, described, goal, read_reports
    from .cluster_status import Progress

    async def look(engine: EtcdEngine) -> tuple[dict[int, Report], int]:
        return await read_reports(engine), engine.revision

    reports, now = with_etcd(config, look)
    if not reports:
        raise MountError(
            "no store node says that etcd went back in time: there is nothing to accept (a node says so "
            "when it runs or is started)"
        )
    floor = goal(reports, above)
    when = time.strftime("%F %T", time.localtime(max(one.time_s for one in reports.values())))
    say(f"found {when}: etcd went back in time: {described(reports)}", err=True)
    say(
        f"what changed after the backup is lost if you go on; etcd's revision is lifted from {now} to "
        f"{floor} first, so that no number is used twice",
        err=True,
    )
    consent("Accept the restored state?", "accepts the restored state", yes)

    async def go_on(engine: EtcdEngine) -> Epoch | None:
        with Progress("lifting the revision", "revisions", max(floor - engine.revision, 0)) as bar:
            return await accept(engine, floor, bar.update)

    if with_etcd(config, go_on) is None:
        raise MountError("nothing was changed: etcd's newest data are back")
    say("the restored state is accepted; nodes and mounts go on: irdmafs cluster status")


@cluster.command("repair-etcd")
@config_option
def repair_etcd(config: ClusterConfig) -> None:
    """Free the room that etcd does not use, and take its alarms back, so that it takes writes again.

    Each member of etcd is defragmented, one after the other: it answers nothing else meanwhile, for some
    seconds per GiB. After the alarm CORRUPT the members' data are compared first.
    """

    async def repair(engine: EtcdEngine) -> None:
        await engine.admin.repair(say)

    with_etcd(config, repair)
    say("see how it is now with: irdmafs cluster status")
