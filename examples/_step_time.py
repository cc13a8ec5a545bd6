"""How long a step takes, and on how many workers training still pays: a model of it. Pure.

The bytes of each phase over the link that carries most of them, beside the computation that they are hidden
behind, as PCL-DNN is analysed (Das et al. 2016, arXiv:1602.06709). Where the workers' hosts are the store
nodes, each sends and receives (N - 1) / N of all parameters in each phase, as in a reduce-scatter and an
allgather. Where the nodes have hosts of their own, a push and a pull go once over a worker's link, and a
node's link carries its part of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# Publications that follow one another in a step: a push, its plan, the shards, the commit.
PUBLISHED = 4


@dataclass(frozen=True)
class Work:
    """The work of one worker in a step. `push_bytes` and `pull_bytes` are those of all parameters;
    `state_bytes` those of master weights and moments, which no worker reads. `every`: the steps that a
    push is made of (local:H). `overlap`: the part of the computation, 0 to 1, behind which pushes are
    hidden."""

    compute_s: float
    push_bytes: float
    pull_bytes: float
    state_bytes: float = 0.0
    every: int = 1
    overlap: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """The hosts of a training run. `link_bytes_s` is what a link carries each way at the same time;
    `latency_s` what it takes until a host sees what another has published. `colocated`: the nodes are on
    hosts of workers. `plan_s`: what the coordinator spends on each push."""

    workers: int
    nodes: int
    link_bytes_s: float
    latency_s: float = 0.0
    colocated: bool = False
    replicas: int = 1
    plan_s: float = 0.0


class StepTime(NamedTuple):
    """Seconds of a step on average, by phase. `push_s` is without what is hidden behind the computation."""

    compute_s: float
    push_s: float
    plan_s: float
    reduce_s: float
    pull_s: float
    latency_s: float

    @property
    def total_s(self) -> float:
        return sum(self)


def step_time(work: Work, cluster: Cluster) -> StepTime:
    """Return how long a step takes in bsp, or in local:H with ``work.every``.

    A version is whole before it is pulled, so phases follow each other; within a phase the link with the
    most bytes decides. Workers are equally fast.
    """
    more = cluster.replicas - 1
    # The bytes of all workers' pushes that one node keeps.
    share = cluster.workers * work.push_bytes / cluster.nodes
    own, kept = _exchanged(cluster, work.push_bytes)
    # Replication: a node hands on what it is primary of, and is handed as much by others.
    busiest = max(own, kept + more * share)
    if cluster.colocated:
        busiest = max(busiest, work.push_bytes * _others(cluster.nodes) + more * share)
    push_s = busiest / cluster.link_bytes_s
    hidden_s = min(push_s, work.overlap * work.compute_s)
    reduce_s = more * (work.pull_bytes + work.state_bytes) / cluster.nodes / cluster.link_bytes_s
    pull_s = max(_exchanged(cluster, work.pull_bytes)) / cluster.link_bytes_s
    phases = (
        push_s - hidden_s,
        cluster.workers * cluster.plan_s,
        reduce_s,
        pull_s,
        PUBLISHED * cluster.latency_s,
    )
    return StepTime(work.compute_s, *(seconds / work.every for seconds in phases))


def _exchanged(cluster: Cluster, size_bytes: float) -> tuple[float, float]:
    """Return the bytes between the nodes and all workers over a worker's link, and over a node's."""
    at_home = 1 if cluster.colocated else 0
    own = size_bytes
    if cluster.colocated and cluster.nodes == cluster.workers:
        own *= _others(cluster.nodes)
    return own, (cluster.workers - at_home) * size_bytes / cluster.nodes


def _others(nodes: int) -> float:
    return (nodes - 1) / nodes
