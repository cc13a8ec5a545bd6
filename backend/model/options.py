"""How a setting is declared: once, as a field of a dataclass.

The field has the name, the type and the default, and what people read:

    streams: int = declare(4, "Connections to each peer", commands=("serve",))

Such fields make the flags of commands (irdmafs/cli/flags.py), the keys of the configuration file
(cluster/config.py) and the tables of docs/options.md.
"""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, field, fields
from types import NoneType
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

T = TypeVar("T")


class Option(NamedTuple):
    """The part of a setting that people read.

    `commands` have a flag for it, with the letter `short` if there is one. `default` is shown where the
    field's own default says too little. A list is given by a flag that is repeated, or, with `commas`, by
    one value. `is_path`: a relative path in the file is relative to the file's directory."""

    help: str
    metavar: str | None
    default: str
    commands: tuple[str, ...]
    short: str
    commas: bool
    is_path: bool


class Declared(NamedTuple):
    """A field that is a setting; `kind` is its type without None."""

    name: str
    kind: Any
    default: Any
    option: Option

    @property
    def flag(self) -> str:
        """Return the name that the setting has on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def shown_default(self) -> str:
        """Return the default as people read it, "" for none."""
        if self.option.default or self.default in (None, "", (), False):
            return self.option.default
        return "yes" if self.default is True else str(self.default)


def declare(
    default: T | Callable[[], T],
    help: str,
    metavar: str | None = None,
    shown: str = "",
    *,
    commands: tuple[str, ...] = (),
    short: str = "",
    commas: bool = False,
    is_path: bool = False,
) -> T:
    """Return the field of a setting. `default` may be a function that makes it; `shown` is the default of
    the Option."""
    option = Option(help, metavar, shown, commands, short, commas, is_path)
    kind = "default_factory" if callable(default) else "default"
    made: T = field(**{kind: default}, metadata={"option": option})  # type: ignore[call-overload]
    return made


def declared(owner: type) -> Iterator[Declared]:
    """Yield the settings that a dataclass declares."""
    hints = get_type_hints(owner)
    for one in fields(owner):
        if (option := one.metadata.get("option")) is not None:
            default = None if one.default is MISSING else one.default
            kinds = get_args(hints[one.name])
            kind = kinds[0] if NoneType in kinds else hints[one.name]
            yield Declared(one.name, kind, default, option)
