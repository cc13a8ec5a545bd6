"""POSIX ACLs: what setfacl and getfacl say and what the kernel lets happen, on the mount as on tmpfs."""

import os
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
from harness.clusters import Cluster, Plan
from harness.mountpoint import Mount
from harness.network import run as run_checked
from harness.processes import Process, TakeProcess
from harness.scenarios import outcomes

SESSIONS = ("kernel",)
USER, GROUP = 12345, 23456

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="other users' processes need root"),
    pytest.mark.skipif(shutil.which("setfacl") is None, reason="acl is not installed (setfacl)"),
]


# User, group and further groups of each process.
USERS = {
    "named": (USER, 7, []),
    "member": (8, 9, [GROUP]),
    "owner": (10, 11, []),
    "other": (12, 13, []),
}


@pytest.fixture(scope="module")
def users() -> Iterator[dict[str, Process]]:
    made = {name: Process() for name in USERS}
    for name, (uid, gid, groups) in USERS.items():
        made[name].do(f"os.setgroups({groups}); os.setresgid(*[{gid}] * 3)")
        made[name].do(f"os.setresuid(*[{uid}] * 3)")
    yield made
    for one in made.values():
        one.close()


def getfacl(path: Path) -> str:
    return run_checked("getfacl", "-n", "-p", "--omit-header", path)


def setfacl(*words: str | Path) -> None:
    run_checked("setfacl", *words)


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


BEGIN = """
import struct
def acl(path):
    command = ['getfacl', '-n', '-p', '--omit-header', path]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
def setfacl(*words):
    return subprocess.run(['setfacl', *words]).returncode
def seen(path):
    return acl(path), os.stat(path).st_mode, sorted(os.listxattr(path))
def allowed(path):
    found = ''
    for way, flags in (('r', os.O_RDONLY), ('w', os.O_WRONLY)):
        try:
            os.close(os.open(path, flags))
            found += way
        except PermissionError:
            pass
    return found
"""
ALLOWED = "".join(f"\n        {name}: allowed('file')" for name in USERS)

SCENARIOS = {
    **{
        f"an ACL says who may open a file: {entries}": f"""
        root: os.chmod('.', 0o755); write('file'); os.chown('file', 10, 11)
        root: os.chmod('file', 0o640){ALLOWED}"""
        + "".join(
            f"""
        root: setfacl({step}, 'file'); seen('file'){ALLOWED}"""
            for step in (f"'-m', '{entries}'", "'-m', 'm::rw'", f"'-x', 'u:{USER}'", "'-b'")
        )
        for entries in ACLS
    },
    "chmod changes the mask": f"""
        root: os.chmod('.', 0o755); write('file'); setfacl('-m', 'u:{USER}:rw,g::r', 'file')"""
    + "".join(
        f"""
        root: os.chmod('file', {mode}); seen('file'){ALLOWED}"""
        for mode in (0o600, 0o660, 0o4717, 0o644)
    ),
    **{
        f"what is made in a directory gets its default ACL: {default}": "".join(
            f"""
        root: os.mkdir('{number}'); {default and f"setfacl('-d', '-m', '{default}', '{number}')"}
        root: os.chdir('{number}'); umask = os.umask({umask})
        root: os.close(open_fd('file', os.O_CREAT | os.O_WRONLY, {mode}))
        root: os.mkdir('sub', {mode}); os.mkdir('sub/sub', {mode}); os.mkfifo('fifo', {mode})
        root: os.symlink('nowhere', 'link'); fd = open_fd('.', os.O_TMPFILE | os.O_RDWR, {mode})
        root: os.link(f'/proc/self/fd/{{fd}}', 'unnamed', src_dir_fd=fd, follow_symlinks=True)
        root: os.umask(umask); [seen(name) for name in ('file', 'sub', 'sub/sub', 'fifo', 'unnamed')]
        root: os.chdir('..')"""
            for number, (umask, mode) in enumerate(product((0, 0o077), (0o777, 0o640, 0o2775)))
        )
        for default in (None, f"u::rwx,g::rx,o::-,u:{USER}:rwx", "u::rw,g::r,o::rx")
    },
    "set-group-id is lost by an ACL of somebody outside the group": f"""
        root: os.chmod('.', 0o755); write('file'); os.chown('file', 10, {GROUP}); os.chmod('file', 0o2755)
        owner: n = 2**32 - 1; new = struct.pack('<IHHIHHIHHI', 2, 1, 7, n, 4, 5, n, 32, 0, n)
        owner: os.setxattr('file', 'system.posix_acl_access', new)
        root: seen('file')
    """,
    "an ACL that is none is refused": """
        root: write('file'); os.setxattr('file', 'system.posix_acl_access', b'\\2\\0\\0\\0junk')
        root: os.setxattr('file', 'system.posix_acl_access', b'\\7\\0\\0\\0')
        root: os.setxattr('file', 'system.posix_acl_access', b'\\2\\0\\0\\0' + bytes(8))
        root: entries = b''.join(struct.pack('<HHI', tag, 7, 2**32 - 1) for tag in (1, 4, 32))
        root: os.setxattr('file', 'system.posix_acl_default', b'\\2\\0\\0\\0' + entries)
        root: seen('file')
    """,
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_acls_do_as_on_a_tmpfs(
    folder: Path, tmpfs: Path, process: TakeProcess, users: dict[str, Process], scenario: str
) -> None:
    found, expected = (
        outcomes(SCENARIOS[scenario], BEGIN, place, lambda name: users.get(name) or process())
        for place in (folder, tmpfs)
    )
    assert found == expected


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
    named = users["named"]
    named.do(f"import os, subprocess\n{BEGIN}")
    with Cluster(Plan(nodes=1, replicas=1, mounts=0)) as cluster:
        one = cluster.add_mount("-o", "allow_other")
        other = cluster.add_mount("-o", "allow_other", "--follow", "/")
        for mount in (one, other):
            mount.path.chmod(0o755)
        file = one.path / "file"
        file.write_bytes(b"content")
        file.chmod(0o640)
        seen = other.path / "file"
        assert named.do("allowed(path)", path=str(seen)) == ""
        for rights, expected in (("rw", "rw"), ("r", "r"), ("-", "")):
            setfacl("-m", f"u:{USER}:{rights}", file)
            assert named.do("allowed(path)", path=str(seen)) == expected
            assert getfacl(seen) == getfacl(file)
        (one.path / "shared").mkdir()
        setfacl("-d", "-m", f"u:{USER}:rwx", one.path / "shared")
        (other.path / "shared" / "file").write_bytes(b"made elsewhere")
        assert named.do("allowed(path)", path=str(one.path / "shared/file")) == "rw"
