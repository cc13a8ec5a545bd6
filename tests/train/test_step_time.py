"""The model of a step's time has the limits that its analysis promises."""

import sys

import pytest
from harness.example_programs import EXAMPLES

sys.path.append(str(EXAMPLES))
from _step_time import Cluster, Work, step_time

GRADIENT_BYTES = 4e9
LINK_BYTES_S = 1e9
WORK = Work(10.0, GRADIENT_BYTES, GRADIENT_BYTES)
TRANSFER_S = GRADIENT_BYTES / LINK_BYTES_S


def exchange_s(cluster: Cluster, work: Work = WORK) -> float:
    found = step_time(work, cluster)
    return found.push_s + found.pull_s


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 10_000])
def test_nodes_on_workers_hosts_cost_what_an_allreduce_costs(workers: int) -> None:
    cluster = Cluster(workers, workers, LINK_BYTES_S, colocated=True)
    assert exchange_s(cluster) == pytest.approx(2 * (workers - 1) / workers * TRANSFER_S)


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 10_000])
def test_push_and_pull_go_once_over_a_link_with_as_many_nodes_of_their_own(workers: int) -> None:
    found = step_time(WORK, Cluster(workers, workers, LINK_BYTES_S))
    assert found.push_s == found.pull_s == pytest.approx(TRANSFER_S)


def test_one_node_receives_the_pushes_of_all() -> None:
    assert exchange_s(Cluster(64, 1, LINK_BYTES_S)) == pytest.approx(2 * 64 * TRANSFER_S)
    assert exchange_s(Cluster(64, 1, LINK_BYTES_S, colocated=True)) == pytest.approx(
        2 * 63 * TRANSFER_S
    )


def test_replicas_are_handed_every_push_and_every_result() -> None:
    work = Work(10.0, GRADIENT_BYTES, GRADIENT_BYTES, state_bytes=6 * GRADIENT_BYTES)
    once = step_time(work, Cluster(8, 8, LINK_BYTES_S))
    twice = step_time(work, Cluster(8, 8, LINK_BYTES_S, replicas=2))
    assert twice.push_s == pytest.approx(once.push_s + TRANSFER_S)
    assert twice.reduce_s == pytest.approx(7 * TRANSFER_S / 8)
    assert twice.pull_s == once.pull_s


def test_pushes_are_hidden_behind_the_computation_that_is_still_left() -> None:
    cluster = Cluster(8, 8, LINK_BYTES_S)
    half = step_time(Work(10.0, GRADIENT_BYTES, GRADIENT_BYTES, overlap=0.2), cluster)
    assert half.push_s == pytest.approx(TRANSFER_S - 2)
    whole = step_time(Work(10.0, GRADIENT_BYTES, GRADIENT_BYTES, overlap=1), cluster)
    assert whole.push_s == 0
    assert whole.pull_s == pytest.approx(TRANSFER_S)


def test_planning_is_what_grows_with_the_workers_in_the_end() -> None:
    few, many = (
        step_time(WORK, Cluster(count, count, LINK_BYTES_S, 0.001, colocated=True, plan_s=0.001))
        for count in (100, 10_000)
    )
    assert many.total_s - few.total_s == pytest.approx(
        9_900 * 0.001 + 2 * (1 / 100 - 1 / 10_000) * TRANSFER_S
    )
