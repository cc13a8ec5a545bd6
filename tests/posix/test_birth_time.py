"""The time of birth, which statx(2) tells."""

import os
from pathlib import Path

from harness.cluster_mount import CLUSTER
from harness.mountpoint import Mount, run_checked
from harness.processes import TakeProcess

SESSIONS = ("kernel", CLUSTER)


def birth(path: Path) -> float:
    return float(run_checked("stat", "--format=%.9W", path))


def test_time_of_birth_is_told_and_never_changes(own_mount: Mount, process: TakeProcess) -> None:
    file, directory = own_mount.path / "file", own_mount.path / "dir"
    file.write_bytes(b"x")
    directory.mkdir()
    born = [birth(path) for path in (file, directory)]
    made = file.stat().st_mtime
    assert abs(made - born[0]) < 10
    process().do("import time; time.sleep(0.02); open(f, 'wb').write(b'other')", f=str(file))
    os.utime(file, (1, 1))
    os.chmod(file, 0o600)
    os.rename(file, own_mount.path / "moved")
    assert birth(own_mount.path / "moved") == born[0]
    own_mount.restart()
    assert [birth(path) for path in (own_mount.path / "moved", directory)] == born
