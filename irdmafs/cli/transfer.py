"""The commands that move files' contents ahead or wait for it: `irdmafs rebalance`, `prefetch`."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import click

from ..mount_options import MountError
from .cluster import (
    WATCH_PERIOD_S,
    ask,
    config_option,
    json_option,
    load,
    print_json,
    read_state,
    say,
    with_etcd,
)

if TYPE_CHECKING:
    from ..backend.etcd.engine import EtcdEngine

_PREFETCH_PERIOD_S = 0.1
_PREFETCH_XATTR = "user.irdmafs.prefetch"
_PREFETCH_NOW_XATTR = "user.irdmafs.prefetch_now"


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what would move.")
@click.option("--without", "leaving", multiple=True, metavar="NODE",
              help="With --dry-run: as if this node were drained.")  # fmt: skip
@click.option("--add", "added", type=click.IntRange(1, 1000), metavar="COUNT",
              help="With --dry-run: as if so many nodes joined.")  # fmt: skip
@json_option
@config_option
def rebalance(
    dry_run: bool,
    leaving: tuple[str, ...],
    added: int | None,
    as_json: bool,
    config_path: str | None,
) -> None:
    """Wait until every file is on the store nodes that should keep it, or say what would move.

    Nodes move files by themselves, at their --rebalance-rate, when nodes come, go or are drained.
    """
    from .cluster_status import Progress, print_moves

    if (leaving or added) and not dry_run:
        raise click.UsageError("--without and --add are for --dry-run")
    if as_json and not dry_run:
        raise click.UsageError("--json is for --dry-run")
    config = load(config_path)

    async def dry(engine: EtcdEngine) -> dict[str, Any]:
        from ..backend.cluster.overview import read_group_bytes
        from ..backend.model.policy import Candidate

        found = await read_state(config, engine)
        settings = found.members.settings
        assert settings is not None
        gone = {found.find_node(name) for name in leaving}
        candidates = [c for c in found.members.candidates() if c.node not in gone]
        # The ids of new nodes are random anyway.
        candidates += (Candidate(number, 1.0, {}) for number in range(1, (added or 0) + 1))
        held = await read_group_bytes(engine, settings.buckets)
        return found.plan(candidates, held)

    async def wait(engine: EtcdEngine) -> None:
        import trio

        total = 0
        with Progress("rebalancing", "replicas", 0) as progress:
            while True:
                found = await read_state(config, engine)
                if not found.members.candidates():
                    raise MountError("no store node is up that could take anything")
                left = len(found.plan(found.members.candidates(), {})["moves"])
                total = max(total, left)
                progress.update(total - left, total)
                if not left:
                    return
                await trio.sleep(WATCH_PERIOD_S)

    if not dry_run:
        with_etcd(config, wait)
        say("everything is where it should be")
        return
    plan = with_etcd(config, dry)
    if as_json:
        print_json(plan)
    else:
        print_moves(plan)


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--no-wait", is_flag=True, help="Return at once; the fetching goes on.")
def prefetch(paths: tuple[str, ...], no_wait: bool) -> None:
    """Fetch files into this host's cache now.

    A directory stands for all files below it.
    Ctrl-C ends the waiting only.
    """
    from .cluster_status import Progress

    for path in paths:
        _ask(path, _PREFETCH_NOW_XATTR)
    for path in () if no_wait else paths:
        with Progress(f"fetching {path}", "bytes", 0) as bar:
            while True:
                # How much there is to fetch, and how much is here.
                now = json.loads(_ask(path, _PREFETCH_XATTR) or b"{}")
                bar.update(now.get("bytes_done", 0), now.get("bytes", 0))
                if now.get("done", 0) >= now.get("files", 0):
                    break
                time.sleep(_PREFETCH_PERIOD_S)


def _ask(path: str, attribute: str) -> bytes:
    return ask(path, attribute, "prefetch", "it is not on a cluster's mount")
