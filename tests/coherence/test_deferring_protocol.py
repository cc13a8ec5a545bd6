"""Deferred changes are seen by every look, in every order of events, and the protocol needs its rules."""

import pytest
from harness.models.deferring import Bounds, Model, Rules
from harness.models.explorer import Broken, explore

TWO, CUT_OFF = Bounds(), Bounds(changes=1, losses=1)
NEEDED = dict.fromkeys(Rules._fields, TWO) | {
    "defers_within_session_only": CUT_OFF,
    "stores_compare_without_claim": CUT_OFF,
}


@pytest.mark.parametrize("bounds", [TWO, CUT_OFF], ids=["two hosts", "a claim is lost"])
def test_a_look_sees_every_answered_change_in_any_order_of_events(bounds: Bounds) -> None:
    explored = explore(Model(bounds))
    assert explored.complete
    assert explored.states > 500


@pytest.mark.parametrize("rule", Rules._fields)
def test_every_rule_is_needed(rule: str) -> None:
    with pytest.raises(Broken) as broken:
        explore(Model(NEEDED[rule], Rules()._replace(**{rule: False})))
    print(broken.value)
