"""Several users train in one directory: one owns it and reduces, others take part, and may do no more."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import make_mount
from harness.mountpoint import Mount, eventually
from harness.network import run as run_checked
from harness.processes import Process, as_user
from harness.training_runs import parameters

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")

OWNER, WORKER, STRANGER = 1000, 2000, 3000
TAKES_PART = """
from pathlib import Path
from harness.training_runs import *
from irdmafs.train.directory import TrainDirectory
run = Path(run)
train = TrainDirectory(run)
"""


@pytest.fixture(scope="module")
def shared_mount() -> Iterator[Mount]:
    with make_mount("kernel", "-o", "allow_other") as mount:
        mount.path.chmod(0o1777)
        yield mount


@pytest.fixture(scope="module")
def users(shared_mount: Mount) -> Iterator[dict[int, Process]]:
    """A process of each user."""
    with contextlib.ExitStack() as stack:
        yield {uid: stack.enter_context(Process(as_user(uid))) for uid in (OWNER, WORKER, STRANGER)}


@pytest.fixture(params=[1, 3])
def run(shared_mount: Mount, users: dict[int, Process], request: Any) -> Path:
    """A run of OWNER, in which the others may take part."""
    run = shared_mount.path / f"run{request.param}-{request.function.__name__}"
    for process in users.values():
        process.do(TAKES_PART, run=str(run))
    owner = users[OWNER]
    owner.do("start(run, shards=shards)", shards=request.param)
    for name in ("push", "staging", "workers"):
        owner.do("os.chmod(train.path / name, 0o1777)", name=name)
    # The owner can remove files of others there.
    places = [run / ".train" / name for name in ("push", "staging")]
    run_checked("setfacl", "-d", "-m", f"u:{OWNER}:rwx,g::rx,o::rx", *places)
    return run


def test_push_of_another_user_counts_and_is_removed(run: Path, users: dict[int, Process]) -> None:
    owner, worker = users[OWNER], users[WORKER]
    owner.do("reducer = Reducer(run, threads=1)")
    worker.do("worker = Worker(run, 'w')")
    for step in (1, 2):
        assert worker.do("worker.push(ones())") == step
        owner.do("reduce_until(reducer, lambda: newest(run) == step, 'it is made')", step=step)
        worker.do("worker.pull(timeout_s=30)")
    with pytest.raises(OSError, match="NaN"):
        worker.do("worker.push(ones(float('nan')))")
    worker.do("worker.close()")
    owner.do("reduce(reducer); reducer.close()")
    eventually(lambda: not os.listdir(run / ".train" / "push"), "pushes that counted are removed")
    assert parameters(run)["norm"].tolist() == [2] * 3


def test_member_can_change_nothing_but_its_own_pushes(run: Path, users: dict[int, Process]) -> None:
    worker, stranger = users[WORKER], users[STRANGER]
    worker.do("worker = Worker(run, 'w')")
    worker.do("worker.push(ones())")
    before = sorted(str(path) for path in (run / ".train").rglob("*"))
    (push,) = (run / ".train" / "push").glob("w@1*")
    file = next(path for path in (push, *push.glob("*")) if path.is_file())
    for attempt in (
        "os.rename(push, train.push / 'mine')",
        "(train.workers / 'w').unlink()",
        "(train.workers / 'w').write_bytes(b'')",
        "os.truncate(train.config_path, 0)",
        "os.rename(train.push, train.path / 'other')",
        "os.symlink('/etc', train.path / 'refused2')",
        "(train.refused / 'file').touch()",
        "(train.versions / '9').mkdir()",
        "(train.next / '1').mkdir()",
        "(train.reducers / 'coordinator').touch()",
        "os.setxattr(train.push, 'user.irdmafs.awaits', b'versions')",
        "os.truncate(file, 0)",
    ):
        with pytest.raises(PermissionError):
            stranger.do(attempt, push=str(push), file=str(file))
    assert sorted(str(path) for path in (run / ".train").rglob("*")) == before
    worker.do("worker.close()")
