"""The processes of a cluster besides etcd: store nodes and mounts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from irdmafs.mount.mounting import ask_mount

from . import forks
from .daemons import Daemon, wait_until
from .network import COMMAND_TIMEOUT_S, CommandFailed, Host, run
from .scratch import is_mounted

STATUS_XATTR = "user.irdmafs.status"
# What a node needs besides extents: its records, and a page for each file.
_ROOM_BYTES = 1 << 20


Part = TypeVar("Part", bound=Daemon)


def irdmafs_command(*arguments: str | os.PathLike[str]) -> list[str]:
    return [*forks.PREFIX, *(os.fspath(word) for word in arguments)]


def run_instead(part: Part, program: str) -> Part:
    """Have a part run a program, if one is named, that is the command `irdmafs` with changes. Return the
    part."""
    assert tuple(part.command[: len(forks.PREFIX)]) == forks.PREFIX
    if program:
        part.command[: len(forks.PREFIX)] = [sys.executable, program]
    return part


def write_toml(path: Path, sections: Mapping[str, Mapping[str, object]]) -> None:
    """Write sections of plain values; JSON's strings, numbers, booleans and lists are TOML's."""
    lines = []
    for name, values in sections.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    path.write_text("\n".join(lines) + "\n")


def mount_tmpfs(path: Path, size_bytes: int) -> bool:
    """A tmpfs of its own for `path`, with huge pages where they fit. False: it stays a directory,
    because mounting takes root."""
    path.mkdir(parents=True)
    if os.geteuid() != 0:
        return False
    options = f"size={size_bytes},huge=within_size,mode=0755"
    try:
        run("mount", "-t", "tmpfs", "-o", options, "irdmafs-cluster", path)
    except CommandFailed:
        run("mount", "-t", "tmpfs", "-o", options.replace("huge=within_size,", ""), "none", path)
    return True


class StoreNode(Daemon):
    """`irdmafs serve` with a memory of its own. `store` is its store directory."""

    def __init__(self, name: str, host: Host, directory: Path, size_bytes: int) -> None:
        directory.mkdir()
        self._memory = directory / "memory"
        self._own_memory = mount_tmpfs(self._memory, size_bytes)
        self.size_bytes = size_bytes
        self.store = self._memory / "store"
        self.store.mkdir()
        self.config = directory / "node.toml"
        self._filler = self._memory / "filler"
        command = irdmafs_command("serve", self.store, "--config", self.config, "-f")
        super().__init__(name, host, command, directory / "log")

    @property
    def node_id(self) -> int:
        """Its number in the cluster. Raises OSError before its first start."""
        identity: dict[str, Any] = json.loads((self.store / "node.json").read_text())
        return int(identity["id"], 16)

    def wipe(self) -> None:
        """Lose all that it stored, its identity included, as a machine that was switched off does."""
        assert not self.alive
        shutil.rmtree(self.store)
        self.store.mkdir()

    def fill(self, leave_bytes: int = 0) -> None:
        """Take the space of its memory away, all but `leave_bytes`."""
        assert self._own_memory, "this would fill the memory of the machine"
        with self._filler.open("ab") as file:
            while (size := shutil.disk_usage(self._memory).free - leave_bytes) > 0:
                # The node writes, too.
                with contextlib.suppress(OSError):
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)

    def unfill(self) -> None:
        self._filler.unlink(missing_ok=True)

    def stored_bytes(self) -> int:
        """Bytes of the extents that it holds."""
        sizes = []
        for entry in os.scandir(self.store / "extents"):
            with contextlib.suppress(FileNotFoundError):
                sizes.append(entry.stat().st_size)
        return sum(sizes)

    def close(self) -> None:
        self.kill9()
        if self._own_memory:
            run("umount", "-l", self._memory, check=False)


class ClusterMount(Daemon):
    """`irdmafs mount --cluster` on `path`."""

    def __init__(
        self,
        name: str,
        host: Host,
        directory: Path,
        arguments: tuple[str | os.PathLike[str], ...],
        cache_bytes: int,
    ) -> None:
        directory.mkdir()
        self.path = directory / "mount"
        self.path.mkdir()
        self._memory = directory / "memory"
        self._own_memory = mount_tmpfs(self._memory, cache_bytes * 2 + _ROOM_BYTES)
        self.cache = self._memory / "cache"
        self.config = directory / "mount.toml"
        command = irdmafs_command(
            *("mount", self.path, "--cluster", self.config, "--store", self.cache),
            *("--cache-size", str(cache_bytes), "--host", host.name, "-f", *arguments),
        )
        super().__init__(name, host, command, directory / "log")

    def is_mounted(self) -> bool:
        """Whether the mount table has it; asks nothing of the filesystem itself."""
        return is_mounted(self.path)

    def start(self) -> None:
        self.detach()
        super().start()

    def wait_ready(self, within_s: float = COMMAND_TIMEOUT_S) -> None:
        """Until it is mounted and answers. Raises CommandFailed."""
        wait_until(self.is_mounted, f"{self.name} does not mount:", within_s, self)
        try:
            self.status()
        except OSError as error:
            raise CommandFailed(
                f"{self.name} does not answer: {error}\n{self.log_tail()}"
            ) from None

    def status(self, timeout_s: float = 20.0) -> dict[str, Any]:
        """What it says of itself. Raises OSError, TimeoutError when there is no answer in time."""
        answer: dict[str, Any] = json.loads(ask_mount(str(self.path), STATUS_XATTR, timeout_s))
        return answer

    def detach(self) -> None:
        """Take the mountpoint of a dead daemon away."""
        while self.is_mounted():
            run("umount", "-il", self.path)

    def restart(self) -> None:
        """Kill it and mount again."""
        self.kill9()
        self.start()
        self.wait_ready()

    def close(self) -> None:
        self.kill9()
        with contextlib.suppress(CommandFailed):
            self.detach()
        if self._own_memory:
            run("umount", "-l", self._memory, check=False)


def run_irdmafs(
    host: Host, *arguments: str | os.PathLike[str], timeout_s: float = COMMAND_TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run the command line tool on a host; its exit status is for the caller to judge."""
    return forks.run(irdmafs_command(*arguments), host.launcher, timeout_s=timeout_s)
