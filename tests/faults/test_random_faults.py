"""Whatever fails, what was acknowledged is readable, whole, and never goes back.

Programs on several mounts write and read while nodes, mounts and etcd members are killed, paused, cut
off, slowed down and filled. IRDMAFS_SEED repeats a run's faults, IRDMAFS_FAULTS says how many,
IRDMAFS_AT_ONCE how many at a time (1: the cluster recovers from each before the next one).
"""

import os
import time
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from harness.clusters import MIB, Cluster, Plan
from harness.seeds import chosen_seed
from harness.storms.faults import AT_ONCE, Fault, Faults, can_write, with_deferred
from harness.storms.history import Operation, Workers, check
from harness.storms.reachability import LOOK_EVERY_S, Gap, Lookouts, gaps

# Errors that a storm may bring: a mount was killed, a node is full.
OF_FAULTS = ("ENOTCONN", "ECONNABORTED", "ENOSPC")
# Two hosts made a file at once, or wrote it in place (docs/sharing.md).
OF_CONFLICTS = ("ESTALE",)
# IRDMAFS_FAULTS asks for more.
FAULTS = 6
ASKED = int(os.environ.get("IRDMAFS_FAULTS") or 0)
# A writer that has what it takes (reachability.py) writes again within so many leases.
GAP_LEASES = 5


def _run(plan: Plan, count: int) -> None:
    seed = chosen_seed()
    print(f"IRDMAFS_FAULTS={count}")
    with Cluster(plan, links=True) as cluster:
        folder = cluster.mounts[0].path / "work"
        folder.mkdir()
        folders = {mount.host.name: mount.path / "work" for mount in cluster.mounts}
        logs = cluster.directory / "history"
        with (
            Workers(folders, logs, seed=seed, largest_bytes=4 * MIB) as workers,
            Lookouts(cluster) as lookouts,
        ):
            faults = Faults(cluster, seed, int(os.environ.get("IRDMAFS_AT_ONCE") or AT_ONCE))
            try:
                faults.run(count)
                workers.stop()
                workers.final_reads()
            finally:
                operations = workers.operations()
                _report(faults, operations)
                longest = _longest_gaps(faults, operations, lookouts)
                _keep(cluster, faults.history, operations)
        # A mount that opens many files of a directory follows it, so that it need not ask etcd.
        kept = with_deferred(faults.history, operations)
        violations = check(kept, across_hosts=False)
        texts = "\n\n".join(f"{v.kind}: {v.text}" for v in violations[:20])
        happened = "\n".join(str(fault) for fault in faults.history)
        assert not violations, f"{len(violations)} with seed {seed}:\n{texts}\n\n{happened}"
        assert sum(o.outcome == "ok" for o in operations) > 10 * count
        refused = dict.fromkeys(("write", "create"), (*OF_FAULTS, *OF_CONFLICTS))  # in place
        failed = [o for o in operations if o.outcome == "failed"]
        odd = [str(o) for o in failed if o.detail not in refused.get(o.kind, OF_FAULTS)]
        assert not odd, f"seed {seed}: {odd}\n{happened}"
        assert max(gap.clear for gap in longest) * LOOK_EVERY_S <= GAP_LEASES * plan.lease_ttl_s, (
            f"seed {seed}: {longest}\n{happened}"
        )


def _report(faults: Faults, operations: list[Operation]) -> None:
    outcomes = Counter(f"{o.kind} {o.outcome}" for o in operations)
    errors = Counter(o.detail for o in operations if o.outcome == "failed")
    print(f"faults: {dict(Counter(fault.kind for fault in faults.history))}")
    print(f"operations: {dict(outcomes.most_common())}; errors: {dict(errors)}")
    slowest = sorted(operations, key=lambda o: o.began - min(o.end, time.monotonic_ns()))[:3]
    for operation in slowest:
        print(f"slow: began {operation.began / 1e9:.3f}: {operation}")


def _longest_gaps(faults: Faults, operations: list[Operation], lookouts: Lookouts) -> list[Gap]:
    """Return, for each writer, the time without a successful write in which it had longest what that takes.
    Print the longest times."""
    ends: dict[tuple[str, int], list[int]] = defaultdict(list)
    for operation in operations:
        if operation.kind != "read" and operation.outcome == "ok":
            ends[operation.host, operation.worker].append(int(operation.end))
    found = []
    for (host, worker), successes in sorted(ends.items()):
        all_gaps = gaps(
            sorted(successes), lookouts.looks[host], partial(can_write, faults.history, host)
        )
        by_clear = sorted(all_gaps, key=lambda gap: -gap.clear)
        by_time = sorted(all_gaps, key=lambda gap: gap.began - gap.ended)
        print(f"worker {worker} on {host}: {len(successes)} writes; longest without one:")
        for gap in dict.fromkeys((*by_time[:3], *by_clear[:5])):
            print(f"  {gap}")
        found += by_clear[:1]
    return found


def _keep(cluster: Cluster, faults: list[Fault], operations: list[Operation]) -> None:
    """IRDMAFS_HISTORY names a directory that keeps what was done and logged, to look into it."""
    if path := os.environ.get("IRDMAFS_HISTORY"):
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "operations").write_text("\n".join(map(str, operations)) + "\n")
        (folder / "faults").write_text("\n".join(map(str, faults)) + "\n")
        for part in cluster.parts():
            (folder / f"{part.name}.log").write_text(part.log_tail(1 << 30))


@pytest.mark.timeout(3 * 3600 if ASKED else 240)
def test_history_is_allowed_while_things_fail() -> None:
    """On a larger cluster if so many faults are asked for; 500 take half an hour."""
    plan = Plan(nodes=3, mounts=2, etcd_members=3, replicas=2, node_config={"rereplicate_after": 3})
    if ASKED:
        plan = replace(plan, nodes=5, mounts=3, replicas=3, buckets=32)
    _run(plan, ASKED or FAULTS)
