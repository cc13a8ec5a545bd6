"""Quotas of directory trees at a mount: who sets them, what they stop, and what programs see of them."""

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.cluster_mount import CLUSTER
from harness.errors import error_of, fails_with
from harness.mountpoint import Mount, eventually
from harness.processes import NOBODY, Process, TakeProcess

SESSIONS = ("kernel", CLUSTER)

KIB = 1 << 10
MIB = 1 << 20
BYTES, INODES = "user.irdmafs.quota_bytes", "user.irdmafs.quota_inodes"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def limit(directory: Path, *, size: str | None = None, inodes: int | None = None) -> None:
    if size is not None:
        os.setxattr(directory, BYTES, size.encode())
    if inodes is not None:
        os.setxattr(directory, INODES, b"%d" % inodes)


def used(directory: Path) -> tuple[int, int]:
    """Inodes and bytes."""
    inodes = os.getxattr(directory, "user.irdmafs.quota_used_inodes")
    return int(inodes), int(os.getxattr(directory, "user.irdmafs.quota_used_bytes"))


def counted(directory: Path) -> tuple[int, int]:
    """Inodes and bytes below a directory, as du(1) counts them."""
    below = {path.lstat().st_ino: path.lstat() for path in directory.rglob("*")}
    return len(below), sum(512 * one.st_blocks for one in below.values())


def write(path: Path, size: int, flags: int = os.O_CREAT | os.O_TRUNC) -> str:
    """The error of the call that failed: open, write or close."""
    call, left = "open", size
    try:
        fd = os.open(path, flags | os.O_WRONLY, 0o644)
        call = "write"
        while left:
            left -= os.write(fd, bytes(min(left, MIB)))
    except OSError as error:
        if call == "write":
            os.close(fd)
        return f"{call} {errno.errorcode[error.errno or 0]}"
    return f"close {error_of(lambda: os.close(fd))}"


# -- names -----------------------------------------------------------------------------------------


def test_what_makes_an_inode_is_refused_when_there_is_no_room_for_it(
    folder: Path, process: TakeProcess
) -> None:
    limit(folder, inodes=3)
    (folder / "a").mkdir()
    (folder / "a" / "file").touch()
    (folder / "link").symlink_to("a")
    assert used(folder) == (3, 0) == counted(folder)
    for make in ("os.mkdir(f)", "os.mkfifo(f)", "os.symlink('x', f)", "open(f, 'w')"):
        for where in (folder, folder / "a"):
            with fails_with(errno.EDQUOT):
                process().do(make, f=str(where / "new"))
    (folder / "link").unlink()
    (folder / "a" / "new").touch()
    assert used(folder) == (3, 0)
    os.removexattr(folder, INODES)
    (folder / "more").touch()


def test_nothing_is_moved_or_linked_into_a_quota_but_copied(folder: Path) -> None:
    place, outside = folder / "place", folder / "outside"
    place.mkdir()
    outside.mkdir()
    limit(place, inodes=3)
    (outside / "file").write_bytes(b"content")
    (outside / "directory").mkdir()
    assert error_of(lambda: (outside / "file").rename(place / "file")) == "EXDEV"
    assert error_of(lambda: (outside / "directory").rename(place / "directory")) == "EXDEV"
    assert error_of(lambda: os.link(outside / "file", place / "file")) == "EXDEV"
    shutil.move(outside / "file", place / "file")
    assert used(place)[0] == 1
    (place / "file").rename(place / "other")
    (place / "sub").mkdir()
    (place / "other").rename(place / "sub" / "file")
    assert used(place)[0] == 2
    (place / "sub").rename(outside / "sub")
    assert used(place) == (0, 0)
    assert (outside / "sub" / "file").read_bytes() == b"content"


def test_a_file_without_a_name_is_charged_when_it_gets_one(folder: Path) -> None:
    limit(folder, inodes=1, size="1M")
    for size, result in ((2 * MIB, "EDQUOT"), (KIB, "ok"), (KIB, "EDQUOT")):
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR)
        os.write(fd, bytes(size))
        path = folder / f"{size}{result}"
        assert error_of(lambda: os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=0)) == result  # noqa: B023
        os.close(fd)
    assert used(folder) == (1, 4 * KIB) == counted(folder)


# -- bytes -----------------------------------------------------------------------------------------


def test_a_version_that_does_not_fit_is_not_published_and_the_one_before_stays(
    folder: Path, file: Path
) -> None:
    limit(folder, size="1M")
    file.write_bytes(b"before" * 10000)
    before = used(folder)
    result = write(file, 2 * MIB)
    assert result in ("close EDQUOT", "write EDQUOT")
    assert file.read_bytes() == b"before" * 10000
    assert used(folder) == before == counted(folder)
    assert write(file, MIB) == "close ok"
    assert used(folder) == (1, MIB) == counted(folder)
    assert write(folder / "other", 1).split()[1] == "EDQUOT"
    file.write_bytes(b"")
    assert used(folder)[1] == 0
    assert write(folder / "other", 1) == "close ok"


def test_a_copy_that_does_not_fit_leaves_the_version_before(folder: Path, file: Path) -> None:
    (folder / "source").write_bytes(bytes(2 * MIB))
    file.write_bytes(b"before")
    limit(folder, size="3M")
    fd = os.open(file, os.O_WRONLY | os.O_TRUNC)
    with (folder / "source").open("rb") as source, fails_with(errno.EDQUOT):
        while os.copy_file_range(source.fileno(), fd, MIB):
            pass
    for call in (os.fsync, os.close):
        with fails_with(errno.EDQUOT):
            call(fd)
    assert file.read_bytes() == b"before"


def test_what_does_not_fit_behind_a_file_is_not_kept(folder: Path, file: Path) -> None:
    limit(folder, size="1M")
    file.write_bytes(b"x" * 100)
    assert write(file, 2 * MIB, os.O_APPEND) == "close EDQUOT"
    assert file.stat().st_size == 100
    assert file.read_bytes() == b"x" * 100
    assert used(folder) == counted(folder)
    assert write(file, KIB, os.O_APPEND) == "close ok"
    assert file.read_bytes() == b"x" * 100 + bytes(KIB)


def test_room_that_there_is_not_cannot_be_allocated(folder: Path) -> None:
    limit(folder, size="1M")
    fd = os.open(folder / "file", os.O_CREAT | os.O_RDWR)
    assert error_of(lambda: os.posix_fallocate(fd, 0, 2 * MIB)) == "EDQUOT"
    os.posix_fallocate(fd, 0, 512 * KIB)
    os.posix_fallocate(fd, 0, 600 * KIB)
    os.close(fd)
    # In a cluster a copy is published, which may have holes, and is shown when the descriptor is released.
    eventually(lambda: used(folder) == counted(folder), "the published version is shown")


def test_holes_are_not_counted(folder: Path) -> None:
    limit(folder, size="1M")
    with (folder / "file").open("wb") as file:
        file.truncate(1 << 30)
        file.write(b"x")
    assert used(folder) == (1, 4 * KIB) == counted(folder)


def test_fsync_tells_that_there_is_no_room(folder: Path) -> None:
    limit(folder, size="64K")
    fd = os.open(folder / "file", os.O_CREAT | os.O_WRONLY)
    try:
        os.write(fd, bytes(60 * KIB))
        os.fsync(fd)
        result = error_of(lambda: os.write(fd, bytes(60 * KIB)))
        assert result == "EDQUOT" or error_of(lambda: os.fsync(fd)) == "EDQUOT"
    finally:
        error_of(lambda: os.close(fd))
    assert used(folder) == counted(folder)


# -- what is seen ----------------------------------------------------------------------------------


def test_a_limit_set_on_a_tree_counts_what_is_there_and_may_be_below_it(folder: Path) -> None:
    (folder / "a" / "b").mkdir(parents=True)
    for name in ("1", "a/2", "a/b/3"):
        (folder / name).write_bytes(bytes(100 * KIB))
    limit(folder, inodes=2, size="150K")
    assert used(folder) == (5, 300 * KIB) == counted(folder)
    assert error_of((folder / "new").touch) == "EDQUOT"
    assert write(folder / "1", 200 * KIB) != "close ok"
    assert write(folder / "1", 50 * KIB) == "close ok"  # less than before
    assert os.getxattr(folder, BYTES) == b"150K"


def test_a_directory_without_a_quota_has_nothing_to_tell(folder: Path) -> None:
    for name in (BYTES, INODES, "user.irdmafs.quota_used_bytes"):
        assert error_of(lambda: os.getxattr(folder, name)) == "ENODATA"  # noqa: B023
    assert error_of(lambda: os.setxattr(folder, BYTES, b"much")) == "EINVAL"
    assert error_of(lambda: os.setxattr(folder, "user.irdmafs.quota_used_bytes", b"1")) == "EPERM"
    (folder / "file").touch()
    assert error_of(lambda: os.setxattr(folder / "file", BYTES, b"1M")) == "EINVAL"


def test_statfs_shows_what_the_quota_leaves(folder: Path) -> None:
    whole = os.statvfs(folder)
    limit(folder, size="10M", inodes=100)
    (folder / "file").write_bytes(bytes(3 * MIB))
    for path in (folder, folder / "file"):
        found = os.statvfs(path)
        assert found.f_blocks * found.f_frsize == 10 * MIB
        assert found.f_bavail * found.f_frsize == found.f_bfree * found.f_frsize == 7 * MIB
        assert (found.f_files, found.f_ffree) == (100, 99)
    assert os.statvfs(folder.parent).f_blocks == whole.f_blocks
    shown = subprocess.check_output(["df", "--output=size", "-B1", folder])
    assert int(shown.split()[-1]) == 10 * MIB


def test_status_lists_quotas(mount: Mount, folder: Path) -> None:
    limit(folder, size="1M")
    (folder / "file").touch()
    (found,) = [one for one in mount.status()["quotas"] if one["path"] == f"/{folder.name}"]
    assert found == {
        "path": f"/{folder.name}", "bytes": 0, "limit_bytes": MIB, "inodes": 1, "limit_inodes": None,
    }  # fmt: skip


def test_copies_do_not_take_the_quota_with_them(folder: Path) -> None:
    (folder / "a").mkdir()
    limit(folder / "a", size="1M")
    assert os.listxattr(folder / "a") == []
    subprocess.run(["cp", "-a", folder / "a", folder / "b"], check=True)
    assert error_of(lambda: os.getxattr(folder / "b", BYTES)) == "ENODATA"


# -- who may set it --------------------------------------------------------------------------------


@needs_root
def test_only_root_sets_and_lifts_a_quota(folder: Path, nobody: Process) -> None:
    folder.chmod(0o777)
    own = folder / "own"
    own.mkdir()
    os.chown(own, NOBODY, NOBODY)
    limit(own, inodes=1)
    for call in (
        f"os.setxattr(f, {BYTES!r}, b'100G')",
        f"os.setxattr(f, {INODES!r}, b'100')",
        f"os.removexattr(f, {INODES!r})",
    ):
        with fails_with(errno.EPERM):
            nobody.do(call, f=str(own))
    nobody.do("os.mkdir(f + '/sub')")
    for name in ("sub2", "sub/sub2"):
        with fails_with(errno.EDQUOT):
            nobody.do(f"os.mkdir(f + '/{name}')")
    used = "os.getxattr(f, 'user.irdmafs.quota_used_inodes')"
    assert nobody.do(f"{used}, os.getxattr(f, {INODES!r})") == (b"1", b"1")


@needs_root
@pytest.mark.parametrize("inside", [(), ("unshare", "--user", "--map-root-user")])
def test_root_without_its_capability_sets_no_quota(folder: Path, inside: tuple[str, ...]) -> None:
    """Also with that of a user namespace of its own."""
    done = subprocess.run(
        ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin", *inside, "setfattr",
         "-n", BYTES, "-v", "1M", folder],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if "unshare failed" in done.stderr:
        pytest.skip(f"no user namespaces: {done.stderr}")
    assert done.returncode != 0 and "not permitted" in done.stderr, done


@needs_root
def test_a_quota_that_one_host_sets_holds_on_the_other(pair: list[Path]) -> None:
    one, other = pair
    limit(one, inodes=20, size="1M")
    (one / "file").write_bytes(bytes(900 * KIB))
    assert used(other) == (1, 900 * KIB)
    assert write(other / "large", 200 * KIB) == "close EDQUOT"
    (one / "file").unlink()
    assert write(other / "large", 200 * KIB) == "close ok"
    with Process() as here, Process() as there:
        for process, place in ((here, one), (there, other)):
            process.start(
                "made = 0\n"
                "for number in range(30):\n"
                "    try: os.mkdir(f'{place}/{os.getpid()}.{number}'); made += 1\n"
                "    except OSError as error: assert error.errno == errno.EDQUOT",
                place=str(place),
            )
        for process in (here, there):
            process.result()
        made = here.do("made") + there.do("made")
    assert used(one) == used(other) == counted(one) == (made + 1, 200 * KIB)
    assert 20 <= used(one)[0] <= 21
    assert error_of((other / "new").mkdir) == "EDQUOT"


def test_the_account_is_right_after_the_daemon_was_killed(new_mount: Callable[..., Mount]) -> None:
    with new_mount() as mount:
        place = mount.path / "place"
        place.mkdir()
        limit(place, inodes=5, size="1M")
        (place / "a").mkdir()
        (place / "a" / "file").write_bytes(bytes(100 * KIB))
        half = os.open(place / "never closed", os.O_CREAT | os.O_WRONLY)
        os.write(half, b"x")
        assert used(place)[0] == 3
        mount.kill9()
        error_of(lambda: os.close(half))
        subprocess.run(["umount", "-l", mount.path], check=True)
        mount.remount()
        # In a cluster its name counts until it is taken anew, though nobody sees it.
        (place / "never closed").write_bytes(b"")
        assert used(place) == counted(place)
        assert used(place)[1] == 100 * KIB
        assert json.loads(os.getxattr(mount.path, "user.irdmafs.status"))["quotas"]
        assert write(place / "large", MIB).split()[1] == "EDQUOT"


def test_a_directory_that_was_removed_with_its_quota_is_no_obstacle_to_the_next_mount(
    session: str, own_mount: Mount
) -> None:
    if session == CLUSTER:
        pytest.skip("what is written is not on the next mount's host")
    for name in ("removed", "kept"):
        (own_mount.path / name).mkdir()
        os.setxattr(own_mount.path / name, "user.irdmafs.quota_inodes", b"10")
    (own_mount.path / "removed").rmdir()
    own_mount.restart()
    assert os.getxattr(own_mount.path / "kept", "user.irdmafs.quota_inodes") == b"10"
