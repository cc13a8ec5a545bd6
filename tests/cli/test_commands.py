"""The command line: what it prints, its exit codes, and that it leaves nothing half-done."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from harness.mount_namespaces import none_is_made
from harness.mountpoint import IRDMAFS, Mount, eventually, irdmafs, needs_fuse, one_line, succeeded
from harness.processes import Program

from irdmafs import __version__
from irdmafs.cli import status
from irdmafs.cli.command import main
from irdmafs.mount import mounting, stores

pytestmark = needs_fuse


@pytest.fixture
def own() -> Iterator[Mount]:
    """A place to mount on, not mounted yet."""
    place = Mount("auto")
    yield place
    place.close()


@pytest.fixture
def mounted(own: Mount) -> Mount:
    own.mount()
    return own


# -- the command itself ---------------------------------------------------------------------------


def test_version_and_help_are_printed() -> None:
    assert irdmafs("--version").stdout == f"irdmafs {__version__}\n"
    for flag in ("-h", "--help"):
        page = irdmafs(flag).stdout
        for command in ("mount", "umount", "status", "versions", "doctor"):
            assert re.search(rf"^  {command} ", page, re.MULTILINE), page


@pytest.mark.parametrize(
    ("modules", "libraries"),
    [
        ("irdmafs.cli.command", "trio pyfuse3 numpy rich cryptography msgspec google grpc ssl"),
        # It takes as long to load as all that a node has of its own; only who places groups needs it.
        ("irdmafs.mount.daemon, irdmafs.backend.store.remote.store", "numpy"),
        ("irdmafs.backend.node.daemon", "numpy"),
    ],
)
def test_programs_start_without_libraries_they_seldom_need(modules: str, libraries: str) -> None:
    program = f"import sys, {modules}; print(set('{libraries}'.split()) & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "set()\n", done


@pytest.mark.parametrize(
    "arguments",
    [("mount",), ("mount", "--session", "fast", "x"), ("umount",), ("frob",),
     ("umount", "--lazy", "--discard", "x"), ("versions",)],
)  # fmt: skip
def test_wrong_usage_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    assert irdmafs(*arguments).returncode == 2


# -- mount ----------------------------------------------------------------------------------------


def test_mount_says_session_and_store(own: Mount) -> None:
    done = own.try_mount()
    assert done.returncode == 0, own.explain(done)
    session = own.status()["session"]
    first = done.stdout.splitlines()[0]
    assert first == f"irdmafs: {own.path} mounted ({session} session; store {own.store})"
    [mount] = [m for m in mounting.irdmafs_mounts() if m.mountpoint == str(own.path)]
    assert mount.fstype == "fuse.irdmafs"


def test_mountpoint_that_cannot_be_is_one_clear_line(own: Mount) -> None:
    own.path.rmdir()
    assert "mkdir -p" in one_line(own.try_mount())
    own.path.write_text("a file")
    assert "not a directory" in one_line(own.try_mount())
    assert "cannot use" in one_line(irdmafs("mount", own.path / "below"))
    assert own.path.read_text() == "a file"


def test_mountpoint_that_is_not_empty_needs_the_option(own: Mount) -> None:
    hidden = own.path / "hidden"
    hidden.write_text("still there")
    assert "not empty" in one_line(own.try_mount())
    own.arguments = ("-o", "nonempty")
    own.mount()
    assert not hidden.exists()
    own.unmount()
    assert hidden.read_text() == "still there"


def test_mounting_twice_names_the_daemon(mounted: Mount) -> None:
    line = one_line(mounted.try_mount())
    assert "already mounted" in line and str(mounted.pid) in line


def test_mounting_waits_for_an_unmount(mounted: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    path, ends = str(mounted.path), mounting._ends
    command = [sys.executable, "-m", "irdmafs", "umount", path]
    begun: list[subprocess.Popen[bytes]] = []

    def unmounted_now(found: mounting.Mount, within_s: float) -> bool:
        begun.append(subprocess.Popen(command))  # nobody looks into the mount any more
        return ends(found, 60.0)

    monkeypatch.setattr(mounting, "_ends", unmounted_now)
    with none_is_made():
        assert mounting.prepare_mountpoint(path) == path
        assert [umount.wait(60) for umount in begun] == [0]


def test_store_on_the_mount_itself_or_another_is_refused(mounted: Mount, tmp_path: Path) -> None:
    second = tmp_path / "second"
    second.mkdir()
    for words in (("mount", second, "--store"), ("serve", "--etcd", "127.0.0.1:1")):
        assert "irdmafs mount" in one_line(irdmafs(*words, mounted.path / "s"))
    assert "contain" in one_line(irdmafs("mount", second, "--store", second / "s"))
    assert list(mounted.path.iterdir()) == list(second.iterdir()) == []


def test_log_that_cannot_be_written_is_one_clear_line(own: Mount) -> None:
    own.log = own.log / "missing" / "log"
    assert "cannot log to" in one_line(own.try_mount())
    assert not own.is_mounted()


def test_default_store_keeps_contents_until_discarded(tmp_path: Path) -> None:
    mountpoint = tmp_path / "models"
    mountpoint.mkdir()
    try:
        assert irdmafs("mount", mountpoint, "--size", "64M").returncode == 0
        (mountpoint / "weights").write_bytes(b"kept")
        store = stores.default_store_path(str(mountpoint))
        assert store is not None
        assert irdmafs("umount", mountpoint).returncode == 0
        left = json.loads(irdmafs("status", "--json").stdout)["leftover_stores"]
        assert [one["path"] for one in left if one["mountpoint"] == str(mountpoint)] == [store]

        assert irdmafs("mount", mountpoint).returncode == 0
        assert (mountpoint / "weights").read_bytes() == b"kept"
        with open(f"{store}/irdmafs.log", "rb"):  # as by tail -f
            assert irdmafs("umount", "--discard", mountpoint).returncode == 0
        assert stores.default_store_path(str(mountpoint)) is None
    finally:
        irdmafs("umount", "--lazy", mountpoint)
        irdmafs("umount", "--discard", mountpoint)


def test_stale_mountpoint_is_healed_by_mounting_again(mounted: Mount) -> None:
    (mounted.path / "file").write_bytes(b"acknowledged")
    mounted.kill9()
    done = irdmafs("status", mounted.path)
    assert done.returncode == 1
    assert f"irdmafs mount {mounted.path}" in done.stdout
    mounted.remount()
    assert (mounted.path / "file").read_bytes() == b"acknowledged"
    assert len([m for m in mounting.mounts() if m.mountpoint == str(mounted.path)]) == 1


# The parent's side is tested with daemons that behave badly.
_BAD_DAEMON = """
import os, signal, sys, trio
from irdmafs.mount import daemon
from irdmafs.cli.command import main
async def serve(config, ready):
    {body}
daemon.serve = serve
main(["mount", *sys.argv[1:]], prog_name="irdmafs")
"""


def with_bad_daemon(own: Mount, body: str) -> list[str]:
    program = _BAD_DAEMON.format(body=body)
    return [sys.executable, "-c", program, str(own.path), "--store", str(own.store)]


@pytest.mark.parametrize(
    ("end", "reason"), [("os.kill(os.getpid(), 9)", "signal 9"), ("os._exit(3)", "code 3")]
)
def test_daemon_that_dies_early_has_its_last_words_told(own: Mount, end: str, reason: str) -> None:
    command = with_bad_daemon(own, f"print('last words', file=sys.stderr, flush=True); {end}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert reason in done.stderr and "last words" in done.stderr


def test_daemon_that_fails_unforeseen_names_its_log(own: Mount) -> None:
    command = with_bad_daemon(own, "raise ZeroDivisionError('bad sum')")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    log = own.store / "irdmafs.log"
    assert f"ZeroDivisionError: bad sum (see {log})" in one_line(done)
    assert "Traceback" in log.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_foreground_mount_ends_by_signal_and_leaves_nothing_mounted(
    own: Mount, number: signal.Signals
) -> None:
    command = (*IRDMAFS, "mount", "-f", own.path, "--store", own.store)
    with Program(*command, stderr=subprocess.DEVNULL) as process:
        assert "mounted" in process.stdout.readline()
        (own.path / "file").write_bytes(b"closed")
        process.send_signal(number)
        assert process.wait(timeout=60) == 0
    assert not own.is_mounted()
    own.mount()
    assert (own.path / "file").read_bytes() == b"closed"


def test_a_mount_does_not_have_the_limits_of_its_shell(own: Mount) -> None:
    command = ("prlimit", "--fsize=1000000:", "--cpu=1000:", *IRDMAFS, "mount", own.path)
    subprocess.run((*command, "--store", own.store), check=True, timeout=60)
    for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_CPU):
        limit, most = resource.prlimit(own.pid, kind)
        assert limit == most


# -- umount ---------------------------------------------------------------------------------------


def test_umount_is_silent_and_waits_for_the_daemon(mounted: Mount) -> None:
    daemon = mounted.pid
    done = irdmafs("umount", mounted.path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not mounted.is_mounted()
    assert not os.path.exists(f"/proc/{daemon}") or daemon not in mounted.pids()


def test_umount_of_what_is_not_ours_is_one_clear_line(own: Mount) -> None:
    assert "not mounted" in one_line(irdmafs("umount", own.path))
    assert "not mounted" in one_line(irdmafs("umount", "--discard", own.path))
    assert "proc" in one_line(irdmafs("umount", "/proc"))


def test_busy_mount_names_its_users_and_stays(mounted: Mount) -> None:
    (place := mounted.path / "a\nirdmafs: b").mkdir()
    with subprocess.Popen(["sleep", "60"], cwd=place) as user:
        try:
            line = one_line(irdmafs("umount", mounted.path))
            assert rf"busy, used by {user.pid} (sleep: cwd {mounted.path}/a\nirdmafs: b)" in line
            assert mounted.is_mounted()
            assert irdmafs("umount", "--lazy", mounted.path).returncode == 0
            assert not mounted.is_mounted()
        finally:
            user.kill()
    eventually(lambda: not mounted.pids(), "the daemon ends with its last user")


def test_discard_takes_the_store_along(mounted: Mount) -> None:
    (mounted.path / "file").write_bytes(b"gone")
    assert irdmafs("umount", "--discard", mounted.path).returncode == 0
    assert not mounted.store.exists()


# -- status and versions --------------------------------------------------------------------------


def test_status_tells_of_one_mount_and_of_all(mounted: Mount) -> None:
    (mounted.path / "file").write_bytes(b"x" * 1000)
    done = succeeded(irdmafs("status", "--json", mounted.path))
    data = json.loads(done.stdout)
    assert data["state"] == "ok"
    assert data["mountpoint"] == str(mounted.path)
    assert data["files"] == 1
    assert data["bytes_published"] >= 1000
    assert data["requests"] and all(isinstance(n, int) for n in data["requests"].values())
    page = irdmafs("status", mounted.path)
    assert page.returncode == 0
    assert str(mounted.store) in page.stdout and "requests" in page.stdout
    assert page.stdout.isascii()
    found = json.loads(irdmafs("status", "--json").stdout)["mounts"]
    assert [one["pid"] for one in found if one["mountpoint"] == str(mounted.path)] == [mounted.pid]
    assert str(mounted.path) in irdmafs("status").stdout


def test_status_asks_all_mounts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Barrier(8)

    def report(mount: mounting.Mount) -> status.MountReport:
        asked.wait(10)
        return status.MountReport(mount, "hung", {})

    mount = mounting.Mount(1, "0:1", "/", "/here", "rw", mounting.FSTYPE, "irdmafs", "rw")
    monkeypatch.setattr(mounting, "irdmafs_mounts", lambda: [mount] * 8)
    monkeypatch.setattr(status, "report", report)
    done = CliRunner().invoke(main, ["status"])
    assert (done.exit_code, done.stdout.count("/here does not answer")) == (1, 8), done


def test_a_question_about_a_plain_directory_is_one_clear_line(tmp_path: Path) -> None:
    for command in ("status", "versions", "prefetch"):
        assert one_line(irdmafs(command, tmp_path)) == f"{tmp_path} is not on an irdmafs mount"
        assert one_line(irdmafs(command, tmp_path / "no")) == f"{tmp_path}/no is not there"
    assert os.listxattr(tmp_path) == []


def test_versions_lists_what_is_current_and_open_and_says_what_has_none(mounted: Mount) -> None:
    file = mounted.path / "file"
    file.write_bytes(b"old")
    with file.open("rb") as reader:
        file.write_bytes(b"newer")
        data = json.loads(irdmafs("versions", "--json", file).stdout)
        page = irdmafs("versions", file)
        assert reader.read() == b"old"
    assert {(one["version"], one["size"], one["state"]) for one in data["versions"]} == {
        (1, 3, "open"),
        (2, 5, "current"),
    }
    assert page.returncode == 0
    assert f"inode {data['ino']}" in page.stdout and "current" in page.stdout
    assert "No such file" in one_line(irdmafs("versions", mounted.path / "missing"))
    assert "no regular file" in one_line(irdmafs("versions", mounted.path))
