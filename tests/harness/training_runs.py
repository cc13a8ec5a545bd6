"""Small training runs: a model, workers and reducers, in a directory of a mount."""

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from harness.mountpoint import eventually
from irdmafs.client import FormatError, _files
from irdmafs.train import Reducer, Refused, TrainConfig, Worker, begin, coordinator, reducer, worker
from irdmafs.train.directory import STATE, TrainDirectory, read_header
from irdmafs.train.layout import Shard
from irdmafs.train.open_push import OpenPush
from irdmafs.train.pushes import check_finite, check_shard, check_turn, push_in_shards, push_of

Arrays = Mapping[str, NDArray[Any]]

# Sizes that no cut is a multiple of, a scalar, and a parameter without elements.
SHAPES = {
    "embedding": (37, 11),
    "head.weight": (5, 64),
    "norm": (3,),
    "scale": (),
    "nothing": (0, 4),
}
BF16 = np.dtype(ml_dtypes.bfloat16)

# How often members of a training run look.
LOOK_S = 0.05


def hurry(set_: Callable[[ModuleType, str, float], object]) -> None:
    """Have members of trainings in this process look often for changes that nobody tells them of: a lock
    that is free, a file that is not written any more. They leave no parts to other hosts for long. `set_`
    sets an attribute of a module."""
    for module in (reducer, coordinator, worker):
        set_(module, "LOOK_S", LOOK_S)
    set_(reducer, "_LEAVE_S", LOOK_S)


def model(seed: int = 0, dtype: Any = np.float32) -> dict[str, NDArray[Any]]:
    """Return random parameters."""
    random = np.random.default_rng(seed)
    return {
        name: np.asarray(random.standard_normal(shape), np.float32).astype(dtype)
        for name, shape in SHAPES.items()
    }


def gradients(worker: int, step: int) -> dict[str, NDArray[Any]]:
    """Return what a worker pushes in a step: always the same."""
    return model(1000 * (worker + 1) + step)


def ones(value: float = 1.0) -> dict[str, NDArray[Any]]:
    return {name: np.full(shape, value, np.float32) for name, shape in SHAPES.items()}


def zeros() -> dict[str, NDArray[Any]]:
    return ones(0.0)


def check(run: Path, fd: int, name: str) -> None:
    """Check a push as reducers do; `name` is its path from push/. Raises Refused and TrainError."""
    train = TrainDirectory(run)
    config, layout = train.config(), train.layout
    *folders, last = name.split("/")
    try:
        header = read_header(last, fd, os.fstat(fd).st_size, layout.header_max_bytes)
    except FormatError as error:
        raise Refused(errno.EINVAL, str(error)) from None
    if not folders:
        push = push_of(layout, name, header)
        if config.nonfinite == "refuse":
            data = np.frombuffer(_files.read_at(fd, os.fstat(fd).st_size, 0), np.uint8)
            tensors = header.tensors.items()
            check_finite({one: _files.view(name, data, form) for one, form in tensors})
        check_turn(train, config, train.newest_plan(), push)
        return
    shard = next(one for one in layout.shards if one.name == last)
    assert push_in_shards(folders[-1]) is not None
    check_shard(shard, header, cut=True)


def start(
    folder: Path,
    parameters: Arrays | None = None,
    *,
    shards: int = 1,
    small: bool | None = False,
    **config: Any,
) -> Path:
    """Begin to train a model in a new directory, as a large or a small run."""
    folder.mkdir()
    save_file(dict(parameters or zeros()), folder / "model.safetensors")
    with sized(small=small):
        begin(folder, TrainConfig(**({"rule": "sum"} | config)), shards=shards)
    return folder


@contextlib.contextmanager
def sized(*, small: bool | None) -> Iterator[None]:
    """Have runs that begin meanwhile be large or small, whatever their models are and wherever; None: as
    they are by themselves."""

    def in_one_part(_: Path, shards: int | None, size: int) -> tuple[list[str], int]:
        return [str(number) for number in range(shards or 1)], 0

    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr("irdmafs.train.models.shard_names", in_one_part)
        elif small is not None:
            patch.setattr("irdmafs.train.placement._SMALLEST_BYTES", 1)
        yield


@contextlib.contextmanager
def reducing(folder: Path) -> Iterator[None]:
    """Have a reducer at work in a thread as long as the block runs."""
    ended = threading.Event()
    with Reducer(folder, threads=1) as reducer, ThreadPoolExecutor(1) as thread:
        running = thread.submit(reducer.run, ended.is_set)
        try:
            yield
        finally:
            ended.set()
            running.result()


def everywhere(folder: Path, value: float) -> bool:
    """Return whether all parameters of the newest version have this value."""
    return all(bool((array == value).all()) for array in parameters(folder).values())


def reduce(reducer: Reducer) -> None:
    """Do all that can be done now."""
    while reducer.step():
        pass


def put_all(worker: Worker, values: Arrays, push: OpenPush | None = None) -> OpenPush:
    """Begin a push, or change it, and wait until all of its files are in staging/."""
    push = push or worker.begin_push()
    for name, value in values.items():
        push.put(name, value)
    for writing in push._written.values():
        writing.result()
    return push


def fetched(worker: Worker) -> bool:
    """Return whether all shards of the version that is being made are here."""
    fetches = list(worker._prefetch._fetches.values()) if worker._prefetch is not None else []
    return len(fetches) == len(worker.layout.shards) and all(one.file.done() for one in fetches)


def push_and_reduce(reducer: Reducer, worker: Worker, gradients: Arrays, **options: Any) -> None:
    """Push gradients, then do all that can be done now."""
    worker.push(gradients, **options)
    reduce(reducer)


def reduce_until(reducer: Reducer, condition: Callable[[], bool], what: str) -> None:
    """Go on until something has happened that needs time: a worker that ended is looked after."""

    def goes_on() -> bool:
        reduce(reducer)
        return condition()

    eventually(goes_on, what, within_s=30)


def state_of(version: Path, shard: Shard) -> Path:
    """The file with what the rule keeps of a shard of a version."""
    return version / shard.part / STATE / shard.name


def newest(folder: Path) -> int:
    return TrainDirectory(folder).newest()


def parameters(folder: Path) -> dict[str, NDArray[Any]]:
    """Return the newest version's parameters, as another library reads them."""
    found: dict[str, NDArray[Any]] = load_file(
        folder / ".train" / "versions" / str(newest(folder)) / "model.safetensors"
    )
    return found


def same_bits(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and one[name].tobytes() == other[name].tobytes()
        for name in one
    )


def run_bsp(
    folder: Path, *, workers: int = 3, steps: int = 4, shards: int = 1, **config: Any
) -> dict[str, NDArray[Any]]:
    """Train in lockstep, and return the parameters."""
    dtype = config.pop("dtype", np.float32)
    start(folder, model(dtype=dtype), shards=shards, **config)
    members = [Worker(folder, f"w{number}") for number in range(workers)]
    with Reducer(folder, threads=2) as reducer:
        for step in range(1, steps + 1):
            # Nobody's place in the sum is the order in which pushes come.
            for number in np.random.default_rng(step).permutation(workers):
                members[number].push(gradients(int(number), step))
            reduce(reducer)
        for member in members:
            member.close()
    return parameters(folder)
