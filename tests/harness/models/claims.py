"""The protocol of backend/store/remote/claims.py as a state machine, for explorer.explore.

Hosts make one name in one directory, each at most once, exclusively, and publish the file. What is atomic
here is atomic there: a transaction in etcd, a host taking in one revision. All else happens in any order: a
transaction that was sent may be applied at any later time. A host may think its session over at any time,
and only then etcd may end it, with the host's claim.

`Rules` names what the protocol demands; taking one away must lead to a name that two hosts made, or to a
published file without its name.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from harness.models.explorer import Broken, Machine, with_item

NOBODY = -1


class Rules(NamedTuple):
    names_compare_claim: bool = True
    claims_compare_none: bool = True
    keeps_within_session_only: bool = True
    claim_waits_for_its_revision: bool = True
    stores_before_it_gives_up: bool = True
    stores_compare_name: bool = True


class Bounds(NamedTuple):
    """`losses` sessions end."""

    losses: int = 0


class Etcd(NamedTuple):
    """`claim` and `name`: the hosts that have them; `seen`: the name's file has a version."""

    claim: int = NOBODY
    name: int = NOBODY
    seen: bool = False
    ended: frozenset[int] = frozenset()


class Flight(NamedTuple):
    """A transaction that was sent, with what it compares."""

    kind: str  # "claim", "make", "store", "publish", "give up"
    claim: int
    name: int


class Host(NamedTuple):
    """`applied`: how many of the states that etcd had it knows. `made`: "" no file, "kept" here alone,
    "stored", "published", "lost"."""

    applied: int = 0
    valid: bool = True
    made: str = ""
    takes_claim: bool = True
    gives_up: bool = False
    flight: Flight | None = None


class State(NamedTuple):
    past: tuple[Etcd, ...]
    hosts: tuple[Host, ...]
    losses: int

    @property
    def etcd(self) -> Etcd:
        return self.past[-1]


class Model(Machine[State]):
    def __init__(self, bounds: Bounds, rules: Rules | None = None) -> None:
        self.bounds = bounds
        self.rules = rules or Rules()
        self._decisions = cache(self._decide)

    def initial(self) -> State:
        return State((Etcd(),), (Host(), Host()), self.bounds.losses)

    def reduced(self, state: State) -> State:
        """Forget what every host has seen."""
        oldest = min(host.applied for host in state.hosts)
        hosts = tuple(host._replace(applied=host.applied - oldest) for host in state.hosts)
        return State(state.past[oldest:], hosts, state.losses)

    def check(self, state: State) -> None:
        """Each host that has made the name, and whose session lives, believes that nobody else did."""
        makers = [
            number
            for number, host in enumerate(state.hosts)
            if host.made in ("kept", "stored") and number not in state.etcd.ended
        ]
        if len(makers) > 1:
            raise Broken(f"hosts {makers} have made the name")
        for number, host in enumerate(state.hosts):
            if host.made == "published" and (state.etcd.name, state.etcd.seen) != (number, True):
                raise Broken(f"the file that host {number} published has lost its name")

    # -- what may happen -------------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        for number, host in enumerate(state.hosts):
            if host.flight is not None:
                answered = self._answered(state, number)
                yield f"etcd answers {host.flight.kind} of host {number}", answered
            if state.losses and host.valid:
                lost = self._with(state, number, valid=False)._replace(losses=state.losses - 1)
                yield f"host {number} thinks its session over", lost
            if not host.valid and number not in state.etcd.ended:
                yield f"etcd ends the session of host {number}", self._ended(state, number)
            if host.flight is None:
                yield from self._host_steps(state, number)

    def _host_steps(self, state: State, number: int) -> Iterator[tuple[str, State]]:
        """A host takes in as many revisions as it needs for a step, with it: to be behind in between leaves
        it all that it may do."""
        host, etcd = state.hosts[number], state.etcd
        anew, has_claim = host._replace(applied=0), etcd.claim == number
        found: dict[tuple[str, Host], int] = {}
        for at in range(host.applied, len(state.past)):
            for decision in self._decisions(number, anew, state.past[at], has_claim):
                found.setdefault(decision, at)
        for (label, after), at in found.items():
            if after.made == "kept" != host.made and number in etcd.ended:
                raise Broken(f"host {number} keeps a file when its session is over")
            hosts = with_item(state.hosts, number, after._replace(applied=at))
            yield f"host {number} {label}", State(state.past, hosts, state.losses)

    def _decide(
        self, number: int, host: Host, known: Etcd, has_claim: bool
    ) -> list[tuple[str, Host]]:
        """Return what a host may do that knows so much. `has_claim`: etcd has its claim by now."""
        found = []
        # A claim of a session that has ended is nobody's.
        if self.rules.claim_waits_for_its_revision:
            has_claim = known.claim == number
        is_ours = has_claim and not host.gives_up
        if self.rules.keeps_within_session_only and not host.valid:
            is_ours = False
        is_free = known.name == NOBODY or (not known.seen and known.name in known.ended)
        sent = []
        if not host.made and is_free:
            if is_ours:
                found.append(("keeps its file to itself", host._replace(made="kept")))
            elif known.claim in (NOBODY, number):
                sent.append("make")
        if host.made == "kept" and (known.name in (NOBODY, number) or known.name in known.ended):
            sent.append("publish")
            if known.claim != number or host.gives_up:
                sent.append("store")
        elif host.made == "kept":
            found.append(("finds its name taken", host._replace(made="lost")))
        if host.made == "stored":
            sent.append("publish")
        if known.claim == NOBODY and host.takes_claim and host.valid:
            sent.append("claim")
        if known.claim == number and not host.gives_up:
            found.append(("hears a wish", host._replace(gives_up=True)))
        has_stored = host.made != "kept" or not self.rules.stores_before_it_gives_up
        if host.gives_up and known.claim == number and has_stored:
            sent.append("give up")
        for kind in sent:
            flight = Flight(kind, known.claim, known.name)
            takes_claim = host.takes_claim and kind != "claim"
            found.append((f"sends {kind}", host._replace(flight=flight, takes_claim=takes_claim)))
        return found

    def _answered(self, state: State, number: int) -> State:
        """Return the state after a transaction was applied, or refused, and its host has heard of it. The
        changes reach the host as revisions."""
        host, etcd = state.hosts[number], state.etcd
        flight = host.flight
        assert flight is not None
        state = self._with(state, number, flight=None)
        if flight.kind == "claim":
            if number in etcd.ended or (self.rules.claims_compare_none and etcd.claim != NOBODY):
                return state
            return self._changed(state, claim=number)
        if flight.kind == "give up":
            return self._changed(state, claim=NOBODY) if etcd.claim == number else state
        if self.rules.names_compare_claim and etcd.claim != flight.claim:
            return state
        compares_name = self.rules.stores_compare_name or flight.kind == "make"
        # Nobody else has made the name as long as the claim is the host's own.
        if compares_name and flight.claim != number and etcd.name != flight.name:
            return state
        if flight.kind == "publish":
            if number in etcd.ended:
                return state  # it compares the session
            state = self._with(state, number, made="published")
            return self._changed(state, name=number, seen=True)
        state = self._with(state, number, made="stored")
        return self._changed(state, name=number, seen=False)

    def _ended(self, state: State, number: int) -> State:
        etcd = state.etcd
        claim = NOBODY if etcd.claim == number else etcd.claim
        return self._changed(state, claim=claim, ended=etcd.ended | {number})

    def _changed(self, state: State, **changes: Any) -> State:
        return state._replace(past=(*state.past, state.etcd._replace(**changes)))

    def _with(self, state: State, number: int, **changes: Any) -> State:
        host = state.hosts[number]._replace(**changes)
        return state._replace(hosts=with_item(state.hosts, number, host))


KEPT = {"a session ends": Bounds(losses=1)}
# Some rules are not needed as long as every session lives.
NEEDED = dict.fromkeys(Rules._fields, Bounds()) | dict.fromkeys(
    ("keeps_within_session_only", "stores_compare_name"), Bounds(losses=1)
)
