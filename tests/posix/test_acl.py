"""POSIX ACLs: what setfacl and getfacl say and what the kernel lets happen, on the mount as on tmpfs."""

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
from harness.clusters import Cluster, Plan
from harness.mountpoint import Mount, run_checked
from harness.processes import Process, TakeProcess

SESSIONS = ("kernel",)
USER, GROUP = 12345, 23456

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="other users' processes need root"),
    pytest.mark.skipif(shutil.which("setfacl") is None, reason="acl is not installed (setfacl)"),
]


def user(uid: int, gid: int, *groups: int) -> Process:
    one = Process()
    one.do(f"os.setgroups({list(groups)}); os.setresgid(*[{gid}] * 3); os.setresuid(*[{uid}] * 3)")
    return one


@pytest.fixture(scope="module")
def users() -> Iterator[dict[str, Process]]:
    made = {
        "named": user(USER, 7),
        "member": user(8, 9, GROUP),
        "owner": user(10, 11),
        "other": user(12, 13),
    }
    yield made
    for one in made.values():
        one.close()


def getfacl(path: Path) -> str:
    return run_checked("getfacl", "-n", "-p", "--omit-header", path)


def setfacl(*words: str | Path) -> None:
    run_checked("setfacl", *words)


def allowed(path: Path, users: dict[str, Process]) -> dict[str, str]:
    """Return what each user may do with a file."""
    found = {}
    for name, one in users.items():
        ways = {"r": os.O_RDONLY, "w": os.O_WRONLY}
        found[name] = "".join(
            way for way, flags in ways.items() if one.do(TRY, f=str(path), w=flags)
        )
    return found


TRY = """
try:
    os.close(os.open(f, w)); ok = True
except PermissionError:
    ok = False
ok
"""

ACLS = (
    f"u:{USER}:rw",
    f"u:{USER}:-,o::r",
    f"g:{GROUP}:rw,m::r",
    f"u:{USER}:r,g:{GROUP}:rw,g::-,o::-",
    "u::rw,g::r,o::-",
)


DIRECTORIES = (
    "u::rwx,g::-,o::-",
    "u::rwx,g::x,o::rx",
    "u::-,g::rx,o::x",
    f"u::rwx,g::-,u:{USER}:rx,g:{GROUP}:x,o::-",
    f"u::rwx,g::rx,u:{USER}:-,g:{GROUP}:rx,m::x,o::rx",
)


@pytest.mark.parametrize("entries", DIRECTORIES)
@pytest.mark.parametrize("group", [0, GROUP])
def test_links_that_wait_tell_nobody_more_than_their_directory(
    folder: Path, users: dict[str, Process], entries: str, group: int
) -> None:
    folder.chmod(0o755)
    versions, since = folder / "versions", folder / "since"
    (versions / "1").mkdir(parents=True)
    (versions / "model").touch()
    since.mkdir()
    os.setxattr(since, "user.irdmafs.awaits", b"versions")
    os.chown(versions, 10, group)
    setfacl("-m", entries, versions)
    for name, one in users.items():

        def may(call: str, *path: str, one: Process = one) -> bool:
            code = f"try:\n  ok = bool(os.{call}(f))\nexcept PermissionError:\n  ok = False\nok"
            return bool(one.do(code, f=str(folder.joinpath(*path))))

        searches = may("stat", "versions", "model")
        lists = searches and may("listdir", "versions")
        told = may("readlink", "since", "model"), may("readlink", "since", "0")
        assert told == (searches, lists), name


@pytest.mark.parametrize("entries", ACLS)
def test_an_acl_says_who_may_open_a_file(
    folder: Path, tmpfs: Path, users: dict[str, Process], entries: str
) -> None:
    def seen(place: Path) -> object:
        place.chmod(0o755)
        file = place / "file"
        file.write_bytes(b"content")
        os.chown(file, 10, 11)
        file.chmod(0o640)
        result: list[object] = [allowed(file, users)]
        for step in (("-m", entries), ("-m", "m::rw"), ("-x", f"u:{USER}"), ("-b",)):
            done = run_or_error("setfacl", *step, file)
            result += [done, getfacl(file), stat.S_IMODE(file.stat().st_mode), allowed(file, users)]
            result.append(sorted(os.listxattr(file)))
        return result

    assert seen(folder) == seen(tmpfs)


def run_or_error(*command: str | Path) -> bool:
    try:
        run_checked(*command)
    except AssertionError:
        return False
    return True


def test_chmod_changes_the_mask(folder: Path, tmpfs: Path, users: dict[str, Process]) -> None:
    def seen(place: Path) -> object:
        place.chmod(0o755)
        file = place / "file"
        file.write_bytes(b"content")
        setfacl("-m", f"u:{USER}:rw,g::r", file)
        result = []
        for mode in (0o600, 0o660, 0o4717, 0o644):
            file.chmod(mode)
            result.append((getfacl(file), file.stat().st_mode, allowed(file, users)))
        return result

    assert seen(folder) == seen(tmpfs)


@pytest.mark.parametrize("default", [None, f"u::rwx,g::rx,o::-,u:{USER}:rwx", "u::rw,g::r,o::rx"])
def test_what_is_made_in_a_directory_gets_its_default_acl(
    folder: Path, tmpfs: Path, process: TakeProcess, default: str | None
) -> None:
    make = """
os.umask(umask)
os.close(os.open('file', os.O_CREAT | os.O_WRONLY, mode))
os.mkdir('sub', mode); os.mkdir('sub/sub', mode)
os.mkfifo('fifo', mode)
os.symlink('nowhere', 'link')
fd = os.open('.', os.O_TMPFILE | os.O_RDWR, mode)
os.link(f'/proc/self/fd/{fd}', 'unnamed', src_dir_fd=fd, follow_symlinks=True)
os.umask(0o022)
"""

    def seen(place: Path) -> object:
        result = []
        for number, (umask, mode) in enumerate(product((0, 0o077), (0o777, 0o640, 0o2775))):
            directory = place / f"{number}"
            directory.mkdir()
            if default is not None:
                setfacl("-d", "-m", default, directory)
            maker = process()
            maker.do("os.chdir(d)", d=str(directory))
            maker.do(make, umask=umask, mode=mode)
            for name in ("file", "sub", "sub/sub", "fifo", "unnamed"):
                path = directory / name
                result.append((name, umask, mode, oct(path.stat().st_mode), getfacl(path)))
        return result

    assert seen(folder) == seen(tmpfs)


def test_set_group_id_is_lost_by_an_acl_of_somebody_outside_the_group(
    folder: Path, tmpfs: Path, users: dict[str, Process]
) -> None:
    def seen(place: Path) -> list[int]:
        place.chmod(0o755)
        file = place / "file"
        file.write_bytes(b"")
        os.chown(file, 10, GROUP)
        file.chmod(0o2755)
        acl = "acl = struct.pack('<IHHIHHIHHI', 2, 1, 7, n, 4, 5, n, 32, 0, n)"
        users["owner"].do(f"import struct; n = 2**32 - 1; {acl}")
        users["owner"].do("os.setxattr(f, 'system.posix_acl_access', acl)", f=str(file))
        return [file.stat().st_mode, len(os.listxattr(file))]

    assert seen(folder) == seen(tmpfs)


def test_an_acl_that_is_none_is_refused(folder: Path, tmpfs: Path) -> None:
    for place in (folder, tmpfs):
        (place / "file").touch()
        for value in (b"\2\0\0\0junk", b"\7\0\0\0", b"\2\0\0\0" + bytes(8)):
            with pytest.raises(OSError):
                os.setxattr(place / "file", "system.posix_acl_access", value)
        with pytest.raises(PermissionError):
            os.setxattr(place / "file", "system.posix_acl_default", ENTRIES)
        assert getfacl(place / "file") == "user::rw-\ngroup::r--\nother::r--\n\n"


UNNAMED = b"\xff" * 4
ENTRIES = b"\2\0\0\0" + b"".join(bytes((tag, 0, 7, 0)) + UNNAMED for tag in (1, 4, 32))


@pytest.mark.parametrize("options", ["allow_other", "allow_other,noacl"])
def test_acls_cost_others_a_question_for_the_root_alone(
    new_mount: Callable[..., Mount], users: dict[str, Process], options: str
) -> None:
    """The kernel made the inode of the root before it knew that it may keep ACLs."""
    mount = new_mount("-o", options)
    mount.path.chmod(0o755)
    for number in range(20):
        (mount.path / f"{number}").write_bytes(b"x")
    look = "for n in range(20): os.close(os.open(f'{d}/{n}', os.O_RDONLY))"
    users["other"].do(look, d=str(mount.path))
    with mount.requests() as counted:
        users["other"].do(look, d=str(mount.path))
    asked = 0 if "noacl" in options else 20
    assert counted["GETXATTR"] <= asked and counted["GETATTR"] <= 1, counted
    with mount.requests() as counted:
        for number in range(20):
            os.close(os.open(mount.path / f"{number}", os.O_RDONLY))
    assert not counted["GETXATTR"], "the owner needs no ACL"


def test_acls_outlive_the_daemon(new_mount: Callable[..., Mount]) -> None:
    mount = new_mount("-o", "allow_other")
    (mount.path / "file").write_bytes(b"x")
    setfacl("-m", f"u:{USER}:rw", mount.path / "file")
    kept = getfacl(mount.path / "file")
    mount.restart()
    assert getfacl(mount.path / "file") == kept


def test_copies_and_archives_keep_acls(folder: Path) -> None:
    (folder / "file").write_bytes(b"x")
    setfacl("-m", f"u:{USER}:rw", folder / "file")
    run_checked("cp", "-a", folder / "file", folder / "copy")
    run_checked("tar", "--acls", "-C", folder, "-cf", folder / "tar", "file")
    (folder / "out").mkdir()
    run_checked("tar", "--acls", "-C", folder / "out", "-xf", folder / "tar")
    assert getfacl(folder / "copy") == getfacl(folder / "file") == getfacl(folder / "out" / "file")


def test_an_acl_holds_on_every_host_at_once(users: dict[str, Process]) -> None:
    with Cluster(Plan(nodes=1, replicas=1, mounts=0)) as cluster:
        one = cluster.add_mount("-o", "allow_other")
        other = cluster.add_mount("-o", "allow_other", "--follow", "/")
        for mount in (one, other):
            mount.path.chmod(0o755)
        file = one.path / "file"
        file.write_bytes(b"content")
        file.chmod(0o640)
        seen = other.path / "file"
        assert allowed(seen, users)["named"] == ""
        for entries, expected in (
            (f"u:{USER}:rw", "rw"),
            (f"u:{USER}:r", "r"),
            (f"u:{USER}:-", ""),
        ):
            setfacl("-m", entries, file)
            assert allowed(seen, users)["named"] == expected
            assert getfacl(seen) == getfacl(file)
        (one.path / "shared").mkdir()
        setfacl("-d", "-m", f"u:{USER}:rwx", one.path / "shared")
        (other.path / "shared" / "file").write_bytes(b"made elsewhere")
        assert allowed(one.path / "shared" / "file", users)["named"] == "rw"
