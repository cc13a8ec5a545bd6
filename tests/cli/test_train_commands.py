"""`irdmafs train`: what it says to mistakes, and what a script learns from exit codes."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from conftest import make_mount
from harness.daemons import Daemon
from harness.forks import real_commands
from harness.mountpoint import IRDMAFS, eventually, irdmafs, one_line
from harness.network import Host
from harness.parts import irdmafs_command
from harness.processes import AS_NOBODY
from harness.training_runs import newest, ones
from safetensors.numpy import load_file, save_file

from irdmafs.train import TrainConfig, TrainError, Worker, begin, end
from irdmafs.train.directory import TrainDirectory
from irdmafs.train.liveness import is_locked


@pytest.fixture
def models(run: Path) -> Path:
    """A directory with a model that is not trained yet."""
    run.mkdir()
    save_file(ones(0), run / "model.safetensors")
    return run


def refused(*arguments: str | Path, code: int = 1, launcher: tuple[str, ...] = ()) -> str:
    """Return what a command says that fails: one line, except to wrong usage (code 2)."""
    done = irdmafs("train", *arguments, launcher=launcher)
    if code != 2:
        return one_line(done, code)
    assert (done.returncode, done.stdout) == (code, "")
    return done.stderr


@contextlib.contextmanager
def reducing(directory: Path) -> Iterator[Daemon]:
    command = irdmafs_command("train", "reduce", directory)
    log = directory.with_name("reducer.log")
    reducer = Daemon("reducer", Host("here", "127.0.0.1"), command, log)
    reducer.start()
    try:
        lock = TrainDirectory(directory).reducers / "coordinator"
        eventually(lambda: is_locked(lock), "a reducer is at work", 30)
        yield reducer
    finally:
        reducer.kill9()


# -- init ------------------------------------------------------------------------------------------


def test_of_two_inits_at_once_one_begins(models: Path) -> None:
    def init(rule: str) -> int:
        return irdmafs("train", "init", models, "--rule", rule).returncode

    with ThreadPoolExecutor(2) as pool:
        codes = list(pool.map(init, ["sum", "mean"]))
    assert sorted(codes) == [0, 1]
    assert TrainDirectory(models).config().rule == ["sum", "mean"][codes.index(0)]
    assert sorted(os.listdir(models)) == [".train", "model.safetensors"]
    with Worker(models, "w") as worker, reducing(models):
        worker.push(ones())
        worker.pull(timeout_s=60)


def test_init_without_models_is_refused(run: Path) -> None:
    assert "is not a directory" in refused("init", run)
    run.mkdir()
    assert "put the model there first" in refused("init", run)
    (run / "model.safetensors").write_bytes(b"garbage")
    assert "not a .safetensors file" in refused("init", run)
    save_file({"a": np.ones(3, np.int32)}, run / "model.safetensors")
    assert "cannot be trained" in refused("init", run)
    save_file({"a": np.ones((0, 3), np.float32)}, run / "model.safetensors")
    assert "no parameters" in refused("init", run)
    assert os.listdir(run) == ["model.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["--rule", "adagrad"], 1, "no rule 'adagrad'; there are sum, mean"),
        (["--sync", "bps"], 1, "sync is bsp, async"),
        (["--workers", "a,b/c"], 1, "workers is auto, a number"),
        (["--set", "momentum"], 1, "--set takes OPTION=NUMBER"),
        (["--keep", "1"], 1, "keep is a whole number that is at least 2"),
        (["--nonfinite", "drop"], 2, "'refuse', 'skip', 'count'"),
        (["--lr", "x"], 2, "not a valid float"),
    ],
    ids=lambda value: "=".join(value) if isinstance(value, list) else "",
)
def test_init_with_words_that_are_none_is_refused(
    models: Path, arguments: list[str], code: int, reason: str
) -> None:
    assert reason in refused("init", models, *arguments, code=code)
    assert os.listdir(models) == ["model.safetensors"]


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_init_without_the_permission_to_write_is_refused(models: Path) -> None:
    for path in (models, *models.parents):
        if path.stat().st_uid == 0 and not path.stat().st_mode & 0o1:
            path.chmod(0o755)
    assert "Permission denied" in refused("init", models, launcher=AS_NOBODY)
    assert os.listdir(models) == ["model.safetensors"]


def test_init_elsewhere_than_on_irdmafs_is_refused(tmp_path: Path) -> None:
    save_file(ones(), tmp_path / "model.safetensors")
    assert "is not on a mount of irdmafs" in refused("init", tmp_path)
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small tmpfs")
def test_init_on_a_full_filesystem_leaves_the_model_as_it_was() -> None:
    with make_mount("kernel", store_size="32m") as mount:
        save_file({"a": np.ones(3_000_000, np.float32)}, mount.path / "model.safetensors")
        assert "No space left" in refused("init", mount.path, "--rule", "adam")
        assert os.listdir(mount.path) == ["model.safetensors"]
        assert np.all(load_file(mount.path / "model.safetensors")["a"] == 1)


@pytest.mark.parametrize("step", ["assemble", "first_state", "os.rename", "os.replace"])
def test_interrupted_init_leaves_the_model_as_it_was(
    models: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    save_file({f"2{name}": array for name, array in ones(1).items()}, models / "other.safetensors")
    before = {name: load_file(models / name) for name in os.listdir(models)}

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(f"irdmafs.train.models.{step}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        begin(models, TrainConfig())
    left = [name for name in os.listdir(models) if not name.startswith(".")]
    assert sorted(left) == ["model.safetensors", "other.safetensors"]
    assert not TrainDirectory(models).path.exists()
    for name, arrays in before.items():
        assert not (models / name).is_symlink()
        found = load_file(models / name)
        assert all(np.array_equal(found[key], array) for key, array in arrays.items())
    begin(models, TrainConfig())


# -- reduce and status -----------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["reduce", "status", "end"])
def test_directory_that_is_no_run_says_how_to_begin(models: Path, command: str) -> None:
    assert f"irdmafs train init {models} begins" in refused(command, models)


def test_status_says_that_nobody_reduces_and_what_to_do(models: Path) -> None:
    begin(models, TrainConfig())
    done = irdmafs("train", "status", models)
    assert done.returncode == 1
    assert done.stdout.startswith("version   0\n")
    assert done.stderr == f"irdmafs: no reducer is at work: irdmafs train reduce {models}\n"
    with reducing(models) as reducer:
        done = irdmafs("train", "status", models)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"{os.uname().nodename} {reducer.pid}: coordinator" in done.stdout
    assert irdmafs("train", "status", models).returncode == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_reducer_that_is_told_to_end_does_so_in_order(models: Path, number: int) -> None:
    begin(models, TrainConfig())
    with real_commands(), reducing(models) as reducer:
        os.kill(reducer.pid, number)
        assert reducer.wait(60) == 0
        assert reducer.log_tail() == ""


def test_second_reducer_takes_over_from_one_that_is_killed(models: Path) -> None:
    begin(models, TrainConfig())
    with reducing(models) as first, reducing(models), Worker(models, "w") as worker:
        worker.push(ones())
        worker.pull(timeout_s=60)
        first.kill9()
        worker.push(ones())
        worker.pull(timeout_s=60)
        assert newest(models) == 2


def test_run_that_is_at_work_is_not_ended_and_its_reducer_ends_with_it(models: Path) -> None:
    begin(models, TrainConfig())
    with reducing(models) as reducer:
        assert "is still at work" in refused("end", models)
        with Worker(models, "w"):
            assert "is still at work" in refused("end", models)
        end(models)
        assert reducer.wait(60) == 1
        assert "is not trained in any more" in reducer.log_tail()
    assert os.listdir(models) == ["model.safetensors"]


@pytest.mark.parametrize("files", [3, 1000])
def test_what_a_reducer_adds_while_its_run_is_removed_goes_with_it_or_is_told(
    models: Path, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    begin(models, TrainConfig())
    late = iter(range(files))
    rmdir = os.rmdir

    def add_and_remove(path: str, **options: int) -> None:
        if (
            os.path.basename(path).startswith(".train.")
            and (number := next(late, None)) is not None
        ):
            (Path(path) / str(number)).touch()
        rmdir(path, **options)

    monkeypatch.setattr(os, "rmdir", add_and_remove)
    if files > 10:
        with pytest.raises(TrainError, match=r"training has ended in .*\.train\..* is left"):
            end(models)
    else:
        end(models)
        assert os.listdir(models) == ["model.safetensors"]
    assert not (models / "model.safetensors").is_symlink()
    assert not TrainDirectory(models).path.exists()


def test_worker_of_a_directory_that_is_no_run_says_how_to_begin(models: Path) -> None:
    with pytest.raises(TrainError, match="irdmafs train init"):
        Worker(models)
    script = f"from irdmafs.train import Worker; Worker({str(models)!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd="/")
    assert done.returncode == 1


# -- status and run --------------------------------------------------------------------------------

WORKER = """
import os, sys, time
from irdmafs.train import Worker
number = int(os.environ["IRDMAFS_WORKER"])
with Worker(sys.argv[1], f"w{number}") as worker:
    gradients = {one.name: worker.pull()[one.name] * 0 + 1 for one in worker.layout.parameters}
    for _ in range(int(sys.argv[2])):
        worker.push_pull(gradients, timeout_s=60)
    if len(sys.argv) > 3:
        sys.exit(int(sys.argv[3])) if number == 1 else time.sleep(1000)
    worker.push(gradients)
"""


def running(models: Path, *command: str) -> subprocess.Popen[str]:
    words = [*IRDMAFS, "train", "run", str(models), "--workers", "2", "--", *command]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd="/")


def is_idle(models: Path) -> bool:
    """Return whether nobody takes part in a training, nor reduces."""
    train = TrainDirectory(models)
    locks = [*train.workers.iterdir(), *train.reducers.iterdir()]
    return not any(is_locked(path) for path in locks)


def test_run_trains_with_all_that_it_needs_and_counts_the_last_pushes(models: Path) -> None:
    begin(models, TrainConfig(rule="sum", workers=2))
    with running(models, sys.executable, "-c", WORKER, str(models), "3") as run:
        _, said = run.communicate(timeout=60)
    assert run.returncode == 0, said
    assert f"irdmafs train run {models} --workers 2 -- {sys.executable} -c" in said
    assert newest(models) == 4
    assert is_idle(models)


def test_run_ends_with_the_code_of_the_worker_that_fails(models: Path) -> None:
    begin(models, TrainConfig(rule="sum", workers=2))
    with running(models, sys.executable, "-c", WORKER, str(models), "1", "7") as run:
        _, said = run.communicate(timeout=60)
    assert run.returncode == 7
    assert "worker 1 has failed with the exit code 7" in said
    eventually(lambda: is_idle(models), "all others have ended")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_ends_with_all_that_it_started(models: Path, number: int) -> None:
    """A worker may be a shell that starts others, which ignore Ctrl-C as shells' children do."""
    begin(models, TrainConfig())
    script = 'touch "$0/$IRDMAFS_WORKER"; sleep 1000 & wait'
    with running(models, "sh", "-c", script, str(models)) as run:
        lock = TrainDirectory(models).reducers / "coordinator"
        eventually(lambda: is_locked(lock), "a reducer is at work", 60)
        eventually(lambda: {"0", "1"} <= {*os.listdir(models)}, "workers are at work", 60)
        run.send_signal(number)
        # All have closed their end of the pipe.
        run.communicate(timeout=60)
    assert run.returncode == 128 + number
    assert is_idle(models)


def test_run_of_a_program_that_is_not_there_ends_at_once(models: Path) -> None:
    begin(models, TrainConfig())
    with running(models, "/no/such/program") as run:
        _, said = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "irdmafs: /no/such/program: No such file or directory\n" in said
    assert is_idle(models)
