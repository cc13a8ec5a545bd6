"""The daemon is killed in the middle of a storm of changes; mounting again must show what was acknowledged.

A child process makes random changes, says before and after each one what it is, and carries out what was
acknowledged on a tmpfs as well. After the crash the mount must equal the tmpfs, as it is or with the one
change that was in flight. IRDMAFS_CRASH_ROUNDS says how often the daemon is killed.
"""

import os
import random
import time
from pathlib import Path

import pytest
from harness.changed_tree import Change, carry_out
from harness.mountpoint import Mount, eventually
from harness.network import run as run_checked
from harness.patterns import pattern, version_of
from harness.processes import Process
from harness.seeds import chosen_seed

ROUNDS = int(os.environ.get("IRDMAFS_CRASH_ROUNDS", "6"))


def look(top: Path) -> dict[str, object]:
    """Walk a tree: of a file the version, the size, the mode, the label, and the names that share it."""
    found: dict[str, object] = {}
    inodes: dict[int, list[str]] = {}
    for path in sorted(top.rglob("*")):
        key = str(path.relative_to(top))
        if path.is_symlink():
            found[key] = os.readlink(path)
        elif path.is_dir():
            found[key] = None
        else:
            status = path.stat()
            data = path.read_bytes()
            assert len(data) == status.st_size, f"{key}: stat says {status.st_size}"
            label = os.getxattr(path, "user.label") if "user.label" in os.listxattr(path) else None
            same = inodes.setdefault(status.st_ino, [])
            same.append(key)
            found[key] = (version_in(key, data), len(data), status.st_mode & 0o777, label, same)
    return found


def version_in(key: str, data: bytes) -> int:
    try:
        return version_of(data) if data else 0
    except AssertionError as error:
        raise AssertionError(f"{key}: {error}") from None


STORM = """
import random
from harness.changed_tree import carry_out, propose
rng = random.Random(seed)
while True:
    version += 1
    change = propose(model, rng, version)
    os.write(told, repr(change).encode() + b'\\n')
    try:
        carry_out(change, top, rng)
    except OSError:
        break
    carry_out(change, model, rng)
    os.write(told, b'\\n')
os.close(told)
"""


def storm(mount: Mount, model: Path, version: int, rng: random.Random) -> tuple[int, Change | None]:
    """Let a process change the tree until the daemon is killed, at a random moment.

    Returns the last version and the change in flight."""
    reader, writer = os.pipe()
    with Process(pass_fds=(writer,)) as child, os.fdopen(reader) as told:
        os.close(writer)
        names = {"model": model, "top": mount.path, "version": version}
        child.start(STORM, seed=rng.random(), told=writer, **names)
        acknowledged, wanted = 0, rng.randrange(1, 120)
        in_flight: Change | None = None
        killed = False
        for line in told:
            if line != "\n":
                in_flight = eval(line)
                version += 1
            else:
                in_flight = None
                acknowledged += 1
            if not killed and acknowledged >= wanted:
                time.sleep(rng.choice([0, 0, 0.0002, 0.001, 0.003]))
                mount.kill9()
                killed = True
        assert killed, f"the storm ended by itself, in flight: {in_flight}"
    return version, in_flight


@pytest.mark.timeout(max(120, ROUNDS * 5))
@pytest.mark.kernel_session("what survives is decided below the sessions")
def test_acknowledged_changes_survive_the_daemons_death(own_mount: Mount, memory: Path) -> None:
    rng = random.Random(chosen_seed())
    version = 0
    for number in range(ROUNDS):
        version, in_flight = storm(own_mount, memory, version, rng)
        own_mount.remount()
        found = look(own_mount.path)
        if in_flight and found != look(memory):
            carry_out(in_flight, memory, rng)
        where = f"round {number}, {in_flight} was in flight"
        assert found == look(memory), where
        files = (there for there in found.values() if isinstance(there, tuple))
        live = {tuple(names) for _, size, *_, names in files if size}
        assert len(own_mount.extents()) == len(live), where
    run_checked("find", own_mount.path, "-mindepth", "1", "-delete")
    eventually(lambda: not own_mount.extents(), "extents of removed files are removed")
    status = own_mount.status()
    assert (status["bytes_published"], status["files"]) == (0, 0)


def test_open_unpublished_and_unlinked_files_leave_nothing_after_a_crash(own_mount: Mount) -> None:
    old = own_mount.path / "old"
    old.write_bytes(pattern(1, 100_000))
    with Process() as writer:
        writer.do("f = open(file, 'wb', buffering=0); f.write(b'half')", file=str(old))
        writer.do(
            "g = open(file, 'wb', buffering=0); g.write(b'half')", file=str(own_mount.path / "new")
        )
        writer.do(
            "h = open(file, 'w+b'); h.write(b'x' * 99_999); h.flush(); os.unlink(file)",
            file=str(own_mount.path / "gone"),
        )
        writer.do("i = open(file, 'r+b', buffering=0); i.write(b'in place')", file=str(old))
        own_mount.kill9()
    own_mount.remount()
    assert version_of(old.read_bytes()) == 1
    assert os.listdir(own_mount.path) == ["old"]
    assert len(own_mount.extents()) == 1
