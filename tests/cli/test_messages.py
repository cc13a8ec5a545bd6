"""The messages to users who are careless, unlucky or not entitled: what was found, and what to do."""

import contextlib
import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness.mountpoint import (
    INTERRUPTED,
    IRDMAFS,
    Mount,
    eventually,
    irdmafs,
    needs_fuse,
    one_line,
    succeeded,
)
from harness.network import run as run_checked
from harness.processes import AS_NOBODY_WHO_OPENS_ALL, Process, Program, has_ended
from harness.scratch import mounted_on
from test_commands import mounted, own

from irdmafs.__main__ import _interrupts_end_silently
from irdmafs.backend.model.values import meminfo, memory_limit
from irdmafs.cli import status
from irdmafs.mount import mounting, stores, users
from irdmafs.mount_options import MountError, MountOptions

__all__ = ["mounted", "own"]

pytestmark = needs_fuse


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory whose mount has a store of its own."""
    path = tmp_path / "models"
    path.mkdir()
    yield path
    irdmafs("umount", "--lazy", path)
    irdmafs("umount", "--discard", path)


# -- stores


def test_a_mount_right_after_umount_8_waits_for_the_daemon_before(place: Path) -> None:
    assert irdmafs("mount", place, "--size", "64M").returncode == 0
    for i in range(5):
        (place / "file").write_text(str(i))
        run_checked("umount", place)
        succeeded(irdmafs("mount", place, "--size", "64M"))
        assert (place / "file").read_text() == str(i)


def test_a_mount_at_any_path_by_a_caller_who_closed_everything(place: Path) -> None:
    path = place / os.fsdecode(b"no utf-8: \xff")
    path.mkdir()
    mount = f"{shlex.join(IRDMAFS)} mount --size 64M"
    run_checked("sh", "-c", f'{mount} "$1" <&- >&- 2>&-', "sh", path)
    daemon = json.loads(irdmafs("status", "--json", path).stdout)["pid"]
    assert os.readlink(f"/proc/{daemon}/fd/2").endswith("/irdmafs.log")
    done = irdmafs("umount", "--discard", path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [["status", "--json"], ["--help"]])
def test_output_that_finds_no_room_is_one_clear_line(arguments: list[str]) -> None:
    words = ["sh", "-c", '"$@" >/dev/full', "sh", *IRDMAFS, *arguments]
    done = subprocess.run(words, capture_output=True, text=True)
    assert one_line(done) == "cannot print: No space left on device"


def test_a_store_that_a_detached_mount_still_serves_says_so(
    mounted: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = mounted.pid
    monkeypatch.setattr("irdmafs.mount.users._FREE_WITHIN_S", 0.1)
    with Process() as user:
        user.do("file = open(path, 'wb')", path=str(mounted.path / "file"))
        assert irdmafs("umount", "--lazy", mounted.path).returncode == 0
        with pytest.raises(MountError) as caught:
            stores.explicit_store(str(mounted.store), str(mounted.path))
        assert "--lazy" in str(caught.value) and f"kill {daemon}" in str(caught.value)
        user.kill()
    eventually(lambda: not mounted.pids(), "the daemon ends with its last user")
    mounted.mount()


def test_who_sees_a_mount_here_does_not_hold_it_elsewhere(mounted: Mount) -> None:
    """The next mount may get the device number of one that was unmounted."""
    found = mounting.mounted_at(str(mounted.path))
    assert found is not None and os.getpid() not in users.holders_of(found.device)


def test_a_store_in_use_stays_and_names_the_mount_using_it(mounted: Mount, tmp_path: Path) -> None:
    line = one_line(irdmafs("mount", tmp_path, "--store", mounted.store))
    assert not os.path.ismount(tmp_path)
    assert mounted.status()["store"] == str(mounted.store)
    assert f"in use by the mount at {mounted.path} (process {mounted.pid})" in line
    assert f"irdmafs umount {mounted.path}" in line
    line = one_line(irdmafs("umount", "--discard", "--store", mounted.store))
    assert f"in use by the mount at {mounted.path}" in line
    assert mounted.is_mounted()


def test_a_directory_with_models_in_it_does_not_become_a_store(own: Mount) -> None:
    (own.store / "model.safetensors").write_bytes(b"weights")
    line = one_line(own.try_mount())
    assert "model.safetensors" in line and "empty or a new directory" in line
    assert os.listdir(own.store) == ["model.safetensors"]


def test_a_directory_of_another_user_does_not_become_a_store(own: Mount) -> None:
    os.chown(own.store, 65534, 65534)
    assert "belongs to user 65534" in one_line(own.try_mount())
    os.chown(own.store, 0, 0)
    planted = own.store / "extents"
    planted.symlink_to("/etc")
    os.chown(planted, 65534, 65534, follow_symlinks=False)
    assert "belongs to user 65534" in one_line(own.try_mount())


def test_nobody_else_may_write_to_a_store(own: Mount) -> None:
    own.store.chmod(0o777)
    done = own.try_mount()
    assert done.returncode == 0 and "cannot any more" in done.stderr
    assert stat.S_IMODE(own.store.stat().st_mode) == 0o755


def test_a_read_only_store_is_one_clear_line(own: Mount) -> None:
    with mounted_on(own.store, "ro"):
        assert "its filesystem is read-only" in one_line(own.try_mount())
        done = irdmafs("mount", own.path, "--store", own.store / "below")
        assert "read-only" in one_line(done)


def test_a_full_store_is_one_clear_line(own: Mount) -> None:
    with mounted_on(own.store, "size=64k"):
        with (
            contextlib.suppress(OSError),
            (own.store / "extents").open("wb", buffering=0) as filler,
        ):
            filler.write(bytes(1 << 17))
        for store in (own.store, own.store / "below"):
            line = one_line(irdmafs("mount", own.path, "--store", store))
            assert "No space left on device" in line
            assert "--store" in line


def test_a_place_for_stores_that_cannot_be_made_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "TMPFS_ROOT", "/proc/irdmafs/stores")
    with pytest.raises(MountError, match=r"cannot make the store in /proc.*--store DIR"):
        stores.default_store(str(tmp_path))


def test_a_size_that_no_store_can_have_is_refused(place: Path) -> None:
    assert "1M or more" in one_line(irdmafs("mount", place, "--size", "10"))
    line = one_line(irdmafs("mount", place, "--size", "500T"))
    assert "500 TiB is more than this machine has" in line and "--store" in line
    whole = memory_limit() + meminfo("SwapTotal")
    line = one_line(irdmafs("mount", place, "--size", str(whole)))
    assert "beside the 48.0 MiB of irdmafs itself" in line
    assert stores.default_store_path(str(place)) is None


def test_a_given_store_is_discarded_with_nothing_else(mounted: Mount) -> None:
    notes = mounted.store / "notes"
    notes.write_text("mine")
    mounted.unmount()
    assert "--store STORE" in one_line(irdmafs("umount", "--discard", mounted.path))
    assert irdmafs("umount", "--discard", "--store", mounted.store).returncode == 0
    assert os.listdir(mounted.store) == ["notes"]


def test_what_is_no_store_is_not_discarded(tmp_path: Path) -> None:
    (tmp_path / "extents").mkdir()
    (tmp_path / "extents" / "model").write_text("weights")
    assert "not the store" in one_line(irdmafs("umount", "--discard", "--store", tmp_path))
    assert (tmp_path / "extents" / "model").read_text() == "weights"
    assert irdmafs("umount", "--store", tmp_path, tmp_path).returncode == 2


# -- paths


@pytest.mark.parametrize(
    "words",
    [
        ("mount", ""),
        ("mount", "DIR", "--store", ""),
        ("umount", ""),
        ("umount", "--discard", ""),
        ("umount", "--discard", "--store", ""),
        ("status", ""),
        ("versions", ""),
        ("prefetch", ""),
        ("watch", ""),
        ("publish", "", "DIR"),
        ("clone", "", "DIR"),
        ("clone", "/etc/hostname", ""),
        ("mount", "DIR", "--cluster", ""),
        ("cluster", "drain", "NODE", "--cluster", ""),
        ("serve", "", "--etcd", "127.0.0.1:1"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_an_empty_path_is_not_the_current_directory(tmp_path: Path, words: tuple[str, ...]) -> None:
    """As "$DIR" is where nobody has set it."""
    given = [str(tmp_path) if word == "DIR" else word for word in words]
    assert "an empty path was given" in one_line(irdmafs(*given))
    assert not os.path.ismount(tmp_path)


@pytest.mark.parametrize(
    "words", [("mount", "m"), ("versions", "f"), ("serve", "s", "--etcd", "h")]
)
def test_a_command_in_a_removed_directory_says_so(tmp_path: Path, words: tuple[str, ...]) -> None:
    here = tmp_path / "here"
    here.mkdir()
    launcher = ("sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(here))
    assert "change to another directory" in one_line(irdmafs(*words, launcher=launcher))


def test_a_mount_that_has_another_below_it_names_that(mounted: Mount, tmp_path: Path) -> None:
    below = mounted.path / "below"
    below.mkdir()
    with mounted_on(below):
        line = one_line(irdmafs("umount", mounted.path))
        assert f"is busy; {below} is mounted below it: unmount that first" in line


# -- other users


def test_only_who_mounted_and_root_unmount_and_others_are_told_whose_it_is(mounted: Mount) -> None:
    line = one_line(irdmafs("umount", mounted.path, launcher=AS_NOBODY_WHO_OPENS_ALL))
    assert "was mounted by root (user 0)" in line
    assert mounted.is_mounted()
    line = one_line(irdmafs("mount", mounted.path, launcher=AS_NOBODY_WHO_OPENS_ALL))
    assert line == f"{mounted.path} is already mounted by root (user 0)"


def test_allow_other_that_root_has_not_allowed_says_how_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "fuse.conf"
    monkeypatch.setattr(mounting, "_FUSE_CONFIG", str(config))
    monkeypatch.setattr(mounting, "can_mount", lambda: False)
    monkeypatch.setattr(mounting, "fusermount", lambda: "/bin/fusermount3")
    options = MountOptions(allow_other=True)
    for text in (None, "", "#user_allow_other\n", "mount_max = 10\n"):
        if text is not None:
            config.write_text(text)
        with pytest.raises(MountError, match="user_allow_other there"):
            mounting.refuse_what_users_may_not(options)
    config.write_text("user_allow_other # yes\n")
    mounting.refuse_what_users_may_not(options)
    monkeypatch.setattr(mounting, "fusermount", lambda: None)
    with pytest.raises(MountError, match="apt install fuse3"):
        mounting.refuse_what_users_may_not(MountOptions())


IMPOSTOR = """
import errno, json, os, stat, sys
import pyfuse3, trio
class Operations(pyfuse3.Operations):
    async def getattr(self, inode, ctx):
        entry = pyfuse3.EntryAttributes()
        entry.st_ino, entry.st_mode, entry.st_nlink = 1, stat.S_IFDIR | 0o755, 2
        return entry
    async def getxattr(self, inode, name, ctx):
        return sys.argv[2].encode()
pyfuse3.init(Operations(), sys.argv[1], {"fsname=irdmafs", "subtype=irdmafs", "allow_other"})
print("mounted", flush=True)
trio.run(pyfuse3.main)
"""


@contextlib.contextmanager
def impostor(path: Path, says: str) -> Iterator[None]:
    """A filesystem that calls itself irdmafs and answers each question about itself with `says`."""
    with Program(sys.executable, "-c", IMPOSTOR, path, says) as process:
        try:
            assert process.stdout.readline() == "mounted\n"
            yield
        finally:
            process.terminate()
            process.wait(30)
            irdmafs("umount", "--lazy", path)


IMPOSTORS_SAY = (
    '{"store": "STORE", "pid": 1}',
    '{"warnings": 3, "requests": [], "errors": "x", "cluster": 7, "files": {"a": [[]]}}',
    '{"session": "\\u001b[2Jowned", "warnings": ["\\u001b]0;x\\u0007"]}',
    '{"uptime_s": 1e999, "files": NaN}',
    "[" * 50_000,
)


def test_what_another_users_filesystem_says_is_not_believed(mounted: Mount, tmp_path: Path) -> None:
    """He can call it irdmafs; root, who unmounts it, discards nothing that it names."""
    store = mounted.store
    mounted.unmount()
    with contextlib.ExitStack() as impostors:
        paths = [tmp_path / str(number) for number in range(len(IMPOSTORS_SAY))]
        for path, says in zip(paths, IMPOSTORS_SAY, strict=True):
            path.mkdir()
            impostors.enter_context(impostor(path, says.replace("STORE", str(store))))
        for words in ((), ("--json",), *((str(path),) for path in paths)):
            done = irdmafs("status", *words)
            assert "Traceback" not in done.stderr and "\x1b" not in done.stdout, done.args
    assert (store / "names").exists()


def test_a_store_named_by_anothers_daemon_is_not_discarded(mounted: Mount, tmp_path: Path) -> None:
    store = mounted.store
    mounted.unmount()
    with impostor(tmp_path, f'{{"store": "{store}", "pid": 1}}'):
        # As the kernel tells of a mount of his.
        program = (
            "import sys\n"
            "from irdmafs.cli import command\n"
            "from irdmafs.mount import mounting\n"
            "mounting.Mount.user = property(lambda self: 1000)\n"
            "command.main(sys.argv[1:], prog_name='irdmafs')"
        )
        command = [sys.executable, "-c", program, "umount", "--discard", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and "user 1000" in done.stderr, done
    assert (store / "names").exists()


# -- questions


def test_a_killed_process_is_one_line_in_the_log(mounted: Mount) -> None:
    with Process() as writer:
        writer.do(
            "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (4000, 4000))\n"
            "files = [open(f'{path}/{i}', 'wb', 0) for i in range(500)]\n"
            "for file in files: file.write(b'x')",
            path=str(mounted.path),
        )
        writer.kill()
        pid = writer.pid
    eventually(lambda: mounted.status()["open_handles"] == 0, "all are closed")
    lines = [line for line in mounted.log.read_text().splitlines() if f"pid {pid} " in line]
    assert len(lines) == 1, textwrap.shorten("\n".join(lines), 500)


def test_text_for_a_terminal_does_not_steer_it() -> None:
    assert status.printable("a\x1b[31mb\x07\n\udcff") == "a?[31mb?\n\ufffd"


def test_name_in_a_table_does_not_pass_for_a_row_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    status.print_table(("quota of",), [["/a\nwarning: b"]])
    assert capsys.readouterr().out == "quota of\n/a\\nwarning: b\n"


def test_attribute_that_means_nothing_is_refused_and_log_and_status_say_why(mounted: Mount) -> None:
    for name, value, said in (
        ("replicas", "many", "replicas"),
        ("replicas", "99", "99"),
        ("stripe_size", "huge", "huge"),
        ("placement", "zone", "zone"),
        ("version", "3", "cannot be set"),
        ("replica", "2", "user.irdmafs.replicas"),
    ):
        with pytest.raises(OSError):
            os.setxattr(mounted.path, f"user.irdmafs.{name}", value.encode())
        for lines in (mounted.log.read_text().splitlines(), mounted.status()["warnings"]):
            told = [line for line in lines if "is refused" in line][-1]
            assert f"'user.irdmafs.{name}' is refused: " in told
            assert said in told
            assert f"process {os.getpid()} gave {value!r}" in told
    for _ in range(100):
        with pytest.raises(OSError):
            os.setxattr(mounted.path, "user.irdmafs.nonsense", b"")
    assert mounted.log.read_text().count("'user.irdmafs.nonsense'") < 50


def test_a_remedy_can_be_given_to_a_shell(tmp_path: Path) -> None:
    missing = tmp_path / "it's not there"
    subprocess.run(
        one_line(irdmafs("mount", missing)).partition("with: ")[2], shell=True, check=True
    )
    assert missing.is_dir()


def test_a_question_to_a_stale_mount_says_what_is_wrong_and_it_is_unmounted(mounted: Mount) -> None:
    (mounted.path / "file").write_text("x")
    mounted.kill9()
    file, directory = mounted.path / "file", mounted.path
    for words in (
        *(("versions", file), ("prefetch", file), ("watch", file), ("publish", file, directory)),
        *(("hold", directory, "true"), ("rollback", directory, "1"), ("diff", directory, "1", "2")),
    ):
        assert "mount it again" in one_line(irdmafs(*words))
    assert irdmafs("umount", mounted.path).returncode == 0
    assert not mounted.is_mounted()


def test_commands_at_a_mount_whose_daemon_is_stopped_end_and_say_so(mounted: Mount) -> None:
    daemon = mounted.pid
    commands = ("versions",), ("prefetch",), ("train", "status"), ("train", "end")
    os.kill(daemon, signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        for line in pool.map(lambda words: one_line(irdmafs(*words, mounted.path)), commands):
            assert line.endswith("its mount does not answer for 5 s; see: irdmafs status")
    while "is busy" in (line := one_line(irdmafs("umount", mounted.path))):
        pass  # others ask all mounts, and so this one, how they are
    assert line.startswith(f"{mounted.path} is unmounted, but its daemon did not answer: ")
    assert not has_ended(daemon)
    os.kill(daemon, signal.SIGCONT)
    eventually(lambda: has_ended(daemon), "the daemon ends when it goes on")


@contextlib.contextmanager
def waiting_mount(place: Path) -> Iterator[tuple[Program, int]]:
    """Yield a command that mounts, and its daemon, which waits for an etcd that does not answer."""
    config = place.with_name("cluster.toml")
    config.write_text('[cluster]\netcd = ["127.0.0.1:1"]\n')
    command = (*IRDMAFS, "mount", place, "--cluster", config)
    with Program(*command, stderr=subprocess.PIPE) as mount:
        log = Path(stores.TMPFS_ROOT, stores.store_name(str(place)), "irdmafs.log")
        eventually(lambda: log.exists() and log.read_text() != "", "its daemon waits for etcd")
        yield mount, int(Path(f"/proc/{mount.pid}/task/{mount.pid}/children").read_text())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_mount_that_is_ended_while_it_waits_leaves_nothing_and_says_nothing(
    place: Path, number: signal.Signals
) -> None:
    with waiting_mount(place) as (mount, daemon):
        mount.send_signal(number)
        assert mount.stderr.read() == ""
    assert mount.returncode in (INTERRUPTED if number == signal.SIGINT else [-number])
    assert has_ended(daemon)
    assert stores.default_store_path(str(place)) is None


def test_a_mount_that_is_killed_while_it_waits_takes_its_daemon_along(place: Path) -> None:
    with waiting_mount(place) as (mount, daemon):
        mount.kill()
    eventually(lambda: has_ended(daemon), "the daemon has ended, long before it gives etcd up", 5)


def test_an_interrupt_during_imports_shows_no_traceback() -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with _interrupts_end_silently():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with _interrupts_end_silently():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, handler)
