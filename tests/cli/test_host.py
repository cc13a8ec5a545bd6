"""irdmafs as mount(8), fstab and systemd of a host use it."""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from click.testing import CliRunner
from harness.closing import Closing
from harness.cluster_mount import OneNodeMount
from harness.mount_namespaces import in_new_mount_namespace
from harness.mountpoint import irdmafs, needs_fuse, succeeded
from harness.network import run as run_checked
from harness.processes import Program, has_ended
from test_careless import mounted, shared
from test_messages import place

from irdmafs.cli.command import main
from irdmafs.cli.mount_helper import mount_irdmafs

__all__ = ["mounted", "place", "shared"]

pytestmark = needs_fuse

FAILED = 32
AUTOMOUNTER = Path(__file__).parents[1] / "harness/programs/automounter.py"
UNITS = "etc/systemd/system"
NAMES = (
    "sbin/mount.irdmafs", "sbin/umount.irdmafs", "sbin/mount.fuse.irdmafs", "sbin/umount.fuse.irdmafs",
    f"{UNITS}/irdmafs-mount@.service", f"{UNITS}/irdmafs-serve@.service",
)  # fmt: skip


class InstalledHost:
    """A mount namespace in which irdmafs is installed; the machine's own directories stay as they are.
    Attributes: `mountpoint` and `store`, directories; `fstab`, a file."""

    def __init__(self, directory: Path) -> None:
        self.mountpoint, self.store = directory / "mount", directory / "store"
        self.fstab = directory / "fstab"
        self._directory = directory
        self.mountpoint.mkdir()
        self.store.mkdir()

    def __enter__(self) -> Self:
        command = in_new_mount_namespace("sh", "-c", "echo; exec cat")
        self._holder = Program(*command)
        self._holder.stdout.readline()
        layers = self._directory / "layers"
        layers.mkdir()
        self.checked("mount", "-t", "tmpfs", "none", layers)
        for number, path in enumerate(("/sbin", f"/{UNITS}")):
            upper, work = layers / f"upper{number}", layers / f"work{number}"
            path = os.path.realpath(path)
            self.checked("mkdir", "-p", upper, work, path)
            options = f"lowerdir={path},upperdir={upper},workdir={work}"
            done = self.run("mount", "-t", "overlay", "-o", options, "overlay", path)
            if done.returncode != 0:
                pytest.skip(f"no overlayfs: {done.stderr}")
        self.checked(sys.executable, "-m", "irdmafs", "install")
        return self

    def __exit__(self, *_exc: object) -> None:
        for _ in range(2):
            self.run("umount", "-l", self.mountpoint)
        self._holder.communicate()

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        command = ("nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", "--", *map(str, words))
        return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/")

    def checked(self, *words: str | Path) -> str:
        done = succeeded(self.run(*words))
        return done.stdout

    def mount(self, source: str | Path, options: str = "rw") -> subprocess.CompletedProcess[str]:
        return self.run("mount", "-t", "irdmafs", source, self.mountpoint, "-o", options)

    def shown(self) -> list[str]:
        """Source, type and options of what is mounted at the mountpoint."""
        columns = ("--noheadings", "--output", "SOURCE,FSTYPE,OPTIONS")
        return self.run("findmnt", *columns, self.mountpoint).stdout.split()

    def status(self) -> dict[str, Any]:
        command = (sys.executable, "-m", "irdmafs", "status", "--json", self.mountpoint)
        return dict(json.loads(self.checked(*command)))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[InstalledHost]:
    with InstalledHost(tmp_path) as made:
        yield made


# -- mount(8) and umount(8)


def test_fstab_is_mounted_once_and_umount_waits_for_the_daemon(host: InstalledHost) -> None:
    options = "defaults,_netdev,nofail,user,comment=x,x-systemd.automount,log-level=debug"
    host.fstab.write_text(f"{host.store} {host.mountpoint} irdmafs {options} 0 0\n")
    host.checked("mount", "--all", "--fstab", host.fstab)
    host.checked("mount", "--all", "--fstab", host.fstab)
    assert "already mounted" in host.mount(host.store).stderr
    listed = host.checked("findmnt", "--noheadings", "--types", "fuse.irdmafs", host.mountpoint)
    assert len(listed.splitlines()) == 1
    source, fstype, shown = host.shown()
    assert (source, fstype) == (str(host.store), "fuse.irdmafs")
    assert {"nosuid", "nodev", "noexec"} <= set(shown.split(","))
    assert str(host.mountpoint) in host.checked("df", "--type", "fuse.irdmafs", host.mountpoint)
    assert "DEBUG" in (host.store / "irdmafs.log").read_text()
    pid = host.status()["pid"]
    assert not has_ended(pid)
    host.checked("umount", host.mountpoint)
    assert not host.shown()
    assert has_ended(pid)


def test_mount_takes_a_private_store_a_directory_or_a_cluster(
    host: InstalledHost, shared: OneNodeMount
) -> None:
    discard = (sys.executable, "-m", "irdmafs", "umount", "--discard", host.mountpoint)
    for source in ("none", host.store, shared.config):
        succeeded(host.run("mount", "-t", "fuse.irdmafs", source, host.mountpoint, "-o", "ro"))
        assert host.shown()[:2] == [str(source), "fuse.irdmafs"]
        status = host.status()
        assert (status["store"] == str(host.store)) == (source == host.store)
        assert ("cluster" in status) == (source == shared.config)
        assert "Read-only" in host.run("touch", host.mountpoint / "file").stderr
        host.checked("umount", host.mountpoint)
        host.run(*discard)


@pytest.mark.skipif(
    "autofs" not in Path("/proc/filesystems").read_text(), reason="this kernel has no autofs"
)
def test_an_automounter_can_mount_it(host: InstalledHost) -> None:
    """As systemd does it with x-systemd.automount; the kernel lets nobody else reach the directory."""
    assert host.mount(host.store).returncode == 0
    host.checked("touch", host.mountpoint / "kept")
    host.checked("umount", host.mountpoint)
    mount = ("mount", "-t", "irdmafs", host.store, host.mountpoint)
    told = host.checked(sys.executable, AUTOMOUNTER, host.mountpoint, *mount)
    assert told.endswith("kept\n")
    assert not has_ended(host.status()["pid"])
    host.checked("umount", host.mountpoint)


@pytest.mark.parametrize(
    ("source", "options", "told"),
    [
        ("/no/such", "rw", "'/no/such' is nothing to mount: it takes"),
        ("/no/such.toml", "rw", "/no/such.toml: No such file"),
        ("a,b", "rw", "comma"),
        ("none", "size=3x", "--size: '3x' is not a size"),
        ("none", "timeout=3s", "--timeout needs --cluster"),
        ("none", "sise=3M", "unknown mount option 'sise'"),
        ("none", "session=fast", "'fast' is not one of"),
        ("none", "log_file", "-o log-file needs a value"),
    ],
)
def test_what_cannot_mount_is_told(tmp_path: Path, source: str, options: str, told: str) -> None:
    done = CliRunner().invoke(mount_irdmafs, [source, str(tmp_path), "-o", options])
    assert done.exit_code == FAILED, done
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_remount_changes_what_kernel_obeys_and_says_what_it_does_not(host: InstalledHost) -> None:
    assert host.mount(host.store, "noatime,nosuid").returncode == 0
    assert "nodev" not in host.shown()[2]  # mount(8) has dev and suid by default
    script = f"exec 3>{host.mountpoint}/file; echo; exec cat"
    with Program(
        "nsenter", f"--mount=/proc/{host._holder.pid}/ns/mnt", "sh", "-c", script
    ) as writes:
        writes.stdout.readline()
        done = host.run("mount", "-o", "remount,ro", host.mountpoint)
        assert done.returncode == FAILED
        assert "files are open for writing" in done.stderr
        writes.kill()
    done = succeeded(host.run("mount", "-o", "remount,ro,noexec,locks=local", host.mountpoint))
    assert "a remount does not change locks=local; " in done.stderr
    assert {"ro", "noexec", "noatime", "nosuid"} <= set(host.shown()[2].split(","))
    assert "nodev" not in host.shown()[2]
    assert "Read-only" in host.run("touch", host.mountpoint / "file").stderr
    done = host.run("mount", "-o", "remount,rw", host.mountpoint)
    assert (done.returncode, done.stderr) == (0, "")
    host.checked("touch", host.mountpoint / "file")


# -- irdmafs install


def test_install_is_repeated_without_a_change_and_undone(tmp_path: Path) -> None:
    done = irdmafs("install", "--root", tmp_path, "--dry-run")
    assert done.stdout.count("would be made") == len(NAMES)
    assert list(tmp_path.iterdir()) == []
    assert irdmafs("install", "--root", tmp_path).returncode == 0
    assert all((tmp_path / name).exists() for name in NAMES)
    assert "nothing to change" in irdmafs("install", "--root", tmp_path).stdout
    # An installation elsewhere, and another version.
    helper, unit = tmp_path / NAMES[0], tmp_path / NAMES[-1]
    target = os.readlink(helper)
    helper.unlink()
    helper.symlink_to("/opt/other/bin/mount.irdmafs")
    unit.write_text(unit.read_text() + "# older\n")
    done = irdmafs("install", "--root", tmp_path)
    assert done.stdout.count(" made\n") == 2
    assert os.readlink(helper) == target
    assert "older" not in unit.read_text()
    assert irdmafs("uninstall", "--root", tmp_path).stdout.count(" removed\n") == len(NAMES)
    assert not any((tmp_path / name).is_symlink() or (tmp_path / name).exists() for name in NAMES)
    assert "nothing to change" in irdmafs("uninstall", "--root", tmp_path).stdout


def test_install_warns_of_programs_that_a_user_can_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "mount.irdmafs").touch()
    os.chown(programs, 65534, 65534)
    monkeypatch.setattr(sys, "argv", [str(programs / "irdmafs")])
    done = CliRunner().invoke(main, ["install", "--root", str(tmp_path / "root")])
    assert done.exit_code == 0
    assert (
        f"{programs} belongs to nobody (user 65534), who can change what root runs" in done.stderr
    )


@pytest.mark.parametrize("name", [NAMES[0], NAMES[-1]])
def test_install_touches_nothing_of_others(tmp_path: Path, name: str) -> None:
    theirs = tmp_path / name
    theirs.parent.mkdir(parents=True)
    theirs.write_text("of another\n")
    done = irdmafs("install", "--root", tmp_path)
    assert done.returncode == 1
    assert f"{theirs} is not of irdmafs" in done.stderr
    assert irdmafs("uninstall", "--root", tmp_path).returncode == 0
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == [theirs]
    assert theirs.read_text() == "of another\n"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
@pytest.mark.parametrize("kind", ["mount", "serve"])
def test_systemd_takes_the_units(tmp_path: Path, kind: str) -> None:
    assert irdmafs("install", "--root", tmp_path).returncode == 0
    unit = tmp_path / UNITS / f"irdmafs-{kind}@.service"
    instance = unit.with_name(f"irdmafs-{kind}@mnt-a\\x20b.service")
    unit.rename(instance)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", instance], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


# -- Type=notify


class Manager(Closing):
    """The socket on which a service manager waits, and what it is told."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(30)
        self._socket.bind(address.replace("@", "\0", 1) if address.startswith("@") else address)
        self.environment = os.environ | {"NOTIFY_SOCKET": address}

    def close(self) -> None:
        self._socket.close()

    def told(self) -> list[str]:
        """Wait for the next message, and return its lines."""
        return self._socket.recv(65536).decode().splitlines()

    def is_told_nothing(self) -> bool:
        return not select.select([self._socket], [], [], 0)[0]

    def start(self, *words: str | Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "irdmafs", *map(str, words)]
        return subprocess.Popen(
            command, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )


@pytest.mark.parametrize("ends", ["signal", "umount"])
def test_manager_is_told_of_a_mounts_begin_and_end(place: Path, tmp_path: Path, ends: str) -> None:
    with Manager(f"@irdmafs-test-{os.getpid()}") as manager:
        daemon = manager.start("mount", "-f", place, "--store", tmp_path / "store")
        ready, status = manager.told()
        assert ready == "READY=1"
        assert status.startswith("STATUS=")
        assert "session" in status
        assert os.path.ismount(place)
        if ends == "signal":
            daemon.send_signal(signal.SIGTERM)
        else:
            run_checked("umount", "-i", place)
        assert manager.told()[0] == "STOPPING=1"
        assert daemon.wait(30) == 0


def test_manager_of_a_program_that_mounts_is_not_told_of_mount(place: Path, tmp_path: Path) -> None:
    with Manager(str(tmp_path / "socket")) as manager:
        assert manager.start("mount", place, "--store", tmp_path / "store").wait(30) == 0
        run_checked("umount", "-i", place)
        assert manager.is_told_nothing()


def test_manager_is_told_when_a_node_serves_and_ends(shared: OneNodeMount, tmp_path: Path) -> None:
    serve = ("serve", "-f", tmp_path / "store", "--cluster", shared.config)
    with Manager(str(tmp_path / "socket")) as manager:
        node = manager.start(*serve)
        ready, status = manager.told()
        assert ready == "READY=1"
        assert status.startswith("STATUS=serves as node ")
        node.terminate()
        assert manager.told()[0] == "STOPPING=1"
        assert node.wait(30) == 0
