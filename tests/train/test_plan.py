"""A version is made of pushes that count once, in an order that does not depend on when they came, when
those are there who are waited for."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from irdmafs.train.config import TrainConfig
from irdmafs.train.plan import Plan, Push, first_plan, is_wanted, may_pull, next_plan, pending

WORKERS = ("a", "b", "c", "d")
syncs = st.sampled_from(["bsp", "local:5", "quorum:1", "quorum:2", "quorum:9", "ssp:1", "async"])
# Workers in the order of their pushes; each pushes its next step.
arrivals = st.lists(st.sampled_from(WORKERS), max_size=16)
expected_workers = st.sampled_from(["auto", WORKERS, ("a", "b"), 2, 4])


def config_of(sync: str, workers: Any = "auto") -> TrainConfig:
    return TrainConfig(rule="sum", sync=sync, workers=workers)


def pushes_of(order: Sequence[str]) -> list[Push]:
    steps = dict.fromkeys(order, 0)
    pushes = []
    for worker in order:
        steps[worker] += 1
        pushes.append(Push(worker, steps[worker], f"{worker}@{steps[worker]}"))
    return pushes


def drain(config: TrainConfig, newest: Plan, there: list[Push], members: set[str]) -> list[Plan]:
    """Return the plans that can be made one after the other; the pushes in them are removed."""
    plans = []
    while (plan := next_plan(config, newest, there, members)) is not None:
        plans.append(plan)
        newest = plan
        counted = {push.path for push in plan.pushes}
        there[:] = [push for push in there if push.path not in counted]
    return plans


@given(syncs, arrivals, st.data())
def test_each_push_counts_once_and_in_the_order_of_its_worker(
    sync: str, order: list[str], data: st.DataObject
) -> None:
    config, there, plans = config_of(sync), list[Push](), [first_plan(config_of(sync))]
    for push in pushes_of(order):
        there.append(push)
        members = data.draw(st.sets(st.sampled_from(WORKERS)))
        plans += drain(config, plans[-1], there, members)
    # All have ended: what they pushed counts.
    while there:
        more = drain(config_of("bsp"), plans[-1], there, set())
        assert more
        plans += more
    counted = [(push.worker, push.step) for plan in plans for push in plan.pushes]
    assert sorted(counted) == sorted((push.worker, push.step) for push in pushes_of(order))
    for worker in WORKERS:
        assert [step for name, step in counted if name == worker] == list(
            range(1, order.count(worker) + 1)
        )
    assert [plan.version for plan in plans] == list(range(len(plans)))
    for before, after in pairwise(plans):
        assert all(after.clocks[name] >= step for name, step in before.clocks.items())


@given(syncs, expected_workers, arrivals, st.randoms(), st.sets(st.sampled_from(WORKERS)))
def test_plan_does_not_depend_on_the_order_in_which_pushes_came(
    sync: str,
    workers: str | int | tuple[str, ...],
    order: list[str],
    random: object,
    members: set[str],
) -> None:
    config, pushes = config_of(sync, workers), pushes_of(order)
    shuffled = list(pushes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    newest = first_plan(config)
    plan = next_plan(config, newest, pushes, members)
    assert next_plan(config, newest, shuffled, members) == plan
    if plan is not None:
        keys = [(push.worker, push.step) for push in plan.pushes]
        assert keys == sorted(keys)


@given(syncs, expected_workers, arrivals, st.sets(st.sampled_from(WORKERS)))
def test_plan_is_made_when_those_are_there_who_are_waited_for(
    sync: str, workers: str | int | tuple[str, ...], order: list[str], members: set[str]
) -> None:
    config, pushes, came = config_of(sync, workers), pushes_of(order), set(order)
    wanted = members if workers == "auto" else workers
    number = wanted if isinstance(wanted, int) else len(set(wanted))
    if sync in ("ssp:1", "async"):
        made = bool(came)
    elif sync.startswith("quorum"):
        made = bool(came) and len(came) >= min(int(sync[7:]), number or 1)
    elif isinstance(wanted, int):
        made = len(came) >= wanted
    else:
        made = bool(came) and set(wanted) <= came
    plan = next_plan(config, first_plan(config), pushes, members)
    assert (plan is not None) == made
    enough, awaited = is_wanted(config, pending(pushes, {}), members)
    assert enough == made
    assert not (made and awaited)
    assert came.isdisjoint(awaited)
    if plan is not None and not plan.apart:
        assert [(push.worker, push.step) for push in plan.pushes] == [
            (worker, 1) for worker in sorted(came)
        ]
    elif plan is not None:
        assert len(plan.pushes) == len(pushes)


@given(arrivals, st.dictionaries(st.sampled_from(WORKERS), st.integers(0, 20)))
def test_push_that_is_not_above_its_workers_clock_never_counts(
    order: list[str], clocks: dict[str, int]
) -> None:
    again = [*pushes_of(order), *pushes_of(order)]
    found = pending(again, clocks)
    assert len({(push.worker, push.step) for push in found}) == len(found)
    assert {(push.worker, push.step) for push in found} == {
        (push.worker, push.step) for push in again if push.step > clocks.get(push.worker, 0)
    }


@given(
    syncs,
    st.integers(0, 9),
    st.dictionaries(st.sampled_from(WORKERS), st.integers(0, 9), min_size=1),
    st.sets(st.sampled_from(WORKERS[1:])),
)
def test_worker_pulls_what_has_its_push_and_in_ssp_is_few_steps_ahead(
    sync: str, pushed: int, clocks: dict[str, int], others: set[str]
) -> None:
    config = config_of(sync)
    members = dict.fromkeys((*others, "a"), 0)
    may = may_pull(config, "a", pushed, pushed, clocks, members)
    behind = min((clocks.get(name, 0) for name in others), default=pushed)
    expected = clocks.get("a", 0) >= pushed
    if sync == "ssp:1":
        expected = expected and behind >= pushed - 1
    assert may == expected
