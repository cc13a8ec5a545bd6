"""What a mount is asked to be: options, sizes, and the configuration the daemon is given."""

from __future__ import annotations

import grp
import pwd
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from ..backend import sizes

if TYPE_CHECKING:
    from ..backend.cluster.config import ClusterConfig

SessionName = Literal["auto", "kernel", "pyfuse3"]
WakeupSetting = Literal["auto", "on", "off"]
# Which hosts the locks of a mount hold on: all of its cluster, this one only, or none.
LockScope = Literal["cluster", "local", "refuse"]


class MountError(Exception):
    """Something about a mount cannot be done; the text is one line for the person who asked."""


@dataclass(frozen=True, slots=True)
class MountOptions:
    """The options of ``-o``. ``uid``, ``gid`` and ``umask`` are overrides: None shows what is
    stored. Sizes are in bytes; None leaves them to the session."""

    read_only: bool = False
    allow_other: bool = False
    default_permissions: bool = True
    acl: bool = True
    uid: int | None = None
    gid: int | None = None
    umask: int | None = None
    dev: bool = False
    suid: bool = False
    exec: bool = True
    noatime: bool = False
    nodiratime: bool = False
    lazytime: bool = False
    relatime: bool = False
    sync: bool = False
    dirsync: bool = False
    nonempty: bool = False
    fsname: str = "irdmafs"
    max_read: int | None = None
    max_write: int | None = None
    locks: LockScope = "cluster"
    isolation: bool = True


@dataclass(frozen=True, slots=True)
class MountConfig:
    """One mount, with every default filled in. ``mountpoint`` and ``store`` are absolute paths
    without symlinks; ``size`` is the store's limit in bytes, None where none was asked for.
    ``cluster`` makes it a mount of a cluster, and ``store`` the cache of what it fetched."""

    mountpoint: str
    store: str
    session: SessionName = "auto"
    options: MountOptions = field(default_factory=MountOptions)
    size: int | None = None
    fast_wakeups: WakeupSetting = "auto"
    log_level: str = "info"
    log_file: str | None = None
    foreground: bool = False
    cluster: ClusterConfig | None = None


_FLAGS: dict[str, dict[str, bool]] = {
    "ro": {"read_only": True},
    "rw": {"read_only": False},
    "allow_other": {"allow_other": True},
    "default_permissions": {"default_permissions": True},
    "acl": {"acl": True},
    "noacl": {"acl": False},
    "dev": {"dev": True},
    "nodev": {"dev": False},
    "suid": {"suid": True},
    "nosuid": {"suid": False},
    "exec": {"exec": True},
    "noexec": {"exec": False},
    "atime": {"noatime": False},
    "noatime": {"noatime": True},
    "diratime": {"nodiratime": False},
    "nodiratime": {"nodiratime": True},
    "relatime": {"relatime": True},
    "lazytime": {"lazytime": True},
    "nolazytime": {"lazytime": False},
    "sync": {"sync": True},
    "async": {"sync": False},
    "dirsync": {"dirsync": True},
    "nonempty": {"nonempty": True},
}

# What fstab and systemd say to each other, not to a filesystem.
_IGNORED = frozenset(
    {"_netdev", "auto", "defaults", "group", "noauto", "nofail", "nouser", "owner", "user", "users"}
)
_IGNORED_PREFIXES = ("x-", "comment=")


def _parse_user(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else pwd.getpwnam(text).pw_uid


def _parse_group(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else grp.getgrnam(text).gr_gid


def _parse_umask(text: str) -> int:
    mask = int(text, 8)
    if not 0 <= mask <= 0o777:
        raise ValueError(text)
    return mask


def _parse_request_size(text: str) -> int:
    size = parse_size(text)
    if not 4096 <= size <= 1 << 30:
        raise ValueError(text)
    return size


def _parse_locks(text: str) -> LockScope:
    scopes: dict[str, LockScope] = {"cluster": "cluster", "local": "local", "refuse": "refuse"}
    return scopes[text]


def _parse_name(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError(text)
    return text


def _parse_switch(text: str) -> bool:
    return {"on": True, "off": False}[text]


_VALUES: dict[str, tuple[Callable[[str], Any], str]] = {
    "uid": (_parse_user, "a user id or name"),
    "gid": (_parse_group, "a group id or name"),
    "umask": (_parse_umask, "an octal mask such as 022"),
    "fsname": (_parse_name, "a name"),
    "isolation": (_parse_switch, "on or off"),
    "max_read": (_parse_request_size, "a size from 4K to 1G"),
    "max_write": (_parse_request_size, "a size from 4K to 1G"),
    "locks": (_parse_locks, "cluster, local or refuse"),
}


def parse_mount_options(arguments: Iterable[str]) -> MountOptions:
    """Read ``-o`` arguments, each a comma-separated list; of contradicting options the last wins.

    Raises MountError for an unknown option or a value that makes no sense.
    """
    changes: dict[str, Any] = {}
    for option in (part.strip() for argument in arguments for part in argument.split(",")):
        name, equals, value = option.partition("=")
        if not option or option in _IGNORED or option.startswith(_IGNORED_PREFIXES):
            continue
        if not equals and name in _FLAGS:
            changes.update(_FLAGS[name])
        elif equals and name in _VALUES:
            parse, expected = _VALUES[name]
            try:
                changes[name] = parse(value)
            except (ValueError, KeyError, MountError):
                raise MountError(f"-o {option}: {name} takes {expected}") from None
        elif name in _VALUES:
            raise MountError(f"-o {name} needs a value: {name}={_VALUES[name][1]}")
        elif equals and name in _FLAGS:
            raise MountError(f"-o {option}: {name} takes no value")
        elif name == "strictatime":
            raise MountError(
                "-o strictatime is not supported: reads that pass through are noted as with relatime"
            )
        elif name == "allow_root":
            raise MountError(
                "-o allow_root is not supported; use allow_other (permissions are still checked)"
            )
        else:
            known = ", ".join(sorted([*_FLAGS, *(f"{key}=" for key in _VALUES)]))
            raise MountError(f"unknown mount option {name!r}; known are: {known}")
    return replace(MountOptions(), **changes)


def parse_size(text: str) -> int:
    """Bytes meant by "4096", "64M", "8GiB" (powers of 1024) or "50%" (of the machine's memory).

    Raises MountError for anything else, and for nothing at all.
    """
    try:
        return sizes.parse_size(text)
    except ValueError as error:
        raise MountError(str(error)) from None
