"""A mount whose users do not train pays nothing for what others train."""

from collections import Counter
from collections.abc import Callable

import pytest
from harness.cluster_mount import CLUSTER
from harness.mountpoint import NOT_BLOCKING, Mount, eventually
from harness.training_runs import newest, ones, reduce_until, start

from irdmafs.train import Reducer, Worker

SESSIONS = ("kernel", CLUSTER)
# The kernel asks again for what it has not asked for a second.
ASKS_AGAIN = {"LOOKUP", "GETATTR"}
TIMES = 50

pytestmark = pytest.mark.usefixtures("looks_often")


def cost_of(mount: Mount, use: Callable[[], object]) -> tuple[Counter[str], dict[str, int]]:
    """Return the requests of a use that is warm, and what it asked of etcd and of store nodes."""
    use()
    before = mount.status().get("cluster", {})
    with mount.requests() as counted:
        use()
    after = mount.status().get("cluster", {})
    for kind in (*NOT_BLOCKING, *ASKS_AGAIN):
        counted.pop(kind, None)
    names = ("transactions", "round_trips", "lease_transactions")
    return counted, {name: after[name] - before[name] for name in names if before}


def test_use_of_a_mount_costs_the_same_with_a_run_elsewhere_on_it(
    new_mount: Callable[..., Mount],
) -> None:
    with new_mount() as mount:
        folder = mount.path / "folder"
        folder.mkdir()
        (folder / "file").write_bytes(b"x" * 1000)

        def opens() -> None:
            for _ in range(TIMES):
                (folder / "file").read_bytes()

        def publishes() -> None:
            for _ in range(TIMES):
                (folder / "new").write_bytes(b"y")

        def costs() -> list[tuple[Counter[str], dict[str, int]]]:
            return [cost_of(mount, use) for use in (opens, publishes)]

        before = costs()
        while (again := costs()) != before:
            before = again
        run = start(mount.path / "run")
        with Reducer(run) as reducer, Worker(run, "w") as worker:
            worker.push(ones())
            reduce_until(reducer, lambda: newest(run) == 1, "a version is made")
            worker.pull(timeout_s=60)
            # A mount gives up what it has not used for a while, and others may ask how it is.
            eventually(lambda: costs() == before, f"it costs {before} again", 60)
