"""The commands of versions: `irdmafs versions`, of those in several files `publish`, `rollback`, `hold` and
`diff`, `clone`, and `watch`, which tells of new ones."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from ..backend.model.values import human_bytes
from ..mount import mounting
from . import status
from .cluster import Lacking, ask, json_option, print_json, say

if TYPE_CHECKING:
    from ..client import Versions

_expected_option = click.option(
    "--expected", metavar="N", type=int,
    help="Fail if the newest version is not N: somebody else has published one.",
)  # fmt: skip


@click.command()
@click.argument("path", metavar="PATH")
@json_option
def versions(path: str, as_json: bool) -> None:
    """List the versions of the file PATH that are kept, the current one and those that are open; or those
    that `irdmafs publish` made in the directory PATH, and which of them are held."""
    columns = ["version", "state", "size", "modified", "open in processes"]
    otherwise = "it is no regular file, and `irdmafs publish` has made no version in it"
    try:
        data = status.parsed(ask(path, mounting.VERSIONS_XATTR, "list the versions of", otherwise))
    except Lacking:
        data = _versions_in(path)
        if not data["versions"]:
            raise
        columns[3:] = ["published"]
    if as_json:
        print_json(data)
        return
    rows = [_row(entry)[: len(columns)] for entry in data.get("versions") or ()]
    status.print_table(columns, rows, title=f"{path} (inode {data.get('ino', '-')})")


def _row(entry: Mapping[str, Any]) -> list[str]:
    mtime_ns, when = entry.get("mtime_ns"), "-"
    if isinstance(mtime_ns, int):
        when = datetime.fromtimestamp(mtime_ns / 1e9).isoformat(" ", "milliseconds")
    openers = ", ".join(map(str, entry.get("openers") or ())) or "-"
    first = [status.shown(cell, entry) for cell in ("{version}", "{state}", "{size:bytes}")]
    return [*first, when, openers]


def _versions(directory: str, **options: int) -> Versions:
    from ..client import Versions

    return Versions(directory, **options)


def _versions_in(directory: str) -> dict[str, Any]:
    """Return what is told of the versions in a directory, the newest first."""
    from ..client._drafts import below

    found, made = list[dict[str, Any]](), _versions(directory)
    for number in reversed(made.numbers()):
        with suppress(FileNotFoundError):  # it has just been removed
            state = "held" if made.is_held(number) else "kept" if found else "current"
            # It was renamed when it was published.
            when_ns = os.stat(made.path(number)).st_ctime_ns
            _, files = below(made.path(number), lambda error: None)  # maybe of another user
            size = sum(os.lstat(file).st_size for file in files)
            found.append({"version": number, "state": state, "size": size, "mtime_ns": when_ns})
    return {"ino": os.stat(directory).st_ino, "versions": found}


@click.command()
@click.argument("source", metavar="SOURCE")
@click.argument("directory", metavar="DIR")
@_expected_option
@click.option(
    "--keep", metavar="K", type=click.IntRange(1), default=3, show_default=True,
    help="Remove what came before the newest K versions, unless somebody holds it.",
)  # fmt: skip
def publish(source: str, directory: str, expected: int | None, keep: int) -> None:
    """Make the directory SOURCE the next version of DIR, DIR/versions/N, in one change; print its path.

    SOURCE is on the same mount, and loses its name. Readers use `irdmafs hold`, or irdmafs.client.Versions.
    """
    made = _versions(directory, keep=keep)
    click.echo(status.printable(made.path(made.publish(mounting.named(source), expected=expected))))


@click.command()
@click.argument("directory", metavar="DIR")
@click.argument("number", metavar="N", type=int)
@_expected_option
def rollback(directory: str, number: int, expected: int | None) -> None:
    """Publish version N of DIR again, as its newest version; print its path. No bytes are copied."""
    made = _versions(directory)
    click.echo(status.printable(made.path(made.roll_back(number, expected=expected))))


@click.command()
@click.argument("directory", metavar="DIR")
@click.argument("command", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--version", "number", metavar="N", type=int, help="This version  [default: the newest]"
)
@click.option(
    "--newer-than", metavar="N", type=int, default=0, help="Wait for one after version N."
)
@click.option("--timeout", metavar="S", type=float, help="Fail if there is none for S seconds.")
@click.option("--local", is_flag=True, help="Bring all of it to this host first.")
def hold(directory: str, command: tuple[str, ...], number: int | None, **when: Any) -> None:
    """Run COMMAND while a version of DIR stays, whole, whatever is published and removed meanwhile.

    COMMAND finds the version's directory in IRDMAFS_PATH, its number in IRDMAFS_VERSION. It is held until
    COMMAND and all programs that it starts have ended, or have closed the descriptors they got.
    """
    from ..client._files import naming

    made = _versions(directory)
    try:
        os.stat(directory)
    except FileNotFoundError:
        say(f"waiting for {directory}, which is not there yet", err=True)
    with made.hold(number, **when) as held:
        told = {"IRDMAFS_PATH": held.path, "IRDMAFS_VERSION": str(held.number)}
        os.set_inheritable(held.fd, True)
        with naming(command[0], instead=True):
            os.execvpe(command[0], command, {**os.environ, **told})


@click.command()
@click.argument("directory", metavar="DIR")
@click.argument("old", metavar="OLD", type=int)
@click.argument("new", metavar="NEW", type=int)
@json_option
@click.pass_context
def diff(ctx: click.Context, directory: str, old: int, new: int, as_json: bool) -> None:
    """List the files of DIR that differ between versions OLD and NEW, and tensors of .safetensors files:
    + came, - went, ~ changed. The exit code is 1 if anything differs."""
    from ..client._differences import differences

    made = _versions(directory)
    with made.hold(old) as first, made.hold(new) as second:
        found = []
        for sign, name in differences(first.path, second.path):
            if not as_json:
                click.echo(f"{sign} {status.one_line(name)}")
            found.append({"change": sign, "name": name})
    if as_json:
        print_json({"differences": found})
    ctx.exit(1 if found else 0)


@click.command()
@click.argument("source", metavar="SOURCE")
@click.argument("target", metavar="TARGET")
def clone(source: str, target: str) -> None:
    """Copy the file or directory SOURCE to TARGET, which it replaces, in one change, as `cp -a` does.

    On one mount the copy shares the bytes, and takes no room. Tells what was shared, and what was copied.
    """
    from ..client import clone

    shared, shared_bytes, copied, copied_bytes = clone(
        mounting.named(source), mounting.named(target)
    )
    sizes = human_bytes(shared_bytes), human_bytes(copied_bytes)
    click.echo(f"{shared} files shared ({sizes[0]}), {copied} copied ({sizes[1]})")


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

    seen = _waiting.look(mounting.named(path))
    if seen is None:
        say(f"waiting for {path}, which is not there yet", err=True)
    while True:
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
