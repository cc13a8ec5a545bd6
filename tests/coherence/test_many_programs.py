"""Many programs that write, replace, cut, map and rename the same few files at once.

IRDMAFS_SEED repeats a run, as far as the order of system calls can be repeated. IRDMAFS_SECONDS is how long
the programs run before what they leave is looked at.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import make_mount
from harness.clusters import LONG_LEASE_S, Cluster, Plan
from harness.seeds import chosen_seed
from harness.storms import programs as storm

PROGRAMS = 3
SECONDS = float(os.environ.get("IRDMAFS_SECONDS") or 0.5)
OPENING, REFUSED = ("read", "hold"), ("EIO", "ESTALE")


@pytest.mark.timeout(120 + 2 * SECONDS)
@pytest.mark.parametrize("beside", [{}, {0: 0}], ids=["apart", "beside-a-node"])
def test_afterwards_every_host_shows_the_same_files(beside: dict[int, int]) -> None:
    """Programs run on one of two hosts first, then on both."""
    seed = chosen_seed()
    with Cluster(Plan(mounts=2, beside=beside, lease_ttl_s=LONG_LEASE_S)) as cluster:
        for hosts in (1, 2):
            folders = [mount.path / f"{hosts}" for mount in cluster.mounts]
            folders[0].mkdir()
            failures = run_programs(folders[:hosts], seed + 1000 * hosts)
            print(failures)
            assert not failures & {f"{step}: {error}" for step in OPENING for error in REFUSED}
            shown = [shown_in(folder) for folder in folders]
            assert shown[0] == shown[1]


def test_on_one_host_no_call_fails_except_for_a_missing_name() -> None:
    seed = chosen_seed()
    with make_mount("kernel") as mount:
        assert all(one.endswith(": ENOENT") for one in run_programs([mount.path], seed))


def test_nobody_meets_an_error_or_a_conflict(here: Path) -> None:
    (here / "file0").touch()
    steps = ("replace", "reopen", "truncate")
    assert not run_programs([here], chosen_seed(), "1", *steps, count=8, seconds=3 * SECONDS)
    assert os.listdir(here) == ["file0"]


def run_programs(
    folders: list[Path],
    seed: int,
    files: str = "3",
    *steps: str,
    count: int = PROGRAMS,
    seconds: float = SECONDS,
) -> set[str]:
    """Return which steps failed with which errors."""
    begun = []
    for number, folder in itertools.product(range(count), folders):
        numbered = str(seed + 10 * folders.index(folder) + number), str(seconds)
        command = [sys.executable, storm.__file__, str(folder), *numbered, files, *steps]
        begun.append(subprocess.Popen(command, stdout=subprocess.PIPE))
    failures: set[str] = set()
    for program in begun:
        printed, _ = program.communicate(timeout=seconds + 60)
        # A mapped file that another program cut: as anywhere.
        assert program.returncode in (0, -7)
        failures |= set(json.loads(printed or "{}"))
    return failures


def shown_in(folder: Path) -> dict[str, bytes]:
    shown = {}
    for name in sorted(os.listdir(folder)):
        shown[name] = (folder / name).read_bytes()
        assert (folder / name).stat().st_size == len(shown[name]), name
    return shown
