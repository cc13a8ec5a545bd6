"""Commands about store nodes, and what lies where: drain, scrub, remove, admit, rebalance, prefetch."""

from __future__ import annotations

import os
import re
import tempfile
from typing import TYPE_CHECKING

import click

from ..backend.model.values import counted, human_bytes
from ..mount.mounting import reason
from ..mount_options import MountError
from .cluster import WATCH_PERIOD_S, ask, config_option, consent, read_state, say, with_etcd
from .status import one_line

if TYPE_CHECKING:
    from ..backend.cluster.config import ClusterConfig
    from ..backend.cluster.overview import Cluster
    from ..backend.cluster.removal import Lost
    from ..backend.etcd.engine import EtcdEngine

# The elected node looks for groups to begin anew every second.
_BEGIN_ANEW_S = 30.0
_PATHS_SHOWN = 20
_PREFETCHED_AT_ONCE = 8


async def _read_trusted(config: ClusterConfig, engine: EtcdEngine) -> Cluster:
    """Read the cluster's state. Raises WentBack while etcd is known to have been restored from a backup
    that was not accepted yet: its records of nodes may be out of date."""
    from ..backend.cluster.history import History

    await History(engine).check()
    return await read_state(config, engine)


@click.command()
@click.argument("node")
@click.option("--cancel", is_flag=True, help="Use the node again.")
@click.option("--no-wait", is_flag=True, help="Return at once; the draining goes on.")
@config_option
def drain(node: str, cancel: bool, no_wait: bool, config: ClusterConfig) -> None:
    """Move everything off a store node, and wait until it is empty.

    NODE is a name that `irdmafs cluster status` shows: its id (or as many digits as make it clear), host or
    address. Ctrl-C ends the waiting only.
    """
    import trio

    from .cluster_admin import set_node_state
    from .cluster_status import Progress

    async def begin(engine: EtcdEngine) -> tuple[int, int]:
        found = await _read_trusted(config, engine)
        number = found.find_node(node)
        if not cancel:
            others = [n for n in found.live if n != number and found.state_of(n) == "up"]
            if not others:
                raise MountError(f"node {number:016x} cannot be drained: no other node is up")
        await set_node_state(engine, number, "up" if cancel else "draining")
        return number, found.groups_of(number)

    async def wait(engine: EtcdEngine) -> None:
        with Progress(f"draining {number:016x}", "groups", total) as progress:
            while left := (await _read_trusted(config, engine)).groups_of(number):
                progress.update(max(total - left, 0))
                await trio.sleep(WATCH_PERIOD_S)
            progress.update(total)

    number, total = with_etcd(config, begin)
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
        raise
    say(f"node {number:016x} is empty; stop it, then: irdmafs cluster remove {number:016x}")


@click.command()
@click.argument("node", required=False)
@config_option
@click.pass_context
def scrub(ctx: click.Context, node: str | None, config: ClusterConfig) -> None:
    """Have a store node, or all, compare everything it keeps with what was published, beginning now.

    NODE is a name that `irdmafs cluster status` shows: its id (or the first digits of it), host or address.
    The node replaces wrong copies by those of other nodes; `irdmafs cluster status` shows how far it is. In
    the cluster's file, scrub_rate and scrub_period under [node] set how fast it reads, and how often it
    does this by itself.
    """
    from ..backend.cluster.overview import ask_each
    from ..backend.transport.peers import Peers

    async def begin(engine: EtcdEngine) -> dict[int, str]:
        found = await read_state(config, engine)
        if node is not None and (number := found.find_node(node)) not in found.live:
            raise MountError(f"node {number:016x} is down")
        nodes = found.live if node is None else {number}
        if not nodes:
            raise MountError("no store node is up")
        return await ask_each(found, config, nodes, Peers.scrub)

    refused = with_etcd(config, begin)
    for number, why in refused.items():
        say(f"node {number:016x}: {why}", err=True)
    if refused:
        ctx.exit(1)
    say("begun; see how far it is with: irdmafs cluster status")


@click.command()
@click.argument("node")
@click.option("--force", is_flag=True, help="Also remove a dead node that still counts as keeping data, "
              "and the files that only this node has.")  # fmt: skip
@click.option("--yes", is_flag=True, help="Do not ask before files are removed.")
@config_option
def remove(node: str, force: bool, yes: bool, config: ClusterConfig) -> None:
    """Forget a store node that has been drained and stopped, or that is dead for good.

    NODE is a name that `irdmafs cluster status` shows: its id, host or address.
    """

    async def look(engine: EtcdEngine) -> tuple[int, Lost]:
        from ..backend.cluster.removal import Lost, removal

        found = await _read_trusted(config, engine)
        number = found.find_node(node)
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
    """Name the files that are removed with a node, and ask for consent. Raises MountError without it."""
    say(f"{_files(lost)} have their only copy on node {name} and are removed with it:", err=True)
    for path in lost.paths[:_PATHS_SHOWN]:
        click.echo(f"  {one_line(os.fsdecode(path))}", err=True)
    if len(lost.paths) > _PATHS_SHOWN:
        with tempfile.NamedTemporaryFile(
            "w", prefix=f"irdmafs-lost-{name}-", suffix=".txt", delete=False
        ) as file:
            file.writelines(f"{one_line(os.fsdecode(path))}\n" for path in lost.paths)
        say(f"all {len(lost.paths)} names are in {file.name}", err=True)
    consent("Remove them for ever?", "agrees to the removal of these files", yes)


async def _take_out(engine: EtcdEngine, node: int, is_needed: bool) -> None:
    """Remove a node; if it `is_needed`, also the files whose only copy it has."""
    from ..backend.cluster.history import History
    from ..backend.cluster.removal import removal
    from .cluster_admin import forget_node

    await History(engine).check()
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
    return f"{counted(lost.files, 'file')} ({human_bytes(lost.bytes)})"


@click.command()
@click.argument("node")
@config_option
def admit(node: str, config: ClusterConfig) -> None:
    """Let a store node that was removed start again, with the extents it keeps.

    NODE is its full id, as in its log. A new node needs no admission.
    """
    from ..backend.cluster.membership import admit
    from ..backend.model.records import NodeRecord

    number = int(node, 16) if re.fullmatch("[0-9a-fA-F]{16}", node) else 0
    if not 0 < number < 1 << 63:
        raise MountError(f"{node!r} is not the id of a node: 16 hexadecimal digits")
    # It registers its weight and labels when it starts again.
    if not with_etcd(config, lambda engine: admit(engine, number, NodeRecord("up", 1.0, {}))):
        raise MountError(f"node {number:016x} was not removed")
    say(f"node {number:016x} may start again: irdmafs serve STORE")


@click.command()
@config_option
def rebalance(config: ClusterConfig) -> None:
    """Wait until every file is on the store nodes that should keep it.

    Nodes move files by themselves, at their --rebalance-rate, when nodes come, go or are drained.
    """
    import trio

    from .cluster_status import Progress

    async def wait(engine: EtcdEngine) -> None:
        total = 0
        with Progress("rebalancing", "replicas", 0) as progress:
            while True:
                found = await read_state(config, engine)
                if not found.members.candidates():
                    raise MountError("no store node is up that could take anything")
                left = found.misplaced()
                total = max(total, left)
                progress.update(total - left, total)
                if not left:
                    return
                await trio.sleep(WATCH_PERIOD_S)

    with_etcd(config, wait)
    say("everything is where it should be")


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
def prefetch(paths: tuple[str, ...]) -> None:
    """Fetch files into this host's cache now, by opening each.

    A directory stands for all files below it.
    """
    from concurrent.futures import ThreadPoolExecutor

    from ..client._drafts import below
    from ..client._versions import open_once
    from .cluster_status import Progress

    failed = list[OSError]()

    def fetch(file: str) -> None:
        try:
            open_once(file)
        except OSError as error:
            failed.append(error)

    files = set[str]()
    for path in paths:
        ask(path, "", "prefetch", "it does not answer")
        files.update(below(path, failed.append)[1] if os.path.isdir(path) else [path])
    with Progress("fetching", "files", len(files)) as bar:
        pool = ThreadPoolExecutor(_PREFETCHED_AT_ONCE)
        try:
            for done, _ in enumerate(pool.map(fetch, files), 1):
                bar.update(done)
        finally:
            pool.shutdown(cancel_futures=True)
    for error in failed:
        say(f"{error.filename}: {reason(error)}", err=True)
    if failed:
        raise MountError(f"could not fetch {counted(len(failed), 'file')}")
