"""The commands that mend a cluster's etcd: accept-restore, repair-etcd."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from ..mount_options import MountError
from .cluster import config_option, consent, load, say, with_etcd

if TYPE_CHECKING:
    from ..backend.etcd.engine import EtcdEngine
    from ..backend.model.records import Epoch, Report


@click.command("accept-restore")
@click.option("--above", type=click.IntRange(0), default=0, metavar="REVISION",
              help="A revision of etcd that was seen elsewhere, in a log for example.")  # fmt: skip
@click.option("--yes", is_flag=True, help="Do not ask.")
@config_option
def accept_restore(above: int, yes: bool, config_path: str | None) -> None:
    """Go on with an etcd that was restored from a backup, as its newest data are lost.

    Files are again as they were when the backup was made. What is newer stays in the nodes' quarantine
    for a while. A file whose content was replaced or removed since cannot be read.
    """
    from ..backend.cluster.history import accept, described, goal, read_reports
    from .cluster_status import Progress

    config = load(config_path)

    async def look(engine: EtcdEngine) -> tuple[dict[int, Report], int]:
        return await read_reports(engine), engine.revision

    reports, now = with_etcd(config, look)
    if not reports:
        raise MountError(
            "no store node says that etcd went back in time: there is nothing to accept (a node says so "
            "when it runs or is started)"
        )
    floor = goal(reports, above)
    when = time.strftime(
        "%Y-%m-%d %H:%M:%S", time.localtime(max(r.time_s for r in reports.values()))
    )
    say(f"found {when}: etcd {described(reports)}", err=True)
    say(
        f"what changed after the backup is lost if you go on; etcd's revision is lifted from {now} to "
        f"{floor} first, so that no number is used twice",
        err=True,
    )
    consent("Accept the restored state?", "accepts the restored state", yes)

    async def go_on(engine: EtcdEngine) -> Epoch | None:
        with Progress(
            "lifting etcd's revision", "revisions", max(floor - engine.revision, 0)
        ) as bar:
            return await accept(engine, floor, bar.update)

    if with_etcd(config, go_on) is None:
        raise MountError("nothing was changed: etcd's newest data are back")
    say(
        "the restored state is accepted; nodes and mounts go on by themselves: irdmafs cluster status"
    )


@click.command("repair-etcd")
@config_option
def repair_etcd(config_path: str | None) -> None:
    """Free the room that etcd does not use, and take its alarms back, so that it takes writes again.

    Each member of etcd is defragmented, one after the other: it answers nothing else meanwhile, for some
    seconds per GiB. After the alarm CORRUPT the members' data are compared first.
    """

    async def repair(engine: EtcdEngine) -> None:
        await engine.admin.room.repair(say)

    with_etcd(load(config_path), repair)
    say("see how it is now with: irdmafs cluster status")
