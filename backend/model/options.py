"""How a setting is declared: once, as a field of a dataclass.

The field has the name, the type and the default. Its annotation adds what people read:

    streams: Annotated[int, Option("Connections to each peer", commands=("serve",))] = 4

Such fields make the flags of commands (irdmafs/cli/flags.py), the keys of the configuration file
(cluster/config.py) and the tables of docs/options.md.
"""

from collections.abc import Iterator
from dataclasses import MISSING, fields
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints


class Option(NamedTuple):
    """The part of a setting that people read.

    `commands` have a flag for it, with the letter `short` if there is one. `default` is shown where the
    field's own default says too little. A list is given by a flag that is repeated, or, with `commas`, by
    one value. `is_path`: a relative path in the file is relative to the file's directory."""

    help: str
    metavar: str | None = None
    default: str = ""
    commands: tuple[str, ...] = ()
    short: str = ""
    commas: bool = False
    is_path: bool = False


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


def declared(owner: type) -> Iterator[Declared]:
    """Yield the settings that a dataclass declares."""
    hints = get_type_hints(owner, include_extras=True)
    for field in fields(owner):
        hint = hints[field.name]
        if get_origin(hint) is not Annotated:
            continue
        kind, option = get_args(hint)
        if isinstance(option, Option):
            default = None if field.default is MISSING else field.default
            yield Declared(field.name, _without_none(kind), default, option)


def _without_none(kind: Any) -> Any:
    others = [one for one in get_args(kind) if one is not NoneType]
    return others[0] if NoneType in get_args(kind) else kind
