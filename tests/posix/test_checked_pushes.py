"""A file that is written where user.irdmafs.train=push says so is checked before it is published."""

import errno
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster_mount import CLUSTER
from conftest import SESSIONS as _SESSIONS
from conftest import make_mount
from harness.pushes import COMMAND
from mountpoint import Mount, eventually
from processes import Process

SESSIONS = (*_SESSIONS, CLUSTER)
pytestmark = pytest.mark.beyond_posix

TakeProcess = Callable[[], Process]
ATTRIBUTE = "user.irdmafs.train"


@pytest.fixture(scope="module")
def module_mount(session: str) -> Iterator[Mount]:
    with make_mount(session, command=COMMAND) as mount:
        yield mount


@pytest.fixture
def pushes(folder: Path) -> Path:
    """A directory for pushes."""
    directory = folder / ".train" / "push"
    directory.mkdir(parents=True)
    os.setxattr(directory, ATTRIBUTE, b"push")
    return directory


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def refused(file: Path, content: bytes) -> int | None:
    """Write a file, and return the error code of its close."""
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(fd, content)
    try:
        os.close(fd)
    except OSError as error:
        return error.errno
    return None


def said_of(mount: Mount, file: Path) -> list[str]:
    name = str(file.relative_to(mount.path))
    return [line for line in mount.log.read_text().splitlines() if name in line]


def kill_checker(mount: Mount, fifo: Path) -> int:
    """Kill the process that asks for a verdict, and return its number when it is dead."""
    with open(fifo, "w"):
        pid = int(re.findall(r"process (\d+) checks pushes", mount.log.read_text())[-1])
        process = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        select.select([process], [], [])
        os.close(process)
    return pid


def test_push_that_is_in_order_is_published(pushes: Path, process: TakeProcess) -> None:
    assert refused(pushes / "w@1", b"fine") is None
    assert process().do("open(file, 'rb').read()", file=str(pushes / "w@1")) == b"fine"
    assert os.getxattr(pushes / "w@1", "user.irdmafs.version") == b"1"


@pytest.mark.parametrize("name", ["w@1", "w@1.tmp/3"])
def test_refused_push_fails_its_close_and_leaves_no_name(
    mount: Mount, pushes: Path, process: TakeProcess, name: str
) -> None:
    file = pushes / name
    file.parent.mkdir(exist_ok=True)
    assert refused(file, b"bad shape of layer0") == errno.EINVAL
    assert not file.exists()
    assert os.listdir(file.parent) == []
    assert process().do("os.listdir(path)", path=str(file.parent)) == []
    (line,) = said_of(mount, file)
    assert line.endswith("the push is refused: shape of layer0")
    assert refused(file, b"fine") is None
    assert file.read_bytes() == b"fine"


def test_what_is_not_a_push_is_not_checked(folder: Path, pushes: Path) -> None:
    deep = pushes / "a" / "b" / "c"
    deep.mkdir(parents=True)
    for file in (folder / "file", deep / "file"):
        assert refused(file, b"bad") is None
        assert file.read_bytes() == b"bad"


def test_published_version_stays_when_its_replacement_is_refused(pushes: Path) -> None:
    file = pushes / "w@1"
    assert refused(file, b"fine") is None
    assert refused(file, b"bad one") == errno.EINVAL
    assert file.read_bytes() == b"fine"
    assert refused(file, b"fine again") is None
    assert file.read_bytes() == b"fine again"


def test_refused_push_fails_fsync_and_the_close_after_it(pushes: Path) -> None:
    fd = os.open(pushes / "w@1", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"bad one")
    for call in (os.fsync, os.close):
        with pytest.raises(OSError) as caught:
            call(fd)
        assert caught.value.errno == errno.EINVAL
    assert os.listdir(pushes) == []


@pytest.mark.parametrize("change", [os.rename, os.link])
@pytest.mark.parametrize("good", [True, False])
def test_push_that_gets_another_name_is_checked_when_it_is_closed(
    pushes: Path, change: Callable[[Path, Path], None], good: bool
) -> None:
    """safetensors writes a file under another name, renames it, and closes it then."""
    before, after = pushes / ".w@1", pushes / "w@1"
    fd = os.open(before, os.O_RDWR | os.O_CREAT)
    os.write(fd, b"fine" if good else b"bad one")
    change(before, after)
    assert os.getxattr(after, "user.irdmafs.version") == b"0"
    if good:
        os.close(fd)
        assert after.read_bytes() == b"fine"
        assert os.getxattr(after, "user.irdmafs.version") == b"1"
    else:
        with pytest.raises(OSError) as caught:
            os.close(fd)
        assert caught.value.errno == errno.EINVAL
        assert os.listdir(pushes) == []


def test_push_written_by_two_is_refused_to_both(pushes: Path, process: TakeProcess) -> None:
    file = str(pushes / "w@1")
    writers = [process(), process()]
    for writer in writers:
        writer.do("fd = os.open(file, os.O_WRONLY | os.O_CREAT)", file=file)
    writers[0].do("os.write(fd, b'bad one')")
    for writer in writers:
        with pytest.raises(OSError) as caught:
            writer.do("os.close(fd)")
        assert caught.value.errno == errno.EINVAL
    assert os.listdir(pushes) == []


def test_push_written_by_two_is_published(pushes: Path, process: TakeProcess) -> None:
    file = str(pushes / "w@1")
    writers = [process(), process()]
    for n, writer in enumerate(writers):
        writer.do("fd = os.open(file, os.O_WRONLY | os.O_CREAT)", file=file)
        writer.do("os.pwrite(fd, b'fine', 4 * n)", n=n)
    for writer in writers:
        writer.do("os.close(fd)")
    assert Path(file).read_bytes() == b"finefine"


@pytest.mark.kernel_session("pyfuse3 does not tell who closes")
def test_push_is_checked_when_who_opened_it_closes_it_not_a_forked_child(
    pushes: Path, process: TakeProcess
) -> None:
    fork = """
f = open(file, 'wb', buffering=0)
f.write(b'bad')
child = os.fork()
if not child:
    os._exit(0)
os.waitpid(child, 0)
f.seek(0)
f.write(b'fine')
f.close()
"""
    process().do(fork, file=str(pushes / "w@1"))
    assert (pushes / "w@1").read_bytes() == b"fine"


def test_killed_checker_is_started_again(
    mount: Mount, pushes: Path, fifo: Path, process: TakeProcess
) -> None:
    writer, file = process(), pushes / "w@1"
    writer.start("open(file, 'wb').write(content)", file=str(file), content=b"ask %b" % bytes(fifo))
    kill_checker(mount, fifo)
    fifo.write_text("fine")
    writer.result()
    assert file.exists()


def test_push_is_refused_when_its_check_kills_the_checker_twice(
    mount: Mount, pushes: Path, fifo: Path, process: TakeProcess
) -> None:
    writer, file = process(), pushes / "w@1"
    write = "fd = os.open(file, os.O_WRONLY | os.O_CREAT); os.write(fd, content); os.close(fd)"
    writer.start(write, file=str(file), content=b"ask %b" % bytes(fifo))
    assert kill_checker(mount, fifo) != kill_checker(mount, fifo)
    with pytest.raises(OSError) as caught:
        writer.result()
    assert caught.value.errno == errno.EIO
    (line,) = said_of(mount, file)
    assert "the checker of pushes ended: killed by SIGKILL" in line
    assert os.listdir(pushes) == []


def test_others_are_served_during_a_slow_check(
    folder: Path, pushes: Path, fifo: Path, process: TakeProcess
) -> None:
    writer, file = process(), pushes / "w@1"
    writer.start("open(file, 'wb').write(content)", file=str(file), content=b"ask %b" % bytes(fifo))
    with open(fifo, "w") as verdict:
        (folder / "other").write_bytes(b"other")
        assert (folder / "other").read_bytes() == b"other"
        assert os.listdir(pushes) == ["w@1"]
        assert not writer.finished()
        verdict.write("fine")
    writer.result()
    assert file.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another user")
def test_slow_check_holds_up_no_push_of_another_user(
    folder: Path, pushes: Path, fifo: Path, process: TakeProcess
) -> None:
    other = folder / "other" / ".train" / "push"
    other.mkdir(parents=True)
    os.setxattr(other, ATTRIBUTE, b"push")
    os.chown(other, 65534, 65534)
    writer, file = process(), pushes / "w@1"
    writer.start("open(file, 'wb').write(content)", file=str(file), content=b"ask %b" % bytes(fifo))
    with open(fifo, "w") as verdict:
        assert refused(other / "w@1", b"fine") is None
        assert refused(other / "w@2", b"bad one") == errno.EINVAL
        assert not writer.finished()
        verdict.write("fine")
    writer.result()


def test_checker_ends_with_its_daemon_in_the_middle_of_a_check(
    session: str, fifo: Path, process: TakeProcess
) -> None:
    with make_mount(session, command=COMMAND) as mount:
        pushes = mount.path / ".train" / "push"
        pushes.mkdir(parents=True)
        os.setxattr(pushes, ATTRIBUTE, b"push")
        writer, file = process(), pushes / "w@1"
        content = b"ask %b" % bytes(fifo)
        writer.start("open(file, 'wb').write(content)", file=str(file), content=content)
        with open(fifo, "w"):
            pid = int(re.findall(r"process (\d+) checks pushes", mount.log.read_text())[-1])
            checker = os.pidfd_open(pid)
            mount.kill9()
            assert select.select([checker], [], [], 60)[0]
            os.close(checker)
        writer.result()


def test_push_removed_while_it_is_checked_stays_removed(
    pushes: Path, fifo: Path, process: TakeProcess
) -> None:
    writer, file = process(), pushes / "w@1"
    writer.start("open(file, 'wb').write(content)", file=str(file), content=b"ask %b" % bytes(fifo))
    with open(fifo, "w") as verdict:
        file.unlink()
        verdict.write("fine")
    writer.result()
    assert os.listdir(pushes) == []


@pytest.mark.kernel_session("pyfuse3 does not carry interrupts")
def test_interrupt_ends_a_check_and_the_next_push_is_checked(
    pushes: Path, fifo: Path, process: TakeProcess
) -> None:
    write = "import os, sys; fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT);"
    write += "os.write(fd, b'ask ' + os.fsencode(sys.argv[2])); os.close(fd)"
    interruptible = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL);"
    file = pushes / "w@1"
    writer = subprocess.Popen([sys.executable, "-c", interruptible + write, file, fifo])
    with open(fifo, "w"):
        writer.send_signal(signal.SIGINT)
        assert writer.wait(60) == -signal.SIGINT
    eventually(lambda: os.listdir(pushes) == [], "the name is gone")
    assert refused(file, b"fine") is None


def test_only_directories_have_the_attribute_and_it_has_one_value(folder: Path) -> None:
    (folder / "file").write_bytes(b"")
    for path, value in ((folder / "file", b"push"), (folder, b"pull")):
        with pytest.raises(OSError) as caught:
            os.setxattr(path, ATTRIBUTE, value)
        assert caught.value.errno == errno.EINVAL


def test_daemon_does_not_load_numpy(session: str) -> None:
    source = "import sys, irdmafs.mount.daemon; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", source], check=True, timeout=60)


def test_a_name_cannot_forge_lines_of_the_log(mount: Mount, pushes: Path) -> None:
    forged = "a\n2026-01-01 00:00:00,000 1 ERROR irdmafs.store: forged \x1b[2J"
    assert refused(pushes / forged, b"bad") == errno.EINVAL
    lines = mount.log_tail().splitlines()
    assert not any(line.startswith("2026-01-01") for line in lines)
    assert any("a\\x0a2026-01-01" in line and "\\x1b[2J" in line for line in lines)
