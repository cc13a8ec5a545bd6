"""Whatever fails, of several hosts one makes a name, and what it published stays.

The hosts make names in the same directories, by turns so fast that they claim them. IRDMAFS_SEED repeats a
run's faults, IRDMAFS_FAULTS says how many.
"""

import os
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from harness.clusters import Cluster, Plan
from harness.mountpoint import eventually
from harness.processes import TakeProcess
from harness.seeds import chosen_seed
from harness.storms import names
from harness.storms.faults import RECOVERY_S, Faults

FAULTS = 3


@pytest.mark.timeout(600)
def test_a_name_is_made_once_while_things_fail(tmp_path: Path, process: TakeProcess) -> None:
    seed = chosen_seed()
    count = int(os.environ.get("IRDMAFS_FAULTS") or FAULTS)
    print(f"IRDMAFS_FAULTS={count}")
    plan = Plan(nodes=3, mounts=3, etcd_members=3, replicas=2, node_config={"rereplicate_after": 3})
    with Cluster(plan, links=True) as cluster:
        for number in range(names.DIRECTORIES):
            (cluster.mounts[0].path / f"directory{number}").mkdir()
        makers = {mount.name: process() for mount in cluster.mounts}
        for mount in cluster.mounts:
            makers[mount.name].start(
                "from harness.storms import names; names.make_names(directory, host, seed, end)",
                directory=mount.path, host=mount.name, seed=seed, end=tmp_path / "end",
            )  # fmt: skip
        faults = Faults(cluster, seed)
        try:
            faults.run(count)
            place = cluster.mounts[0].path
            eventually(lambda: len([*place.glob("*/name*")]) > 20 * count, "many names", RECOVERY_S)
        finally:
            (tmp_path / "end").touch()
        made: dict[int, list[str]] = defaultdict(list)
        tried: dict[int, list[str]] = defaultdict(list)
        outcomes = Counter[str]()
        for name, maker in makers.items():
            for number, outcome in maker.result(RECOVERY_S):
                outcomes[outcome] += 1
                if outcome == "made":
                    made[number].append(name)
                elif outcome == "failed":
                    tried[number].append(name)
        happened = "\n".join(map(str, faults.history))
        print(dict(outcomes), happened)
        assert outcomes["made"] > 10 * count
        for number, hosts in made.items():
            assert len(hosts) == 1, f"seed {seed}: {names.name_of(number)}: {hosts}\n{happened}"
        for mount in cluster.mounts:
            for number in {*made, *tried}:
                path = mount.path / names.name_of(number)
                # After a close that failed, the name stays on its own host, empty.
                own = [""] if mount.name in tried[number] else []
                allowed = made[number] or [*tried[number], *own]
                if made[number] or path.exists():
                    assert path.read_text() in allowed, f"seed {seed}: {path}\n{happened}"
