"""The configuration of a cluster's processes: one TOML file for nodes, mounts and the command.

    [cluster]  which cluster, where its etcd is, and the credentials
    [node]     irdmafs serve
    [mount]    irdmafs mount
    [log]      both

Flags override the file. Paths in the file are relative to the file's directory, so that a directory
made by `irdmafs cluster init` can be moved. Every error names the file and the key.
"""

import difflib
import ipaddress
import os
import signal
import socket
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, get_args, get_origin

import msgspec

from ..model.options import declared
from ..model.values import ConfigError, Seconds, Size, from_text, split_host_port
from ..transport.verbs.devices import local_address
from .config_sections import SECTIONS, ClusterSection, LogSection, MountSection, NodeSection

DEFAULT_PATH = "/etc/irdmafs/cluster.toml"
PATH_VARIABLE = "IRDMAFS_CONFIG"
_CONFIG_LIMIT_BYTES = 1 << 20

Overrides = Mapping[str, Mapping[str, object]]


class Listen(NamedTuple):
    """The address on which a node listens. `advertised` is the one that peers use; port 0: any free one."""

    bind: str
    advertised: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """One process's configuration; `path` is the file it came from, None if there was none."""

    cluster: ClusterSection = field(default_factory=ClusterSection)
    node: NodeSection = field(default_factory=NodeSection)
    mount: MountSection = field(default_factory=MountSection)
    log: LogSection = field(default_factory=LogSection)
    path: str | None = None

    @classmethod
    def load(cls, path: str | None = None, overrides: Overrides | None = None) -> "ClusterConfig":
        """Read `path`, or the file that `find_config` finds; `overrides` are {section: {key: value}} of
        flags, in which None means that the flag was not given.

        Raises ConfigError, also when no etcd is named at all.
        """
        path = find_config(path)
        data: dict[str, dict[str, object]] = {}
        if path is not None:
            data = _read(path)
            _convert(data, path)
        given = {
            section: {key: value for key, value in values.items() if value is not None}
            for section, values in (overrides or {}).items()
        }
        _make_paths_absolute(given, os.getcwd())
        for section, values in given.items():
            data[section] = {**data.get(section, {}), **values}
        config = replace(_convert(data, "command line"), path=path)
        if not config.cluster.etcd:
            where = f"{path} names no etcd" if path else "no etcd is named"
            raise ConfigError(
                f'{where}; set etcd = ["HOST:PORT"] in [cluster] of the file that --cluster, '
                f"${PATH_VARIABLE} or {DEFAULT_PATH} gives (irdmafs cluster init writes one)"
            )
        return config

    def listen(self) -> Listen:
        """Return the address on which a node listens: without `listen`, the one from which etcd is reached
        if there are credentials (or `insecure`), else loopback.

        Raises ConfigError for an address that is none, and for one that opens nodes without credentials.
        """
        is_open = self.cluster.secured or self.cluster.insecure
        if self.node.listen:
            host, port = split_host_port(self.node.listen, 0)
            bind = _resolve(host)
        else:
            bind, port = (self._own_address() if is_open else "127.0.0.1"), 0
        address = ipaddress.ip_address(bind.partition("%")[0])
        if not is_open and not address.is_loopback:
            raise ConfigError(
                f"will not listen on {bind} without credentials: anybody could read and write; set ca, "
                "cert and key in [cluster] (irdmafs cluster init makes them), or allow it with --insecure"
            )
        return Listen(bind, self._own_address() if address.is_unspecified else bind, port)

    def _own_address(self) -> str:
        host, _ = self.cluster.endpoints[0]
        try:
            return local_address(host)
        except OSError as error:
            raise ConfigError(
                f"cannot tell which of this host's addresses reaches etcd at {host}: "
                f"{error.strerror}; say it with --listen ADDR"
            ) from error


def find_config(path: str | None = None) -> str | None:
    """Return the configuration file: `path`, $IRDMAFS_CONFIG, or /etc/irdmafs/cluster.toml if there."""
    chosen = path or os.environ.get(PATH_VARIABLE)
    if chosen:
        return os.path.abspath(chosen)
    return DEFAULT_PATH if os.path.exists(DEFAULT_PATH) else None


def _make_paths_absolute(data: dict[str, dict[str, object]], directory: str) -> None:
    for section, values in data.items():
        for setting in declared(SECTIONS[section]):
            value = values.get(setting.name)
            if setting.option.is_path and isinstance(value, str) and value:
                path = os.path.join(directory, os.path.expanduser(value))
                values[setting.name] = os.path.normpath(path)


def _read(path: str) -> dict[str, dict[str, object]]:
    try:
        with open(path, "rb") as file:
            text = file.read(_CONFIG_LIMIT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    if len(text) > _CONFIG_LIMIT_BYTES:
        raise ConfigError(f"{path} is too long for a configuration")
    try:
        data = tomllib.loads(text.decode("utf-8-sig"))
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    _check_keys(data, path)
    _make_paths_absolute(data, os.path.dirname(path))
    return data


def _check_keys(data: Mapping[str, Any], source: str) -> None:
    for section, values in data.items():
        if section not in SECTIONS:
            what = "section" if isinstance(values, dict) else "key outside a section"
            raise ConfigError(f"{source}: unknown {what} {section!r}{_hint(section, SECTIONS)}")
        if not isinstance(values, dict):
            raise ConfigError(f"{source}: {section} is a section: write [{section}]")
        known = [key.name for key in fields(SECTIONS[section])]
        if odd := [key for key in values if key not in known]:
            what = f"unknown key {odd[0]!r} in [{section}]"
            raise ConfigError(f"{source}: {what}{_hint(odd[0], known)}")
        for key, value in values.items():
            if "\0" in "".join(map(str, value if isinstance(value, list) else [value])):
                raise ConfigError(f"{source}: {section}.{key}: a text cannot have a NUL byte")


def _hint(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are: {', '.join(known)}"


def _convert(data: Mapping[str, Any], source: str) -> ClusterConfig:
    # msgspec swallows a KeyboardInterrupt that comes while it looks types up.
    signals = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        return _plain(msgspec.convert(data, ClusterConfig, dec_hook=from_text, strict=True))
    except msgspec.ValidationError as error:
        # "Expected `int`, got `str` - at `$.node.streams`"
        what, _, place = str(error).partition(" - at `$.")
        place = place.rstrip("`")
        if not isinstance(error.__cause__, ValueError):  # not the words of this program
            what = _expected(data, place) or what.replace("`", "")
        raise ConfigError(f"{source}: {place and place + ': '}{what}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)


def _expected(data: Mapping[str, Any], place: str) -> str:
    """Return what is wrong with a value of another type than its key, at `place`, has; "" if not known."""
    section, _, key = place.partition("[")[0].partition(".")
    for setting in declared(SECTIONS[section]) if section in SECTIONS else ():
        if setting.name == key:
            return f"{data[section][key]!r} is not {_described(setting.kind)}"
    return ""


def _described(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) is tuple:
        return 'a list of texts such as ["a", "b"]'
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[kind]


def _plain(config: ClusterConfig) -> ClusterConfig:
    """Return the configuration with int and float for Size and Seconds: msgspec encodes no others, and
    values that are computed from a limit go into records."""
    sections = {}
    for name in SECTIONS:
        section = getattr(config, name)
        values = asdict(section)
        sections[name] = replace(
            section,
            **{key: int(value) for key, value in values.items() if isinstance(value, Size)},
            **{key: float(value) for key, value in values.items() if isinstance(value, Seconds)},
        )
    return replace(config, **sections)


def _resolve(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"listen: cannot resolve {host!r}: {error.strerror}") from error
