"""The command `irdmafs cluster repair-etcd`: freeing etcd's room, and taking back its alarms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .cluster import config_option, load, say, with_etcd

if TYPE_CHECKING:
    from ..backend.etcd.engine import EtcdEngine


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
