"""A GlusterFS volume of two replicas on two hosts of a network, with clients on others.

Each glusterd runs in a mount namespace of its own, in which tmpfs lie over the directories that are
compiled into it: what is on the machine itself is neither used nor changed.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from harness.daemons import Daemon, wait_until
from harness.network import CommandFailed, Host, run
from harness.parts import mount_tmpfs

VOLUME = "bench"
START_TIMEOUT_S = 30.0
_SOCKET = "/run/gluster/glusterd.socket"
_PRIVATE = (Path("/var/lib/glusterd"), Path("/run/gluster"), Path("/var/log/glusterfs"))


class Gluster:
    """A context manager. `mounts` are the mountpoints of `clients`, in their order.

    Raises CommandFailed where it is not installed (glusterfs-server, glusterfs-client) or does not work.
    """

    def __init__(
        self, servers: Sequence[Host], clients: Sequence[Host], directory: Path, brick_bytes: int
    ) -> None:
        directory.mkdir()
        self._new_directories = [path for path in _PRIVATE if not path.exists()]
        self._servers = servers
        self._clients = clients
        self._directory = directory
        self._brick_bytes = brick_bytes
        self._daemons: list[Daemon] = []
        self._mounted: list[Path] = []
        self.mounts: list[Path] = []

    def __enter__(self) -> Gluster:
        if shutil.which("glusterd") is None or shutil.which("glusterfs") is None:
            raise CommandFailed("gluster is missing: apt install glusterfs-server glusterfs-client")
        try:
            for server in self._servers:
                self._start_server(server)
            self._make_volume()
            for client in self._clients:
                self._mount(client)
        except BaseException:
            self.close()
            raise
        return self

    def _start_server(self, host: Host) -> None:
        brick = self._directory / host.name
        if mount_tmpfs(brick, self._brick_bytes):
            self._mounted.append(brick)
        (brick / "brick").mkdir()
        directories = " ".join(map(str, _PRIVATE))
        script = (
            f"for d in {directories}; do mkdir -p $d && mount -t tmpfs none $d || exit 1; done; "
            "exec glusterd -N --pid-file=/run/gluster/glusterd.pid "
            f"--xlator-option=management.glusterd-sockfile={_SOCKET}"
        )
        log = self._directory / f"{host.name}.log"
        daemon = Daemon(host.name, host, ["unshare", "--mount", "sh", "-c", script], log)
        daemon.start()
        self._daemons.append(daemon)
        # Until then it is not in the namespace in which it is asked.
        command = Path(f"/proc/{daemon.pid}/cmdline")
        wait_until(
            lambda: b"glusterd\0-N" in command.read_bytes(),
            "glusterd does not start:",
            START_TIMEOUT_S,
            daemon,
        )
        self._command(daemon, "pool", "list")

    def _command(self, server: Daemon, *words: str) -> str:
        """gluster's command line where that glusterd runs; waits for a glusterd that is not ready."""
        inside = ("nsenter", f"--target={server.pid}", "--mount", "--net", "--")
        command = ("gluster", "--mode=script", f"--glusterd-sock={_SOCKET}", *words)
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                return run(*inside, *command)
            except CommandFailed as error:
                if not server.alive or time.monotonic() > deadline:
                    raise CommandFailed(f"{error}\n{server.log_tail()}") from None
            time.sleep(0.2)

    def _make_volume(self) -> None:
        first = self._daemons[0]
        for host in self._servers[1:]:
            self._command(first, "peer", "probe", host.address)
        others = len(self._servers) - 1
        wait_until(
            lambda: self._command(first, "peer", "status").count("(Connected)") >= others,
            "the gluster servers do not find each other",
            START_TIMEOUT_S,
        )
        bricks = [f"{h.address}:{self._directory / h.name / 'brick'}" for h in self._servers]
        replicas = str(len(self._servers))
        self._command(first, "volume", "create", VOLUME, "replica", replicas, *bricks, "force")
        self._command(first, "volume", "start", VOLUME)

    def _mount(self, host: Host) -> None:
        path = self._directory / f"{host.name}-mount"
        path.mkdir()
        log = self._directory / f"{host.name}.log"
        client = Daemon(
            host.name,
            host,
            [
                *("glusterfs", "-N", f"--volfile-server={self._servers[0].address}"),
                *(f"--volfile-id={VOLUME}", f"--log-file={log}", str(path)),
            ],
            log,
        )
        client.start()
        self._daemons.append(client)
        wait_until(path.is_mount, "glusterfs does not mount:", START_TIMEOUT_S, client)
        self._mounted.append(path)
        self.mounts.append(path)

    def close(self) -> None:
        for path in reversed(self._mounted):
            run("umount", "-l", path, check=False)
        for daemon in reversed(self._daemons):
            # The bricks' processes are in sessions of their own; they end with their namespace.
            daemon.kill9()
        shutil.rmtree(self._directory, ignore_errors=True)
        for path in self._new_directories:
            with contextlib.suppress(OSError):
                path.rmdir()

    def __exit__(self, *_exc: object) -> None:
        self.close()
