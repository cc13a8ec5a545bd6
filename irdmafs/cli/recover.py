"""The command `irdmafs recover`, which makes a damaged store usable again."""

from __future__ import annotations

import os

import click

from ..mount.config import MountError
from . import status

_SHOWN = 20


@click.command()
@click.argument("store")
def recover(store: str) -> None:
    """Mend a store whose journal is damaged, after a mount of it was refused with that message.

    STORE is its directory. All records that are sound are kept, and a copy of the damaged journal. Files
    and contents that have lost their name are in lost+found when the store is mounted again.
    """
    import trio

    from ..backend.kv import Damaged
    from ..backend.store.recovery import recover

    directory = os.path.abspath(store)
    try:
        done = trio.run(recover, directory)
    except Damaged as error:
        raise MountError(str(error)) from error
    except OSError as error:
        raise MountError(f"{directory}: {error.strerror or error}") from error
    if done is None:
        _say(f"{directory}: its journal is sound; nothing was changed")
        return
    for start, end in done.broken:
        _say(f"bytes {start} to {end} of the journal are lost; a copy of it is {done.kept}")
    _say(f"{done.records} records are kept; {done.dropped} names that led to nothing are gone")
    if done.found:
        _say(f"{len(done.found)} files and directories without a name are in lost+found:")
        for name in done.found[:_SHOWN]:
            click.echo(f"  {status.printable(name)}")
    _say("the store can be mounted again")


def _say(text: str) -> None:
    click.echo(f"irdmafs: {status.printable(text)}")
