"""Names: directories, links, renames, owners, modes, times, extended attributes, as POSIX and Linux say."""

import errno
import os
from pathlib import Path

import pytest
from conftest import EVERYWHERE
from harness.errors import fails_with
from harness.mountpoint import Mount
from harness.processes import Process, TakeProcess
from harness.scenarios import AsOnTmpfs

SESSIONS = EVERYWHERE


NOREPLACE, WHITEOUT = 1, 4

SCENARIOS = {
    "a file without a name lives on for those who have it open": """
        holder: fd = open_fd('scratch', os.O_RDWR | os.O_CREAT, 0o640); os.write(fd, b'a')
        a: os.unlink('scratch'); tree()
        holder: os.fstat(fd).st_nlink
        holder: os.pwrite(fd, b'bcd', 1); os.fsync(fd); os.pread(fd, 10, 0)
        holder: os.ftruncate(fd, 2); os.fchmod(fd, 0o600); os.fstat(fd).st_size, os.fstat(fd).st_mode
        a: write('scratch', 'another')
        holder: os.pread(fd, 10, 0)
        holder: os.close(fd)
        a: read('scratch')
    """,
    "a directory is removed while a process is in it": """
        a: os.mkdir('d')
        inside: os.chdir('d')
        a: os.rmdir('d')
        inside: os.listdir('.'), os.stat('.').st_nlink
        inside: open('file', 'w')
    """,
    "a directory stream that is rewound shows the present": """
        a: fd = open_fd('.', os.O_RDONLY); os.listdir(fd)
        a: write('a'); os.listdir(fd)
        a: os.unlink('a'); os.listdir(fd)
    """,
    "a listing says type and inode": """
        a: write('file'); os.mkdir('directory'); os.symlink('file', 'symlink'); os.mkfifo('fifo')
        b: found = {entry.name: entry for entry in os.scandir('.')}
        b: sorted((name, one.is_file(follow_symlinks=False)) for name, one in found.items())
        b: [name for name, one in found.items() if one.inode() != os.lstat(name).st_ino]
    """,
    "rename leaves a whiteout": f"""
        a: found = lambda path: (lambda s: (s.st_mode, s.st_rdev, s.st_nlink))(os.lstat(path))
        a: write('a', 'a'); write('b', 'b'); os.mkdir('d')
        a: renameat2('a', 'b', {WHITEOUT | NOREPLACE})
        a: renameat2('a', 'b', {WHITEOUT}); found('a'), read('b')
        a: renameat2('d', 'e', {WHITEOUT | NOREPLACE}); found('d'), os.listdir('e'), tree()
        a: os.rename('e', 'c'); renameat2('a', 'd', {WHITEOUT}); found('a'), found('d')
        a: os.unlink('d'); tree()
    """,
    "the parent follows a directory that was moved": """
        a: os.makedirs('a/b/deep'); os.mkdir('c')
        inside: top = os.getcwd(); os.chdir('a/b')
        a: os.rename('a/b', 'c/moved')
        inside: os.listdir('..'), os.listdir('.'), os.path.relpath(os.getcwd(), top)
        inside: os.stat('..').st_ino == os.stat(top + '/c').st_ino
        inside: write('file')
        a: tree()
    """,
    "symlinks of any length, and loops": """
        a: os.symlink('t' * 4095, 'longest')
        b: os.readlink('longest'), os.lstat('longest').st_size
        a: os.symlink('t' * 4096, 'too long')
        a: os.symlink('two', 'one'); os.symlink('one', 'two')
        b: os.stat('one')
        b: os.readlink('.')
    """,
    "hard links to symlinks": """
        a: os.symlink('target', 'a'); os.link('a', 'b', follow_symlinks=False)
        b: os.readlink('b'), os.lstat('a').st_nlink
    """,
    "sockets are bound": """
        a: import socket; s = socket.socket(socket.AF_UNIX); s.bind('s'); s.listen()
        a: c = socket.socket(socket.AF_UNIX); c.connect('s'); c.send(b'hello')
        a: s.accept()[0].recv(10), stat.S_ISSOCK(os.stat('s').st_mode)
    """,
    "device nodes keep their numbers": """
        root: os.mknod('char', stat.S_IFCHR | 0o600, os.makedev(250, 70_000))
        root: os.mknod('block', stat.S_IFBLK | 0o600, os.makedev(250, 70_000))
        root: [(os.stat(name).st_mode, os.stat(name).st_rdev) for name in ('char', 'block')]
    """,
    "umask and modes": """
        a: before = os.umask(0o027); os.close(open_fd('file', os.O_CREAT | os.O_WRONLY, 0o777))
        a: os.mkdir('dir'); os.mkfifo('fifo'); os.umask(before)
        b: modes = lambda: [os.stat(name).st_mode for name in ('file', 'dir', 'fifo')]
        b: modes()
        a: os.chmod('file', 0)
        b: modes()
        a: os.chmod('file', 0o7777)
        b: modes()
    """,
    "a file made without write permission is written by its maker": """
        a: fd = open_fd('file', os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o400)
        a: os.write(fd, b'read only'); os.close(fd); read('file')
    """,
    "owners and what they may": """
        root: os.chmod('.', 0o755); write('file'); os.chmod('file', 0o600)
        nobody: open('file')
        nobody: os.chmod('file', 0o777)
        nobody: open('file2', 'w')
        root: os.chown('file', 65534, 1234)
        nobody: read('file'), os.stat('file').st_uid, os.stat('file').st_gid
        nobody: os.chown('file', 0, -1)
    """,
    "new files belong to their maker and to the group of a set-group-id directory": """
        root: os.chmod('.', 0o777); os.mkdir('setgid')
        root: os.chown('setgid', 0, 1234); os.chmod('setgid', 0o2777)
        nobody: write('plain'); os.mkdir('setgid/below'); write('setgid/f')
        root: found = map(os.stat, ('plain', 'setgid/below', 'setgid/f'))
        root: [(one.st_uid, one.st_gid, one.st_mode) for one in found]
    """,
    "a sticky directory protects the files of others": """
        root: os.chmod('.', 0o1777); write('theirs')
        nobody: os.unlink('theirs')
        nobody: os.rename('theirs', 'mine')
        nobody: write('mine')
        nobody: os.rename('mine', 'theirs')
        nobody: os.rename('mine', 'still mine')
        nobody: os.unlink('still mine')
        root: tree()
    """,
    "a stranger's chown to nobody leaves the set-user-id bit": """
        root: os.chmod('.', 0o755); write('program'); os.chmod('program', 0o6755)
        nobody: os.chown('program', -1, -1)
        root: os.stat('program').st_mode
        root: os.chmod('program', 0o755)
        nobody: os.chown('program', -1, -1)
        root: os.chmod('program', 0o6755); os.chown('program', -1, -1); os.stat('program').st_mode
    """,
    "times are kept to the nanosecond": """
        a: write('file'); os.symlink('file', 'link')
        a: os.utime('file', ns=(1_234_567_890_123_456_789, 987_654_321_012_345_678))
        a: os.utime('.', ns=(5, 4_000_000_000_000_000_001))
        a: os.utime('link', ns=(1, 2), follow_symlinks=False)
        b: found = [os.lstat(path) for path in ('file', '.', 'link')]
        b: [(one.st_atime_ns, one.st_mtime_ns) for one in found]
        a: os.utime('file', ns=(-1_500_000_001, -1))
        b: now = os.stat('file'); now.st_atime_ns, now.st_mtime_ns
        a: os.utime('file')
        b: os.stat('file').st_mtime_ns > 10**18, os.stat('file').st_ctime_ns >= now.st_ctime_ns
    """,
    "a time of a directory is that which was set last, also while a file in it is written": """
        a: fd = open_fd('file', os.O_WRONLY | os.O_CREAT); os.utime('.', ns=(1, 2))
        b: os.stat('.').st_mtime_ns
        a: os.close(fd); os.utime('.', ns=(3, 4))
        b: os.stat('.').st_mtime_ns
    """,
    "changes move times": """
        a: write('file')
        a: moved('file', lambda: write('file', 'y'))
        a: moved('file', lambda: write('file', 'y', 'r+'))
        a: moved('file', lambda: read('file'))
        a: moved('file', lambda: os.chmod('file', 0o640))
        a: moved('file', lambda: os.link('file', 'link'))
        a: moved('file', lambda: os.unlink('link'))
        a: moved('file', lambda: os.mkdir('sub'))
        a: moved('file', lambda: os.truncate('file', 0))
    """,
    "a time that is set while nobody writes a new file stays for its next writer": """
        a: fd = open_fd('file', os.O_RDWR | os.O_CREAT)
        a: fd = reopened(fd, os.O_WRONLY | os.O_APPEND)
        a: fd = reopened(fd, os.O_RDONLY); os.utime(fd, ns=(1, 2))
        a: writer = open_fd(f'/proc/self/fd/{fd}', os.O_WRONLY); os.stat('file').st_mtime_ns
        a: os.close(writer); os.stat('file').st_mtime_ns
        a: os.truncate('file', 1); os.utime(fd, ns=(1, 2))
        a: writer = open_fd(f'/proc/self/fd/{fd}', os.O_WRONLY); os.stat('file').st_mtime_ns
        a: os.close(writer); os.stat('file').st_mtime_ns
    """,
    "extended attributes": """
        b: look = lambda path: {name: os.getxattr(path, name) for name in sorted(os.listxattr(path))}
        a: write('file'); os.setxattr('file', 'user.dtype', b'bfloat16')
        a: os.setxattr('file', 'user.empty', b'')
        b: look('file')
        a: os.setxattr('file', 'user.dtype', b'y', os.XATTR_CREATE)
        a: os.setxattr('file', 'user.missing', b'y', os.XATTR_REPLACE)
        a: os.setxattr('file', 'user.dtype', b'float32', os.XATTR_REPLACE)
        a: os.setxattr('file', 'user.new', b'1', os.XATTR_CREATE)
        a: os.removexattr('file', 'user.empty')
        a: os.removexattr('file', 'user.empty')
        a: os.getxattr('file', 'user.empty')
        a: write('file', 'a new version keeps them'); os.rename('file', 'moved')
        b: look('moved')
        a: os.setxattr('.', 'user.a', b'b')
        b: look('.')
        a: os.symlink('nowhere', 'link')
        a: os.setxattr('link', 'user.a', b'b', follow_symlinks=False)
        a: os.setxattr('.', 'nonsense.a', b'b')
    """,
    "large extended attributes, and probing for their size": """
        a: largest = bytes(range(256)) * 256; write('file'); os.setxattr('file', 'user.large', largest)
        b: os.getxattr('file', 'user.large') == bytes(range(256)) * 256
        b: small = ctypes.create_string_buffer(100); libc.getxattr(b'file', b'user.large', None, 0)
        b: checked(libc.getxattr(b'file', b'user.large', small, 100))
        b: checked(libc.listxattr(b'file', small, 3))
        b: checked(libc.listxattr(b'file', None, 0)) > len('user.large')
        a: os.setxattr('file', 'user.larger', largest + b'x')
    """,
    "trees deeper than a path that a call takes": """
        a: fd, name = open_fd('.', os.O_RDONLY), 'deeper-and-deeper' * 5
        a: for _ in range(60): os.mkdir(name, dir_fd=fd); fd = os.open(name, os.O_RDONLY, dir_fd=fd)
        a: open('bottom', 'w', opener=lambda name, flags: os.open(name, flags, dir_fd=fd)).write('x')
        a: os.listdir(fd)
    """,
    "a directory is synced": """
        a: os.fsync(open_fd('.', os.O_RDONLY))
    """,
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_names_and_attributes_do_as_on_a_tmpfs(as_on_tmpfs: AsOnTmpfs, scenario: str) -> None:
    as_on_tmpfs(SCENARIOS[scenario])


NAMES = (
    b"n" * 255,
    b"\xff\xfe not utf-8 \x80",
    "gr\u00fc\u00dfe \U0001f9ee".encode(),
    b"new\nline\t\\ '\"",
    b"-rf",
    b"...",
)


def test_any_name_that_linux_allows_works(as_on_tmpfs: AsOnTmpfs) -> None:
    lines = """
        a: write({0!r}); os.listdir(b'.')
        b: read({0!r})
        a: os.rename({0!r}, b'2'); os.symlink({0!r}, {0!r})
        b: os.readlink({0!r}), sorted(os.listdir(b'.'))
        a: os.unlink({0!r}); os.unlink(b'2')
        b: os.listdir(b'.')
    """
    as_on_tmpfs("\n".join(lines.format(name).strip() for name in NAMES))


def test_listing_has_the_inodes_of_files_that_are_being_replaced(
    folder: Path, file: Path, reader: Process, writer: Process
) -> None:
    file.write_bytes(b"before")
    ino = file.stat().st_ino
    reader.do("before = open(f, 'rb')", f=str(file))
    listed = []
    for step in ("w = open(f, 'wb'); w.write(b'after'); w.flush()", "w.close()"):
        writer.do(step, f=str(file))
        with os.scandir(folder) as entries:
            listed += [entry.inode() for entry in entries]
        listed.append(file.stat().st_ino)
    assert listed == [ino] * 4
    assert (reader.do("before.read()"), file.read_bytes()) == (b"before", b"after")


def test_names_that_stay_are_listed_once_among_others(folder: Path, process: TakeProcess) -> None:
    stay = {f"stay{n}" for n in range(200)}
    go = {f"go{n}" for n in range(200)}
    for pair in zip(sorted(stay), sorted(go), strict=True):
        for name in pair:
            os.mknod(folder / name)
    reader, changer = process(), process()
    reader.do("entries = os.scandir(folder); seen = [next(entries).name]", folder=str(folder))
    changer.do("for name in go: os.unlink(f'{folder}/{name}')", folder=str(folder), go=go)
    changer.do("for n in range(100): os.mknod(f'{folder}/new{n}')", folder=str(folder))
    seen = reader.do("seen += [entry.name for entry in entries]; seen")
    assert len(seen) == len(set(seen)), "a name was listed twice"
    assert stay <= set(seen)
    assert set(os.listdir(folder)) == stay | {f"new{n}" for n in range(100)}


def test_listing_goes_on_behind_many_names_just_removed(folder: Path, session: str) -> None:
    """Also while others begin to list the directory."""
    if session != "kernel":
        pytest.skip("listed by the same code in every session, and slow to fill")
    # In the order in which they are listed; who lists them first does so here.
    order = [f"name{number:04}" for number in range(5200)]
    for name in order:
        os.mknod(folder / name)
    os.listdir(folder)
    with os.scandir(folder) as listing:
        next(listing)
        for name in order[500:5100]:
            os.unlink(folder / name)
        assert os.listdir(folder) == order[:500] + order[5100:]
        seen = {entry.name for entry in listing}
    assert seen.issuperset(order[5100:])


def test_times_are_in_the_order_of_the_calls_that_made_them(folder: Path, file: Path) -> None:
    seen = []
    for number in range(25):
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


def test_a_name_cannot_forge_lines_of_the_log(folder: Path, mount: Mount) -> None:
    forged = folder / "a\n2026-01-01 00:00:00,000 1 ERROR irdmafs.store: forged \x1b[2J"
    forged.write_text("x")
    with fails_with(errno.EINVAL):
        os.setxattr(forged, "user.irdmafs.replica", b"3")
    lines = mount.log_tail(5000).splitlines()
    assert not any(line.startswith("2026-01-01") for line in lines)
    assert any("a\\x0a2026-01-01" in line and "\\x1b[2J" in line for line in lines)


def test_statvfs_is_sane(folder: Path, process: TakeProcess) -> None:
    found = process().do("os.statvfs(folder)", folder=str(folder))
    assert found.f_bsize > 0
    assert found.f_frsize > 0
    assert found.f_blocks >= found.f_bfree >= found.f_bavail > 0
    assert found.f_namemax == 255
    used: list[int] = []
    while not used or used[-1] < 15 << 20:
        # Others may free as much of the machine's memory meanwhile, but not again and again.
        assert len(used) < 5, f"writing 16 MiB made {used} bytes less free"
        before = os.statvfs(folder)
        (folder / f"large{len(used)}").write_bytes(bytes(16 << 20))
        after = os.statvfs(folder)
        used.append((before.f_bfree - after.f_bfree) * before.f_frsize)
    assert os.stat(folder / "large0").st_blocks * 512 >= 16 << 20
