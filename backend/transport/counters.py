"""Plain counters of what a transport did, for metrics and for tests that count round trips."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Of one end. `round_trips` are those a caller waited for, one after the other: the streams of one
    transfer count once. `moved_bytes` are a caller's, by the mover that did it, `fallbacks` the transfers
    that began with one mover and were done by another, `reroutes` those that went on over another queue
    pair; `rails` is what moved over each of this end's rails. `message_bytes` are a caller's, too: those of
    extents inside messages, which alone are in Python objects. `rejected` are connections of strangers, of
    peers that made no sense, and data connections in which somebody else spoke; `denied` is how often a
    peer asked for something without the right to it."""

    requests: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    received_bytes: int = 0
    sent_bytes: int = 0
    moved_bytes: Counter[str] = field(default_factory=Counter)
    message_bytes: int = 0
    fallbacks: int = 0
    reroutes: int = 0
    rails: Counter[str] = field(default_factory=Counter)
    round_trips: int = 0
    connects: int = 0
    connections: int = 0
    rejected: int = 0
    denied: int = 0
