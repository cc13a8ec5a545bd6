"""Attributes as tmpfs has them: each scenario runs on the mount and on tmpfs, and must end alike."""

import ctypes
import errno
import os
import stat
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import EVERYWHERE
from harness.cluster_mount import CLUSTER
from harness.errors import error_of, fails_with
from harness.mountpoint import Mount
from harness.processes import AS_NOBODY, NOBODY, Process, TakeProcess
from harness.scenarios import AsOnTmpfs, outcomes

from irdmafs.mount.mounting import find_mount, remount

SESSIONS = EVERYWHERE

# struct vfs_cap_data of revision 2, with CAP_NET_BIND_SERVICE permitted.
A_CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")
CAPABILITY = f"'security.capability', {A_CAPABILITY!r}"
# From <linux/sched.h>.
CLONE_NEWUSER = 0x10000000
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
libc = ctypes.CDLL(None, use_errno=True)


# -- set-user-id and set-group-id ----------------------------------------------------------------

CHANGES = {
    "write": "fd = os.open(f, os.O_WRONLY); os.write(fd, b'x')",
    "append": "fd = os.open(f, os.O_WRONLY | os.O_APPEND); os.write(fd, b'x')",
    "truncating open": "fd = os.open(f, os.O_WRONLY | os.O_TRUNC)",
    "truncating open and write": "fd = os.open(f, os.O_RDWR | os.O_TRUNC); os.write(fd, b'x')",
    "ftruncate": "fd = os.open(f, os.O_WRONLY); os.ftruncate(fd, 1)",
    "truncate": "fd = os.open(f, os.O_RDONLY); os.truncate(f, 1)",
    "fallocate": "fd = os.open(f, os.O_WRONLY); os.posix_fallocate(fd, 0, 4096)",
    "copy_file_range": "fd = os.open(f, os.O_RDWR); os.copy_file_range(fd, fd, 1, 0, 8192)",
    "only looking": "fd = os.open(f, os.O_RDWR); os.read(fd, 1)",
}


def modes_after(change: str, by: str, mode: int, content: bytes) -> str:
    """Return steps: the mode of a file is seen before and after the descriptor of a change is closed."""
    return f"""
        root: f = 'file'; write(f, {content!r}, 'wb'); os.chown(f, 0, 4321); os.chmod(f, {mode})
        {by}: f = 'file'; {change}; os.fstat(fd).st_mode
        root: os.stat(f).st_mode
        {by}: os.close(fd)
        root: left = os.stat(f).st_mode; os.unlink(f); left
    """.rstrip()


@needs_root
@pytest.mark.parametrize("content", [b"", b"content"], ids=["empty", "filled"])
@pytest.mark.parametrize("change", CHANGES)
def test_set_ids_are_lost_when_somebody_else_changes_the_content(
    as_on_tmpfs: AsOnTmpfs, session: str, change: str, content: bytes
) -> None:
    # Without HANDLE_KILLPRIV_V2 the kernel leaves set-group-id where the group may not execute.
    modes = [0o6777, 0o4777, 0o2777, 0o777, *([0o2767] if session != "pyfuse3" else [])]
    steps = [modes_after(CHANGES[change], "nobody", mode, content) for mode in modes]
    as_on_tmpfs("root: os.chmod('.', 0o777)" + "".join(steps))


@needs_root
def test_set_group_id_stays_for_a_member_when_nobody_may_execute(folder: Path, tmpfs: Path) -> None:
    """Such a file does not run as its group."""
    steps = modes_after(CHANGES["write"], "member", 0o2767 & ~0o111, b"content")
    seen = []
    for place in (tmpfs, folder):
        place.chmod(0o777)
        with Process() as root, Process() as member:
            member.do(f"os.setgroups([4321]); os.setresgid(*[{NOBODY}] * 3)")
            member.do(f"os.setresuid(*[{NOBODY}] * 3)")
            found = outcomes(steps, "", place, {"root": root, "member": member}.__getitem__)
            seen.append([stat.S_IMODE(mode) for _, mode in found if isinstance(mode, int)])
    assert seen[1] == seen[0] == [0o2666] * 3


@needs_root
def test_privileges_given_while_a_copy_is_written_are_not_those_of_the_copy(
    folder: Path, nobody: Process, process: TakeProcess
) -> None:
    """Else whoever may write a file could put a program of his own where root trusts another one."""
    folder.chmod(0o777)
    for number, writer in enumerate((nobody, nobody, process())):
        file = folder / f"file{number}"
        file.write_bytes(b"sound")
        os.chown(file, NOBODY, NOBODY)
        writer.do("fd = os.open(f, os.O_WRONLY | os.O_TRUNC); os.write(fd, b'x')", f=str(file))
        if number == 1:
            os.setxattr(file, "security.capability", A_CAPABILITY)
        else:
            file.chmod(0o6755)
        writer.do("os.write(fd, b'evil'); os.close(fd)")
        left = stat.S_IMODE(file.stat().st_mode), os.listxattr(file)
        assert left == ((0o644, []) if number == 1 else (0o755 if number == 0 else 0o6755, []))


# -- scenarios ---------------------------------------------------------------------------------

NOW, OMIT = (1 << 30) - 1, (1 << 30) - 2
TIMES = (
    (5, 0, 6, 0),
    (0, NOW, 0, NOW),
    (5, 0, 0, OMIT),
    (0, OMIT, 0, OMIT),
    (0, NOW, 0, OMIT),
    (0, NOW, 6, 0),
    (5, 0, 6, 10**9),
)
KEEP_SIZE, PUNCH_HOLE, COLLAPSE, ZERO, INSERT, UNSHARE = 1, 2, 8, 16, 32, 64
ALLOCATIONS = (0, KEEP_SIZE, PUNCH_HOLE, PUNCH_HOLE | KEEP_SIZE, ZERO, COLLAPSE, INSERT, UNSHARE)
FICLONE, FIDEDUPERANGE, FIONREAD = 0x40049409, 0xC0189436, 0x541B
FS_IOC_FIEMAP, TCGETS = 0xC020660B, 0x5401

SCENARIOS = {
    "set-ids given while a file is open are lost by the next write": """
        root: os.chmod('.', 0o777)
        nobody: fd = open_fd('file', os.O_WRONLY | os.O_CREAT); os.write(fd, b'x')
        nobody: os.fchmod(fd, 0o6755); os.fstat(fd).st_mode
        nobody: os.write(fd, b'x')
        root: os.stat('file').st_mode
        nobody: os.close(fd)
        root: os.stat('file').st_mode
    """,
    **{
        f"set-ids and capabilities are lost by chown of {what}": "".join(
            f"""
            root: write('file'); os.chmod('file', {mode}); os.setxattr('file', {CAPABILITY})
            root: os.chown('file', *{owners}); os.stat('file').st_mode, os.listxattr('file')
            root: os.unlink('file')
            """.rstrip()
            for mode in (0o6755, 0o6745, 0o2644, 0o755)
        )
        + f"""
            root: os.mkdir('sub'); os.chmod('sub', 0o6755); os.chown('sub', *{owners})
            root: os.stat('sub').st_mode
        """
        for what, owners in (
            *(("both", (1, 1)), ("the group", (-1, 1))),
            *(("the user", (1, -1)), ("nothing", (-1, -1))),
        )
    },
    **{
        f"capabilities are lost when anybody changes the content: {change}": f"""
            root: f = 'file'; write(f, 'content'); os.setxattr(f, {CAPABILITY})
            root: {CHANGES[change]}; os.close(fd); os.listxattr(f)
        """
        for change in ("write", "truncating open", "truncate", "only looking")
    },
    "the access time stays when what was read is opened for writing": """
        a: write('file', 'content'); reader = open('file'); os.utime('file', (1, 2))
        a: reader.read(); read_ns = os.stat('file').st_atime_ns; read_ns > 10**9
        a: fd = open_fd('file'); os.stat('file').st_atime_ns == read_ns
        a: os.close(fd); reader.close(); os.stat('file').st_atime_ns == read_ns
    """,
    **{
        f"who may set which times of a file of {owner} with the mode {mode:o}": "".join(
            f"""
            root: os.chmod('.', 0o777); write('file'); os.chown('file', {owner}, {owner})
            root: os.chmod('file', {mode})
            nobody: times = __import__('struct').pack('<qqqq', *{times})
            nobody: checked(libc.utimensat(-100, b'file', times, 0))
            root: s = os.stat('file'); [int(t) in (5, 6) for t in (s.st_atime, s.st_mtime)]
            root: os.unlink('file')
            """.rstrip()
            for times in TIMES
        )
        for mode, owner in ((0o666, 0), (0o644, 0), (0o444, NOBODY))
    },
}
NAMESPACES = (
    *("user.a", "trusted.a", "security.a", "system.a", "other.a", "user.", "plain"),
    "user." + "n" * 251,
)
# tmpfs takes no user attributes in kernels before 6.6.
SCENARIOS["extended attributes of every namespace"] = "\n".join(
    [
        "root: os.chmod('.', 0o755); write('file'); os.mkdir('dir'); os.mkfifo('fifo')",
        "root: os.symlink('file', 'link'); of = {'follow_symlinks': False}",
        *(
            f"root: os.{call}({kind!r}, {name!r}{value}, **of)"
            for kind in ("file", "dir", "link", "fifo")
            for name in NAMESPACES
            for call, value in (("setxattr", ", b'v'"), ("getxattr", ""))
        ),
        "root: [sorted(os.listxattr(kind, **of)) for kind in ('file', 'dir', 'link', 'fifo')]",
        "nobody: sorted(os.listxattr('file'))",
        *(f"nobody: os.getxattr('file', {name!r})" for name in NAMESPACES),
        *(f"root: os.removexattr('file', {name!r})" for name in NAMESPACES * 2),
    ]
)
NOT_IN_PYFUSE3 = {
    "files without a name take the group of their directory": """
        root: os.chown('.', 0, 1234); os.chmod('.', 0o2777)
        root: fd = open_fd('.', os.O_TMPFILE | os.O_WRONLY)
        root: os.fstat(fd).st_gid, os.fstat(fd).st_mode
    """,
    "a file that was emptied before it got a name is there when nobody has it open": """
        a: fd = open_fd('.', os.O_TMPFILE | os.O_RDWR); os.write(fd, b'content'); os.fsync(fd)
        a: reader = open_fd(f'/proc/self/fd/{fd}', os.O_RDONLY | os.O_TRUNC); os.close(fd)
        a: os.link(f'/proc/self/fd/{reader}', 'file', src_dir_fd=reader, follow_symlinks=True)
        a: os.close(reader)
        b: os.stat('file').st_size, read('file'), os.listdir('.')
    """,
    **{
        f"allocating {name} files": "".join(
            f"""
            a: write('{mode}', 'x' * 20_000, 'a'); fd = open_fd('{mode}'); os.pwrite(fd, b'x' * 20_000, 0)
            a: {begin.format(mode=mode)}
            a: checked(libc.fallocate(fd, {mode}, ctypes.c_int64(4096), ctypes.c_int64(32_768)))
            a: os.fstat(fd).st_size, told(os.pread(fd, 40_000, 0))
            a: os.close(fd); content('{mode}')
            """.rstrip()
            for mode in ALLOCATIONS
        )
        for name, begin in (
            ("old", "None"),
            (
                "new",
                "os.close(fd); os.unlink('{mode}'); fd = open_fd('{mode}', os.O_RDWR | os.O_CREAT); "
                "os.pwrite(fd, b'x' * 20_000, 0)",
            ),
        )
    },
    "times of a new file that stays empty do not go back when it is closed": f"""
        a: fd = open_fd('file', os.O_RDWR | os.O_CREAT); made = os.fstat(fd)
        a: checked(libc.fallocate(fd, {KEEP_SIZE}, ctypes.c_int64(0), ctypes.c_int64(4096)))
        a: changed = os.fstat(fd); os.close(fd); closed = os.stat('file')
        a: made.st_mtime_ns < changed.st_mtime_ns == closed.st_mtime_ns
        a: made.st_ctime_ns < changed.st_ctime_ns == closed.st_ctime_ns
    """,
    "clones and other ioctls are refused": f"""
        a: write('file', 'content'); source = open('file', 'rb'); copy = open('copy', 'wb')
        a: fcntl.ioctl(copy, {FICLONE}, source.fileno())
        a: fcntl.ioctl(source, {FIONREAD}, bytes(4))
        a: fcntl.ioctl(copy, {FS_IOC_FIEMAP}, bytes(64))
        a: fcntl.ioctl(copy, {TCGETS}, bytes(64))
        a: fcntl.ioctl(copy, {FIDEDUPERANGE}, bytes(64))
    """,
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_attributes_do_as_on_a_tmpfs(as_on_tmpfs: AsOnTmpfs, scenario: str) -> None:
    as_on_tmpfs(SCENARIOS[scenario])


@pytest.mark.kernel_session("pyfuse3 does not carry it")
@pytest.mark.parametrize("scenario", NOT_IN_PYFUSE3)
def test_what_pyfuse3_lacks_does_as_on_a_tmpfs(as_on_tmpfs: AsOnTmpfs, scenario: str) -> None:
    as_on_tmpfs(NOT_IN_PYFUSE3[scenario])


# -- what descriptors show -----------------------------------------------------------------------


def test_a_descriptor_that_never_opened_a_file_keeps_it_all_the_same(
    session: str, folder: Path, tmpfs: Path
) -> None:
    def seen(place: Path) -> Any:
        found = []
        for ending in ("unlink", "replaced"):
            file = place / ending
            file.write_bytes(b"content")
            fd = os.open(file, os.O_PATH)
            if ending == "unlink":
                file.unlink()
            else:
                (place / "other").write_bytes(b"other")
                os.rename(place / "other", file)
            s = os.fstat(fd)
            found.append((s.st_nlink, s.st_size))
            if session != CLUSTER:  # its store nodes keep what is named, or open
                with open(f"/proc/self/fd/{fd}", "rb") as again:
                    assert again.read() == b"content"
            os.close(fd)
        return found

    assert seen(folder) == seen(tmpfs)


@pytest.mark.kernel_session("pyfuse3 does not hand O_TMPFILE on")
def test_what_was_written_to_a_file_without_a_name_is_there_for_a_descriptor_that_never_opened_it(
    session: str, folder: Path
) -> None:
    for kind in ("unnamed", "unlinked"):
        flags = os.O_RDWR | (os.O_TMPFILE if kind == "unnamed" else os.O_CREAT)
        writer = os.open(folder if kind == "unnamed" else folder / kind, flags, 0o644)
        if kind == "unlinked":
            (folder / kind).unlink()
        os.write(writer, b"content")
        fd = os.open(f"/proc/self/fd/{writer}", os.O_PATH)
        os.close(writer)
        if session == CLUSTER:  # its store nodes keep what is named, or open
            assert os.fstat(fd).st_size == 0
            with pytest.raises(OSError, match="Stale"):
                os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        else:
            assert os.fstat(fd).st_size == 7
            with open(f"/proc/self/fd/{fd}", "rb") as again:
                assert again.read() == b"content"
        os.close(fd)


def test_what_was_written_to_a_file_without_a_name_is_published_with_its_first_by_who_has_it_open(
    here: Path, there: Path
) -> None:
    writer = os.open(here, os.O_TMPFILE | os.O_RDWR)
    os.write(writer, b"content")
    with open(f"/proc/self/fd/{writer}", "rb") as reader:
        os.close(writer)
        path = f"/proc/self/fd/{reader.fileno()}"
        os.link(path, here / "file", src_dir_fd=reader.fileno(), follow_symlinks=True)
        assert (there / "file").read_bytes() == (here / "file").read_bytes() == b"content"
    assert (there / "file").read_bytes() == (here / "file").read_bytes() == b"content"


@needs_root
def test_capabilities_in_a_user_namespace_give_its_user_nothing(folder: Path, tmpfs: Path) -> None:
    def seen(place: Path) -> Any:
        place.chmod(0o755)
        program = place / "program"
        program.touch()
        program.chmod(0o6755)
        os.setxattr(program, "trusted.a", b"v")
        with Process(AS_NOBODY) as user:
            user.do(f"import ctypes; failed = ctypes.CDLL(None).unshare({CLONE_NEWUSER})")
            if user.do("failed"):
                pytest.skip("no user namespaces")
            chown = partial(user.do, "os.chown(f, -1, -1)", f=str(program))
            return error_of(chown), user.do("os.listxattr(f)"), program.stat().st_mode

    assert seen(folder) == seen(tmpfs)


# -- access times --------------------------------------------------------------------------------

MOVED = """
import time
d, f, link = 'dir', 'dir/file', 'dir/link'
def moved(code):
    before = [os.lstat(path).st_atime_ns for path in (d, f, link)]
    time.sleep(0.02)
    exec(code, globals())
    return [os.lstat(path).st_atime_ns != was for path, was in zip((d, f, link), before)]
"""
ATIME_STEPS = (
    "fd = open_fd(f, os.O_RDONLY); os.read(fd, 100); os.close(fd)",
    "fd = open_fd(f, os.O_RDONLY); os.read(fd, 100); os.close(fd)",
    "fd = open_fd(f, os.O_RDONLY); m = mmap.mmap(fd, 7, prot=1); m[:]; os.close(fd)",
    "os.close(open_fd(f, os.O_RDONLY))",
    "os.stat(f)",
    "write(f, 'x', 'r+'); time.sleep(0.02); read(f)",
    "write(f, 'other')",
    "read(f)",
    "os.chmod(f, 0o600); time.sleep(0.02); read(f)",
    "os.utime(f, (1, 2))",
    "read(f)",
    "os.utime(f, (2**31, 2**31 + 5))",
    "fd = open_fd(f, os.O_RDONLY | os.O_NOATIME); os.read(fd, 9); os.close(fd)",
    "os.listdir(d)",
    "os.listdir(d)",
    "os.mkdir(d + '/sub'); time.sleep(0.02); os.listdir(d)",
    "os.stat(link)",
    "fd = open_fd(f); os.read(fd, 9); os.close(fd)",
)


def test_access_times_move_when_they_move_on_tmpfs(as_on_tmpfs: AsOnTmpfs) -> None:
    """By the rule of relatime; compared is which step moves which time."""
    lines = ["a: os.mkdir(d); write(f, 'content'); os.symlink('file', link)"]
    lines += [f"a: moved({step!r})" for step in ATIME_STEPS]
    as_on_tmpfs("\n".join(lines), MOVED)


@needs_root
def test_access_time_moves_by_the_read_after_a_change_though_the_kernel_had_forgotten_the_file(
    mount: Mount, file: Path
) -> None:
    file.write_bytes(b"content")
    file.read_bytes()
    found = find_mount(str(mount.path))
    assert found is not None
    with mount.requests() as asked:
        remount(found, found.options.split(","))  # the kernel forgets what nobody uses
        file.chmod(0o640)
        before = file.stat().st_atime_ns
        time.sleep(0.02)
        file.read_bytes()
    assert file.stat().st_atime_ns != before
    assert asked["FORGET"] + asked["BATCH_FORGET"]


@pytest.mark.parametrize("option", ["relatime", "noatime", "ro"])
def test_access_times_move_by_reads_unless_an_option_forbids_it_and_are_kept_at_the_unmount(
    session: str, new_mount: Callable[..., Mount], process: TakeProcess, option: str
) -> None:
    if session == CLUSTER and option == "ro":
        pytest.skip("what is written is not on the next mount's host")
    mount = new_mount(*(("-o", option) if option != "ro" else ()))
    paths = mount.path / "file", mount.path / "dir"
    paths[0].write_bytes(b"content")
    paths[1].mkdir()
    for path in paths:
        os.utime(path, (1, 2))
    if option == "ro":
        mount.arguments = ("-o", option)
        mount.restart()
    process().do("open(f, 'rb').read(); os.listdir(d)", f=str(paths[0]), d=str(paths[1]))
    atimes_ns = [path.stat().st_atime_ns for path in paths]
    assert [atime_ns > 10**9 for atime_ns in atimes_ns] == [option == "relatime"] * 2
    if session != CLUSTER:
        mount.restart()
        assert [path.stat().st_atime_ns for path in paths] == atimes_ns


def test_file_tells_its_store_nodes_in_a_cluster_only(folder: Path, session: str) -> None:
    (folder / "file").write_bytes(b"content")
    if session == CLUSTER:
        assert b'"nodes":[{"node":"' in os.getxattr(folder / "file", "user.irdmafs.nodes")
        return
    with fails_with(errno.ENODATA):
        os.getxattr(folder / "file", "user.irdmafs.nodes")
