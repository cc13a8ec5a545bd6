"""Counters of what a transport did: for metrics, and for tests that count round trips."""

# Functions that return dataclasses.field are called in the class bodies below.
# ruff: noqa: RUF009

from collections import Counter
from dataclasses import dataclass, field

from ..observe.figures import count, counts, gauge


@dataclass(slots=True)
class Counters:
    """The caller's end. `round_trips` are those that a caller waited for, one after the other: the streams
    of one transfer count once. `moved_bytes` are by the mover that did it, `fallbacks` the transfers that
    began with one mover and were done by another, `reroutes` those that went on over another queue pair;
    `rails` is what moved over each of this end's rails. `message_bytes` are those of extents inside
    messages, which alone are in Python objects. `connects` are attempts to reach a node."""

    moved_bytes: Counter[str] = field(default_factory=Counter)
    message_bytes: int = 0
    fallbacks: int = 0
    reroutes: int = 0
    rails: Counter[str] = field(default_factory=Counter)
    round_trips: int = 0
    connects: int = 0


@dataclass(slots=True)
class ServerFigures:
    """The node's end."""

    requests: Counter[str] = counts("Requests served, by kind", "kind")
    errors: Counter[str] = counts("Requests that failed, by errno name", "errno")
    received_bytes: int = count("Bytes of extents received")
    sent_bytes: int = count("Bytes of extents sent, also down the chain")
    rejected_peers: int = count("Connections refused: not authenticated, or not understood")
    denied_requests: int = count("Requests of peers without the right to them")
    connections: int = gauge("Connections of peers")
