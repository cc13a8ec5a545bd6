"""The ways of docs/weight-sync.md to hand models in several files from one host to another."""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from harness.beside import beside

from irdmafs import client

STEPS = 10
KEPT = 3
SHARDS = 3
INDEX = "model.safetensors.index.json"


def save(directory: Path, step: int) -> None:
    """Write a model as frameworks do: shards, then the index, each under its own name."""
    directory.mkdir()
    for shard in range(SHARDS):
        (directory / f"{shard}.safetensors").write_bytes(b"%d " % step * 50_000)
    index = {"step": step, "files": [f"{shard}.safetensors" for shard in range(SHARDS)]}
    (directory / INDEX).write_text(json.dumps(index))


def load(directory: Path) -> set[int]:
    """Return the steps that the files of a directory are of."""
    index = json.loads((directory / INDEX).read_bytes())
    contents = [(directory / name).read_bytes() for name in index["files"]]
    return {index["step"], *(int(word) for content in contents for word in set(content.split()))}


def remove(directory: Path) -> None:
    """Remove a directory so that nobody sees a part of it."""
    aside = directory.with_name(f"old-{directory.name}")
    directory.rename(aside)
    shutil.rmtree(aside)


def publishing(publish: Callable[[int], None]) -> AbstractContextManager[Any]:
    """Publish all steps meanwhile."""
    return beside(lambda: [*map(publish, range(1, STEPS + 1))])


def test_a_worker_waits_for_a_version_and_loads_it_whole(here: Path, there: Path) -> None:
    (here / "versions").mkdir()
    (here / "since").mkdir()
    os.setxattr(here / "since", "user.irdmafs.awaits", b"versions")

    def publish(step: int) -> None:
        save(here / "next", step)
        (here / "next").rename(here / "versions" / f"{step}")
        if step > KEPT:
            remove(here / "versions" / f"{step - KEPT}")

    loaded, late = 0, 0
    with publishing(publish):
        while loaded < STEPS:
            version = Path(os.path.realpath(there / "since" / f"{loaded + 1}", strict=True))
            try:
                assert load(version) == {int(version.name)}
            except FileNotFoundError:
                # Slower than KEPT steps: there is a newer one.
                late += 1
                continue
            loaded = int(version.name)
    assert late < STEPS


def test_a_worker_is_told_by_a_pointer_to_a_whole_directory(here: Path, there: Path) -> None:
    (here / "LATEST").write_text("step-0")
    save(here / "step-0", 0)

    def publish(step: int) -> None:
        save(here / "next", step)
        (here / "next").rename(here / f"step-{step}")
        (here / "LATEST").write_text(f"step-{step}")

    pointer, seen = None, -1
    with publishing(publish):
        while seen < STEPS:
            pointer = client.wait(there / "LATEST", pointer, timeout=30)
            name = (there / "LATEST").read_text()
            step = int(name.removeprefix("step-"))
            assert step >= seen
            seen = step
            assert load(there / name) == {step}
