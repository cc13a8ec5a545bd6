"""Options, mount tables, mountpoints and stores; the mounts are real."""

import contextlib
import fcntl
import mmap
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.closing import descriptor
from harness.mountpoint import needs_fuse
from harness.processes import Program

from irdmafs.backend.files.extents import in_memory, lock_directory
from irdmafs.backend.model.values import memory_limit, parse_size
from irdmafs.client._files import is_versioned
from irdmafs.mount import mounting, stores
from irdmafs.mount.users import is_locked, users_of
from irdmafs.mount_options import MountError, MountOptions, parse_mount_options

needs_root = pytest.mark.skipif(not mounting.can_mount(), reason="mounting needs CAP_SYS_ADMIN")


def detach(path: str | Path) -> None:
    while mounting.find_mount(os.fspath(path)) is not None:
        mounting.unmount_filesystem(os.fspath(path), mounting.MNT_DETACH)


@contextlib.contextmanager
def mounted_tmpfs(path: str | Path) -> Iterator[str]:
    target = os.fspath(path)
    os.makedirs(target, exist_ok=True)
    mounting.mount_filesystem("test", target, "tmpfs", 0, "size=1m")
    try:
        yield target
    finally:
        detach(target)


@contextlib.contextmanager
def silent_mount(path: str | Path, options: MountOptions | None = None) -> Iterator[int]:
    """A FUSE mount that nobody serves: it hangs until its descriptor is closed, then is stale."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        mounting.mount_fuse(device, os.fspath(path), options or MountOptions())
        yield device
    finally:
        os.close(device)
        detach(path)


@pytest.fixture
def mountpoint(tmp_path: Path) -> str:
    path = tmp_path / "mnt"
    path.mkdir()
    return str(path)


# -- options ------------------------------------------------------------------------------------


def test_no_options_are_the_safe_ones() -> None:
    options = parse_mount_options([])
    assert options == MountOptions()
    assert not (options.dev or options.suid or options.allow_other)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ro", MountOptions(read_only=True)),
        ("ro,rw", MountOptions()),
        ("allow_other,default_permissions", MountOptions(allow_other=True)),
        ("uid=1000,gid=100,umask=027", MountOptions(uid=1000, gid=100, umask=0o27)),
        ("uid=root,gid=root", MountOptions(uid=0, gid=0)),
        ("dev,suid,noexec", MountOptions(dev=True, suid=True, exec=False)),
        ("noatime,sync,dirsync", MountOptions(noatime=True, sync=True, dirsync=True)),
        ("nonempty,fsname=weights", MountOptions(nonempty=True, fsname="weights")),
        ("relatime,nolazytime,nostrictatime", MountOptions()),
        ("locks=local", MountOptions(locks="local")),
        ("locks=refuse,locks=cluster", MountOptions()),
        ("_netdev,nofail,noauto,user,x-systemd.automount,x-gvfs-show,,", MountOptions()),
    ],
)
def test_options_mean_what_mount_tools_mean(text: str, expected: MountOptions) -> None:
    assert parse_mount_options([text]) == expected
    assert parse_mount_options(text.split(",")) == expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ro,cache=yes", "'cache'.*allow_other.*uid="),
        ("umask=9", "octal"),
        ("umask=7777", "octal"),
        ("uid=-1", "uid"),
        ("gid=4294967295", "gid"),
        ("uid=no-such-user-here", "uid"),
        ("uid", "needs a value"),
        ("ro=1", "takes no value"),
        ("lazytime", "lazytime"),
        ("strictatime", "strictatime"),
        ("max_read=128K", "max_read"),
        ("locks=maybe", "locks takes cluster, local or refuse"),
        ("fsname=", "fsname"),
        ("allow_root", "allow_other"),
    ],
)
def test_option_that_makes_no_sense_is_named(text: str, named: str) -> None:
    with pytest.raises(MountError, match=named) as raised:
        parse_mount_options([text])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("4096B", 4096), ("1k", 1024), ("1.5M", 3 << 19), ("8GiB", 8 << 30),
     (" 2 T ", 2 << 40)],
)  # fmt: skip
def test_sizes_are_powers_of_1024(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_percent_is_of_memory() -> None:
    assert parse_size("100%") == memory_limit()
    assert abs(parse_size("50%") - memory_limit() / 2) <= 1


def test_memory_is_that_of_the_control_groups_around_a_process() -> None:
    root, file = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    if not root.exists():
        root, file = root.parent, "memory.max"
    group = root / f"irdmafs-test-{os.getpid()}"
    program = "from irdmafs.backend.model.values import memory_limit as limit; print(limit())"
    joined = f"echo $$ > {group}/inner/cgroup.procs; exec {sys.executable} -c '{program}'"
    with contextlib.ExitStack() as made:
        try:
            for directory in (group, group / "inner"):
                directory.mkdir()
                made.callback(directory.rmdir)
            (group / file).write_text(str(1 << 28))
        except OSError as error:
            pytest.skip(f"no memory can be limited: {error}")
        assert int(subprocess.check_output(["sh", "-c", joined])) == 1 << 28


@pytest.mark.parametrize(
    "text", ["", "G", "-1G", "0", "0%", "101%", "8GB8", "1e9", "8 X", "99999999T", "9" * 400]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


# -- the mount table ------------------------------------------------------------------------------


def test_mount_table_is_read_with_its_escapes_and_without_lines_of_another_form() -> None:
    line = (
        rb"41 26 0:37 / /tmp/a\040b\134c\012d rw,nosuid shared:7 master:1"
        rb" - fuse.irdmafs my\040fs rw,user_id=0"
    )
    [mount] = mounting.parse_mountinfo(b"\ngarbage\n" + line + b"\n1 2 3 - 4\n")
    assert mount.mountpoint == "/tmp/a b\\c\nd"
    assert (mount.fstype, mount.source, mount.device) == ("fuse.irdmafs", "my fs", "0:37")


@needs_root
@pytest.mark.parametrize("name", [b"a b\\c", b"line\nfeed", b"line\rreturn", b"latin-\xe9"])
def test_mount_is_found_whatever_its_name(tmp_path: Path, name: bytes) -> None:
    with mounted_tmpfs(os.path.join(os.fspath(tmp_path), os.fsdecode(name))) as path:
        found = mounting.find_mount(path)
        assert found is not None
        assert (found.mountpoint, found.fstype) == (path, "tmpfs")
        assert in_memory(path)
        assert not is_versioned(path)


@needs_root
def test_topmost_of_two_mounts_is_found(mountpoint: str) -> None:
    with mounted_tmpfs(mountpoint):
        mounting.mount_filesystem("upper", mountpoint, "tmpfs", 0, "")
        found = mounting.find_mount(mountpoint)
        assert found is not None and found.source == "upper"


@needs_root
def test_mount_is_found_through_symlinks_and_from_inside(mountpoint: str, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("mnt")
    with mounted_tmpfs(mountpoint):
        found = mounting.find_mount(str(link))
        assert found is not None and found.mountpoint == mountpoint
        (Path(mountpoint) / "sub").mkdir()
        inside = mounting.containing_mount(str(link / "sub" / "file"))
        assert inside is not None and inside.mountpoint == mountpoint
        assert mounting.find_mount(mountpoint + "/sub") is None


# -- mounts that answer, hang, or are stale -----------------------------------------------------


@needs_fuse
def test_mount_shows_type_source_and_options(mountpoint: str) -> None:
    options = MountOptions(read_only=True, exec=False, allow_other=True, fsname="weights")
    with silent_mount(mountpoint, options):
        found = mounting.find_mount(mountpoint)
    assert found is not None
    assert (found.fstype, found.source) == ("fuse.irdmafs", "weights")
    assert {"ro", "nosuid", "nodev", "noexec"} <= set(found.options.split(","))
    assert {"allow_other", "default_permissions"} <= set(found.super_options.split(","))


@needs_fuse
def test_mount_without_a_device_is_one_clear_error(mountpoint: str) -> None:
    with open(os.devnull) as null, pytest.raises(MountError, match="cannot mount on"):
        mounting.mount_fuse(null.fileno(), mountpoint, MountOptions())
    assert mounting.find_mount(mountpoint) is None


@needs_fuse
def test_question_to_a_hung_mount_comes_back(mountpoint: str) -> None:
    with silent_mount(mountpoint):
        with pytest.raises(TimeoutError):
            mounting.ask_mount(mountpoint, mounting.STATUS_XATTR, timeout_s=0.2)
        assert mounting.mount_state(mountpoint, timeout_s=0.2) == "hung"


@needs_root
def test_healing_spares_mounts_of_others(mountpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with mounted_tmpfs(mountpoint):
        assert mounting.mount_state(mountpoint) == "ok"
        monkeypatch.setattr(mounting, "mount_state", lambda path: "stale")
        with pytest.raises(MountError, match="tmpfs"):
            mounting.prepare_mountpoint(mountpoint)
        assert mounting.find_mount(mountpoint) is not None


def test_mountpoint_is_known_by_its_real_path(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert mounting.prepare_mountpoint(str(tmp_path / "link")) == str(tmp_path / "real")


# -- unmounting -----------------------------------------------------------------------------------


_HOLDERS = {
    "cwd": "os.chdir(path)",
    "file": "held = open(path + '/file')",
    "mapping": "file = open(path + '/file', 'rb'); "
    "held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ); file.close(); "
    "[os.close(int(fd)) for fd in os.listdir('/proc/self/fd') if fd not in '012' "
    "and os.path.lexists('/proc/self/fd/' + fd) "
    "and os.readlink('/proc/self/fd/' + fd).startswith(path)]",
}


@needs_root
def test_who_keeps_a_mount_busy_is_named(mountpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("irdmafs.mount.users._PATIENCE_S", 60.0)
    holders: dict[str, Program] = {}
    with mounted_tmpfs(mountpoint):
        Path(mountpoint, "file").write_bytes(bytes(mmap.PAGESIZE))
        for how, holds in _HOLDERS.items():
            program = f"import mmap, os, sys; path = sys.argv[1]; {holds}; print(); input()"
            holders[how] = Program(sys.executable, "-c", program, mountpoint, cwd="/")
            holders[how].stdout.readline()
        found = users_of(mountpoint)
        for holder in holders.values():
            holder.communicate("\n")
    for how, holder in holders.items():
        users = [user for user in found if user.pid == holder.pid]
        assert [user.how for user in users] == [how]
        assert users[0].path.startswith(mountpoint)


# -- stores ---------------------------------------------------------------------------------------


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Default stores under this directory instead of the machine's."""
    monkeypatch.setattr(stores, "TMPFS_ROOT", str(tmp_path / "run" / "stores"))
    monkeypatch.setattr(stores, "SHM_ROOT", str(tmp_path / "shm"))
    (tmp_path / "shm").mkdir()
    yield tmp_path
    for mount in mounting.mounts():
        if mounting.is_under(mount.mountpoint, str(tmp_path)):
            detach(mount.mountpoint)


@pytest.fixture
def unprivileged(roots: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mounting, "can_mount", lambda: False)
    return roots


@needs_root
def test_default_store_is_a_private_tmpfs_found_again(roots: Path) -> None:
    first = stores.default_store("/some/where", 8 << 20)
    assert first.created
    found = mounting.find_mount(first.path)
    assert found is not None and found.fstype == "tmpfs"
    assert stat.S_IMODE(os.stat(first.path).st_mode) == 0o700
    usage = os.statvfs(first.path)
    assert usage.f_blocks * usage.f_frsize == 8 << 20
    Path(first.path, "names").write_bytes(b"kept")
    again = stores.default_store("/some/where")
    assert (again.path, again.created) == (first.path, False)
    assert Path(again.path, "names").read_bytes() == b"kept"
    assert stores.default_store("/else/where").path != first.path


@needs_root
def test_default_store_is_resized_but_never_below_its_contents(roots: Path) -> None:
    store = stores.default_store("/some/where", 8 << 20)
    Path(store.path, "data").write_bytes(bytes(4 << 20))
    stores.default_store("/some/where", 16 << 20)
    usage = os.statvfs(store.path)
    assert usage.f_blocks * usage.f_frsize == 16 << 20
    with pytest.raises(MountError, match="cannot resize"):
        stores.default_store("/some/where", 1 << 20)
    assert Path(store.path, "data").stat().st_size == 4 << 20


def _lock(store: str) -> int:
    descriptor = os.open(os.path.join(store, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def test_store_with_a_daemon_is_neither_leftover_nor_discarded(
    unprivileged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("irdmafs.mount.users._FREE_WITHIN_S", 0.1)
    store = stores.default_store("/some/where")
    with descriptor(_lock(store.path)):
        assert stores.leftover_stores([]) == []
        with pytest.raises(MountError, match="in use"):
            stores.discard_store(store.path)
    # As a store of another mount namespace looks from here.
    Path(store.path).with_name("empty").mkdir()
    assert [left.path for left in stores.leftover_stores([])] == [store.path]
    stores.discard_store(store.path)
    assert not os.path.exists(store.path)


def test_daemon_waits_for_who_looks_at_whether_its_store_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = _lock(str(tmp_path))
    monkeypatch.setattr("time.sleep", lambda _: os.close(looks))
    os.close(lock_directory(str(tmp_path), "it is in use"))


def test_cache_is_emptied_without_a_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, taken = str(tmp_path), list[bool]()
    (tmp_path / "cluster").write_text("cluster.toml")
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: taken.append(is_locked(cache)))
    with descriptor(_lock(cache)):
        stores.empty_cache(cache)
    assert taken == []
    stores.empty_cache(cache)
    assert taken == [True]


def test_unprivileged_store_is_private_and_found_again(unprivileged: Path) -> None:
    store = stores.default_store("/some/where")
    assert store.path.startswith(str(unprivileged / "shm" / f"irdmafs-{os.geteuid()}"))
    assert stat.S_IMODE(os.stat(store.path).st_mode) == 0o700
    assert not stores.default_store("/some/where").created
    with pytest.raises(MountError, match="--size needs"):
        stores.default_store("/some/where", 8 << 20)


@pytest.mark.parametrize("trap", ["symlink", "file", "directory of somebody else"])
def test_store_directory_that_is_not_ours_is_refused(unprivileged: Path, trap: str) -> None:
    path = unprivileged / "shm" / f"irdmafs-{os.geteuid()}"
    if trap == "symlink":
        path.symlink_to(unprivileged)
    elif trap == "file":
        path.touch()
    elif os.geteuid() != 0:
        pytest.skip("giving a directory away needs root")
    else:
        path.mkdir()
        os.chown(path, 65534, 65534)
    with pytest.raises(MountError, match="the store"):
        stores.default_store("/some/where")


def test_explicit_store_is_created_private(tmp_path: Path) -> None:
    store = stores.explicit_store(str(tmp_path / "a" / "b"), "/some/where")
    assert store.created
    assert stat.S_IMODE(os.stat(store.path).st_mode) == 0o700
    assert not stores.explicit_store(store.path, "/some/where").created


def test_explicit_store_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        with pytest.raises(MountError, match="not a directory"):
            stores.explicit_store(str(path), "/some/where")
    with pytest.raises(MountError, match="--size limits"):
        stores.explicit_store(str(tmp_path), "/some/where", 8 << 20)
    for mountpoint in (tmp_path, tmp_path / "mnt", tmp_path.parent):
        with pytest.raises(MountError, match="contain"):
            stores.explicit_store(str(tmp_path), str(mountpoint))
