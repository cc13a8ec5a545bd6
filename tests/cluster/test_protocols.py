"""Each protocol keeps its promises in every order of events, and needs its rules."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from harness.models import claims, deferring, locks, replication, training
from harness.models.explorer import Broken, explore
from harness.models.locks import Bounds, Model, Rules, State

from irdmafs.backend.model import groups
from irdmafs.backend.model.records import GroupConfig

PROTOCOLS = (claims, deferring, locks, replication, training)
# A node refuses data for an old configuration so that the writer learns of it before its commit fails.
CONVENIENT = {"node_fences_older_configuration"}


def cases(table: str, protocols: tuple[ModuleType, ...], *marks: Any) -> Iterator[Any]:
    """Yield the entries of a table that each protocol has, with the protocol."""
    for protocol in protocols:
        for what, bounds in getattr(protocol, table).items():
            name = f"{protocol.__name__.rpartition('.')[2]}, {what}"
            yield pytest.param(protocol, what, bounds, id=name, marks=marks)


@pytest.mark.parametrize(
    ("protocol", "_what", "bounds"),
    [
        *cases("KEPT", (claims, deferring, locks)),
        *cases("KEPT", (replication, training), pytest.mark.long),
        *cases("BOUNDED", (locks, replication), pytest.mark.slow),
        *cases("LARGE", (replication,), pytest.mark.slow, pytest.mark.timeout(1200)),
    ],
)
def test_promises_are_kept_in_every_order(protocol: ModuleType, _what: str, bounds: Any) -> None:
    explored = explore(protocol.Model(bounds))
    print(explored)
    assert explored.complete
    assert explored.depth > 10 and explored.states > 200


@pytest.mark.parametrize(
    ("protocol", "rule", "bounds"),
    [
        *cases("NEEDED", (claims, deferring, locks, training)),
        *cases("NEEDED", (replication,), pytest.mark.long),
    ],
)
def test_without_this_rule_there_is_harm(protocol: ModuleType, rule: str, bounds: Any) -> None:
    with pytest.raises(Broken) as broken:
        explore(protocol.Model(bounds, protocol.Rules(**{rule: False})))
    print(broken.value)
    assert broken.value.trace


def test_every_rule_is_tried() -> None:
    tried = {rule for protocol in PROTOCOLS for rule in protocol.NEEDED}
    rules = {rule for protocol in PROTOCOLS for rule in protocol.Rules._fields}
    assert tried | TRACES.keys() | CONVENIENT == rules


def test_fencing_at_nodes_is_for_speed_and_not_for_safety() -> None:
    rules = replication.Rules(node_fences_older_configuration=False)
    bounds = replication.Bounds(writers=1, events=0)
    assert explore(replication.Model(bounds, rules)).complete


# --- locks of three hosts


# Three hosts are too many to visit all that may happen. The writer (0) has heard of nothing when one of
# two readers (1, 2) takes the guard away.
COMES_DOWN = (
    *("a process of host 0 wants", "host 0 sends grow"),
    *("a process of host 1 wants", "host 1 sends grow", "etcd answers grow of host 1: True"),
    *("host 1 hears how grow ended", "a process of host 2 wants"),
    *("host 2 takes in 1 and sends put", "etcd answers put of host 2: True"),
    *("host 2 hears how put ended", "host 1 takes in 1 and sends put"),
    *("etcd answers put of host 1: True", "host 1 hears how put ended"),
)
ENDS = ("host 2 thinks its session may be over", "etcd ends the session of host 2")
SHARES = (
    *("host 2 takes in 2 and sends grow", "etcd answers grow of host 2: True"),
    "host 2 hears how grow ended",
)
OVERTAKEN = ("etcd answers grow of host 0: True", "host 0 hears how grow ended")
TRACES = {
    "guard_outlives_leases": (*COMES_DOWN, *SHARES, *ENDS, *OVERTAKEN),
    "removal_compares_guard": (
        *(*COMES_DOWN, *ENDS, "host 2 begins a new session"),
        *("the process of host 1 unlocks", "host 1 takes in 2 and sends remove"),
        *(*SHARES, "etcd answers remove of host 1: True", *OVERTAKEN),
    ),
}


def follow(model: Model, labels: tuple[str, ...]) -> State:
    """Take the steps whose labels begin so. Raises Broken, and KeyError for one that cannot be taken."""
    state = model.initial()
    for wanted in labels:
        found = {label: after for label, after in model.steps(state) if label.startswith(wanted)}
        if not found:
            raise KeyError(wanted)
        (state,) = found.values()
        state = model.reduced(state)
        model.check(state)
    return state


@pytest.mark.parametrize("rule", TRACES)
def test_without_a_rule_a_host_that_heard_of_nothing_gets_in(rule: str) -> None:
    bounds = Bounds(writers=1, readers=2, rounds=1, losses=1)
    with pytest.raises(Broken):
        follow(Model(bounds, Rules()._replace(**{rule: False})), TRACES[rule])
    with pytest.raises(KeyError):
        follow(Model(bounds), TRACES[rule])


# --- the transitions of groups by themselves


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
