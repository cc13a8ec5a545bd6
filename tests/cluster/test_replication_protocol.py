"""The replication protocol keeps its invariants in every order of events, and needs each of its rules."""

import pytest
from harness.models.explorer import Broken, Explored, explore
from harness.models.replication import Model
from harness.models.replication_state import (
    ABORT,
    CRASH,
    DAMAGE,
    EVENTS,
    EXPIRY,
    LOSS,
    PIN,
    REMOVAL,
    Bounds,
    Rules,
)

from irdmafs.backend.model import groups
from irdmafs.backend.model.records import GroupConfig

# Visited completely in little time.
PARTS = {
    "two writers while the group changes": Bounds(epochs=3, events=0),
    "two writers and any one event": Bounds(epochs=2, events=1),
}
# Together some seconds on one core; each is visited completely.
BOUNDED = {
    "late data, late promotions and any one event": Bounds(
        writers=1, events=1, late_puts=True, late_promotions=True
    ),
    "data arrives slowly, and a node or a session dies": Bounds(
        writers=1, events=1, torn=True, kinds=(CRASH, DAMAGE, EXPIRY)
    ),
    "a node keeps for a while what it had as a member": Bounds(
        writers=1, events=1, leftovers=True, torn=True, kinds=(CRASH, DAMAGE)
    ),
    "a writer with a second session": Bounds(
        writers=1, contents=2, epochs=2, events=2, kinds=(EXPIRY, LOSS), late_puts=True
    ),
}
# Half a minute, together.
LARGE = {
    "two writers, changes and any one event": Bounds(epochs=3, events=1),
    "the members in sync are given up after a change": Bounds(
        writers=1, epochs=4, events=2, kinds=(CRASH, REMOVAL)
    ),
    "any two events, of which one may be that the members in sync are given up": Bounds(
        writers=1, epochs=3, events=2, kinds=(*EVENTS, REMOVAL), late_puts=True
    ),
    "the members in sync are given up under two writers": Bounds(
        epochs=3, events=2, kinds=(CRASH, REMOVAL)
    ),
    "a member leaves, comes back and leaves": Bounds(writers=1, epochs=4, events=1),
}
# Which of the rules is needed where.
NEEDED = {
    "commit_compares_configuration": Bounds(writers=1, events=0),
    "commit_compares_session": Bounds(writers=1, epochs=1, kinds=(EXPIRY,)),
    "writer_includes_joining": Bounds(writers=1, events=0),
    "acknowledgement_is_of_one_configuration": Bounds(writers=1, epochs=3, kinds=(DAMAGE,)),
    "abort_only_when_not_committing": Bounds(writers=1, epochs=1, kinds=(ABORT,)),
    "node_waits_for_newer_configuration": Bounds(writers=1, epochs=3, events=0),
    "node_serves_only_sealed": Bounds(writers=1, events=0, torn=True),
    "change_compares_configuration": Bounds(writers=1, events=0),
    "last_in_sync_stays": Bounds(writers=1, events=0),
    "promotion_compares_contents": Bounds(writers=1, events=0),
    "promotion_looks_at_its_own_revision": Bounds(writers=1, events=0),
    "restart_verifies": Bounds(writers=1, kinds=(DAMAGE,)),
    "restart_refences": Bounds(writers=1, kinds=(DAMAGE,)),
    "restart_keeps_pending": Bounds(writers=1, kinds=(CRASH,)),
    "pending_lives_with_its_session": Bounds(writers=1, events=0),
    "old_version_stays_until_superseded": Bounds(epochs=1, events=0),
    "pin_compares_version": Bounds(epochs=1, kinds=(PIN,)),
    "pinned_stays": Bounds(epochs=1, kinds=(PIN,)),
    "group_is_fenced_before_it_is_emptied": Bounds(writers=1, events=2, kinds=(CRASH, REMOVAL)),
    "group_is_emptied_when_nothing_is_named": Bounds(writers=1, kinds=(REMOVAL,)),
}
# A node refuses data for an old configuration so that the writer learns of it before its commit fails.
CONVENIENT = {"node_fences_older_configuration"}


def assert_complete(explored: Explored) -> None:
    print(f"{explored.states} states, {explored.steps} steps, depth {explored.depth}")
    assert explored.complete


@pytest.mark.long
@pytest.mark.parametrize("bounds", PARTS.values(), ids=PARTS.keys())
def test_no_order_of_changes_or_with_one_event_breaks_an_invariant(bounds: Bounds) -> None:
    assert_complete(explore(Model(bounds)))


@pytest.mark.slow
@pytest.mark.parametrize("bounds", BOUNDED.values(), ids=BOUNDED.keys())
def test_no_order_of_events_breaks_an_invariant(bounds: Bounds) -> None:
    assert_complete(explore(Model(bounds)))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("bounds", LARGE.values(), ids=LARGE.keys())
def test_no_order_of_many_events_breaks_an_invariant(bounds: Bounds) -> None:
    assert_complete(explore(Model(bounds)))


@pytest.mark.long
@pytest.mark.parametrize("rule", NEEDED)
def test_without_this_rule_the_explorer_finds_a_way_to_harm(rule: str) -> None:
    rules = Rules()._replace(**{rule: False})
    with pytest.raises(Broken) as broken:
        explore(Model(NEEDED[rule], rules))
    print(broken.value)
    assert broken.value.trace


def test_fencing_at_nodes_is_for_speed_and_not_for_safety() -> None:
    rules = Rules(node_fences_older_configuration=False)
    assert_complete(explore(Model(Bounds(writers=1, events=0), rules)))


def test_every_rule_is_tried() -> None:
    assert NEEDED.keys() | CONVENIENT == set(Rules._fields)


# --- the transitions by themselves


def test_the_first_live_member_in_sync_leads() -> None:
    config = GroupConfig(3, (5, 2, 9), (7,))
    assert groups.leader(config, {2, 7, 9}) == 2
    assert groups.leader(config, {7}) is None
    assert groups.degraded(config, {2, 7, 9}, 3) == 1


def test_dead_members_leave_at_once_but_never_the_last_in_sync() -> None:
    config = GroupConfig(3, (1, 2, 3), (4,))
    assert groups.next_step(config, {2}, (1, 2, 3)) == GroupConfig(4, (2,))
    assert groups.next_step(config, {4}, (4,)) is None


def test_nodes_join_before_others_leave_and_the_target_orders_them() -> None:
    live = {1, 2, 3, 4}
    joining = groups.next_step(GroupConfig(1, (1, 2)), live, (4, 3))
    assert joining == GroupConfig(2, (1, 2), (4, 3))
    assert groups.next_step(joining, live, (4, 3)) is None
    partly = groups.promoted(joining, 3)
    assert groups.next_step(partly, live, (4, 3)) is None
    surplus = groups.next_step(groups.promoted(partly, 4), live, (4, 3))
    assert surplus == GroupConfig(5, (3, 4))
    ordered = groups.next_step(surplus, live, (4, 3))
    assert ordered == GroupConfig(6, (4, 3))
    assert groups.next_step(ordered, live, (4, 3)) is None


def test_a_node_that_is_not_wanted_any_more_stops_joining() -> None:
    assert groups.next_step(GroupConfig(1, (1,), (2,)), {1, 2, 3}, (1, 3)) == GroupConfig(2, (1,))


def test_no_replica_is_given_up_while_its_replacement_is_missing() -> None:
    config = GroupConfig(1, (1, 2))
    # 3 died a moment ago: it is still wanted, and not replaced.
    assert groups.next_step(config, {1, 2}, (1, 3)) is None
    # It lives, but has no room for another group to fill.
    assert groups.next_step(config, {1, 2, 3}, (1, 3), joinable={1, 2}) is None


def test_an_acknowledgement_outlives_only_a_change_that_is_about_others() -> None:
    before = GroupConfig(4, (1, 2), (3,))
    assert groups.has_still(before, before, 1)
    assert groups.has_still(before, groups.without(before, 2), 1)
    assert groups.has_still(before, groups.promoted(before, 3), 3)
    assert not groups.has_still(before, groups.without(before, 2), 2)
    assert not groups.has_still(before, groups.demoted(before, 1), 1)
    assert not groups.has_still(before, groups.refenced(before), 1)
    assert not groups.has_still(before, groups.without(groups.without(before, 3), 2), 1)
