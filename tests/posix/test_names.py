"""Names: directories, links, renames, owners, modes, times, extended attributes, as POSIX and Linux say."""

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import SESSIONS as _SESSIONS
from harness.cluster_mount import CLUSTER
from harness.mountpoint import Mount
from harness.processes import Process

SESSIONS = (*_SESSIONS, CLUSTER)

TakeProcess = Callable[[], Process]
RENAME_NOREPLACE, RENAME_EXCHANGE, RENAME_WHITEOUT = 1, 2, 4
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def raises(number: int) -> Iterator[None]:
    """The block must raise OSError with this errno."""
    with pytest.raises(OSError) as caught:
        yield
    found = caught.value.errno
    assert found == number, f"{errno.errorcode[found or 0]}, expected {errno.errorcode[number]}"


def renameat2(source: Path, target: Path, flags: int) -> None:
    if libc.renameat2(-100, bytes(source), -100, bytes(target), flags) != 0:
        raise OSError(ctypes.get_errno(), "renameat2")


@pytest.fixture
def nobody() -> Iterator[Process]:
    """A process of another, unprivileged user."""
    with Process() as one:
        one.do(f"os.setgroups([]); os.setresgid(*[{NOBODY}] * 3); os.setresuid(*[{NOBODY}] * 3)")
        yield one


# -- creating and removing -------------------------------------------------------------------


def test_exclusive_creation_fails_when_the_name_exists(folder: Path, process: TakeProcess) -> None:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    os.close(os.open(folder / "a", flags))
    with raises(errno.EEXIST):
        process().do("os.open(file, flags)", file=str(folder / "a"), flags=flags)
    os.symlink("nowhere", folder / "link")
    with raises(errno.EEXIST):
        os.open(folder / "link", flags)
    assert not (folder / "nowhere").exists()


def test_exactly_one_of_many_exclusive_creators_wins(folder: Path, process: TakeProcess) -> None:
    racers = [process() for _ in range(4)]
    for racer in racers:
        racer.start(
            """
won = []
for n in range(50):
    try:
        os.close(os.open(f'{folder}/{n}', os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        won.append(n)
    except FileExistsError:
        pass
won
""",
            folder=str(folder),
        )
    winners = [n for racer in racers for n in racer.result()]
    assert sorted(winners) == list(range(50))


def test_symlinks_are_not_followed_when_asked(folder: Path) -> None:
    (folder / "file").write_text("x")
    os.symlink("file", folder / "link")
    with raises(errno.ELOOP):
        os.open(folder / "link", os.O_RDONLY | os.O_NOFOLLOW)
    assert (folder / "link").read_text() == "x"
    assert stat.S_ISLNK(os.lstat(folder / "link").st_mode)


def test_only_directories_open_as_directories(folder: Path) -> None:
    (folder / "file").write_text("x")
    with raises(errno.ENOTDIR):
        os.open(folder / "file", os.O_RDONLY | os.O_DIRECTORY)
    os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
    with raises(errno.EISDIR):
        os.open(folder, os.O_WRONLY)
    with raises(errno.ENOTDIR):
        os.stat(folder / "file" / "below")


def test_errors_of_unlink_and_rmdir(folder: Path) -> None:
    (folder / "full").mkdir()
    (folder / "full" / "file").write_text("x")
    with raises(errno.ENOTEMPTY):
        os.rmdir(folder / "full")
    with raises(errno.EISDIR):
        os.unlink(folder / "full")
    with raises(errno.ENOTDIR):
        os.rmdir(folder / "full" / "file")
    with raises(errno.ENOENT):
        os.unlink(folder / "missing")
    with raises(errno.EEXIST):
        os.mkdir(folder / "full")
    os.unlink(folder / "full" / "file")
    os.rmdir(folder / "full")
    assert os.listdir(folder) == []


def test_unlinked_file_goes_on_living_for_those_who_have_it_open(
    folder: Path, process: TakeProcess
) -> None:
    file = folder / "scratch"
    holder = process()
    holder.do(
        "fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o640); os.write(fd, b'a')", file=str(file)
    )
    os.unlink(file)
    assert not file.exists()
    assert holder.do("os.fstat(fd).st_nlink") == 0
    assert holder.do("os.pwrite(fd, b'bcd', 1); os.fsync(fd); os.pread(fd, 10, 0)") == b"abcd"
    assert holder.do("os.ftruncate(fd, 2); os.fchmod(fd, 0o600); os.fstat(fd).st_size") == 2
    assert holder.do("stat.S_IMODE(os.fstat(fd).st_mode)") == 0o600
    file.write_text("another")
    assert holder.do("os.pread(fd, 10, 0)") == b"ab"
    holder.do("os.close(fd)")
    assert file.read_text() == "another"


def test_temporary_files_of_python_work(folder: Path, process: TakeProcess) -> None:
    step = """
import tempfile
with tempfile.TemporaryFile(dir=folder) as f:
    f.write(b'x' * 100_000); f.seek(0); whole = f.read() == b'x' * 100_000
with tempfile.NamedTemporaryFile(dir=folder) as f:
    f.write(b'y'); f.flush(); size = os.stat(f.name).st_size
whole, size, os.listdir(folder)
"""
    whole, _, left = process().do(step, folder=str(folder))
    assert whole
    assert left == []


def test_directory_removed_while_a_process_is_in_it(folder: Path, process: TakeProcess) -> None:
    (folder / "d").mkdir()
    inside = process()
    inside.do("os.chdir(folder)", folder=str(folder / "d"))
    os.rmdir(folder / "d")
    assert inside.do("os.listdir('.')") == []
    with raises(errno.ENOENT):
        inside.do("open('file', 'w')")
    assert inside.do("os.stat('.').st_nlink") == 0


def test_directory_link_counts_follow_its_subdirectories(folder: Path) -> None:
    assert os.stat(folder).st_nlink == 2
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    (folder / "file").write_text("x")
    assert os.stat(folder).st_nlink == 4
    (folder / "a" / "c").mkdir()
    os.rename(folder / "a" / "c", folder / "c")
    assert (os.stat(folder).st_nlink, os.stat(folder / "a").st_nlink) == (5, 2)
    os.rmdir(folder / "b")
    assert os.stat(folder).st_nlink == 4


# -- listing ---------------------------------------------------------------------------------


def test_large_directory_lists_every_name_once(folder: Path, process: TakeProcess) -> None:
    names = [f"layer.{n:05}.weight" for n in range(2000)]
    process().do("for name in names: os.mknod(f'{folder}/{name}')", folder=str(folder), names=names)
    for _ in range(2):
        assert sorted(process().do("os.listdir(folder)", folder=str(folder))) == names


def test_listing_has_the_inodes_of_files_that_are_being_replaced(
    folder: Path, process: TakeProcess
) -> None:
    file = folder / "file"
    file.write_bytes(b"before")
    ino = file.stat().st_ino
    reader, writer = process(), process()
    reader.do("before = open(f, 'rb')", f=str(file))
    listed = []
    for step in ("w = open(f, 'wb'); w.write(b'after'); w.flush()", "w.close()"):
        writer.do(step, f=str(file))
        with os.scandir(folder) as entries:
            listed += [entry.inode() for entry in entries]
        listed.append(file.stat().st_ino)
    assert listed == [ino] * 4
    assert (reader.do("before.read()"), file.read_bytes()) == (b"before", b"after")


def test_names_that_stay_are_listed_once_while_others_come_and_go(
    folder: Path, process: TakeProcess
) -> None:
    stay = {f"stay{n}" for n in range(400)}
    go = {f"go{n}" for n in range(400)}
    for pair in zip(sorted(stay), sorted(go), strict=True):
        for name in pair:
            os.mknod(folder / name)
    reader, changer = process(), process()
    reader.do("entries = os.scandir(folder); seen = [next(entries).name]", folder=str(folder))
    changer.do("for name in go: os.unlink(f'{folder}/{name}')", folder=str(folder), go=go)
    changer.do("for n in range(200): os.mknod(f'{folder}/new{n}')", folder=str(folder))
    seen = reader.do("seen += [entry.name for entry in entries]; seen")
    assert len(seen) == len(set(seen)), "a name was listed twice"
    assert stay <= set(seen)
    assert set(os.listdir(folder)) == stay | {f"new{n}" for n in range(200)}


def test_rewound_directory_stream_shows_the_present(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        assert os.listdir(fd) == []
        (folder / "a").write_text("x")
        assert os.listdir(fd) == ["a"]
        os.unlink(folder / "a")
        assert os.listdir(fd) == []
    finally:
        os.close(fd)


def test_listing_says_type_and_inode(folder: Path) -> None:
    (folder / "file").write_text("x")
    (folder / "directory").mkdir()
    os.symlink("file", folder / "symlink")
    os.mkfifo(folder / "fifo")
    with os.scandir(folder) as entries:
        found = {e.name: (e.is_file(follow_symlinks=False), e.inode()) for e in entries}
    assert found == {
        name: (name == "file", os.lstat(folder / name).st_ino) for name in os.listdir(folder)
    }
    assert len(found) == 4


# -- renaming --------------------------------------------------------------------------------


def test_rename_replaces_files_and_empty_directories_only(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / name).write_text(name)
    os.rename(folder / "a", folder / "b")
    assert (folder / "b").read_text() == "a"
    assert os.listdir(folder) == ["b"]
    (folder / "d").mkdir()
    (folder / "full").mkdir()
    (folder / "full" / "x").write_text("x")
    for source, target, number in (
        ("b", "d", errno.EISDIR),
        ("d", "b", errno.ENOTDIR),
        ("d", "full", errno.ENOTEMPTY),
        ("missing", "b", errno.ENOENT),
        ("d", "d/below", errno.EINVAL),
    ):
        with raises(number):
            os.rename(folder / source, folder / target)
    os.rename(folder / "full", folder / "d")
    assert os.listdir(folder / "d") == ["x"]


def test_renaming_a_file_onto_itself_or_its_own_link_changes_nothing(folder: Path) -> None:
    (folder / "a").write_text("x")
    os.rename(folder / "a", folder / "a")
    os.link(folder / "a", folder / "b")
    os.rename(folder / "a", folder / "b")
    assert sorted(os.listdir(folder)) == ["a", "b"]
    assert os.stat(folder / "a").st_nlink == 2


def test_rename_without_replacing(folder: Path) -> None:
    (folder / "a").write_text("a")
    (folder / "b").write_text("b")
    with raises(errno.EEXIST):
        renameat2(folder / "a", folder / "b", RENAME_NOREPLACE)
    renameat2(folder / "a", folder / "c", RENAME_NOREPLACE)
    assert {p.name: p.read_text() for p in folder.iterdir()} == {"b": "b", "c": "a"}


def test_rename_exchanges(folder: Path) -> None:
    (folder / "a").write_text("a")
    (folder / "d").mkdir()
    (folder / "d" / "b").write_text("b")
    renameat2(folder / "a", folder / "d" / "b", RENAME_EXCHANGE)
    assert ((folder / "a").read_text(), (folder / "d" / "b").read_text()) == ("b", "a")
    renameat2(folder / "a", folder / "d", RENAME_EXCHANGE)
    assert (folder / "d").read_text() == "b"
    assert (folder / "a" / "b").read_text() == "a"
    with raises(errno.ENOENT):
        renameat2(folder / "a", folder / "missing", RENAME_EXCHANGE)
    with raises(errno.EINVAL):
        renameat2(folder / "a", folder / "d", RENAME_EXCHANGE | RENAME_NOREPLACE)


@pytest.mark.skipif(os.geteuid() != 0, reason="the whiteout belongs to root")
def test_rename_leaves_a_whiteout(folder: Path) -> None:
    def is_whiteout(path: Path) -> bool:
        found = os.lstat(path)
        return (found.st_mode, found.st_rdev, found.st_nlink) == (stat.S_IFCHR, 0, 1)

    (folder / "a").write_text("a")
    (folder / "b").write_text("b")
    (folder / "d").mkdir()
    with raises(errno.EEXIST):
        renameat2(folder / "a", folder / "b", RENAME_WHITEOUT | RENAME_NOREPLACE)
    renameat2(folder / "a", folder / "b", RENAME_WHITEOUT)
    assert is_whiteout(folder / "a")
    assert (folder / "b").read_text() == "a"
    renameat2(folder / "d", folder / "e", RENAME_WHITEOUT | RENAME_NOREPLACE)
    assert is_whiteout(folder / "d")
    assert os.listdir(folder / "e") == []
    assert sorted(os.listdir(folder)) == ["a", "b", "d", "e"]
    os.rename(folder / "e", folder / "c")
    renameat2(folder / "a", folder / "d", RENAME_WHITEOUT)
    assert is_whiteout(folder / "a")
    assert is_whiteout(folder / "d")
    os.unlink(folder / "d")


def test_listing_goes_on_behind_many_names_that_were_removed_meanwhile(
    folder: Path, session: str
) -> None:
    if session == CLUSTER:
        pytest.skip("listed by the same code as on one host, and slow to fill")
    # In the order in which they are listed; who lists them first does so here.
    order = [f"name{number}" for number in range(6000)]
    for name in order:
        os.mknod(folder / name)
    with os.scandir(folder) as listing:
        next(listing)
        for name in order[1000:5900]:
            os.unlink(folder / name)
        seen = {entry.name for entry in listing}
    assert seen.issuperset(order[5900:])


def test_parent_follows_a_directory_that_was_moved(folder: Path, process: TakeProcess) -> None:
    for name in ("a/b/deep", "c"):
        (folder / name).mkdir(parents=True)
    inside = process()
    inside.do("os.chdir(folder)", folder=str(folder / "a" / "b"))
    process().do("os.rename(f'{d}/a/b', f'{d}/c/moved')", d=str(folder))
    assert inside.do("os.listdir('..'), os.listdir('.')") == (["moved"], ["deep"])
    assert inside.do("os.stat('..').st_ino") == os.stat(folder / "c").st_ino
    assert inside.do("os.getcwd()") == str(folder / "c" / "moved")
    inside.do("open('file', 'w').close()")
    assert (folder / "c" / "moved" / "file").exists()


def test_names_are_seen_by_others_at_once(folder: Path, process: TakeProcess) -> None:
    watcher, actor = process(), process()
    names = "sorted(os.listdir(d)), [os.path.lexists(f'{d}/{n}') for n in 'abc']"
    assert watcher.do(names, d=str(folder)) == ([], [False] * 3)
    for step, there in (
        ("open(f'{d}/a', 'w').close()", "a"),
        ("os.mkdir(f'{d}/b')", "ab"),
        ("os.rename(f'{d}/a', f'{d}/c')", "bc"),
        ("os.symlink('c', f'{d}/a')", "abc"),
        ("os.rmdir(f'{d}/b')", "ac"),
        ("os.unlink(f'{d}/c')", "a"),
        ("os.unlink(f'{d}/a')", ""),
    ):
        actor.do(step, d=str(folder))
        assert watcher.do(names, d=str(folder)) == (list(there), [n in there for n in "abc"]), step


# -- names -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        b"n" * 255,
        b"\xff\xfe not utf-8 \x80",
        "gr\u00fc\u00dfe \U0001f9ee".encode(),
        b"new\nline\t\\ '\"",
        b"-rf",
        b"...",
    ],
)
def test_any_name_that_linux_allows_works(folder: Path, process: TakeProcess, name: bytes) -> None:
    path = os.path.join(os.fsencode(folder), name)
    process().do("open(path, 'w').write('x')", path=path)
    assert os.listdir(os.fsencode(folder)) == [name]
    assert process().do("open(path).read()", path=path) == "x"
    os.rename(path, path[:-1] + b"2")
    os.symlink(name, path)
    assert os.readlink(path) == name
    os.unlink(path)
    os.unlink(path[:-1] + b"2")


def test_names_that_are_too_long_are_refused(folder: Path) -> None:
    for name in ("n" * 256, "\u00e9" * 128):
        for call in (os.mkdir, os.mknod, os.stat, os.unlink, os.rmdir):
            with raises(errno.ENAMETOOLONG):
                call(folder / name)
        with raises(errno.ENAMETOOLONG):
            os.symlink("target", folder / name)
        (folder / "file").write_text("x")
        with raises(errno.ENAMETOOLONG):
            os.rename(folder / "file", folder / name)


def test_symlinks_of_any_length_and_loops(folder: Path) -> None:
    longest = "t" * 4095
    os.symlink(longest, folder / "longest")
    assert os.readlink(folder / "longest") == longest
    assert os.lstat(folder / "longest").st_size == 4095
    with raises(errno.ENAMETOOLONG):
        os.symlink("t" * 4096, folder / "too long")
    os.symlink("two", folder / "one")
    os.symlink("one", folder / "two")
    with raises(errno.ELOOP):
        os.stat(folder / "one")
    with raises(errno.EINVAL):
        os.readlink(folder)


def test_deep_trees_work(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(300):
        os.mkdir("deeper-and-deeper", dir_fd=fd)
        below = os.open("deeper-and-deeper", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    with open("bottom", "w", opener=lambda name, flags: os.open(name, flags, dir_fd=fd)) as file:
        file.write("x")
    assert os.listdir(fd) == ["bottom"]
    os.close(fd)


# -- hard links, special files ---------------------------------------------------------------


def test_hard_links_are_one_file(folder: Path, process: TakeProcess) -> None:
    (folder / "d").mkdir()
    (folder / "a").write_text("first")
    os.link(folder / "a", folder / "d" / "b")
    look = "[(s.st_ino, s.st_nlink, s.st_size, s.st_mode) for s in map(os.stat, files)]"
    files = [str(folder / "a"), str(folder / "d" / "b")]
    one, other = process().do(look, files=files)
    assert one == other
    assert one[1] == 2
    os.chmod(folder / "a", 0o600)
    assert process().do(look, files=files)[1][3] == stat.S_IFREG | 0o600
    os.unlink(folder / "a")
    assert os.stat(folder / "d" / "b").st_nlink == 1
    assert (folder / "d" / "b").read_text() == "first"
    with raises(errno.EPERM):
        os.link(folder / "d", folder / "hard")
    with raises(errno.EEXIST):
        os.link(folder / "d" / "b", folder / "d" / "b")


def test_hard_links_to_symlinks(folder: Path) -> None:
    os.symlink("target", folder / "a")
    os.link(folder / "a", folder / "b", follow_symlinks=False)
    assert os.readlink(folder / "b") == "target"
    assert os.lstat(folder / "a").st_nlink == 2


def test_fifo_carries_bytes_between_processes(folder: Path, process: TakeProcess) -> None:
    os.mkfifo(folder / "fifo", 0o600)
    assert stat.S_ISFIFO(os.stat(folder / "fifo").st_mode)
    reader, writer = process(), process()
    reader.start("open(fifo, 'rb').read()", fifo=str(folder / "fifo"))
    writer.do("open(fifo, 'wb').write(b'through')", fifo=str(folder / "fifo"))
    assert reader.result() == b"through"


def test_unix_sockets_bind_on_the_mount(folder: Path, process: TakeProcess) -> None:
    step = """
import socket
s = socket.socket(socket.AF_UNIX); s.bind('s'); s.listen()
c = socket.socket(socket.AF_UNIX); c.connect('s'); c.send(b'hello')
s.accept()[0].recv(10)
"""
    one = process()
    one.do("os.chdir(folder)", folder=str(folder))
    assert one.do(step) == b"hello"
    assert stat.S_ISSOCK(os.stat(folder / "s").st_mode)


@needs_root
def test_device_nodes_keep_their_numbers(folder: Path) -> None:
    for name, kind in (("char", stat.S_IFCHR), ("block", stat.S_IFBLK)):
        device = os.makedev(250, 70_000)
        os.mknod(folder / name, kind | 0o600, device)
        found = os.stat(folder / name)
        assert stat.S_IFMT(found.st_mode) == kind
        assert found.st_rdev == device


# -- modes, owners, times --------------------------------------------------------------------


def test_umask_and_modes(folder: Path, process: TakeProcess) -> None:
    maker = process()
    maker.do("previous = os.umask(0o027); os.chdir(folder)", folder=str(folder))
    maker.do("os.close(os.open('file', os.O_CREAT | os.O_WRONLY, 0o777)); os.mkdir('dir')")
    maker.do("os.mkfifo('fifo'); os.chdir('/'); os.umask(previous)")
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()}
    assert modes == {"file": 0o750, "dir": 0o750, "fifo": 0o640}
    for mode in (0, 0o7777, 0o644):
        os.chmod(folder / "file", mode)
        assert stat.S_IMODE(process().do("os.stat(f).st_mode", f=str(folder / "file"))) == mode


def test_file_made_without_write_permission_can_be_written_by_its_maker(
    folder: Path, process: TakeProcess
) -> None:
    fd = os.open(folder / "file", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o400)
    os.write(fd, b"read only")
    os.close(fd)
    assert (folder / "file").read_bytes() == b"read only"


@needs_root
def test_owners_and_what_they_may(folder: Path, nobody: Process) -> None:
    file = folder / "file"
    file.write_text("x")
    os.chmod(file, 0o600)
    with raises(errno.EACCES):
        nobody.do("open(file)", file=str(file))
    with raises(errno.EPERM):
        nobody.do("os.chmod(file, 0o777)", file=str(file))
    with raises(errno.EACCES):
        nobody.do("open(file + '2', 'w')", file=str(file))
    os.chown(file, NOBODY, 1234)
    assert nobody.do("open(file).read()", file=str(file)) == "x"
    assert (os.stat(file).st_uid, os.stat(file).st_gid) == (NOBODY, 1234)
    with raises(errno.EPERM):
        nobody.do("os.chown(file, 0, -1)", file=str(file))


@needs_root
def test_new_files_belong_to_their_maker_and_to_the_group_of_a_setgid_directory(
    folder: Path, nobody: Process
) -> None:
    os.chmod(folder, 0o777)
    nobody.do("open(d + '/plain', 'w').close()", d=str(folder))
    (folder / "setgid").mkdir()
    os.chown(folder / "setgid", 0, 1234)
    os.chmod(folder / "setgid", 0o2777)
    nobody.do("os.mkdir(d + '/below'); open(d + '/f', 'w').close()", d=str(folder / "setgid"))
    plain, below, file = map(
        os.stat, (folder / "plain", folder / "setgid/below", folder / "setgid/f")
    )
    assert (plain.st_uid, plain.st_gid) == (NOBODY, NOBODY)
    assert (below.st_gid, file.st_gid) == (1234, 1234)
    assert below.st_mode & stat.S_ISGID


@needs_root
def test_sticky_directory_protects_the_files_of_others(folder: Path, nobody: Process) -> None:
    os.chmod(folder, 0o1777)
    (folder / "theirs").write_text("x")
    with raises(errno.EPERM):
        nobody.do("os.unlink(d + '/theirs')", d=str(folder))
    with raises(errno.EPERM):
        nobody.do("os.rename(d + '/theirs', d + '/mine')", d=str(folder))
    nobody.do("open(d + '/mine', 'w').close()", d=str(folder))
    with raises(errno.EPERM):
        nobody.do("os.rename(d + '/mine', d + '/theirs')", d=str(folder))
    nobody.do("os.rename(d + '/mine', d + '/still mine')", d=str(folder))
    nobody.do("os.unlink(d + '/still mine')", d=str(folder))
    assert os.listdir(folder) == ["theirs"]


@needs_root
def test_writing_and_chown_drop_the_setuid_bit(folder: Path, nobody: Process) -> None:
    file = folder / "program"
    file.write_text("x")
    os.chmod(file, 0o6777)
    nobody.do("open(file, 'a').write('more')", file=str(file))
    assert stat.S_IMODE(os.stat(file).st_mode) & 0o6000 == 0
    os.chmod(file, 0o6755)
    os.chown(file, 1, 1)
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o755


def test_chown_to_nobody_by_a_stranger_leaves_the_setuid_bit(folder: Path, nobody: Process) -> None:
    file = folder / "program"
    file.write_text("x")
    os.chmod(file, 0o6755)
    with pytest.raises(PermissionError):
        nobody.do("os.chown(file, -1, -1)", file=str(file))
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o6755
    os.chmod(file, 0o755)
    nobody.do("os.chown(file, -1, -1)", file=str(file))
    os.chmod(file, 0o6755)
    os.chown(file, -1, -1)
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o755


def test_times_are_kept_to_the_nanosecond(folder: Path, process: TakeProcess) -> None:
    file = folder / "file"
    file.write_text("x")
    look = "s = os.stat(path, follow_symlinks=False); (s.st_atime_ns, s.st_mtime_ns)"
    os.symlink("file", folder / "link")
    for path, times in (
        (file, (1_234_567_890_123_456_789, 987_654_321_012_345_678)),
        (folder, (5, 4_000_000_000_000_000_001)),
        (folder / "link", (1, 2)),
        (file, (-1_500_000_001, -1)),
    ):
        os.utime(path, ns=times, follow_symlinks=False)
        assert process().do(look, path=str(path)) == times
    before = os.stat(file).st_ctime_ns
    os.utime(file)
    assert os.stat(file).st_mtime_ns > 10**18
    assert os.stat(file).st_ctime_ns >= before


def test_a_time_that_is_set_while_nobody_writes_a_new_file_stays_for_its_next_writer(
    folder: Path,
) -> None:
    file = folder / "file"
    fd = os.open(file, os.O_RDWR | os.O_CREAT)
    for flags in (os.O_WRONLY | os.O_APPEND, os.O_RDONLY):
        again = os.open(f"/proc/self/fd/{fd}", flags)
        os.close(fd)
        fd = again
    os.utime(fd, ns=(1, 2))
    for size in (0, 1):
        writer = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
        assert os.stat(file).st_mtime_ns == 2
        os.close(writer)
        assert os.stat(file).st_mtime_ns == 2
        os.truncate(file, size + 1)
        os.utime(fd, ns=(1, 2))
    os.close(fd)


def test_times_are_in_the_order_of_the_calls_that_made_them(folder: Path) -> None:
    file = folder / "file"
    seen = []
    for number in range(100):
        fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        seen.append(os.fstat(fd).st_ctime_ns)
        os.write(fd, b"x")
        seen.append(os.fstat(fd).st_mtime_ns)
        os.fchmod(fd, 0o600 + number % 2)
        seen.append(os.fstat(fd).st_ctime_ns)
        os.close(fd)
        seen.append(os.stat(file).st_ctime_ns)
        os.unlink(file)
        seen.append(os.stat(folder).st_mtime_ns)
    assert seen == sorted(seen)


def test_changes_move_the_times_that_posix_says(folder: Path, process: TakeProcess) -> None:
    file, long_ago = folder / "file", (1_000_000_000, 1_000_000_000)
    file.write_text("x")
    moved = """
def moved(change):
    for path in (d, file):
        os.utime(path, ns=long_ago)
    ctimes = [os.stat(p).st_ctime_ns for p in (d, file)]
    change()
    return [(os.stat(p).st_mtime_ns != long_ago[1], os.stat(p).st_ctime_ns > c)
            for p, c in zip((d, file), ctimes)]
"""
    one = process()
    one.do(moved, d=str(folder), file=str(file), long_ago=long_ago)
    for change, expected in (
        ("lambda: open(file, 'w').write('y')", [(False, False), (True, True)]),
        ("lambda: open(file, 'r+').write('y')", [(False, False), (True, True)]),
        ("lambda: open(file).read()", [(False, False), (False, False)]),
        ("lambda: os.chmod(file, 0o640)", [(False, False), (False, True)]),
        ("lambda: os.link(file, d + '/link')", [(True, True), (False, True)]),
        ("lambda: os.unlink(d + '/link')", [(True, True), (False, True)]),
        ("lambda: os.mkdir(d + '/sub')", [(True, True), (False, False)]),
        ("lambda: os.truncate(file, 0)", [(False, False), (True, True)]),
    ):
        found = one.do(f"moved({change})")
        assert found == expected, f"[(mtime, ctime) of directory, of file] after {change}"


# -- extended attributes ---------------------------------------------------------------------


def test_extended_attributes(folder: Path, process: TakeProcess) -> None:
    file = folder / "file"
    file.write_text("x")
    os.setxattr(file, "user.dtype", b"bfloat16")
    os.setxattr(file, "user.empty", b"")
    look = "{n: os.getxattr(file, n) for n in os.listxattr(file) if n.startswith('user.')}"
    expected = {"user.dtype": b"bfloat16", "user.empty": b""}
    assert process().do(look, file=str(file)) == expected
    with raises(errno.EEXIST):
        os.setxattr(file, "user.dtype", b"y", os.XATTR_CREATE)
    with raises(errno.ENODATA):
        os.setxattr(file, "user.missing", b"y", os.XATTR_REPLACE)
    os.setxattr(file, "user.dtype", b"float32", os.XATTR_REPLACE)
    os.setxattr(file, "user.new", b"1", os.XATTR_CREATE)
    os.removexattr(file, "user.empty")
    with raises(errno.ENODATA):
        os.removexattr(file, "user.empty")
    with raises(errno.ENODATA):
        os.getxattr(file, "user.empty")
    expected = {"user.dtype": b"float32", "user.new": b"1"}
    assert process().do(look, file=str(file)) == expected
    file.write_text("a new version keeps them")
    os.rename(file, folder / "moved")
    assert process().do(look, file=str(folder / "moved")) == expected


def test_large_extended_attributes_and_size_probing(folder: Path) -> None:
    file = folder / "file"
    file.write_text("x")
    largest = bytes(range(256)) * 256
    try:
        os.setxattr(file, "user.large", largest)
    except OSError as error:
        if error.errno != errno.ENOSPC or "irdmafs" in str(folder):
            raise
        pytest.skip("this filesystem takes no large attributes")
    assert os.getxattr(file, "user.large") == largest
    name = b"user.large"
    assert libc.getxattr(bytes(file), name, None, 0) == len(largest)
    small = ctypes.create_string_buffer(100)
    assert libc.getxattr(bytes(file), name, small, 100) == -1
    assert ctypes.get_errno() == errno.ERANGE
    assert libc.listxattr(bytes(file), None, 0) >= len(name) + 1
    assert libc.listxattr(bytes(file), small, 3) == -1
    assert ctypes.get_errno() == errno.ERANGE
    with raises(errno.E2BIG):
        os.setxattr(file, "user.larger", largest + b"x")


def test_directories_have_extended_attributes_and_links_refuse_users(folder: Path) -> None:
    os.setxattr(folder, "user.a", b"b")
    assert os.getxattr(folder, "user.a") == b"b"
    os.symlink("nowhere", folder / "link")
    with pytest.raises(OSError):
        os.setxattr(folder / "link", "user.a", b"b", follow_symlinks=False)


def test_unknown_attributes_of_ours_are_refused(folder: Path, mount: Mount) -> None:
    file = folder / "file"
    file.write_text("x")
    for path in (folder, file):
        with raises(errno.EINVAL):
            os.setxattr(path, "user.irdmafs.replica", b"3")  # it is "replicas"
        [line] = [line for line in mount.log_tail(5000).splitlines() if f"{path.name}: " in line]
        assert "'user.irdmafs.replica' is refused" in line
        assert all(f"user.irdmafs.{name}" in line for name in ("replicas", "shape", "discard"))
    assert os.listxattr(folder) == []
    os.setxattr(folder, "user.irdmafs.replicas", b"3")
    assert os.listxattr(folder) == ["user.irdmafs.replicas"]


def test_a_name_cannot_forge_lines_of_the_log(folder: Path, mount: Mount) -> None:
    forged = folder / "a\n2026-01-01 00:00:00,000 1 ERROR irdmafs.store: forged \x1b[2J"
    forged.write_text("x")
    with raises(errno.EINVAL):
        os.setxattr(forged, "user.irdmafs.replica", b"3")
    lines = mount.log_tail(5000).splitlines()
    assert not any(line.startswith("2026-01-01") for line in lines)
    assert any("a\\x0a2026-01-01" in line and "\\x1b[2J" in line for line in lines)


def test_unknown_namespaces_of_attributes_are_refused(folder: Path) -> None:
    with raises(errno.EOPNOTSUPP):
        os.setxattr(folder, "nonsense.a", b"b")


# -- the filesystem --------------------------------------------------------------------------


def test_statvfs_is_sane(folder: Path, process: TakeProcess) -> None:
    found = process().do("os.statvfs(folder)", folder=str(folder))
    assert found.f_bsize > 0
    assert found.f_frsize > 0
    assert found.f_blocks >= found.f_bfree >= found.f_bavail > 0
    assert found.f_namemax == 255
    used: list[int] = []
    while not used or used[-1] < 60 << 20:
        # Others may free as much of the machine's memory meanwhile, but not again and again.
        assert len(used) < 5, f"writing 64 MiB made {used} bytes less free"
        before = os.statvfs(folder)
        (folder / f"large{len(used)}").write_bytes(bytes(64 << 20))
        after = os.statvfs(folder)
        used.append((before.f_bfree - after.f_bfree) * before.f_frsize)
    assert os.stat(folder / "large0").st_blocks * 512 >= 64 << 20


def test_fsync_of_a_directory_works(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def test_access_answers_as_the_modes_say(folder: Path) -> None:
    file = folder / "file"
    file.write_text("x")
    os.chmod(file, 0o644)
    assert os.access(file, os.R_OK | os.W_OK)
    assert not os.access(file, os.X_OK)
    assert not os.access(folder / "missing", os.F_OK)
