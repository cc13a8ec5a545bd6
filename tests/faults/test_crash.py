"""The daemon is killed in the middle of a storm of changes; mounting again must show what was acknowledged.

A child process makes random changes and says before and after each one what it is. The oracle is a
model of the tree: after the crash the mount must equal the model with, or without, the one change
that was in flight. IRDMAFS_CRASH_ROUNDS says how often the daemon is killed.
"""

import os
import random
import time
from pathlib import Path

import pytest
from harness.changed_tree import Change, File, Tree
from harness.mountpoint import Mount, eventually
from harness.patterns import pattern, version_of
from harness.processes import Process
from harness.seeds import chosen_seed

ROUNDS = int(os.environ.get("IRDMAFS_CRASH_ROUNDS", "6"))


def look(top: Path) -> dict[str, object]:
    """Walk the mounted tree: everything that the model knows of each name."""
    found: dict[str, object] = {}
    inodes: dict[int, list[str]] = {}
    for parent, directories, files in os.walk(top):
        for name in directories + files:
            path = Path(parent, name)
            key = str(path.relative_to(top))
            if path.is_symlink():
                found[key] = os.readlink(path)
            elif path.is_dir():
                found[key] = None
            else:
                status = path.stat()
                data = path.read_bytes()
                assert len(data) == status.st_size, f"{key}: stat says {status.st_size}"
                label = (
                    os.getxattr(path, "user.label") if "user.label" in os.listxattr(path) else None
                )
                same = inodes.setdefault(status.st_ino, [])
                same.append(key)
                found[key] = (identify(key, data), status.st_mode & 0o777, label, same)
    for there in found.values():
        if isinstance(there, tuple):
            there[3].sort()
    return found


def identify(key: str, data: bytes) -> tuple[int, int]:
    try:
        return version_of(data) if data else 0, len(data)
    except AssertionError as error:
        raise AssertionError(f"{key}: {error}") from None


def comparable(found: dict[str, object]) -> dict[str, object]:
    """Empty files are of no version that could be told from their bytes."""
    return {
        name: ((0, 0), *there[1:]) if isinstance(there, tuple) and there[0][1] == 0 else there
        for name, there in found.items()
    }


STORM = """
import random
from harness.changed_tree import Tree, carry_out
rng = random.Random(seed)
error = None
while error is None:
    version += 1
    change = tree.propose(rng, version)
    os.write(told, repr(('begin', change)).encode() + b'\\n')
    try:
        carry_out(change, top, rng)
    except OSError as caught:
        error = caught.errno
    else:
        tree.apply(change)
        os.write(told, b"('done',)\\n")
os.close(told)
error
"""


def storm(
    mount: Mount, tree: Tree, version: int, rng: random.Random, seed: int
) -> tuple[int, Change | None]:
    """Let a process change the tree until the daemon is killed, at a random moment.

    Applies what was acknowledged to `tree`. Returns the last version and the change in flight.
    """
    reader, writer = os.pipe()
    with Process(pass_fds=(writer,)) as child, os.fdopen(reader, "rb") as told:
        os.close(writer)
        child.start(
            STORM, tree=tree, version=version, top=str(mount.path), seed=rng.random(), told=writer
        )
        acknowledged, wanted = 0, rng.randrange(1, 120)
        in_flight: Change | None = None
        killed = False
        for line in told:
            kind, *change = eval(line)
            if kind == "begin":
                in_flight = change[0]
                version += 1
            else:
                assert in_flight is not None
                tree.apply(in_flight)
                in_flight = None
                acknowledged += 1
            if not killed and acknowledged >= wanted:
                time.sleep(rng.choice([0, 0, 0.0002, 0.001, 0.003]))
                mount.kill9()
                killed = True
        assert killed, f"seed {seed}: the storm ended by itself, in flight: {in_flight}"
    return version, in_flight


def crash_rounds(mount: Mount, rounds: int) -> None:
    seed = chosen_seed()
    rng = random.Random(seed)
    tree, version = Tree(), 0
    for number in range(rounds):
        where = f"seed {seed}, round {number}"
        version, in_flight = storm(mount, tree, version, rng, seed)
        mount.remount()
        found = comparable(look(mount.path))
        allowed = [tree] + ([tree.after(in_flight)] if in_flight else [])
        matching = [one for one in allowed if comparable(one.look()) == found]
        if not matching:
            raise AssertionError(f"{where}, in flight: {in_flight}\n{difference(allowed, found)}")
        tree = matching[0]
        files = {id(there): there for there in tree.names.values() if isinstance(there, File)}
        live = sum(there.content[1] > 0 for there in files.values())
        kept = len(mount.extents())
        assert kept == live, f"{where}: {kept} extents for {live} files with content"
    empty(mount.path)
    eventually(lambda: not mount.extents(), "extents of removed files are removed")
    status = mount.status()
    assert (status["bytes_published"], status["files"]) == (0, 0), f"seed {seed}"


def difference(allowed: list[Tree], found: dict[str, object]) -> str:
    lines = []
    for title, tree in zip(("without it", "with it"), allowed, strict=False):
        wanted = comparable(tree.look())
        lines.append(f"{title}:")
        for name in sorted(wanted.keys() | found.keys()):
            before, now = wanted.get(name, "missing"), found.get(name, "missing")
            if before != now:
                lines.append(f"  {name}: expected {before}, found {now}")
    return "\n".join(lines)


def empty(top: Path) -> None:
    for parent, directories, files in os.walk(top, topdown=False):
        for name in files:
            os.unlink(Path(parent, name))
        for name in directories:
            path = Path(parent, name)
            (os.unlink if path.is_symlink() else os.rmdir)(path)


@pytest.mark.timeout(max(120, ROUNDS * 5))
@pytest.mark.kernel_session("what survives is decided below the sessions")
def test_acknowledged_changes_survive_the_death_of_the_daemon(own_mount: Mount) -> None:
    crash_rounds(own_mount, ROUNDS)


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
