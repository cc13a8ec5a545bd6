"""The command `irdmafs serve`: a store node, in the background or here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from ..mount.mounting import named
from ..mount.stores import OF_NODES, lack_of_memory, make_fit, refuse_mount, refuse_other_purpose
from ..mount_options import MountError
from .cluster import file_option, load, say
from .flags import overrides, section_flags


@click.command()
@click.argument("store")
@file_option
@section_flags("serve")
@click.option("-f", "--foreground", is_flag=True, help="Stay; Ctrl-C ends it.")
def serve(store: str, config_path: str | None, foreground: bool, **flags: Any) -> None:
    """Run a store node of a cluster.

    Contents of files are kept in the directory STORE.

    Returns once the node serves; while etcd does not answer, it waits. SIGTERM ends it; what it keeps stays
    in STORE.
    """
    from ..backend.cluster.config import find_config
    from ..backend.files.extents import in_memory
    from ..mount import background

    given = overrides(flags)
    if config_path is None and given["cluster"]["etcd"] is None and find_config() is None:
        raise MountError(
            "which cluster? give --cluster FILE (irdmafs cluster init writes one) or --etcd HOST:PORT"
        )
    config = load(config_path, {**given, "node": {"store": store, **given["node"]}})
    config.listen()
    config.cluster.credentials("node")
    store = os.path.abspath(named(store))
    refuse_mount(store, store)
    refuse_other_purpose(store, "node")
    try:
        os.makedirs(store, mode=0o700, exist_ok=True)
    except FileExistsError:
        raise MountError(f"the store {store} is not a directory") from None
    except OSError as error:
        raise MountError(f"cannot make the store {store}: {error.strerror}") from error
    for warning in make_fit(store, store, OF_NODES):
        say(f"warning: {warning}", err=True)
    if in_memory(store):
        found = os.statvfs(store)  # no blocks: without a limit
        sizes = filter(None, (config.node.size, found.f_blocks * found.f_frsize))
        if lack := lack_of_memory(min(sizes, default=sys.maxsize)):
            say(f"warning: the room for the store, {lack}; give --size", err=True)
    log = None if foreground else config.log.file or os.path.join(store, "irdmafs.log")

    def run(ready: Callable[[str], None], waits: Callable[[str], None]) -> None:
        import trio

        from ..backend.kv import Damaged
        from ..backend.node.daemon import serve_node
        from ..backend.observe.logs import set_up_logging

        set_up_logging("node", config.log.format, config.log.level, log or config.log.file)
        try:
            trio.run(partial(serve_node, config, ready, waits, patient=foreground))
        except Damaged as error:
            raise MountError(str(error)) from error
        except OSError as error:
            # Errors of etcd and of the network name their origin in the text.
            where = f"{error.filename}: " if error.filename else ""
            raise MountError(f"{where}{error.strerror or error}") from error

    def ready(text: str) -> None:
        say(f"{store} is served ({text})")

    waits = partial(say, err=True)
    if log is None:
        run(ready, waits if config.log.file else lambda text: None)
    else:
        ready(background.start_process(log, run, waits))
