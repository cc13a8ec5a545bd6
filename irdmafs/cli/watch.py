"""The command that tells of new versions: `irdmafs watch`."""

from __future__ import annotations

import os
import subprocess

import click

from ..mount.mounting import named
from . import status
from .cluster import say
from .versions import failing


@click.command()
@click.argument("path", metavar="PATH")
@click.option(
    "--exec", "command", metavar="CMD",
    help="Run a shell command at each change, with PATH in IRDMAFS_PATH and the version of a file in "
    "IRDMAFS_VERSION. Changes that come while it runs are one.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="End after one change, with the exit code of CMD.")
@click.option("--timeout", metavar="S", type=float, help="Fail if nothing changes for S seconds.")
@click.pass_context
def watch(
    ctx: click.Context, path: str, command: str | None, once: bool, timeout: float | None
) -> None:
    """Tell whenever any host publishes the file PATH, or changes something below the directory PATH.

    What is there now does not count; a PATH that is not there yet is waited for.
    """
    from ..client import _waiting

    with failing(path):
        seen = _waiting.look(named(path))
    while True:
        with failing(path):
            seen = _waiting.wait(path, seen, timeout=timeout)
        click.echo(f"{seen.version} {status.printable(path)}")
        code = 0
        if command is not None:
            told = {"IRDMAFS_PATH": path, "IRDMAFS_VERSION": str(seen.version)}
            code = subprocess.run(command, shell=True, env={**os.environ, **told}).returncode
            if code:
                say(f"{command}: exit code {code}", err=True)
        if once:
            ctx.exit(code)
