"""The protocol of locks between hosts keeps its promises in every order of events, and needs its rules."""

import pytest
from harness.models.explorer import Broken, explore
from harness.models.locks import Bounds, Model, Rules, State

ONCE = Bounds(rounds=1)
SHARED = Bounds(writers=1, readers=1, rounds=1)
TWICE = Bounds(rounds=2)
CUT_OFF = Bounds(rounds=1, losses=1)
# Some seconds, together.
LARGE = {
    "hosts that come back for the lock": TWICE,
    "a session that ends": CUT_OFF,
    "a session of two that share the lock ends": Bounds(writers=1, readers=1, rounds=1, losses=1),
}
NEEDED = {
    "growth_compares_guard": ONCE,
    "grants_within_session_only": CUT_OFF,
    "shrinks_before_it_says_so": TWICE,
    "publishes_before_it_unlocks": ONCE,
    "publish_compares_session": CUT_OFF,
    "growth_waits_for_its_revision": ONCE,
}
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


@pytest.mark.parametrize("bounds", [ONCE, SHARED], ids=["exclusive", "shared"])
def test_no_update_is_lost_in_any_order_of_events(bounds: Bounds) -> None:
    explored = explore(Model(bounds))
    assert explored.complete
    assert explored.states > 300


@pytest.mark.slow
@pytest.mark.parametrize("bounds", LARGE.values(), ids=LARGE)
def test_no_update_is_lost_whatever_fails(bounds: Bounds) -> None:
    explored = explore(Model(bounds))
    print(explored)
    assert explored.complete


@pytest.mark.parametrize("rule", NEEDED)
def test_without_a_rule_an_update_is_lost(rule: str) -> None:
    with pytest.raises(Broken) as broken:
        explore(Model(NEEDED[rule], Rules()._replace(**{rule: False})), 200_000)
    print(broken.value)


@pytest.mark.parametrize("rule", TRACES)
def test_without_a_rule_a_host_that_heard_of_nothing_gets_in(rule: str) -> None:
    bounds = Bounds(writers=1, readers=2, rounds=1, losses=1)
    with pytest.raises(Broken):
        follow(Model(bounds, Rules()._replace(**{rule: False})), TRACES[rule])
    with pytest.raises(KeyError):
        follow(Model(bounds), TRACES[rule])


def test_every_rule_is_tried() -> None:
    assert {*NEEDED, *TRACES} == {*Rules._fields}
