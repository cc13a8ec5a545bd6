"""The commands of a cluster: `irdmafs cluster ...`.

What they need beyond click is imported when they run. Exit codes are those of the other commands, and
for `cluster status`: 0 all is well, 1 degraded, 2 unavailable.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from . import status
from .config import MountError

if TYPE_CHECKING:
    from .backend.cluster_config import ClusterConfig
    from .backend.kv.etcd import EtcdEngine
    from .backend.overview import Cluster
    from .backend.removal import Lost
    from .backend.transport.verbs.rdma import Choice

T = TypeVar("T")

# How long a command keeps trying to reach etcd.
_ETCD_TIMEOUT_S = 5.0
WATCH_PERIOD_S = 1.0
# The elected node looks every second for groups that it can begin anew.
_BEGIN_ANEW_S = 30.0
_PATHS_SHOWN = 20
_EXIT_CODES = {"ok": 0, "degraded": 1, "unavailable": 2}

config_option = click.option(
    "--cluster", "--config", "config_path", metavar="FILE",
    help="The cluster's file  [default: $IRDMAFS_CONFIG, /etc/irdmafs/cluster.toml]",
)  # fmt: skip
_RDMA_OPTIONS = (
    click.option("--rdma", type=click.Choice(["auto", "off", "require"]), help="Move parameters by RDMA "
                 "verbs: where it can be done, never, or refuse to start without  [default: auto]"),
    click.option("--rdma-device", metavar="NAME,...", help="Only through these devices  [default: all on "
                 "a network with the peer]"),
    click.option("--gid-index", type=int, metavar="N", help="Only with this entry of its GID table."),
)  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def rdma_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The flags of whoever moves parameters."""
    for option in reversed(_RDMA_OPTIONS):
        command = option(command)
    return command


def rdma_wanted(
    path: str | None, mode: str | None, device: str | None, gid_index: int | None
) -> tuple[Choice, str | None]:
    """What a mount would ask of RDMA, and a host of the cluster, if there is a file of one."""
    import msgspec

    from .backend.cluster_config import ClusterConfig, find_config
    from .backend.config_sections import ClusterSection

    flags = {"rdma": mode, "rdma_device": device, "gid_index": gid_index}
    with one_line_errors():
        if find_config(path) is None:
            given = {name: value for name, value in flags.items() if value is not None}
            try:
                section = msgspec.convert(given, ClusterSection)
            except msgspec.ValidationError as error:
                raise MountError(str(error)) from None
            return section.rdma_choice(encrypt_data=False), None
        config = ClusterConfig.load(path, {"cluster": flags})
        return (
            config.cluster.rdma_choice(config.mount.encrypt_data),
            config.cluster.endpoints[0][0],
        )


def say(text: str, err: bool = False) -> None:
    click.echo(f"irdmafs: {status.printable(text)}", err=err)


def print_json(value: object) -> None:
    click.echo(status.printable(json.dumps(value, indent=2, ensure_ascii=True)))


@contextmanager
def one_line_errors() -> Iterator[None]:
    from .backend.config_values import ConfigError

    try:
        yield
    except ConfigError as error:
        raise MountError(str(error)) from error


def load(path: str | None, overrides: dict[str, dict[str, Any]] | None = None) -> ClusterConfig:
    from .backend.cluster_config import ClusterConfig

    with one_line_errors():
        return ClusterConfig.load(path, overrides)


def with_etcd(config: ClusterConfig, task: Callable[[EtcdEngine], Awaitable[T]]) -> T:
    """Run a task with the cluster's engine. Raises MountError where etcd cannot be used."""
    import trio

    from .backend.etcd.errors import RpcError

    async def run() -> T:
        async with config.cluster.engine("admin", _ETCD_TIMEOUT_S) as engine:
            return await task(engine)

    with one_line_errors():
        try:
            return trio.run(run)
        except RpcError as error:
            raise MountError(
                f"etcd at {', '.join(config.cluster.etcd)} refuses: {error.text}"
            ) from error
        except OSError as error:
            raise MountError(
                f"etcd at {', '.join(config.cluster.etcd)}: {error.strerror or error}"
            ) from error


async def read_state(config: ClusterConfig, engine: EtcdEngine) -> Cluster:
    from .backend.overview import read_cluster

    found = await read_cluster(engine, config.node.rebalance_rate)
    if found.members.settings is None:
        raise MountError(
            f"etcd at {', '.join(config.cluster.etcd)} knows no cluster named "
            f"{config.cluster.name!r}; make it with: irdmafs cluster init"
        )
    return found


def find_node(found: Cluster, name: str) -> int:
    from .backend.overview import NodeNotFound

    try:
        return found.find_node(name)
    except NodeNotFound as error:
        raise MountError(str(error)) from error


@click.group()
def cluster() -> None:
    """Make a cluster, look at it and change it."""


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
@click.option("--etcd-plain", is_flag=True, help="Talk to etcd in clear: whoever reaches it may change "
              "everything.")  # fmt: skip
@click.option("--etcd-user", metavar="USER")
@click.option("--etcd-password-file", metavar="FILE")
@click.option("--etcd-ca", metavar="FILE", help="CA of etcd's certificate: talk TLS to it.")
@click.option("--etcd-cert", metavar="FILE", help="Our certificate for etcd.")
@click.option("--etcd-key", metavar="FILE")
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

    Nothing that exists is overwritten. Files that an earlier run made are used if it came no further.
    Without --no-tls, --etcd-plain or certificates of etcd's own, etcd has to run with the certificate that
    is made for it: --prepare makes the files first, and says how.
    """
    from .backend.placement import BUCKETS
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
    if not (no_tls or etcd_plain or any(etcd_options.values())):
        with one_line_errors():
            etcd_hosts = etcd_hosts or hosts_of(endpoints)
    plan = Plan(
        name=name,
        etcd=endpoints,
        etcd_options={key: value for key, value in etcd_options.items() if value},
        etcd_hosts=etcd_hosts,
        tls=not no_tls,
    )
    stripe_bytes = 0 if stripe == "0" else _parse_size("--stripe", stripe)
    directory = os.path.abspath(directory)
    refused: MountError | None = None
    with one_line_errors(), made_files(directory, plan) as path:
        config = load(path)

        async def make(engine: EtcdEngine) -> list[str]:
            await refuse_existing(engine, config)
            if plan.tls:
                await register_all(engine, certificates_in(directory))
            if etcd_hosts:
                await protect(engine)
            await register(engine, config, replicas, buckets or BUCKETS, stripe_bytes, lease_ttl)
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
                f"start etcd on {', '.join(etcd_hosts)} with ca.pem, etcd.pem and etcd.key of {directory}; "
                f"besides its usual arguments:\n  {' '.join(etcd_arguments(directory))}"
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


def _parse_size(flag: str, text: str) -> int:
    from .backend.sizes import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise MountError(f"{flag}: {error}") from error


@cluster.command("status")
@click.option("--watch", is_flag=True, help="Show it anew every second.")
@json_option
@config_option
@click.pass_context
def status_command(ctx: click.Context, watch: bool, as_json: bool, config_path: str | None) -> None:
    """Show nodes, groups and mounts, what is wrong and what is being moved."""
    import trio

    from .backend.overview import ask_nodes, name_files
    from .cluster_status import print_cluster

    async def show(engine: EtcdEngine) -> str:
        while True:
            found = await read_state(config, engine)
            await ask_nodes(found, config)
            await name_files(found, engine)
            data = {
                "cluster": config.cluster.name,
                "etcd": list(config.cluster.etcd),
                **found.to_json(),
                "warnings": await engine.admin.weaknesses(),
            }
            if watch and sys.stdout.isatty():
                click.clear()
            if as_json:
                print_json(data)
            else:
                print_cluster(data)
            sys.stdout.flush()
            if not watch:
                return str(data["health"])
            await trio.sleep(WATCH_PERIOD_S)

    try:
        config = load(config_path)
        health = with_etcd(config, show)
    except KeyboardInterrupt:
        ctx.exit(128 + signal.SIGINT)
    except MountError as error:
        # As for a cluster whose nodes are all gone.
        say(str(error), err=True)
        ctx.exit(_EXIT_CODES["unavailable"])
    ctx.exit(_EXIT_CODES[health])


@cluster.command()
@click.argument("node")
@click.option("--cancel", is_flag=True, help="Use the node again.")
@click.option("--no-wait", is_flag=True, help="Return at once; it goes on.")
@config_option
@click.pass_context
def drain(
    ctx: click.Context, node: str, cancel: bool, no_wait: bool, config_path: str | None
) -> None:
    """Move everything off a store node, and wait until it is empty.

    NODE is its id, as many digits as make it clear, or HOST:PORT. Ctrl-C ends the waiting only.
    """
    import trio

    from .cluster_admin import set_node_state
    from .cluster_status import Progress

    config = load(config_path)
    number = 0

    async def begin(engine: EtcdEngine) -> int:
        nonlocal number
        found = await read_state(config, engine)
        number = find_node(found, node)
        if not cancel:
            others = [n for n in found.live if n != number and found.state_of(n) == "up"]
            if not others:
                raise MountError(
                    f"node {number:016x} cannot be drained: no other node is up to take its data"
                )
        await set_node_state(engine, number, "up" if cancel else "draining")
        return found.groups_of(number)

    async def wait(engine: EtcdEngine) -> None:
        with Progress(f"draining {number:016x}", "groups", total) as progress:
            while left := (await read_state(config, engine)).groups_of(number):
                progress.update(max(total - left, 0))
                await trio.sleep(WATCH_PERIOD_S)
            progress.update(total)

    total = with_etcd(config, begin)
    if cancel:
        say(f"node {number:016x} is used again")
        return
    if no_wait:
        say(f"node {number:016x} is being drained: {total} groups to move")
        return
    try:
        with_etcd(config, wait)
    except KeyboardInterrupt:
        say("the draining goes on; stop it with: irdmafs cluster drain --cancel " + node, err=True)
        ctx.exit(128 + signal.SIGINT)
    say(f"node {number:016x} is empty; stop it, then: irdmafs cluster remove {number:016x}")


@cluster.command()
@click.argument("node", required=False)
@config_option
@click.pass_context
def scrub(ctx: click.Context, node: str | None, config_path: str | None) -> None:
    """Have a store node, or all, compare everything it keeps with what was published, beginning now.

    NODE is its id, as many digits as make it clear, or HOST:PORT. What is wrong is mended from other
    nodes; `irdmafs cluster status` says how far it is. How fast it reads, and how often without being
    told, say scrub_rate and scrub_period in [node] of the cluster's file.
    """
    from .backend.overview import begin_scrub

    config = load(config_path)

    async def begin(engine: EtcdEngine) -> dict[int, str]:
        found = await read_state(config, engine)
        if node is not None and (number := find_node(found, node)) not in found.live:
            raise MountError(f"node {number:016x} is down")
        nodes = found.live if node is None else {number}
        if not nodes:
            raise MountError("no store node is up")
        return await begin_scrub(found, config, nodes)

    refused = with_etcd(config, begin)
    for number, why in refused.items():
        say(f"node {number:016x}: {why}", err=True)
    if refused:
        ctx.exit(1)
    say("begun; see how far it is with: irdmafs cluster status")


@cluster.command()
@click.argument("node")
@click.option("--force", is_flag=True, help="Also a dead node that still counts as keeping data: files "
              "that only it has are removed.")  # fmt: skip
@click.option("--yes", is_flag=True, help="Do not ask before files are removed.")
@config_option
def remove(node: str, force: bool, yes: bool, config_path: str | None) -> None:
    """Forget a store node that has been drained and stopped, or that is dead for good."""
    from .backend.overview import counted

    config = load(config_path)

    async def look(engine: EtcdEngine) -> tuple[int, Lost]:
        from .backend.removal import Lost, removal

        found = await read_state(config, engine)
        number = find_node(found, node)
        name = f"{number:016x}"
        kept, alone = found.groups_of(number), found.only_copies(number)
        if number in found.live:
            advice = "drain it first" if kept else "stop it first"
            how = f"irdmafs cluster drain {name}" if kept else "end its irdmafs serve"
            raise MountError(f"node {name} is up and keeps {kept} groups; {advice}: {how}")
        lost = Lost(frozenset(), (), 0, 0)
        if alone:
            async with removal(engine) as view:
                lost = view.lost(number)
        if alone and not force:
            raise MountError(
                f"{counted(len(alone), 'group')} with {_files(lost)} have their only copy on node "
                f"{name}: start it again to have them; --force gives them up"
            )
        if kept and not force:
            raise MountError(
                f"node {name} is down and still counts in {kept} groups; wait until others have taken "
                "over (irdmafs cluster status), or use --force"
            )
        return number, lost

    number, lost = with_etcd(config, look)
    if lost.files:
        _consent(f"{number:016x}", lost, yes)
    with_etcd(config, lambda engine: _take_out(engine, number, bool(lost.groups)))


def _consent(name: str, lost: Lost, yes: bool) -> None:
    """Say what is removed together with a node, and have it agreed to. Raises MountError if it is not."""
    say(f"{_files(lost)} have their only copy on node {name} and are removed with it:", err=True)
    for path in lost.paths[:_PATHS_SHOWN]:
        click.echo(f"  {_one_line(path)}", err=True)
    if len(lost.paths) > _PATHS_SHOWN:
        with tempfile.NamedTemporaryFile(
            "w", prefix=f"irdmafs-lost-{name}-", suffix=".txt", delete=False
        ) as file:
            file.writelines(f"{_one_line(path)}\n" for path in lost.paths)
        say(f"all {len(lost.paths)} names are in {file.name}", err=True)
    if yes:
        return
    if not sys.stdin.isatty():
        raise MountError("nothing was changed; --yes agrees to the removal of these files")
    if not click.confirm("Remove them for ever?", err=True):
        raise MountError("nothing was changed")


async def _take_out(engine: EtcdEngine, node: int, is_needed: bool) -> None:
    """Remove a node, and what nobody has without it (`is_needed`)."""
    from .backend.overview import counted
    from .backend.removal import removal
    from .cluster_admin import forget_node

    await forget_node(engine, node)
    say(f"node {node:016x} is removed")
    if not is_needed:
        return
    async with removal(engine) as view:
        lost = await view.carry_out(node)
        if lost.files:
            say(f"{_files(lost)} are removed")
        patience_s = _BEGIN_ANEW_S if view.has_room() else 0.0
        if waiting := await view.wait_usable(node, patience_s):
            advice = "irdmafs cluster status" if patience_s else "irdmafs serve STORE"
            say(f"{counted(waiting, 'group')} wait for a store node: {advice}", err=True)


def _files(lost: Lost) -> str:
    from .backend.overview import counted

    return f"{counted(lost.files, 'file')} ({status.human_bytes(lost.bytes)})"


def _one_line(path: bytes) -> str:
    return status.printable(os.fsdecode(path)).replace("\\", "\\\\").replace("\n", "\\n")


@cluster.command()
@click.argument("node")
@config_option
def admit(node: str, config_path: str | None) -> None:
    """Let a store node that was removed start again, with what it keeps.

    NODE is its whole id, as in its log. One that is new needs no admittance.
    """
    from .cluster_admin import admit_again

    config = load(config_path)
    try:
        number = int(node, 16)
    except ValueError:
        number = 0
    if not 0 < number < 1 << 63:
        raise MountError(f"{node!r} is not the id of a node: 16 hexadecimal digits")
    if not with_etcd(config, lambda engine: admit_again(engine, number)):
        raise MountError(f"node {number:016x} was not removed")
    say(f"node {number:016x} may start again: irdmafs serve STORE")
