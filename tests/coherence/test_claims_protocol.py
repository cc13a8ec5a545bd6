"""The protocol of directories' claims keeps its promises in every order of events, and needs its rules."""

import pytest
from harness.models.claims import Bounds, Model, Rules
from harness.models.explorer import Broken, explore

TWO, CUT_OFF = Bounds(), Bounds(losses=1)
NEEDED = {
    "names_compare_claim": TWO,
    "claims_compare_none": TWO,
    "keeps_within_session_only": CUT_OFF,
    "claim_waits_for_its_revision": TWO,
    "stores_before_it_gives_up": TWO,
    "stores_compare_name": CUT_OFF,
}


@pytest.mark.parametrize("bounds", [TWO, CUT_OFF], ids=["two hosts", "a session ends"])
def test_of_two_hosts_one_makes_a_name_in_any_order_of_events(bounds: Bounds) -> None:
    explored = explore(Model(bounds))
    assert explored.complete
    assert explored.states > 500


@pytest.mark.parametrize("rule", Rules._fields)
def test_every_rule_is_needed(rule: str) -> None:
    with pytest.raises(Broken) as broken:
        explore(Model(NEEDED[rule], Rules()._replace(**{rule: False})))
    print(broken.value)


def test_every_rule_is_tried() -> None:
    assert set(NEEDED) == set(Rules._fields)
