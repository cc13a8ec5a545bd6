"""Claims and leases of directories, at the mount."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.clusters import ClusterMount, counters
from harness.mountpoint import eventually


def often(ask: Callable[[], object]) -> None:
    """Ask about a directory so often at a time that a mount follows it, on a slow machine, too."""
    for _ in range(10):
        ask()


def claimed(place: ClusterMount | Path) -> int:
    """Return of how many directories a mount has the claim; a path is one of it."""
    return int(counters(place)["claimed_directories"])


def transactions(place: ClusterMount | Path) -> int:
    """Return the transactions of a mount, without those about directories that it follows."""
    found = counters(place)
    return int(found["transactions"] - found["lease_transactions"])


@contextmanager
def few_transactions(place: ClusterMount | Path, most: int) -> Iterator[None]:
    """Have a block cost fewer transactions of a mount than `most`, and four more in each 0.8 s: names do
    not wait longer, and contents, their directories' claims and followers cost some, too."""
    before, began_s = counters(place)["transactions"], time.monotonic()
    yield
    rounds = int((time.monotonic() - began_s) / 0.8)
    cost = counters(place)["transactions"] - before
    assert cost < most + 4 * rounds, f"{cost} transactions in {rounds} rounds of 0.8 s"


def claim(directory: Path) -> None:
    """Make files in a directory until its mount has the claim; they are removed again."""

    def costs_nothing() -> bool:
        before = counters(directory)["transactions"]
        for number in range(3):
            path = directory / f".claim{number}"
            fd = os.open(path, os.O_CREAT | os.O_WRONLY)
            path.unlink()
            os.close(fd)
        return bool(counters(directory)["transactions"] == before)

    eventually(costs_nothing, "the directory is claimed")


def claim_exclusively(directory: Path) -> None:
    """Have the mount of a directory defer its changes there."""

    def is_deferred() -> bool:
        before = counters(directory)["deferred_changes"]
        path = directory / ".claim"
        path.touch()
        path.unlink()
        return bool(counters(directory)["deferred_changes"] == before + 2)

    # Another mount may follow a directory above it, which it gives up when it has not looked for 10 s.
    eventually(is_deferred, "changes in the directory are deferred", within_s=30)
