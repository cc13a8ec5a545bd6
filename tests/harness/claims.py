"""Claims of directories, at the mount."""

import os
from pathlib import Path

from harness.clusters import ClusterMount, counters
from harness.mountpoint import eventually


def claimed(mount: ClusterMount) -> int:
    """Return of how many directories a mount has the claim."""
    return int(counters(mount)["claimed_directories"])


def claim(mount: ClusterMount, directory: Path) -> None:
    """Make files in a directory of the mount until it has the claim; they are removed again. Claims of
    other directories may end meanwhile."""
    fewest = claimed(mount)

    def make_some() -> bool:
        nonlocal fewest
        for number in range(3):
            path = directory / f".claim{number}"
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
            path.unlink()
        now = claimed(mount)
        is_more, fewest = now > fewest, min(now, fewest)
        return is_more

    eventually(make_some, "the directory is claimed")
