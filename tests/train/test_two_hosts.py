"""A worker on one host and a reducer on another; the worker is a shell, or any program that opens files."""

import errno
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
from harness.mountpoint import eventually
from harness.processes import is_waiting
from harness.training_runs import ones, reducing, start
from safetensors.numpy import load_file, save_file

from irdmafs.client import Store
from irdmafs.train import TrainConfig, TrainError, Worker, begin
from irdmafs.train.directory import TrainDirectory, read_small
from irdmafs.train.liveness import is_locked
from irdmafs.train.status import report

PATIENCE_S = 60

pytestmark = pytest.mark.usefixtures("looks_often")


class Hosts(NamedTuple):
    """A run, as the host of the worker and that of the reducer see it, and a directory of neither."""

    here: Path
    there: Path
    local: Path


@pytest.fixture
def hosts_of_run(
    pair: list[Path], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Hosts]:
    here, there = (path / "run" for path in pair)
    start(there, **getattr(request, "param", {}))
    with reducing(there):
        yield Hosts(here, there, tmp_path)


def shell(command: str, run: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in .train of a run."""
    return subprocess.run(
        ["bash", "-c", command], cwd=run / ".train", capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip


def push_with(hosts: Hosts, value: float = 1.0, metadata: dict[str, str] | None = None) -> bytes:
    save_file(ones(value), hosts.local / "push.safetensors", metadata)
    return (hosts.local / "push.safetensors").read_bytes()


def test_shell_pushes_by_copying_and_pulls_by_reading(hosts_of_run: Hosts) -> None:
    run, grads = hosts_of_run.here, shlex.quote(str(hosts_of_run.local / "push.safetensors"))
    for step in (1, 2):
        push_with(hosts_of_run)
        done = shell(
            f"cp {grads} push/w0.safetensors && timeout {PATIENCE_S / 2} "
            f"cat since/{step}/model.safetensors > {grads}.pulled",
            run,
        )
        assert done.returncode == 0, done
        assert load_file(f"{grads}.pulled")["norm"].tolist() == [step] * 3
    assert load_file(run / "model.safetensors")["norm"].tolist() == [2] * 3


def test_shell_learns_from_a_file_that_a_push_is_refused(hosts_of_run: Hosts) -> None:
    run = hosts_of_run.here
    push_with(hosts_of_run, np.nan)
    done = shell(f"cp {hosts_of_run.local / 'push.safetensors'} push/w0.safetensors", run)
    assert done.returncode == 0, done
    eventually(lambda: "NaN" in shell("cat refused/*", run).stdout, "the reason", 30)
    assert shell("ls push", run).stdout == "w0.safetensors\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_program_that_waits_for_a_version_ends_at_a_signal(
    hosts_of_run: Hosts, number: signal.Signals
) -> None:
    path = hosts_of_run.here / ".train" / "since" / "99" / "model.safetensors"
    with subprocess.Popen(["cat", path]) as waiting:
        try:
            eventually(lambda: is_waiting(waiting.pid), "it waits", 30)
            waiting.send_signal(number)
            assert waiting.wait(PATIENCE_S) == -number
        finally:
            waiting.kill()


def test_what_another_host_has_just_replaced_is_looked_up_again(
    hosts_of_run: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel looks a name up twice and says ESTALE, as here every other time that a path is opened."""
    stale: set[str] = set()
    open_really = os.open

    def opened(path: str, flags: int, *args: int, **more: int) -> int:
        if not flags & os.O_CREAT and str(path) not in stale:
            stale.add(str(path))
            raise OSError(errno.ESTALE, "Stale file handle", path)
        stale.discard(str(path))
        return open_really(path, flags, *args, **more)

    monkeypatch.setattr(os, "open", opened)
    with Worker(hosts_of_run.here, "w") as worker:
        for step in (1, 2):
            worker.push(ones())
            assert worker.pull(timeout_s=PATIENCE_S)["norm"].tolist() == [step] * 3
    assert Store(hosts_of_run.here)["model.safetensors/norm"].tolist() == [2] * 3


def test_what_is_gone_each_time_that_it_is_looked_up_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
    with pytest.raises(KeyError):
        Store(tmp_path)["array"]
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "file")
    assert not is_locked(tmp_path / "file")


@pytest.mark.parametrize("hosts_of_run", [{"workers": 2}], indirect=True)
def test_status_says_which_worker_or_step_cannot_count(hosts_of_run: Hosts) -> None:
    train = TrainDirectory(hosts_of_run.here)
    for name in ("a", "b"):
        (train.push / f"{name}.safetensors").write_bytes(push_with(hosts_of_run))
    (train.since / "1" / "model.safetensors").read_bytes()
    refusals: list[tuple[str, dict[str, str], str]] = [
        ("c", {}, "too many"),
        ("a", {"step": "1000000000"}, "too far ahead"),
        ("a", {"step": "2", "base": "7"}, "no version 7"),
    ]
    for name, metadata, reason in refusals:
        push = push_with(hosts_of_run, metadata=metadata)
        (train.push / f"{name}.safetensors").write_bytes(push)
        eventually(lambda reason=reason: reason in report(train), reason, 30)  # type: ignore[misc]
    past = train.push / "a.safetensors"
    past.write_bytes(push_with(hosts_of_run, metadata={"step": "1"}))
    eventually(lambda: not past.exists(), "one that has counted is removed", 30)
    (train.push / "a@2.safetensors").write_bytes(push_with(hosts_of_run))


def test_directory_is_one_run_on_both_hosts(hosts_of_run: Hosts) -> None:
    for directory in (hosts_of_run.here, hosts_of_run.there):
        with pytest.raises(TrainError, match="trained in already"):
            begin(directory, TrainConfig())
    with Worker(hosts_of_run.here, "w"), pytest.raises(TrainError, match="taking part"):
        Worker(hosts_of_run.there, "w")
