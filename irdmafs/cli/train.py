"""`irdmafs train`: the commands of the parameter server (docs/training.md)."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import click

from ..mount import mounting
from ..mount_options import MountError
from .cluster import say

_say = partial(say, err=True)
_directory = click.argument("directory", metavar="DIR")


@contextmanager
def _one_line_errors(directory: str) -> Iterator[None]:
    from ..train import TrainError

    try:
        mount = mounting.containing_mount(directory)
        if mount is not None and mount.fstype == mounting.FSTYPE:
            mounting.ask_mount(mount.mountpoint)
        yield
    except TrainError as error:
        raise MountError(str(error)) from error
    except OSError as error:
        raise MountError(f"{error.filename or directory}: {mounting.reason(error)}") from error


@click.group()
def train() -> None:
    """Train models in a directory: workers push gradients and pull parameters, as files."""


@train.command()
@_directory
@click.option("--rule", default="sgd", show_default=True, metavar="RULE",
              help="sgd, adam, adamw, sum, mean, easgd, ema or diloco.")  # fmt: skip
@click.option("--lr", type=float, help="The learning rate  [default: the rule's]")
@click.option("--set", "settings", multiple=True, metavar="OPTION=VALUE",
              help="An option of the rule: --set momentum=0.9 --set nesterov=true.")  # fmt: skip
@click.option("--sync", default="bsp", show_default=True, metavar="SYNC",
              help="Who waits for whom: bsp, async, ssp:S, quorum:Q or local:H.")  # fmt: skip
@click.option("--workers", default="auto", show_default=True, metavar="WORKERS",
              help="Whose pushes make a version: auto (all who take part), a number, names.")  # fmt: skip
@click.option("--clip-norm", default=0.0, help="Scale gradients down to this global norm.")
@click.option("--nonfinite", type=click.Choice(["refuse", "skip", "count"]), default="refuse",
              show_default=True, help="What becomes of a push with NaN or infinity.")  # fmt: skip
@click.option("--staleness", type=click.Choice(["none", "inverse"]), default="none", show_default=True,
              help="Whether a push counts less the older its base is.")  # fmt: skip
@click.option("--keep", type=int, default=3, show_default=True, help="Versions that are kept.")
@click.option("--whole-every", type=int, default=1, show_default=True, metavar="N",
              help="Make model.safetensors of every Nth version (0: of none).")  # fmt: skip
@click.option("--shards", type=click.IntRange(1, 1024), metavar="N",
              help="Pieces to push, reduce and pull  [default: by size and store nodes]")  # fmt: skip
def init(
    directory: str, settings: tuple[str, ...], workers: str, shards: int | None, **given: Any
) -> None:
    """Train the models in DIR: all its .safetensors files."""
    from ..train import TrainConfig, begin

    with _one_line_errors(directory):
        options = dict(map(_setting, settings))
        config = TrainConfig(options=options, workers=_workers(workers), **given)
        layout = begin(directory, config, shards=shards)
    elements = sum(parameter.size for parameter in layout.parameters)
    say(
        f"{directory} trains {elements:,} parameters in {len(layout.parameters)} tensors, "
        f"in {len(layout.shard_names)} shards; next, on one host or more: irdmafs train reduce {directory}"
    )


def _setting(text: str) -> tuple[str, float | bool]:
    name, equals, value = text.partition("=")
    if value in ("true", "false"):
        return name, value == "true"
    try:
        if not (name and equals):
            raise ValueError(text)
        return name, float(value)
    except ValueError:
        raise MountError(f"--set takes OPTION=NUMBER, or true or false, not {text!r}") from None


def _workers(text: str) -> Literal["auto"] | int | tuple[str, ...]:
    if text == "auto":
        return "auto"
    return int(text) if text.isdecimal() else tuple(text.split(","))


@train.command()
@_directory
@click.option(
    "--threads", type=click.IntRange(1, 1024), help="Threads that add up  [default: all cores]."
)
@click.option("-v", "--verbose", is_flag=True, help="Say what it does.")
def reduce(directory: str, threads: int | None, verbose: bool) -> None:
    """Make the versions of DIR, until this is ended by Ctrl-C or SIGTERM.

    Any number may run, on any hosts; where store nodes are they move the fewest bytes. What one that ended
    did is taken over by the others.
    """
    from ..train import Reducer
    from ..train.launcher import signals_taken

    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="irdmafs: %(message)s")
    with (
        signals_taken() as signals,
        _one_line_errors(directory),
        Reducer(directory, threads=threads) as reducer,
    ):
        reducer.run(lambda: bool(signals))


@train.command()
@_directory
@click.option("--workers", type=click.IntRange(1, 10_000), default=1, show_default=True, metavar="N",
              help="Processes that run COMMAND.")  # fmt: skip
@click.argument("command", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def run(ctx: click.Context, directory: str, workers: int, command: tuple[str, ...]) -> None:
    """Train in DIR on this host: irdmafs train run DIR --workers 4 -- python worker.py

    Starts a reducer, if shards are here or none is at work, and COMMAND as many times as there are workers
    (IRDMAFS_WORKER is the number of each, from 0 on, IRDMAFS_WORKERS how many there are), and ends all of
    them together. The exit code is that of the first worker that failed.
    """
    from ..train.directory import TrainDirectory
    from ..train.launcher import launch, reducers_here

    with _one_line_errors(directory):
        found = TrainDirectory(directory)
        found.config()
        reduces, elsewhere = reducers_here(found)
        again = shlex.join([directory, "--workers", str(workers), "--", *command])
        _say(f"on this host: reducers {int(reduces)}, workers {workers}")
        _say(f"for more workers, on another host that mounts it: irdmafs train run {again}")
        if elsewhere:
            hosts, what = ", ".join(elsewhere), shlex.quote(directory)
            _say(f"for fewer bytes on links, on {hosts}, too: irdmafs train reduce {what}")
        code = launch(found, command, workers=workers, reduces=reduces, say=_say)
    ctx.exit(code)


@train.command("status")
@_directory
@click.pass_context
def status_command(ctx: click.Context, directory: str) -> None:
    """Print how far the training in DIR is, and who is waited for.

    The exit code is 1 if no reducer is at work.
    """
    from ..train.directory import TrainDirectory
    from ..train.status import is_reduced, no_reducer, report

    with _one_line_errors(directory):
        found = TrainDirectory(directory)
        click.echo(report(found), nl=False)
        if not is_reduced(found):
            _say(no_reducer(found))
            ctx.exit(1)


@train.command()
@_directory
def end(directory: str) -> None:
    """Stop training in DIR: its models become files again, of the newest version."""
    from ..train import end as end_training
    from ..train.directory import TrainDirectory
    from ..train.liveness import locked_in

    with _one_line_errors(directory):
        found = TrainDirectory(directory)
        found.config()
        for folder in (found.reducers, found.workers):
            for name in locked_in(folder):
                raise MountError(f"{folder.name}/{name} is still at work: end it first")
        number = end_training(directory)
    say(f"{directory} has the models of version {number}")
