"""The examples, run small, and the walk of docs/training.md reach what they claim; the model of a step's
time has the limits that its analysis promises."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from harness.example_programs import EXAMPLES, Run, examples, needs
from harness.mountpoint import irdmafs, succeeded
from safetensors.numpy import load_file

sys.path.append(str(EXAMPLES))
from _step_time import Cluster, Work, step_time

# speedup.py reaches it in half the steps that its usual accuracy takes.
BRIEF = ("--sample-ms=0.1", "--accuracy=0.7")

run = pytest.fixture(scope="module")(examples)


@needs("sklearn")
def test_support_vectors_are_libsvms_however_early_samples_go(run: Run, place: Path) -> None:
    arguments = ("--workers=2", "--data=cells", "--candidates=64")
    printed = run("svm", place, *arguments, "--eliminate=none", "--eliminate=earliest")
    found = re.search(r"(\d+) support vectors of libsvm", printed)
    assert found is not None
    results = re.findall(
        r"eliminate (\w+): .* (\S+) kernel values, (\d+) samples eliminated, "
        r".* (\d+) support vectors, decision values differ by (\S+)",
        printed,
    )
    assert [strategy for strategy, *_ in results] == ["none", "earliest"]
    for *_, vectors, difference in results:
        assert abs(int(vectors) - int(found[1])) <= 1
        assert float(difference) < 0.005
    (_, all_values, none, *_), (_, fewer_values, some, *_) = results
    assert int(none) == 0 < int(some)
    assert int(fewer_values.replace(",", "")) < int(all_values.replace(",", ""))


def test_workers_load_whole_versions_of_a_model_in_several_files(place: Path) -> None:
    """Run as a program, which all examples are."""
    words = [sys.executable, f"{EXAMPLES}/weights.py", f"{place}", "--steps=5", "--size=1000"]
    printed = subprocess.check_output(words, text=True, timeout=110)
    found = re.findall(
        r"^worker (\d): ([1-5]) of 5 versions loaded, 0 mixed$", printed, re.MULTILINE
    )
    assert [number for number, _ in found] == ["0", "1"]
    ends = {path.read_text().rpartition("\n\n\n")[2] for path in EXAMPLES.glob("[!_]*.py")}
    assert ends == {'if __name__ == "__main__":\n    main()\n'}


@needs("torch")
def test_ranks_save_checkpoints_together_that_are_whole(run: Run, place: Path) -> None:
    printed = run("checkpoints", place, "--steps=5", "--size=1000")
    assert re.search(r"^loader: [1-5] of 5 versions loaded, 0 mixed$", printed, re.MULTILINE)
    assert os.listdir(place / ".drafts") == []


@needs("sklearn")
def test_clients_that_differ_learn_all_digits_together(run: Run, tmp_path: Path) -> None:
    # Without a directory it has a mount as long as it runs.
    arguments = ("--workers=3", "--steps=8", f"--out={tmp_path / 'out'}")
    printed = run("fedavg", *arguments)
    rounds = re.findall(r"^ +(\d+) +(\S+) +\S+$", printed, re.MULTILINE)
    assert [int(number) for number, _ in rounds] == list(range(1, 9))
    accuracies = [float(accuracy) for _, accuracy in rounds]
    # No client has enough of all digits for this.
    assert accuracies[-1] > 0.85 > accuracies[0]
    rows = (tmp_path / "out" / "fedavg.csv").read_text().splitlines()
    assert rows[0] == "curve,round,accuracy"
    assert len(rows) == 1 + 2 * 8


@needs("sklearn")
def test_soup_is_better_than_its_models_are_on_average(run: Run, place: Path) -> None:
    printed = run("soup", place, "--workers=3", "--steps=8")
    models = [
        float(one) for one in re.findall(r"^model \d+, lr \S+ +(\S+)$", printed, re.MULTILINE)
    ]
    assert len(models) == 3
    for name, least in (("soup", sum(models) / 3), ("moving average of model 0", min(models))):
        found = re.search(rf"^{name} +(\S+)$", printed, re.MULTILINE)
        assert found is not None
        assert float(found[1]) >= least


@needs("sklearn")
def test_two_workers_reach_accuracy_after_as_many_steps_as_one(run: Run, place: Path) -> None:
    arguments = (*BRIEF, "--workers=1", "--workers=2", f"--out={place / 'out'}")
    printed = run("speedup", place / "run", *arguments)
    (one, two) = re.findall(r"^(\d) workers, bsp .* (\d+) pushes", printed, re.MULTILINE)
    assert (one[0], two[0]) == ("1", "2")
    assert int(two[1]) == 2 * int(one[1])
    rows = (place / "out" / "speedup-workers.csv").read_text().splitlines()
    assert [row.split(",")[1] for row in rows[1:]] == ["1.0", "2.0"] * 2


@needs("sklearn")
def test_accuracy_is_reached_in_spite_of_a_slow_worker(run: Run, place: Path) -> None:
    printed = run("speedup", place, *BRIEF, "--slow=3")
    found = re.findall(r"^4 workers, (\S+) .* (\d+) pushes", printed, re.MULTILINE)
    assert [sync for sync, _ in found] == ["bsp", "ssp:4", "quorum:3", "async"]


WAITING = """
import os
import time
import _common

def work(number):
    os.write(1, b"at work\\n")
    time.sleep(1000)

if __name__ == "__main__":
    with _common.place(None) as place:
        print(place, flush=True)
        _common.in_processes(work, 2)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_example_that_is_ended_leaves_no_mount_and_no_process(tmp_path: Path, number: int) -> None:
    (tmp_path / "waiting.py").write_text(WAITING)
    command = [sys.executable, str(tmp_path / "waiting.py")]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as example:
        assert example.stdout is not None
        try:
            place = Path(example.stdout.readline().strip())
            for _ in range(2):
                assert example.stdout.readline() == "at work\n"
            assert os.path.ismount(place)
        finally:
            example.send_signal(number)
        # All have closed their end of the pipe.
        example.communicate(timeout=60)
    assert example.returncode in (128 + number, -number)
    assert not place.exists()


@needs("sklearn")
@needs("torch")
@pytest.mark.slow
def test_images_are_recognized_with_and_without_waiting(run: Run, place: Path) -> None:
    out = place / "out"
    arguments = ("--workers=2", "--steps=30", "--lr=0.01", "--sync=bsp", "--sync=async")
    printed = run("images", place / "run", *arguments, f"--out={out}")
    found = dict(re.findall(r"^(\S+) .* accuracy (\S+)$", printed, re.MULTILINE))
    assert found.keys() == {"bsp", "async"}
    # A guess is right once in ten times.
    assert all(float(accuracy) > 0.8 for accuracy in found.values())
    for y in ("loss", "accuracy"):
        for x in ("seconds", "bytes"):
            rows = (out / f"images-{y}-{x}.csv").read_text().splitlines()
            assert rows[0] == f"curve,{x},{y}"
            assert len(rows) == 1 + 2 * 6


@needs("torch")
@pytest.mark.slow
def test_language_is_learnt_with_fewer_bytes_by_diloco(run: Run, place: Path) -> None:
    arguments = ("--steps=20", "--every=15", "--rounds=2", f"--out={place / 'out'}")
    printed = run("language", place / "run", *arguments)
    found = re.findall(r"^(\S+) .* (\S+) MB, loss (\S+)$", printed, re.MULTILINE)
    (_, bytes_each_step, loss), (name, bytes_seldom, loss_seldom) = found
    assert name == "DiLoCo"
    assert float(bytes_each_step) == pytest.approx(20 / 2 * float(bytes_seldom), rel=0.01)
    # A guess has 4.6.
    assert float(loss) < 3.2
    assert float(loss_seldom) < 3.2
    assert (place / "out" / "language-bytes.csv").read_text().startswith("curve,bytes,loss\n")


def test_scaling_is_printed_up_to_10000_workers_and_where_its_curves_are(
    run: Run, tmp_path: Path
) -> None:
    printed = run("scaling", f"--out={tmp_path}", plots=True)
    assert "10,000" in printed.splitlines()[0]
    assert f"curves: {tmp_path / 'scaling.csv'}" in printed
    curves = (tmp_path / "scaling.csv").read_text()
    assert curves.startswith("curve,workers,seconds per step")
    assert "10000.0" in curves
    plot = tmp_path / "scaling.png"
    assert str(plot) in printed if plot.exists() else "pip install irdmafs[examples]" in printed


GRADIENT_BYTES = 4e9
LINK_BYTES_S = 1e9
WORK = Work(10.0, GRADIENT_BYTES, GRADIENT_BYTES)
TRANSFER_S = GRADIENT_BYTES / LINK_BYTES_S


def exchange_s(cluster: Cluster) -> float:
    found = step_time(WORK, cluster)
    return found.push_s + found.pull_s


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 10_000])
def test_nodes_on_workers_hosts_cost_what_an_allreduce_costs(workers: int) -> None:
    cluster = Cluster(workers, workers, LINK_BYTES_S, colocated=True)
    assert exchange_s(cluster) == pytest.approx(2 * (workers - 1) / workers * TRANSFER_S)


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 10_000])
def test_push_and_pull_go_once_over_a_link_with_as_many_nodes_of_their_own(workers: int) -> None:
    found = step_time(WORK, Cluster(workers, workers, LINK_BYTES_S))
    assert found.push_s == found.pull_s == pytest.approx(TRANSFER_S)


def test_one_node_receives_the_pushes_of_all() -> None:
    assert exchange_s(Cluster(64, 1, LINK_BYTES_S)) == pytest.approx(2 * 64 * TRANSFER_S)
    assert exchange_s(Cluster(64, 1, LINK_BYTES_S, colocated=True)) == pytest.approx(
        2 * 63 * TRANSFER_S
    )


def test_replicas_are_handed_every_push_and_every_result() -> None:
    work = Work(10.0, GRADIENT_BYTES, GRADIENT_BYTES, state_bytes=6 * GRADIENT_BYTES)
    once = step_time(work, Cluster(8, 8, LINK_BYTES_S))
    twice = step_time(work, Cluster(8, 8, LINK_BYTES_S, replicas=2))
    assert twice.push_s == pytest.approx(once.push_s + TRANSFER_S)
    assert twice.reduce_s == pytest.approx(7 * TRANSFER_S / 8)
    assert twice.pull_s == once.pull_s


def test_pushes_are_hidden_behind_the_computation_that_is_still_left() -> None:
    cluster = Cluster(8, 8, LINK_BYTES_S)
    half = step_time(Work(10.0, GRADIENT_BYTES, GRADIENT_BYTES, overlap=0.2), cluster)
    assert half.push_s == pytest.approx(TRANSFER_S - 2)
    whole = step_time(Work(10.0, GRADIENT_BYTES, GRADIENT_BYTES, overlap=1), cluster)
    assert whole.push_s == 0
    assert whole.pull_s == pytest.approx(TRANSFER_S)


def test_planning_is_what_grows_with_the_workers_in_the_end() -> None:
    few, many = (
        step_time(WORK, Cluster(count, count, LINK_BYTES_S, 0.001, colocated=True, plan_s=0.001))
        for count in (100, 10_000)
    )
    assert many.total_s - few.total_s == pytest.approx(
        9_900 * 0.001 + 2 * (1 / 100 - 1 / 10_000) * TRANSFER_S
    )


PAGE = Path(__file__).parents[2] / "docs" / "training.md"
BLOCK = re.compile(r"```(sh|python)\n(.*?)```", re.DOTALL)


@pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="mounts")
def test_walk_from_a_mount_to_a_trained_model(tmp_path: Path) -> None:
    walk = (
        PAGE.read_text().partition("## From a mount to a trained model\n")[2].partition("\n## ")[0]
    )
    script = []
    for kind, text in BLOCK.findall(walk):
        if kind == "sh":
            script.append(text)
        else:
            (tmp_path / text.split()[1]).write_text(text)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    try:
        done = subprocess.run(
            ["bash", "-e", "-c", "".join(script)], cwd=tmp_path, env={**os.environ, "PATH": path},
            capture_output=True, text=True, timeout=110,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        if os.path.ismount(tmp_path / "params"):
            succeeded(irdmafs("umount", "--discard", tmp_path / "params"))
    slope, offset = re.findall(r"'(?:slope|offset)': array\(\[(\S+)\]", done.stdout)
    found = sorted(float(one) for one in (slope, offset))
    assert np.allclose(found, [1, 3], atol=0.1)
    assert load_file(tmp_path / "version1.safetensors")["slope"] == pytest.approx(found[1] + 1)
