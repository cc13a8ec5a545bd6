"""The command `irdmafs serve`: a store node, in the background or here."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from ..mount.config import MountError
from ..mount.stores import refuse_other_purpose
from .cluster import config_option, load, one_line_errors, rdma_options, say


@click.command()
@click.argument("store")
@config_option
@click.option("--etcd", metavar="HOST:PORT[,...]", help="Where etcd listens.")
@click.option("--name", metavar="NAME", help="The cluster's name.")
@click.option("--listen", metavar="ADDR[:PORT]", help="[default: the address that reaches etcd; "
              "without credentials loopback]")  # fmt: skip
@click.option("--zone", help="Failure domains: replicas are kept in different ones.")
@click.option("--rack")
@click.option("--host", help="Also: processes of equal host share memory  [default: the host name]")
@click.option(
    "--weight", type=float, help="Share of the data, relative to other nodes' [default: 1]"
)
@click.option("--size", metavar="SIZE", help="Limit of what is kept: 512M, 8G, 50%")
@click.option("--streams", type=int, help="Connections to each peer  [default: 4]")
@click.option("--rebalance-rate", metavar="SIZE", help="Bytes per second for filling groups "
              "[default: 256M]")  # fmt: skip
@click.option(
    "--metrics-port", type=int, metavar="PORT", help="Serve Prometheus metrics, on loopback."
)
@click.option("--insecure", is_flag=True, default=None, help="Without credentials, listen on the network "
              "all the same: anybody may read and write.")  # fmt: skip
@click.option(
    "--encrypt-data", is_flag=True, default=None, help="TLS for data, not only for control."
)
@rdma_options
@click.option("-f", "--foreground", is_flag=True, help="Stay; Ctrl-C ends it.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]))
@click.option("--log-format", type=click.Choice(["text", "json"]))
@click.option("--log-file", metavar="FILE", help="[default: irdmafs.log in STORE; in the foreground "
              "stderr]")  # fmt: skip
@click.pass_context
def serve(
    ctx: click.Context,
    /,
    store: str,
    config_path: str | None,
    etcd: str | None,
    name: str | None,
    insecure: bool | None,
    rdma: str | None,
    rdma_device: str | None,
    gid_index: int | None,
    foreground: bool,
    log_level: str | None,
    log_format: str | None,
    log_file: str | None,
    **node: Any,
) -> None:
    """Be a store node of a cluster.

    Contents of files are kept in the directory STORE.

    Returns once the node serves. SIGTERM ends it; what it keeps stays in STORE.
    """
    from ..backend.cluster.config import find_config
    from ..mount import background

    endpoints = [part.strip() for part in etcd.split(",") if part.strip()] if etcd else None
    if config_path is None and endpoints is None and find_config() is None:
        raise MountError(
            "which cluster? give --cluster FILE (irdmafs cluster init writes one) or --etcd HOST:PORT"
        )
    config = load(
        config_path,
        {
            "cluster": {
                "etcd": endpoints,
                "name": name,
                "insecure": insecure,
                "rdma": rdma,
                "rdma_device": rdma_device,
                "gid_index": gid_index,
            },
            "node": {"store": store, **node},
            "log": {"level": log_level, "format": log_format, "file": log_file},
        },
    )
    with one_line_errors():
        config.listen()
        config.cluster.credentials("node")
    store = os.path.abspath(store)
    refuse_other_purpose(store, "node")
    try:
        os.makedirs(store, mode=0o700, exist_ok=True)
    except OSError as error:
        raise MountError(f"cannot make the store {store}: {error.strerror}") from error
    log = None if foreground else config.log.file or os.path.join(store, "irdmafs.log")

    def run(ready: Callable[[str], None]) -> None:
        import trio

        from ..backend.kv import Damaged
        from ..backend.node.daemon import serve_node
        from ..backend.observe.logs import set_up_logging

        with one_line_errors():
            set_up_logging("node", config.log.format, config.log.level, log or config.log.file)
            try:
                trio.run(partial(serve_node, config, ready, patient=foreground))
            except Damaged as error:
                raise MountError(str(error)) from error
            except OSError as error:
                # What etcd and the network refuse says by itself where it comes from.
                where = f"{error.filename}: " if error.filename else ""
                raise MountError(f"{where}{error.strerror or error}") from error

    def ready(text: str) -> None:
        say(f"{store} is served ({text})")
        sys.stdout.flush()

    try:
        if log is None:
            run(ready)
        else:
            ready(background.start_process(log, run))
    except KeyboardInterrupt:
        ctx.exit(128 + signal.SIGINT)
