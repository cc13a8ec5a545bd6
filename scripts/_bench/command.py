"""What the subcommands share: their options, the block that measures, and the order of a round."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

import click
from harness.network import CommandFailed, Unavailable
from rich.console import Console

from irdmafs.backend.model.values import parse_size

from .files import WrongData
from .tables import Rates, save

SETTINGS = {"help_option_names": ["-h", "--help"]}

F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")


class Size(click.ParamType[int]):
    """Bytes as the command line of irdmafs takes them: 64M, 1G."""

    name = "size"

    def __init__(self, multiple: int = 1) -> None:
        self._multiple = multiple

    def convert(
        self, value: str | int, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        try:
            size = value if isinstance(value, int) else parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if size % self._multiple:
            self.fail(f"must be a multiple of {self._multiple >> 20} MiB", param, ctx)
        return size


class Sizes(Size):
    """Several, separated by commas."""

    name = "size,..."

    def convert(  # type: ignore[override]
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        convert = super().convert
        return tuple(convert(word, param, ctx) for word in value.split(","))


class Names(click.ParamType[tuple[str, ...]]):
    """Some of the known names, separated by commas; nothing is none of them."""

    def __init__(self, kind: str, known: Sequence[str]) -> None:
        self.name = f"{kind},..."
        self._kind = kind
        self._known = known

    def convert(
        self, value: str | tuple[str, ...], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(name for name in value.split(",") if name)
        for name in names:
            if name not in self._known:
                self.fail(f"no {self._kind} {name!r}; there are {', '.join(self._known)}")
        return names


json_file = click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write every number there.",
)


def only(kind: str, known: Sequence[str], metavar: str) -> Callable[[F], F]:
    """Return the option --only, which selects some of the known names; by default all."""
    default = ",".join(known)
    return click.option(
        "--only", type=Names(kind, known), default=default, show_default=True, metavar=metavar
    )


asserting = click.option("--assert", "assert_", is_flag=True, help="Fail if a bar is missed.")


@contextlib.contextmanager
def signals_end_the_block() -> Iterator[None]:
    """Have SIGTERM, SIGHUP and Ctrl-C leave the block by an exception, once, so that it cleans up."""
    caught = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

    def leave(number: int, _frame: FrameType | None) -> None:
        for other in caught:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, leave) for number in caught}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """Measure without the garbage collector; end the command with the reason where that fails."""
    gc.disable()
    try:
        with signals_end_the_block():
            yield
    except (CommandFailed, Unavailable, WrongData, OSError) as error:
        raise click.ClickException(str(error)) from None


def turned(things: Sequence[T], round_: int) -> list[T]:
    """Return the things in the order of this round: each round begins with another one."""
    first = round_ % len(things)
    return [*things[first:], *things[:first]]


def say(what: str, round_: int | None = None, rounds: int = 0) -> None:
    """Tell on standard error how far the measurement is."""
    of = "" if round_ is None else f"round {round_ + 1}/{rounds}: "
    print(f"{of}{what}", file=sys.stderr, flush=True)


def wide_console(least: int) -> Console:
    """Return a console of at least this width: a narrow terminal breaks lines and cuts no number off."""
    return Console(width=max(Console().width, least))


def finish(rates: Rates, width: int, json_file: Path | None, assert_: bool) -> NoReturn:
    """Show what was measured, save it, and end."""
    rates.show(wide_console(width))
    save(rates.as_json(), json_file)
    sys.exit(1 if assert_ and rates.missed() else 0)
