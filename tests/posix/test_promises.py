"""The promises: a reader keeps its version, a writer publishes whole, the next open sees it."""

import os
import signal
from pathlib import Path

import pytest
from conftest import EVERYWHERE
from harness.cluster_mount import CLUSTER
from harness.patterns import pattern
from harness.processes import Process, TakeProcess
from harness.scenarios import AsOnTmpfs
from harness.scratch import mounted_on

SESSIONS = EVERYWHERE

SIZES = [64 << 10, 9 << 20]

REPUBLISH = {
    "truncate": "with open(file, 'wb') as f: f.write(pattern(version, size))",
    "rename": """
with open(file + '.new', 'wb') as f: f.write(pattern(version, size))
os.rename(file + '.new', file)
""",
    "unlink": """
os.unlink(file)
with open(file, 'wb') as f: f.write(pattern(version, size))
""",
}


def write(file: Path, version: int, size: int) -> None:
    file.write_bytes(pattern(version, size))


SIZE_OF = {"truncate": SIZES[1], "rename": SIZES[0], "unlink": SIZES[0]}


@pytest.mark.parametrize("how", REPUBLISH)
def test_reader_and_mapping_keep_their_version_when_file_is_republished(
    file: Path, reader: Process, writer: Process, how: str
) -> None:
    size = SIZE_OF[how]
    write(file, 1, size)
    reader.do("f = open(file, 'rb'); begin = f.read(5000)", file=str(file))
    reader.do("m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)")
    writer.do(REPUBLISH[how], file=str(file), version=2, size=20)
    assert reader.do("version_of(begin + f.read())") == 1
    assert reader.do("f.seek(0); version_of(f.read())") == 1
    assert reader.do(
        "f.seek(size // 2); f.read(10) == pattern(1, size)[size // 2:][:10]", size=size
    )
    assert reader.do("os.fstat(f.fileno()).st_size, f.seek(0, os.SEEK_END)") == (size, size)
    assert reader.do("open(file, 'rb').read() == pattern(2, 20)", file=str(file))
    assert reader.do("os.stat(file).st_size") == 20
    # The descriptor is not needed for the mapping.
    reader.do("f.close()")
    for version in (3, 4):
        writer.do(REPUBLISH[how], file=str(file), version=version, size=size)
        assert reader.do("version_of(m[:])") == 1
    assert reader.do("version_of(open(file, 'rb').read())", file=str(file)) == 4


def test_mapping_survives_an_open_for_reading_that_truncates_the_file(
    file: Path, process: TakeProcess, reader: Process, session: str
) -> None:
    write(file, 1, 1 << 20)
    reader.do("f = open(file, 'rb'); m = mmap.mmap(f.fileno(), 0, prot=1)", file=str(file))
    if session == CLUSTER:  # elsewhere a map without a descriptor loses its pages, as POSIX says
        reader.do("f.close()")
    process().do("os.close(os.open(file, os.O_RDONLY | os.O_TRUNC))", file=str(file))
    assert reader.do("version_of(m[:])") == 1
    assert file.read_bytes() == b""


@pytest.mark.parametrize("size", SIZES)
def test_reader_sees_at_once_what_is_edited_in_place(
    file: Path, reader: Process, writer: Process, size: int
) -> None:
    write(file, 1, size)
    reader.do("f = open(file, 'rb', buffering=0)", file=str(file))
    reader.do("m = mmap.mmap(f.fileno(), 0, prot=1); m[:4]")
    writer.do("f = open(file, 'r+b', buffering=0); f.write(b'x' * 5000)", file=str(file))
    expected = b"x" * 5000 + pattern(1, size)[5000:6000]
    assert reader.do("os.pread(f.fileno(), 6000, 0)") == expected
    if "pyfuse3" not in os.environ.get("PYTEST_CURRENT_TEST", ""):
        assert reader.do("m[:6000]") == expected
    writer.do("f.truncate(6000)")
    assert reader.do("os.fstat(f.fileno()).st_size") == 6000
    assert reader.do("f.read()") == expected
    writer.do("f.close()")
    assert reader.do("open(file, 'rb').read()", file=str(file)) == expected


@pytest.mark.parametrize("size", SIZES)
def test_new_version_is_seen_after_close_and_the_old_one_until_then(
    file: Path, reader: Process, writer: Process, size: int
) -> None:
    write(file, 1, size)
    see = "version_of(open(file, 'rb').read())"
    writer.do("f = open(file, 'wb', buffering=0)", file=str(file))
    assert reader.do(see, file=str(file)) == 1
    writer.do("content = pattern(2, size); f.write(content[:size // 2])", size=size)
    assert reader.do(see, file=str(file)) == 1
    assert reader.do("os.stat(file).st_size", file=str(file)) == size
    writer.do("f.write(content[size // 2:])")
    assert reader.do(see, file=str(file)) == 1
    writer.do("f.close()")
    assert reader.do(see, file=str(file)) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_filesystem_on_a_directory_stays_when_a_file_with_two_names_is_published(
    folder: Path, process: TakeProcess
) -> None:
    below = folder / "below"
    below.mkdir()
    with mounted_on(below):
        (below / "inside").touch()
        write(folder / "file", 1, 64 * 1024)
        os.link(folder / "file", folder / "name")
        for version in (2, 3):
            process().do(REPUBLISH["truncate"], file=str(folder / "file"), version=version, size=9)
            assert os.stat(folder / "name").st_size == 9
            assert os.listdir(below) == ["inside"]


@pytest.mark.parametrize("size", SIZES)
def test_last_close_wins_and_is_whole_when_two_writers_overwrite(
    file: Path, process: TakeProcess, size: int
) -> None:
    write(file, 1, 1000)
    first, second, reader = process(), process(), process()
    for writer, version in ((first, 2), (second, 3)):
        writer.do("f = open(file, 'wb', buffering=0)", file=str(file))
        writer.do("content = pattern(version, size)", version=version, size=size)
    for part in ("[:size // 3]", "[size // 3:]"):
        first.do(f"f.write(content{part})")
        second.do(f"f.write(content{part})")
    see = "version_of(open(file, 'rb').read())"
    assert reader.do(see, file=str(file)) == 1
    second.do("f.close()")
    assert reader.do(see, file=str(file)) == 3
    first.do("f.close()")
    assert reader.do(see, file=str(file)) == 2


def test_writes_after_fsync_do_not_change_what_a_reader_then_has(
    file: Path, reader: Process, writer: Process
) -> None:
    file.write_bytes(b"before")
    writer.do("f = open(file, 'wb', buffering=0)", file=str(file))
    writer.do("f.write(pattern(1, 1 << 20)); os.fsync(f.fileno())")
    reader.do("f = open(file, 'rb'); m = mmap.mmap(f.fileno(), 0, prot=1)", file=str(file))
    writer.do("os.pwrite(f.fileno(), pattern(2, 1 << 20), 0)")
    assert reader.do("version_of(f.read())") == 1
    assert reader.do("version_of(m[:])") == 1
    writer.do("f.close()")
    assert reader.do("version_of(m[:])") == 1
    assert reader.do("version_of(open(file, 'rb').read())", file=str(file)) == 2


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_killed_writer_publishes_nothing(
    file: Path, reader: Process, number: int, mapped: bool
) -> None:
    write(file, 1, 3 << 20)
    with Process() as writer:
        writer.do("f = open(file, 'w+b', buffering=0)", file=str(file))
        writer.do("f.write(pattern(2, 3 << 20)[:1 << 20])")
        if mapped:
            writer.do("m = mmap.mmap(f.fileno(), 0); m[:4] = b'half'")
        writer.kill(number)
    assert reader.do("version_of(open(file, 'rb').read())", file=str(file)) == 1
    assert reader.do("os.stat(file).st_size", file=str(file)) == 3 << 20
    write(file, 3, 1 << 20)
    assert reader.do("version_of(open(file, 'rb').read())", file=str(file)) == 3


# Commands, each of which leaves a file `f`.
SHELL = (
    "echo x > f",
    "(echo a; echo b) > f",
    "echo a > f; echo b >> f; (echo c; echo d) >> f",
    "{ echo a; bash -c 'echo b'; echo c; } > f",
    "exec 3> f; echo a >&3; echo b >&3; exec 3>&-",
    "echo old > f; : > f",
    "echo old > f; cat < f > g; mv g f; cat f > /dev/null",
    "seq 1000 | tee f > /dev/null; sed -i s/^1000$/end/ f; tail -n 1 f > g; mv g f",
    "printf abc > f; exec 3<> f; printf X >&3; exec 3>&-",
    "echo a > f; cp f g; echo b > f; cat g f > h; mv h f",
)

# POSIX promises of open files, compared with a tmpfs.
SCENARIOS = {
    "truncation by name is seen at once": """
        a: write('file', pattern(1, 1 << 20), 'wb')
        reader: f = open('file', 'rb')
        a: os.truncate('file', 5000)
        reader: os.fstat(f.fileno()).st_size, told(f.read())
        a: os.truncate('file', 0)
        reader: os.fstat(f.fileno()).st_size, f.read()
        a: content('file')
    """,
    **{
        f"truncation by name is seen by who replaces the file with {access}": f"""
            a: write('file', 'content')
            writer: fd = open_fd('file', os.{access} | os.O_TRUNC); os.fstat(fd).st_size
            a: os.truncate('file', 100)
            writer: os.fstat(fd).st_size, os.lseek(fd, 0, os.SEEK_END)
            writer: os.close(fd)
            a: content('file')
        """
        for access in ("O_RDWR", "O_WRONLY")
    },
    **{
        f"a new file is seen as it grows, opened with {mode}": f"""
            writer: f = open('log', '{mode}', buffering=0)
            reader: early = open('log', 'rb', buffering=0)
            writer: f.write(b'half')
            reader: read('log'), early.read(), os.stat('log').st_size
            writer: f.write(b' and half')
            reader: early.read(), os.stat('log').st_size
            writer: f.close()
            reader: read('log')
        """
        for mode in ("wb", "ab", "w+b", "xb")
    },
    "size and content are right for others once close returned": """
        a: sizes = (0, 1, 4095, 4096, 4097, 1 << 20)
        a: put = lambda mark, length: [write(f'{n}', pattern(mark, length(n)), 'wb') for n in sizes]
        b: seen = lambda: [(os.stat(name).st_size, content(name)) for name in tree()]
        a: put(1, lambda size: size)
        b: seen()
        a: put(2, lambda size: size + 100)
        b: seen()
        a: put(3, lambda size: size // 2)
        b: seen()
    """,
    "every open sees the last close in a long chain of hand-overs": "a: write('token', '0')"
    + 30
    * """
        a: n = int(read('token')); write('token', str(n + 1)); n
        b: n = int(read('token')); write('token', str(n + 1)); n
    """.rstrip(),
    "a new file opened for reading and writing is shared": """
        a: fd = open_fd('database', os.O_RDWR | os.O_CREAT)
        b: fd = open_fd('database', os.O_RDWR | os.O_CREAT)
        a: os.pwrite(fd, b'first', 0)
        b: os.pread(fd, 10, 0)
        b: os.pwrite(fd, b'SECOND', 5)
        a: os.pread(fd, 20, 0), os.fstat(fd).st_size
    """,
    "stores through a mapping are seen by others": """
        a: write('file', pattern(1, 1 << 20), 'wb')
        a: f = open('file', 'r+b'); m = mmap.mmap(f.fileno(), 0); f.close()
        a: m[4096:4100] = b'here'; m.flush()
        reader: f = open('file', 'rb'); f.seek(4096); f.read(4)
        a: m[8192:8197] = b'again'; m.flush(); m.close()
        reader: f = open('file', 'rb'); f.seek(8192); f.read(5)
    """,
    "a writer that exits without closing publishes": """
        a: program = "import os; os.write(os.open('file', os.O_WRONLY | os.O_CREAT), b'whole'); os._exit(0)"
        a: subprocess.run([sys.executable, '-c', program], check=True).returncode
        b: read('file')
    """,
    **{
        f"the shell leaves what it always leaves: {command}": f"""
            a: subprocess.run(['bash', '-ec', {command!r}], check=True, timeout=30).returncode
            b: read('f')
        """
        for command in SHELL
    },
    "forked children may write what their parent opened": """
        a: fd = open_fd('file', os.O_WRONLY | os.O_CREAT)
        a: child = os.fork() or os.write(fd, b'one ') and os._exit(0); os.waitpid(child, 0)[1]
        a: child = os.fork() or os.write(fd, b'two ') and os._exit(0); os.waitpid(child, 0)[1]
        a: os.write(fd, b'three'); os.close(fd)
        b: read('file')
    """,
    # The kernel closes it in the middle of execve(2), when hardly anything can be asked of the process.
    **{
        f"running another program closes a file of {size} bytes that it does not get": f"""
            a: write('file', pattern(2, 5000), 'wb')
            a: put = lambda: os.write(open_fd('file', os.O_WRONLY | os.O_TRUNC), pattern(1, {size}))
            a: run = lambda: (put(), os.execv('/bin/true', ['true']))
            a: child = os.fork() or run(); os.waitpid(child, 0)[1]
            b: content('file')
        """
        for size in (0, 10_000)
    },
    # It is closed under the first number, while it is empty and the process has it under the second.
    "a program is run with a file under another number": """
        a: give = lambda: os.dup2(open_fd('file', os.O_WRONLY | os.O_CREAT), 1)
        a: run = lambda: (give(), os.execv('/bin/echo', ['echo', 'done']))
        a: child = os.fork() or run(); os.waitpid(child, 0)[1]
        b: read('file')
    """,
    "what a program wrote as its output is there when it has ended": """
        a: fd = open_fd('output', os.O_WRONLY | os.O_CREAT)
        a: subprocess.run(['echo', 'done'], stdout=fd, check=True).returncode
        b: read('output')
        a: subprocess.run(['echo', 'done'], stdout=fd, check=True).returncode; os.close(fd)
        b: read('output')
    """,
    "what a program wrote to a descriptor that it got is there when it has ended": """
        a: fd = open_fd('output', os.O_WRONLY | os.O_CREAT); command = ['bash', '-c', f'echo done >&{fd}']
        a: subprocess.run(command, pass_fds=[fd], check=True).returncode
        b: read('output')
        a: subprocess.run(command, pass_fds=[fd], check=True).returncode; os.close(fd)
        b: read('output')
    """,
    "a duplicated descriptor goes on writing after the first is closed": """
        a: fd = open_fd('file', os.O_WRONLY | os.O_CREAT); other = os.dup(fd); os.write(fd, b'one')
        a: os.close(fd); os.write(other, b' two'); os.close(other)
        b: read('file')
    """,
    "an empty write publishes an empty file": """
        a: write('file', pattern(1, 5000), 'wb'); os.close(open_fd('file', os.O_WRONLY | os.O_TRUNC))
        b: read('file'), os.stat('file').st_size
    """,
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_open_files_do_as_on_a_tmpfs(as_on_tmpfs: AsOnTmpfs, scenario: str) -> None:
    as_on_tmpfs(SCENARIOS[scenario])


# What happens in a program, often in another thread, while it writes a file.
BYSTANDERS = {
    "subprocess": "subprocess.run(['true'], check=True)",
    "subprocess that keeps descriptors": "subprocess.run(['true'], check=True, close_fds=False)",
    "system": "assert os.system('true') == 0",
    "fork": "child = os.fork()\nif not child: os._exit(0)\nos.waitpid(child, 0)",
    "fork that is killed": """
child = os.fork()
if not child:
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(child, 0)
""",
    "fork of a thread": """
thread = threading.Thread(target=subprocess.run, args=[['true']])
thread.start()
thread.join()
""",
    "grandchild": "subprocess.run([sys.executable, '-c', 'import os; os.system(\"true\")'], check=True)",
}


@pytest.mark.kernel_session("pyfuse3 does not tell who closes a file")
@pytest.mark.parametrize("opened", ["here", "in a thread that ended"])
@pytest.mark.parametrize("bystander", BYSTANDERS)
def test_processes_that_are_started_meanwhile_publish_nothing_half_written(
    file: Path, writer: Process, reader: Process, bystander: str, opened: str
) -> None:
    write(file, 1, 10_000)
    writer.do("import signal, subprocess, sys, threading")
    source = "fds = []\ntake = lambda: fds.append(os.open(file, os.O_WRONLY | os.O_TRUNC))\n"
    if opened == "here":
        source += "take()"
    else:
        source += "thread = threading.Thread(target=take); thread.start(); thread.join()"
    writer.do(source, file=str(file))
    writer.do("fd = fds.pop(); content = pattern(2, 100_000); os.write(fd, content[:50_000])")
    writer.do(BYSTANDERS[bystander])
    assert reader.do("version_of(open(file, 'rb').read())", file=str(file)) == 1
    writer.do("os.write(fd, content[50_000:]); os.close(fd)")
    assert reader.do("version_of(open(file, 'rb').read())") == 2
    assert os.getxattr(file, "user.irdmafs.version") == b"2"


def test_forked_child_closes_hundreds_of_files_that_its_parent_goes_on_writing(
    folder: Path, process: TakeProcess, session: str
) -> None:
    if session != "kernel":
        pytest.skip("found out by the same code in a cluster, and not at all with pyfuse3")
    process().do(
        """
fds = [os.open(f'{d}/{number}', os.O_WRONLY | os.O_CREAT) for number in range(800)]
for fd in fds: os.write(fd, b'a')
pid = os.fork()
if pid == 0:
    for fd in fds: os.close(fd)
    os._exit(0)
os.waitpid(pid, 0)
for fd in fds:
    os.write(fd, b'b')
    os.close(fd)
""",
        d=str(folder),
    )
    assert {file.read_bytes() for file in folder.iterdir()} == {b"ab"}
