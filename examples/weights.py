#!/usr/bin/env python3
"""Weights from a trainer to its workers: a model in several files, without markers or polling.

The trainer publishes numbered versions (docs/weight-sync.md). Each worker waits for one that is newer than
its last, and loads that while later ones are published. A slow worker leaves versions out, and mixes none.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import _common
import click
import numpy as np

from irdmafs import client

SHARDS = 4


def save(directory: str, step: int, size: int) -> None:
    """Write a model as frameworks do: shards, and an index that names them."""
    with client.open(directory) as store:
        for shard in range(SHARDS):
            weights = np.full(size, step, np.float32)
            store.publish_state_dict({f"layer{shard}": weights}, f"{shard}.safetensors")
    files = {f"layer{shard}": f"{shard}.safetensors" for shard in range(SHARDS)}
    Path(directory, "index.json").write_text(json.dumps(files))


def load(directory: str) -> set[float]:
    """Load a model, and return the steps that its weights are of."""
    files = json.loads(Path(directory, "index.json").read_text())
    with client.open(directory) as store:
        return {float(one) for name in files for one in np.unique(store[f"{files[name]}/{name}"])}


def work(directory: Path, last: int, pause_s: float) -> tuple[int, int]:
    """Load versions up to the last one; return how many were loaded, and how many of them were mixed."""
    versions, seen, loaded, mixed = client.Versions(directory), 0, 0, 0
    while seen < last:
        with versions.hold(newer_than=seen, timeout=_common.TIMEOUT_S, local=True) as version:
            seen, loaded = version.number, loaded + 1
            mixed += load(version.path) != {seen}
            time.sleep(pause_s)
    return loaded, mixed


@click.command()
@_common.directory_argument
@click.option("--workers", default=2, show_default=True)
@click.option("--steps", default=20, show_default=True, help="Versions that the trainer publishes.")
@click.option("--size", default=1 << 20, show_default=True, help="Parameters of each shard.")
def main(directory: Path | None, workers: int, steps: int, size: int) -> None:
    with (
        _common.place(directory) as place,
        ProcessPoolExecutor(workers, get_context("spawn")) as pool,
    ):
        working = [pool.submit(work, place, steps, 0.1 * number) for number in range(workers)]
        versions = client.Versions(place, keep=2)
        for step in range(1, steps + 1):
            with versions.draft() as draft:
                save(draft, step, size)
        for number, (loaded, mixed) in enumerate(one.result() for one in working):
            click.echo(f"worker {number}: {loaded} of {steps} versions loaded, {mixed} mixed")


if __name__ == "__main__":
    main()
