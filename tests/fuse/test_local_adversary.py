"""A local user who wants the mount to wait for him, or for ever: nobody else notices.

A process can have a system call of its own wait half-way, with what that holds locked: it lets it copy from
a page that its own filesystem never delivers. So nothing that a user names, lends or has open is asked,
locked or closed where others wait for it.
"""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from conftest import make_mount
from harness.cluster_mount import CLUSTER
from harness.clusters import Cluster, ClusterMount, Plan
from harness.mountpoint import Mount, eventually
from harness.processes import Process, as_user
from harness.programs.mute_fuse import MuteFuse

NOBODY, NOBODY_ELSE = 65534, 65533
ANSWERS_WITHIN_S = 30.0

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becoming other users needs root")


def _launcher(user: int) -> tuple[str, ...]:
    # May read every file, as the interpreter may be installed below a private home directory.
    may_read = ("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search")
    return (*as_user(user), *may_read)


@pytest.fixture(scope="module")
def shared() -> Iterator[Mount]:
    """A mount of a cluster, which everybody may enter."""
    with make_mount(CLUSTER, "-o", "allow_other") as mount:
        yield mount


@pytest.fixture(scope="module")
def alone() -> Iterator[Mount]:
    with make_mount("kernel", "-o", "allow_other") as mount:
        yield mount


@pytest.fixture
def mute() -> Iterator[MuteFuse]:
    with MuteFuse() as filesystem:
        yield filesystem


@pytest.fixture
def attacker(mute: MuteFuse) -> Iterator[Process]:
    with Process(_launcher(NOBODY)) as one:
        yield one
        mute.kill()  # or it could not end


def public(mount: Mount | ClusterMount) -> str:
    """A directory in which everybody may write."""
    path = mount.path / "public"
    path.mkdir(exist_ok=True)
    path.chmod(0o777)
    return str(path)


def victim(mount: Mount) -> str:
    path = mount.path / "victim"
    path.write_bytes(bytes(100_000))
    path.chmod(0o644)
    return str(path)


def assert_it_answers(mount: Mount | ClusterMount) -> None:
    """The mount opens, writes and says how it is, for others than the attacker."""
    program = (
        "import os, sys; path = sys.argv[1]\n"
        "with open(path + '/asked', 'wb') as file: file.write(b'x')\n"
        "assert open(path + '/asked', 'rb').read() == b'x'\n"
        "os.getxattr(path, 'user.irdmafs.status')"
    )
    command = [sys.executable, "-S", "-c", program, str(mount.path)]
    with subprocess.Popen(command, cwd="/") as other:
        try:
            assert other.wait(ANSWERS_WITHIN_S) == 0
        except subprocess.TimeoutExpired:
            other.kill()
            pytest.fail("the mount does not answer")


LEND = """
import os, fcntl, threading, time
def attempt(memory, lifeline):
    try:
        return os.getxattr(victim, f"user.irdmafs.read_into.{memory}.{lifeline}")
    except OSError as error:
        return error.errno
def memory(size=1 << 20):
    fd = os.memfd_create("lent", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd
def never():
    "Memory that nobody can read."
    import mmap
    fd = os.open(mute + "/page", os.O_RDONLY)
    return mmap.mmap(fd, 4096, prot=mmap.PROT_READ)
def stuck(step):
    "In a thread that stays in the middle of it."
    threading.Thread(target=step, daemon=True).start()
    time.sleep(0.2)
good, (pipe, other_end) = memory(), os.pipe()
"""


def lends(process: Process, mount: Mount, mute: MuteFuse) -> str:
    """A file to ask about; `process` knows what it needs to lend."""
    path = victim(mount)
    process.do(LEND, victim=path, mute=str(mute.path), public=public(mount))
    return path


def lending_works(mount: Mount, path: str, user: int = 0) -> bool:
    with Process(_launcher(user)) as other:
        other.do(LEND, victim=path, mute="", public="")
        answer = other.do("attempt(good, pipe)")
    return isinstance(answer, bytes) and answer.startswith(b"{")


NO_MEMORY = (
    "os.open(public + '/mine', os.O_RDWR | os.O_CREAT, 0o600)",
    "os.open(victim, os.O_RDONLY)",
    "os.open(victim, os.O_PATH)",
    "os.open(public, os.O_RDONLY)",
    "os.open(mute + '/file', os.O_RDWR)",
    "os.open(mute + '/file', os.O_PATH)",
    "os.open(mute, os.O_RDONLY)",
    "os.open('/dev/null', os.O_RDWR)",
    "os.open('/proc/self/mem', os.O_RDWR)",
    "__import__('socket').socketpair()[0].detach()",
    "__import__('select').epoll().__enter__().fileno()",
    "os.pidfd_open(os.getpid())",
    "10_000",
)


def test_what_is_no_memory_is_refused_without_being_asked(
    shared: Mount, mute: MuteFuse, attacker: Process
) -> None:
    path = lends(attacker, shared, mute)
    refused = {22, 9}  # EINVAL, EBADF
    for source in NO_MEMORY:
        attacker.do(f"fd = {source}")
        for call in ("attempt(fd, pipe)", "attempt(good, fd)", "attempt(fd, fd)"):
            assert attacker.do(call) in refused, (source, call)
        answer = attacker.do("attempt(good, pipe)")
        assert answer[:1] == b"{", f"a slip costs nothing: {source}"
        assert_it_answers(shared)
    assert lending_works(shared, path)


def test_descriptors_that_are_swapped_while_they_are_looked_at_keep_only_their_owner_waiting(
    shared: Mount, mute: MuteFuse, attacker: Process
) -> None:
    path = lends(attacker, shared, mute)
    attacker.do(
        "bad = os.open(mute + '/file', os.O_RDWR)\n"
        "mine = os.open(public + '/swapped', os.O_RDWR | os.O_CREAT, 0o600)\n"
        "swapped = os.dup(good)\n"
        "def swap():\n"
        "    while True:\n"
        "        for fd in (mine, good, bad, good): os.dup2(fd, swapped)\n"
        "stuck(swap)"
    )
    # Each dup2() away from `bad` waits as well, so let the mount meet it by chance only.
    attacker.start("[attempt(swapped, pipe) for _ in range(300)]")
    attacker.finished(5)
    assert_it_answers(shared)
    assert lending_works(shared, path, NOBODY_ELSE)


@pytest.mark.parametrize(
    "step",
    [
        "os.write(other_end, page)",  # with the pipe locked
        "os.write(good, page)",  # with the memory's inode locked
    ],
)
def test_what_a_write_keeps_locked_keeps_nobody_else_waiting(
    shared: Mount, mute: MuteFuse, attacker: Process, step: str
) -> None:
    path = lends(attacker, shared, mute)
    attacker.do("page = never()")
    assert attacker.do("attempt(good, pipe)")[:1] == b"{"
    attacker.do(f"stuck(lambda: {step})")
    # The mount takes, and gives back once more, what was lent before.
    attacker.start("[attempt(good, pipe), attempt(memory(), pipe), os.close(pipe)]")
    attacker.finished(5)
    assert_it_answers(shared)
    assert lending_works(shared, path, NOBODY_ELSE)


def test_a_lender_that_is_killed_while_it_is_stuck_frees_what_it_lent_later(
    shared: Mount, mute: MuteFuse, attacker: Process
) -> None:
    lends(attacker, shared, mute)
    attacker.do("page = never()")
    assert attacker.do("attempt(good, pipe)")[:1] == b"{"
    attacker.do("stuck(lambda: os.write(other_end, page))")
    mute.kill()
    attacker.kill()
    eventually(lambda: shared.status()["cluster"]["lent_buffers"] == 0, "it is given back")
    assert_it_answers(shared)


# Requests about a file that somebody is in the middle of writing.
ABOUT_A_WRITTEN_FILE = {
    "closed": "os.close(os.dup(file))",
    "renamed": "os.rename(path, path + '2')",
    "linked": "os.link(path, path + '2')",
    "cut": "os.truncate(path, 10)",
    "written in place": "open(path, 'wb').write(b'z'); open(path, 'r+').close()",
}


@pytest.mark.parametrize("which", ["alone", "shared"])
@pytest.mark.parametrize("request_", ABOUT_A_WRITTEN_FILE)
def test_a_write_that_never_ends_keeps_only_those_waiting_who_ask_for_its_file(
    request: pytest.FixtureRequest, mute: MuteFuse, attacker: Process, request_: str, which: str
) -> None:
    mount = request.getfixturevalue(which)
    lends(attacker, mount, mute)
    flags = os.O_RDWR if request_ == "written in place" else os.O_WRONLY | os.O_TRUNC
    attacker.do(
        "path = public + '/stuck'; open(path, 'wb').write(bytes(1000)); page = never()\n"
        "file = os.open(path, flags); os.write(file, bytes(1000))\n"
        "stuck(lambda: os.write(file, page))",
        flags=flags,
    )
    attacker.start(ABOUT_A_WRITTEN_FILE[request_])
    attacker.finished(1)
    assert_it_answers(mount)


def test_a_write_that_never_ends_stops_no_store_node(mute: MuteFuse, attacker: Process) -> None:
    with Cluster(Plan(nodes=1, mounts=1, replicas=1)) as cluster:
        mount = cluster.add_mount("-o", "allow_other", beside=cluster.nodes[0])
        for directory in (cluster.directory, mount.path.parent):
            directory.chmod(0o755)
        attacker.do(LEND, victim="", mute=str(mute.path), public=public(mount))
        attacker.do(
            "file = os.open(public + '/stuck', os.O_WRONLY | os.O_CREAT); page = never()\n"
            "os.write(file, bytes(200_000)); stuck(lambda: os.write(file, page))"
        )
        attacker.start("os.close(file)")
        attacker.finished(1)
        assert_it_answers(cluster.mounts[0])
        mute.kill()


# Memory that nobody can write.
NOWHERE = """
import ctypes, select, mmap
libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p
fd = os.open(mute + '/page', os.O_RDWR)
nowhere = ctypes.c_void_p(libc.mmap(None, 4096, 3, 2, fd, 0))
"""
# Calls that never return, with something locked that /proc shows of the process.
LOCKED = {
    "a queue of events": (
        "queue = select.epoll(); r, w = os.pipe(); os.write(w, b'x'); queue.register(r)\n"
        "stuck(lambda: libc.epoll_wait(queue.fileno(), nowhere, 1, -1))"
    ),
    "the directory of descriptors": (
        "directory = os.open('/proc/self/fd', os.O_RDONLY)\n"
        "stuck(lambda: libc.syscall(217, directory, nowhere, 4096))\n"  # getdents64(2)
        "stuck(lambda: os.chmod('/proc/self/fd', 0o500))"
    ),
    "the directory of the process": (
        "directory = os.open('/proc/self', os.O_RDONLY)\n"
        "stuck(lambda: libc.syscall(217, directory, nowhere, 4096))\n"
        "stuck(lambda: os.chmod('/proc/self', 0o500))"
    ),
}


@pytest.mark.parametrize("locked", LOCKED)
def test_closing_a_file_asks_nothing_of_a_process_that_has_locked_what_tells_of_it(
    alone: Mount, mute: MuteFuse, attacker: Process, locked: str
) -> None:
    lends(attacker, alone, mute)
    attacker.do(NOWHERE + LOCKED[locked])
    attacker.start(
        "fd = os.open(public + '/new', os.O_WRONLY | os.O_CREAT); again = os.dup(fd)\n"
        "os.close(again); os.write(fd, b'x'); os.close(fd)\n"
        "if not os.fork(): os._exit(0)"
    )
    attacker.finished(2)
    assert_it_answers(alone)


def test_a_killed_daemon_leaves_nobody_waiting_while_a_thread_of_it_waits_for_a_lock(
    mute: MuteFuse, attacker: Process
) -> None:
    with make_mount("pyfuse3", "-o", "allow_other") as mount:
        path = lends(attacker, mount, mute)
        twice = mount.path / "public" / "twice"
        twice.touch()
        twice.with_name("again").hardlink_to(twice)
        file = twice.open("wb")
        attacker.do(
            f"{NOWHERE}directory = os.open(public, os.O_RDONLY)\n"
            "stuck(lambda: libc.syscall(217, directory, nowhere, 4096))"  # getdents64(2)
        )
        with file:  # then the kernel is to forget both names
            file.write(b"x")
        mount.kill9()
        with Process() as other, pytest.raises(OSError, match=r"not connected|abort"):
            other.do("os.truncate(path, 1)", path=path)


CHECKED = """
import errno, os
def attempt(step):
    try:
        step()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
def change():
    os.chown(path + "/file", 0, 0); os.chmod(path + "/file", 0o4777)
[attempt(lambda: open(path + "/file").read()), attempt(lambda: open(path + "/file", "r+").close()),
 attempt(change), attempt(lambda: os.unlink(path + "/directory/file")),
 attempt(lambda: os.stat(path + "/hidden/file")), attempt(lambda: os.listdir(path + "/hidden"))]
"""


@pytest.mark.parametrize("who", ["without capabilities", "with another user for files"])
@pytest.mark.parametrize("options", [(), ("-o", "noacl"), ("-o", "allow_other")])
def test_modes_hold_for_whoever_is_root_by_name_only(who: str, options: tuple[str, ...]) -> None:
    """Root's processes can come into a mount without allow_other, also those that the modes are for."""
    with make_mount("kernel", *options) as mount:
        for name in ("directory", "hidden"):
            (mount.path / name).mkdir()
        files = [mount.path / name for name in ("file", "directory/file", "hidden/file")]
        for file in files:
            file.write_text("secret")
            file.chmod(0o600)
            os.chown(file, 1000, 1000)
        for name, mode in (("directory", 0o555), ("hidden", 0o700)):
            os.chown(mount.path / name, 1000, 1000)
            (mount.path / name).chmod(mode)
        for file in files:
            file.stat()  # the kernel knows the names
        launcher = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
        with Process(launcher if who == "without capabilities" else ()) as process:
            if who != "without capabilities":
                process.do("libc = ctypes.CDLL(None); libc.setfsgid(2000); libc.setfsuid(2000)")
            denied = process.do(CHECKED, path=str(mount.path))
        assert denied == ["EACCES", "EACCES", "EPERM", "EACCES", "EACCES", "EACCES"]
