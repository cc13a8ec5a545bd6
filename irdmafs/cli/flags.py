"""Flags of commands, made of the settings that are declared as fields (backend/model/options.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args, get_origin

import click

from ..backend.cluster.config_sections import SECTIONS
from ..backend.model.options import Declared, declared
from ..backend.model.values import Seconds, Size

Command = Callable[..., Any]

_SEPARATOR = "__"
_METAVARS = {Size: "SIZE", Seconds: "DURATION"}


def flags_of(owner: type) -> Command:
    """Return a decorator that adds a flag for each setting of a dataclass (texts, numbers, choices and
    switches); a flag that is not given has the field's default."""
    return _added(_flag(setting, setting.name, setting.default) for setting in declared(owner))


def section_flags(name: str, prefix: str = "") -> Command:
    """Return a decorator that adds the flags by which the command `name` overrides keys of the
    configuration file; their help begins with `prefix`. The command gives their values to `overrides`."""
    return _added(
        _flag(setting, f"{section}{_SEPARATOR}{setting.name}", None, _log_prefix(section), prefix)
        for section, owner in SECTIONS.items()
        for setting in declared(owner)
        if name in setting.option.commands
    )


def _added(flags: Iterable[Command]) -> Command:
    """Return a decorator that adds these flags in their order."""

    def add(command: Command) -> Command:
        for flag in reversed([*flags]):
            command = flag(command)
        return command

    return add


def overrides(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return {section: {key: value}} of the flags that `section_flags` added; None: it was not given."""
    found: dict[str, dict[str, Any]] = {}
    for parameter, value in values.items():
        section, _, key = parameter.partition(_SEPARATOR)
        found.setdefault(section, {})[key] = None if value == () else value
    return found


def flag_name(section: str, key: str) -> str:
    """Return the flag of a key of the configuration file."""
    return f"--{_log_prefix(section)}{key.replace('_', '-')}"


def _log_prefix(section: str) -> str:
    # Keys of the other sections have flags of the same name.
    return "log-" if section == "log" else ""


def _flag(
    setting: Declared, parameter: str, default: Any, before: str = "", prefix: str = ""
) -> Command:
    option = setting.option
    name = f"--{before}{setting.flag[2:]}"
    kind: dict[str, Any] = {}
    if setting.kind is bool:
        if setting.default:
            name = f"{name}/--no-{name[2:]}"
        kind["is_flag"] = True
    elif get_origin(setting.kind) is Literal:
        kind["type"] = click.Choice(get_args(setting.kind))
    elif setting.kind in (int, float):
        kind["type"] = setting.kind
    elif get_origin(setting.kind) is tuple:
        if option.commas:
            kind["callback"] = _split
        else:
            kind["multiple"] = True
    shown = name.partition("/")[0] if setting.default is True else setting.shown_default
    text = f"{prefix}{option.help[0].lower()}{option.help[1:]}" if prefix else option.help
    return click.option(
        name,
        *([option.short] if option.short else []),
        parameter,
        default=default,
        metavar=option.metavar or _METAVARS.get(setting.kind),
        help=text + (f"  [default: {shown}]" if shown else "."),
        **kind,
    )


def _split(ctx: click.Context, parameter: click.Parameter, value: str | None) -> list[str] | None:
    return [part.strip() for part in value.split(",") if part.strip()] if value else None
