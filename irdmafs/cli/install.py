"""The commands `irdmafs install` and `irdmafs uninstall`: mount(8), umount(8) and systemd of this host know
irdmafs, or do not any more."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from typing import NamedTuple

import click

from ..mount.mounting import FSTYPE, user_name
from ..mount_options import MountError
from .cluster import say

# Where mount(8) and umount(8) look for their helpers, whatever PATH is.
_HELPERS = "sbin"
_UNITS = "etc/systemd/system"
_MARK = "# Written by `irdmafs install`, and removed by `irdmafs uninstall`.\n"

# A second signal would end a process at once, so that systemd sends only the first one to it (mixed).
_UNIT = f"""\
{_MARK}# The instance is the {{instance}}, as `systemd-escape --path` writes it. Other options:
# systemctl edit irdmafs-{{name}}@INSTANCE, with [Service] and Environment="OPTIONS=...".
[Unit]
Description=irdmafs {{what}} %f
Wants=network-online.target
After=network-online.target etcd.service
{{needs}}
[Service]
Environment="OPTIONS=--cluster /etc/irdmafs/cluster.toml"
ExecStart={{irdmafs}} {{name}} --foreground $OPTIONS -- %f
{{does}}
TimeoutStartSec={{starts_in}}
TimeoutStopSec={{stops_in}}
Type=notify
KillMode=mixed
Restart=on-failure
RestartSec=5s
RestartPreventExitStatus=2
LimitNOFILE=1048576
LimitMEMLOCK=infinity

[Install]
WantedBy=multi-user.target
"""
_FIELDS = ("instance", "what", "needs", "does", "starts_in", "stops_in")
_WORDS = {
    "mount": ("mountpoint", "on", "", "ExecStartPre=-/bin/mkdir -p %f", "5min", "2min"),
    "serve": (
        *("store", "store node in", "RequiresMountsFor=%f\n"),
        *("ExecReload=/bin/kill -HUP $MAINPID", "infinity", "1min"),
    ),
}


class _Part(NamedTuple):
    """A file that is installed: a symbolic link to a program of this installation, or a unit of systemd.
    `content`: the target of the link, or the text of the unit."""

    path: str
    content: str
    is_link: bool

    def found(self) -> str:
        """Return the content that has the path; "" if nothing has it, or a file of another kind."""
        try:
            if self.is_link:
                return os.readlink(self.path)
            with open(self.path, errors="replace") as file:
                return file.read()
        except OSError:
            return ""

    def is_foreign(self) -> bool:
        """Return whether something else has this name."""
        if not os.path.lexists(self.path):
            return False
        if self.is_link:
            return os.path.basename(self.found()) != os.path.basename(self.content)
        return not self.found().startswith(_MARK)

    def make(self) -> None:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        if os.path.lexists(self.path):
            os.unlink(self.path)
        if self.is_link:
            os.symlink(self.content, self.path)
        else:
            with open(self.path, "w") as file:
                file.write(self.content)


def _parts(root: str) -> Iterator[_Part]:
    programs = _programs()
    for fstype in ("irdmafs", FSTYPE):
        for kind in ("mount", "umount"):
            path = os.path.join(root, _HELPERS, f"{kind}.{fstype}")
            yield _Part(path, os.path.join(programs, f"{kind}.irdmafs"), is_link=True)
    # Specifiers of systemd begin with %.
    irdmafs = os.path.join(programs, "irdmafs").replace("%", "%%")
    for name, words in _WORDS.items():
        path = os.path.join(root, _UNITS, f"irdmafs-{name}@.service")
        fields = dict(zip(_FIELDS, words, strict=True))
        text = _UNIT.format(**fields, name=name, irdmafs=f'"{irdmafs}"')
        yield _Part(path, text, is_link=False)


def _programs() -> str:
    """Return the directory with the programs of this installation."""
    beside = os.path.dirname(os.path.abspath(sys.argv[0]))
    for directory in (beside, sysconfig.get_path("scripts")):
        if os.path.exists(os.path.join(directory, "mount.irdmafs")):
            return directory
    raise MountError(f"mount.irdmafs is not in {beside}: install it again (pip install irdmafs)")


_root = click.option("--root", default="/", metavar="DIR", show_default=True,
                     help="The root directory of the system to change.")  # fmt: skip
_dry_run = click.option("--dry-run", is_flag=True, help="Only say what would be changed.")


@click.command()
@_root
@_dry_run
def install(root: str, dry_run: bool) -> None:
    """Let mount(8), fstab and systemd of this host use irdmafs.

    Makes the programs that mount and umount run for it, in /sbin, and the units irdmafs-mount@.service and
    irdmafs-serve@.service, whose instances are a mountpoint and a store (docs/operations.md). Repeated, it
    changes what is not up to date.
    """
    parts = list(_parts(os.path.abspath(root)))
    if owner := os.stat(_programs()).st_uid:
        say(
            f"warning: {_programs()} belongs to {user_name(owner)}, who can change what root runs by it",
            err=True,
        )
    for part in parts:
        if part.is_foreign():
            raise MountError(f"{part.path} is not of irdmafs: move it away; nothing was changed")

    due = [part for part in parts if part.found() != part.content]
    _change(due, _Part.make, "made", root, dry_run)


@click.command()
@_root
@_dry_run
def uninstall(root: str, dry_run: bool) -> None:
    """Undo `irdmafs install`. What is mounted or served goes on."""
    parts = _parts(os.path.abspath(root))
    due = [part for part in parts if os.path.lexists(part.path) and not part.is_foreign()]
    _change(due, lambda part: os.unlink(part.path), "removed", root, dry_run)


def _change(
    due: list[_Part], change: Callable[[_Part], None], done: str, root: str, dry_run: bool
) -> None:
    """Change each part, say which were changed, and have systemd read its units again."""
    for part in due:
        try:
            if not dry_run:
                change(part)
        except OSError as error:
            hint = "; run it as root" if os.geteuid() != 0 else ""
            raise MountError(f"cannot change {part.path}: {error.strerror}{hint}") from error
        say(f"{part.path} {'would be ' if dry_run else ''}{done}")
    if not due:
        say("nothing to change")
    # As sd_booted(3) does it.
    elif not dry_run and os.path.abspath(root) == "/" and os.path.isdir("/run/systemd/system"):
        subprocess.run(["systemctl", "daemon-reload"], check=False)
