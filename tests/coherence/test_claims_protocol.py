"""The protocols of directories' claims and of the changes deferred under them keep their promises in every
order of events, and need their rules.

Of two hosts one makes a name; a look sees every answered change.
"""

from typing import Any

import pytest
from harness.models import claims, deferring
from harness.models.explorer import Broken, Machine, explore

KEPT: dict[str, Machine[Any]] = {
    "claims, a session ends": claims.Model(claims.Bounds(losses=1)),
    "deferring, two hosts": deferring.Model(deferring.Bounds()),
    "deferring, a claim is lost": deferring.Model(deferring.Bounds(changes=1, losses=1)),
}
# The rules that are not needed as long as every session lives.
CUT_OFF = {
    "keeps_within_session_only",
    "stores_compare_name",
    "defers_within_session_only",
    "stores_compare_without_claim",
}


@pytest.mark.parametrize("case", KEPT)
def test_promises_are_kept_in_any_order_of_events(case: str) -> None:
    explored = explore(KEPT[case])
    assert explored.complete
    assert explored.states > 500


@pytest.mark.parametrize("rule", (*claims.Rules._fields, *deferring.Rules._fields))
def test_every_rule_is_needed(rule: str) -> None:
    model: Any
    if rule in claims.Rules._fields:
        bounds = claims.Bounds(losses=1 if rule in CUT_OFF else 0)
        model = claims.Model(bounds, claims.Rules(**{rule: False}))
    else:
        limits = deferring.Bounds(changes=1, losses=1) if rule in CUT_OFF else deferring.Bounds()
        model = deferring.Model(limits, deferring.Rules(**{rule: False}))
    with pytest.raises(Broken) as broken:
        explore(model)
    print(broken.value)
