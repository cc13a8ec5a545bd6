"""The protocol of training keeps its promises in every order of events, and needs its rules."""

import pytest
from harness.models.explorer import Broken, explore
from harness.models.training import Bounds, Model, Rules

KEPT = {
    "two coordinators": Bounds(steps=2),
    "two reducers of a shard": Bounds(workers=1, steps=3, reducers=2),
    "two shards": Bounds(shards=2),
    "a coordinator that was stopped for long": Bounds(coordinators=3, reducers=2),
    "bsp": Bounds(sync="bsp", steps=2),
    "quorum": Bounds(sync="quorum:1", steps=2),
    "pushes that are repeated": Bounds(workers=1, steps=2, again=True, reducers=2),
    "a push that is removed": Bounds(removals=1),
    "a push that is removed between two shards": Bounds(workers=1, removals=1, shards=2),
    "a worker that is replaced": Bounds(workers=1, steps=3, coordinators=1, replaced=True),
    "a worker that is replaced beside another": Bounds(steps=2, coordinators=1, replaced=True),
    "sums ahead of the plan": Bounds(steps=2, coordinators=1, reducers=2, sync="bsp", ahead=True),
    "sums ahead, of a worker that is replaced": Bounds(
        workers=1, steps=2, coordinators=1, replaced=True, ahead=True
    ),
    "sums ahead, of a push that is removed": Bounds(removals=1, sync="bsp", ahead=True),
}
NEEDED = {
    "plan_is_made_once": Bounds(),
    "commit_never_replaces": Bounds(coordinators=3, reducers=2),
    "only_pending_pushes_count": Bounds(workers=1, again=True),
    "tidies_only_what_counted": Bounds(),
    "commits_when_all_shards_are_there": Bounds(),
    "attempts_have_directories_of_their_own": Bounds(workers=1, removals=1, shards=2),
    "joining_removes_what_is_staged": Bounds(workers=1, steps=2, coordinators=1, replaced=True),
    "joining_lists_pushes_after_removing": Bounds(workers=1, coordinators=1, replaced=True),
    "joining_reads_clocks_after_listing": Bounds(workers=1, coordinators=1, replaced=True),
    "sums_ahead_are_of_the_planned_files": Bounds(
        workers=1, coordinators=1, replaced=True, ahead=True
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", KEPT)
def test_every_push_counts_once_and_a_version_is_made_by_one_plan(case: str) -> None:
    assert explore(Model(KEPT[case])).complete


@pytest.mark.parametrize("rule", Rules._fields)
def test_rule_is_needed(rule: str) -> None:
    with pytest.raises(Broken):
        explore(Model(NEEDED[rule], Rules(**{rule: False})))
