"""The parts that examples share: a directory on a mount, its reducer, workers as processes, and curves
of their measurements."""

from __future__ import annotations

import contextlib
import csv
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from irdmafs import client
from irdmafs.train import TrainConfig, Worker, begin, end

Array = NDArray[Any]
Curves = Mapping[str, Sequence[tuple[float, float]]]
# A worker that waits for one that has failed gives up after so long.
TIMEOUT_S = 120.0

directory_argument = click.argument(
    "directory", required=False, type=click.Path(path_type=Path, file_okay=False)
)
out_option = click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("plots"), show_default=True,
    help="Where curves are saved, as CSV, and as PNG if matplotlib is installed.",
)  # fmt: skip


@contextlib.contextmanager
def place(directory: Path | None) -> Iterator[Path]:
    """Yield a directory to train in: the one that is given, or a mount that ends with the block, also when
    that ends by Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, _end)
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        yield directory
        return
    made = tempfile.mkdtemp(prefix="irdmafs-example-")
    try:
        _irdmafs("mount", made)
        yield Path(made)
    finally:
        if os.path.ismount(made):
            _irdmafs("umount", "--discard", made)
        os.rmdir(made)


def _end(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _irdmafs(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "irdmafs", *arguments], capture_output=True, text=True
    )
    if done.returncode:
        raise click.ClickException(done.stderr.strip() or f"irdmafs {arguments[0]} failed")


@contextlib.contextmanager
def training(directory: Path, model: Mapping[str, Array], config: TrainConfig) -> Iterator[Path]:
    """Put a model in a directory and train it there, with a reducer beside, as long as the block runs.
    Afterwards the directory has the newest version, as a file."""
    directory.mkdir(exist_ok=True)
    with client.open(directory) as store:
        store.publish_state_dict(dict(model), "model.safetensors")
    begin(directory, config)
    reducer = subprocess.Popen([sys.executable, "-m", "irdmafs", "train", "reduce", str(directory)])
    try:
        yield directory
    finally:
        reducer.terminate()
        reducer.wait()
    end(directory)


def read(directory: Path) -> dict[str, Array]:
    """Return copies of the parameters that a directory has now."""
    with client.open(directory) as store:
        found = store.state_dict("model.safetensors")
        return {name: np.array(array) for name, array in found.items()}


def run(
    work: Callable[..., Any], directory: Path, workers: int, *arguments: Sequence[Any]
) -> list[Any]:
    """Run `work(worker, number, ...)` in as many processes, each with a worker of the directory; return
    the results by number. `arguments`: sequences with an element for each of them."""
    return in_processes(partial(_work, work, directory), workers, *arguments)


def _work(work: Callable[..., Any], directory: Path, number: int, *arguments: Any) -> Any:
    with Worker(directory, f"worker{number}") as worker:
        return work(worker, number, *arguments)


def in_processes(work: Callable[..., Any], count: int, *arguments: Sequence[Any]) -> list[Any]:
    """Run `work(number, ...)` in as many processes; as run(), for work that makes its own worker."""
    # They share the cores: none of them needs threads for its small matrices.
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    # They are forked by a process that has imported what takes long, also for torch's optimizers.
    context = get_context("forkserver")
    slow = ["irdmafs.train", "torch._dynamo"] if "torch" in sys.modules else ["irdmafs.train"]
    context.set_forkserver_preload(slow)
    with ProcessPoolExecutor(count, mp_context=context) as processes:
        calls = [
            processes.submit(work, number, *(one[number] for one in arguments))
            for number in range(count)
        ]
        try:
            return [call.result() for call in calls]
        except BaseException:
            for process in active_children():
                process.terminate()
            raise


def save_curves(
    out: Path, name: str, x: str, y: str, curves: Curves, *, logarithmic: bool = False
) -> None:
    """Save curves as NAME.csv, and as NAME.png where matplotlib is installed, and say where."""
    out.mkdir(parents=True, exist_ok=True)
    table, plot = out / f"{name}.csv", out / f"{name}.png"
    with table.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("curve", x, y))
        rows.writerows((label, *point) for label, points in curves.items() for point in points)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        click.echo(
            f"curves: {table}; a plot of them needs matplotlib: pip install irdmafs[examples]"
        )
        return
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for label, points in curves.items():
        axes.plot(*np.transpose(points), label=label)
    axes.set(title=name, xlabel=x, ylabel=y)
    if logarithmic:
        axes.loglog()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(plot, dpi=120)
    click.echo(f"curves: {table}, {plot}")
