"""The configuration of a mount: its options and flags, and what the daemon is given."""

from __future__ import annotations

import grp
import pwd
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

from .backend.model.options import declare
from .backend.model.values import ConfigError
from .backend.observe.logs import LogLevel

if TYPE_CHECKING:
    from .backend.cluster.config import ClusterConfig

T = TypeVar("T")
SessionName = Literal["auto", "kernel", "pyfuse3"]
# The hosts on which the locks of a mount hold: all of its cluster, this one only, or none.
LockScope = Literal["cluster", "local", "refuse"]


class MountError(ConfigError):
    """A mount cannot be made, unmounted or looked at; the text is one line for the person who asked."""


def _parse_user(text: str) -> int:
    return _number(text) if text.isdecimal() else pwd.getpwnam(text).pw_uid


def _parse_group(text: str) -> int:
    return _number(text) if text.isdecimal() else grp.getgrnam(text).gr_gid


def _number(text: str) -> int:
    """Return the number of a user or group. The largest of 32 bits means none (chown(2))."""
    number = int(text)
    if number >= (1 << 32) - 1:
        raise ValueError(text)
    return number


def _parse_umask(text: str) -> int:
    mask = int(text, 8)
    if not 0 <= mask <= 0o777:
        raise ValueError(text)
    return mask


def _parse_name(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError(text)
    return text


class Switch(NamedTuple):
    """A mount option without a value: the word that sets the field, and the one that clears it, if any."""

    on: str
    off: str | None
    help: str

    def words(self, name: str) -> Iterator[tuple[str, dict[str, bool]]]:
        """Yield each word, and the field's value by it."""
        yield self.on, {name: True}
        if self.off is not None:
            yield self.off, {name: False}


class Value(NamedTuple):
    """A mount option `name=value`. `parse` raises ValueError or KeyError for a text that is not
    `expected`."""

    parse: Callable[[str], Any]
    expected: str
    help: str


def _option(default: T, form: Switch | Value) -> T:
    """Return the field of an option with this default."""
    made: T = field(default=default, metadata={"form": form})
    return made


@dataclass(frozen=True, slots=True)
class MountOptions:
    """The options of ``-o``. Sizes are in bytes."""

    read_only: bool = _option(False, Switch("ro", "rw", "refuse changes"))
    allow_other: bool = _option(
        False, Switch("allow_other", None, "let other users than the one who mounted enter")
    )
    acl: bool = _option(
        True, Switch("acl", "noacl", "keep POSIX ACLs and have the kernel check them")
    )
    uid: int | None = _option(
        None, Value(_parse_user, "a user id or name", "show this user as every owner")
    )
    gid: int | None = _option(
        None, Value(_parse_group, "a group id or name", "show this group as every group")
    )
    umask: int | None = _option(
        None,
        Value(_parse_umask, "an octal mask such as 022", "take these bits off every mode shown"),
    )
    dev: bool = _option(False, Switch("dev", "nodev", "let device files open devices"))
    suid: bool = _option(
        False, Switch("suid", "nosuid", "obey set-user-id, set-group-id and file capabilities")
    )
    exec: bool = _option(True, Switch("exec", "noexec", "let programs be run"))
    noatime: bool = _option(False, Switch("noatime", "atime", "keep access times as they are"))
    nodiratime: bool = _option(
        False, Switch("nodiratime", "diratime", "keep access times of directories as they are")
    )
    sync: bool = _option(
        False, Switch("sync", "async", "writes are synchronous, changes of names as with dirsync")
    )
    dirsync: bool = _option(
        False, Switch("dirsync", None, "changes of names are stored before they are answered")
    )
    nonempty: bool = _option(
        False, Switch("nonempty", None, "allow a mountpoint that is not empty")
    )
    poll: bool = _option(
        False,
        Switch(
            "poll",
            None,
            "open files tell by POLLPRI that they are outdated; io_uring writes slowly",
        ),
    )
    fsname: str = _option(
        "irdmafs", Value(_parse_name, "a name", "the source that the mount table shows")
    )
    locks: LockScope = _option(
        "cluster",
        Value(
            {scope: scope for scope in get_args(LockScope)}.__getitem__,
            "cluster, local or refuse",
            "where locks hold: on every host of the cluster, on this one only, or nowhere (ENOLCK)",
        ),
    )
    isolation: bool = _option(
        True,
        Value(
            {"on": True, "off": False}.__getitem__,
            "on or off",
            "truncating a published file begins a version of its own, and other hosts see a new file with "
            "its first version",
        ),
    )


# The form in which each field is written, in the order of their declaration.
FORMS: dict[str, Switch | Value] = {one.name: one.metadata["form"] for one in fields(MountOptions)}


def switches_of(options: MountOptions) -> set[str]:
    """Return the words of ``-o`` that these options stand for, except those that take a value."""
    words = set()
    for name, form in FORMS.items():
        if isinstance(form, Switch):
            words.add(form.on if getattr(options, name) else form.off)
    return {word for word in words if word is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class MountFlags:
    """Settings of a mount that are given by flags alone."""

    session: SessionName = declare("auto", "How to talk to the kernel")
    foreground: bool = declare(False, "Stay; Ctrl-C unmounts", short="-f")
    log_level: LogLevel = declare("info", "How much to log")
    log_file: str | None = declare(
        None, "Where to log", "FILE", "irdmafs.log in the store, or stderr in the foreground"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MountConfig(MountFlags):
    """One mount, with every default filled in. ``mountpoint`` and ``store`` are absolute paths
    without symlinks; ``size`` is the store's limit in bytes, None where none was asked for.
    ``cluster`` makes it a mount of a cluster, and ``store`` the cache of what it fetched."""

    mountpoint: str
    store: str
    options: MountOptions = field(default_factory=MountOptions)
    size: int | None = None
    cluster: ClusterConfig | None = None


# Options of mount(8), fstab and systemd, which a filesystem ignores, and one that always holds here.
_IGNORED = frozenset(
    {
        "_netdev", "auto", "default_permissions", "defaults", "group", "iversion", "loud",
        "mand", "noauto", "nofail", "noiversion", "nolazytime", "nomand", "norelatime",
        "nostrictatime", "nouser", "owner", "relatime", "silent", "symfollow", "user", "users",
    }
)  # fmt: skip
_IGNORED_PREFIXES = ("x-", "X-", "comment=", "uhelper=", "user=")


def is_for_mount_tools(option: str) -> bool:
    """Return whether an option is for mount(8), fstab or systemd, and means nothing to the filesystem."""
    return option in _IGNORED or option.startswith(_IGNORED_PREFIXES)


def parse_mount_options(arguments: Iterable[str]) -> MountOptions:
    """Read ``-o`` arguments, each a comma-separated list; of contradicting options the last wins.

    Raises MountError for an unknown option or a value that makes no sense.
    """
    changes: dict[str, Any] = {}
    flags: dict[str, dict[str, bool]] = {}
    for name, form in FORMS.items():
        if isinstance(form, Switch):
            flags.update(form.words(name))
    values = {name: form for name, form in FORMS.items() if isinstance(form, Value)}
    for option in (part.strip() for argument in arguments for part in argument.split(",")):
        name, equals, value = option.partition("=")
        if not option or is_for_mount_tools(option):
            continue
        if not equals and name in flags:
            changes.update(flags[name])
        elif equals and name in values:
            try:
                changes[name] = values[name].parse(value)
            except (ValueError, KeyError):
                raise MountError(f"-o {option}: {name} takes {values[name].expected}") from None
        elif name in values:
            raise MountError(f"-o {name} needs a value: {name}={values[name].expected}")
        elif equals and name in flags:
            raise MountError(f"-o {option}: {name} takes no value")
        elif name == "allow_root":
            raise MountError(
                "-o allow_root is not supported; use allow_other (permissions are still checked)"
            )
        else:
            known = ", ".join(sorted([*flags, *(f"{key}=" for key in values)]))
            raise MountError(
                f"unknown mount option {name!r}; known are: {known} (other settings are flags: irdmafs "
                "mount --help)"
            )
    return replace(MountOptions(), **changes)
