"""The protocol of backend/model/lock_claims.py as a state machine, for explorer.explore.

Hosts count in one file under one lock: each takes it, reads the number, adds one, and gives the lock
back. What is atomic here is atomic there: a transaction in etcd, a host taking in one revision. All else
happens in any order: a transaction that was sent may be applied at any later time, or never when its
lease is over, and its answer may come later still. A host may think its session over at any time, and then
etcd may end it; the host hears of that whenever it does.

The decisions are backend.lock_claims', not copies of them. `Rules` names what the protocol demands; taking
one away must lead to a lost update or to two hosts inside at once.
"""

from collections.abc import Iterator
from fcntl import F_RDLCK, F_WRLCK
from itertools import permutations
from typing import Any, NamedTuple

from harness.models.explorer import Broken, Machine, with_item
from irdmafs.backend.model.lock_claims import NOTHING, POSIX, Claim, Entry, is_blocked, is_covered

IDLE, WANTING, INSIDE, WRITTEN, LOST = "idle", "wanting", "inside", "written", "lost"


class Rules(NamedTuple):
    growth_compares_guard: bool = True
    guard_outlives_leases: bool = True
    removal_compares_guard: bool = True
    grants_within_session_only: bool = True
    shrinks_before_it_says_so: bool = True
    publishes_before_it_unlocks: bool = True
    publish_compares_session: bool = True
    growth_waits_for_its_revision: bool = True


class Bounds(NamedTuple):
    """`writers` and `readers` are hosts; each takes the lock `rounds` times, and `losses` sessions end."""

    writers: int = 2
    readers: int = 0
    rounds: int = 2
    losses: int = 0


class Etcd(NamedTuple):
    """`guard`: its revision, 0: there is none; `guard_of`: who put it last. `alive`: leases of hosts."""

    revision: int
    guard: int
    guard_of: int
    entries: tuple[Entry, ...]
    value: int
    leases: tuple[int, ...]


class Flight(NamedTuple):
    """A transaction that was sent. `answer`: None: not applied yet; (succeeded, revision)."""

    kind: str  # "grow", "put", "remove", "publish"
    lease: int
    guard: int
    entry: Entry
    base: int
    value: int
    answer: tuple[bool, int] | None = None


class Host(NamedTuple):
    """`seen`: how many of the states that etcd had it knows, `value` and `base`: what its file holds,
    and the published value which that comes from."""

    seen: int
    lease: int
    valid: bool
    mine: Entry
    phase: str
    rounds: int
    value: int
    base: int
    flight: Flight | None


class State(NamedTuple):
    past: tuple[Etcd, ...]  # from the oldest that a host has seen last
    hosts: tuple[Host, ...]
    losses: int
    acknowledged: int = 0  # updates that were unlocked without an error

    @property
    def etcd(self) -> Etcd:
        return self.past[-1]


class Model(Machine[State]):
    def __init__(self, bounds: Bounds, rules: Rules | None = None) -> None:
        self.bounds = bounds
        self.rules = rules or Rules()
        kinds = [F_WRLCK] * bounds.writers + [F_RDLCK] * bounds.readers
        self._claims = [Claim(POSIX, kind, 0, 0) for kind in kinds]
        self._orders = [
            order
            for order in permutations(range(len(kinds)))
            if [kinds[at] for at in order] == kinds
        ]

    def initial(self) -> State:
        count = len(self._claims)
        etcd = Etcd(1, 0, -1, (NOTHING,) * count, 0, (1,) * count)
        host = Host(0, 1, True, NOTHING, IDLE, self.bounds.rounds, 0, 0, None)
        return State((etcd,), (host,) * count, self.bounds.losses)

    def canonical(self, state: State) -> State:
        """Hosts of one kind can stand for each other."""
        # The first order is that of the state itself.
        others = [self._permuted(state, order) for order in self._orders[1:]]
        return min(state, *others, key=hash) if others else state

    def _permuted(self, state: State, order: tuple[int, ...]) -> State:
        def etcd(one: Etcd) -> Etcd:
            return one._replace(
                guard_of=order.index(one.guard_of) if one.guard_of >= 0 else -1,
                entries=tuple(one.entries[at] for at in order),
                leases=tuple(one.leases[at] for at in order) if one.leases else (),
            )

        hosts = tuple(state.hosts[at] for at in order)
        return state._replace(past=tuple(map(etcd, state.past)), hosts=hosts)

    def reduced(self, state: State) -> State:
        """Forget what every host has seen and what none looks at, and number revisions from there."""
        oldest = min(host.seen for host in state.hosts)
        past = [one._replace(guard_of=-1, leases=()) for one in state.past[oldest:-1]]
        past.append(state.etcd)
        revisions = {0, *(etcd.revision for etcd in past), *(etcd.guard for etcd in past)}
        for host in state.hosts:
            if host.flight is not None:
                revisions.add(host.flight.guard)
                if host.flight.answer is not None:
                    revisions.add(host.flight.answer[1])
        numbers = {revision: at for at, revision in enumerate(sorted(revisions))}
        return State(
            tuple(Etcd(numbers[etcd[0]], numbers[etcd[1]], *etcd[2:]) for etcd in past),
            tuple(self._renumbered(host, numbers, oldest) for host in state.hosts),
            state.losses,
            state.acknowledged,
        )

    def _renumbered(self, host: Host, numbers: dict[int, int], oldest: int) -> Host:
        flight = host.flight
        if flight is not None:
            kind, lease, guard, entry, base, value, answer = flight
            if answer is not None:
                answer = answer[0], numbers[answer[1]]
            flight = Flight(kind, lease, numbers[guard], entry, base, value, answer)
        return Host(host.seen - oldest, *host[1:-1], flight)

    def check(self, state: State) -> None:
        if state.etcd.value < state.acknowledged:
            raise Broken("an update was unlocked that nobody else can see")
        inside = [
            number
            for number, host in enumerate(state.hosts)
            if host.phase in (INSIDE, WRITTEN) and state.etcd.leases[number] == host.lease
        ]
        for one in inside:
            for other in inside:
                if one < other and self._claims[one].conflicts(self._claims[other]):
                    raise Broken(f"hosts {one} and {other} are inside at once")

    # -- what may happen -------------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        stuck = True
        for number in range(len(state.hosts)):
            for parts in (self._etcd_steps, self._process_steps, self._host_steps):
                for step in parts(state, number):
                    stuck = False
                    yield step
        if stuck and any(host.phase != IDLE or host.rounds for host in state.hosts):
            raise Broken("nobody can go on")

    def _with(self, state: State, number: int, **changes: Any) -> State:
        # As _replace does, in half the time: this is most of what the explorer does.
        past, hosts, losses, acknowledged = state
        host = Host(*map(changes.get, Host._fields, hosts[number]))
        return State(past, with_item(hosts, number, host), losses, acknowledged)

    def _etcd_steps(self, state: State, number: int) -> Iterator[tuple[str, State]]:
        host, etcd = state.hosts[number], state.etcd
        flight = host.flight
        if flight is not None and flight.answer is None:
            after = self._applied(etcd, number, flight)
            revision = etcd.revision + 1
            # Only who grows waits for its revision.
            answer = after is not None, revision if after and flight.kind == "grow" else 0
            done = self._with(state, number, flight=flight._replace(guard=0, answer=answer))
            if after is not None:
                done = done._replace(past=(*state.past, after._replace(revision=revision)))
            yield f"etcd answers {flight.kind} of host {number}: {after is not None}", done
        if state.losses and host.valid:
            doubting = self._with(state, number, valid=False)._replace(losses=state.losses - 1)
            yield f"host {number} thinks its session may be over", doubting
        if not host.valid and etcd.leases[number] == host.lease:
            yield f"host {number} renews its lease", self._with(state, number, valid=True)
            ended = state._replace(past=(*state.past, self._ended(etcd, number)))
            yield f"etcd ends the session of host {number}", ended
        if etcd.leases[number] != host.lease and (flight is None or flight.answer is None):
            # A new session; what was sent in the old one fails.
            phase = LOST if host.phase in (INSIDE, WRITTEN) else host.phase
            value, base = host.value, host.base
            if not self.rules.publish_compares_session and host.phase == WRITTEN:
                flight = Flight("publish", etcd.leases[number], 0, NOTHING, base, value)
            else:
                flight = None
            yield f"host {number} begins a new session", self._with(
                state, number, lease=etcd.leases[number], valid=True, mine=NOTHING, phase=phase,
                flight=flight, value=base if flight is None else value, base=base,
            )  # fmt: skip

    def _ended(self, etcd: Etcd, number: int) -> Etcd:
        guard = etcd.guard
        if not self.rules.guard_outlives_leases and etcd.guard_of == number:
            guard = 0
        return etcd._replace(
            revision=etcd.revision + 1,
            guard=guard,
            entries=with_item(etcd.entries, number, NOTHING),
            leases=with_item(etcd.leases, number, etcd.leases[number] + 1),
        )

    def _applied(self, etcd: Etcd, number: int, flight: Flight) -> Etcd | None:
        """Return etcd after a transaction. None: the transaction fails."""
        if etcd.leases[number] != flight.lease:
            return None
        revision = etcd.revision + 1
        if flight.kind == "publish":
            if etcd.value != flight.base:
                raise Broken(
                    f"host {number} makes {flight.value} of {etcd.value}: an update is lost"
                )
            return etcd._replace(value=flight.value)
        entries = with_item(etcd.entries, number, flight.entry)
        if flight.kind == "put":
            return etcd._replace(entries=entries)
        if flight.kind == "grow":
            if self.rules.growth_compares_guard and etcd.guard != flight.guard:
                return None
            return etcd._replace(entries=entries, guard=revision, guard_of=number)
        if self.rules.removal_compares_guard and etcd.guard != flight.guard:
            return None
        return etcd._replace(entries=entries, guard=0, guard_of=-1)

    def _process_steps(self, state: State, number: int) -> Iterator[tuple[str, State]]:
        host = state.hosts[number]
        writes = self._claims[number].type == F_WRLCK
        if host.phase == IDLE and host.rounds:
            wanting = self._with(state, number, phase=WANTING)
            yield f"a process of host {number} wants the lock", wanting
        elif host.phase == WANTING and self._may_grant(state, number):
            self._check_session(state, number)
            yield f"host {number} grants the lock", self._with(state, number, phase=INSIDE)
        elif host.phase == INSIDE and writes:
            written = self._with(state, number, phase=WRITTEN, value=host.value + 1)
            yield f"the process of host {number} adds one", written
        elif host.phase == INSIDE or (host.phase == WRITTEN and self._may_unlock(host)):
            after = self._with(state, number, phase=IDLE, rounds=host.rounds - 1)
            after = after._replace(acknowledged=state.acknowledged + writes)
            yield f"the process of host {number} unlocks", after
        elif host.phase == LOST:
            told = self._with(state, number, phase=IDLE, rounds=host.rounds - 1)
            yield f"the process of host {number} is told that its lock was lost", told

    def _check_session(self, state: State, number: int) -> None:
        if state.etcd.leases[number] != state.hosts[number].lease:
            raise Broken(f"host {number} grants the lock when its session is over")

    def _may_grant(self, state: State, number: int) -> bool:
        host = state.hosts[number]
        if self.rules.grants_within_session_only and not host.valid:
            return False
        return is_covered(host.mine, self._claims[number])

    def _may_unlock(self, host: Host) -> bool:
        return host.value == host.base or not self.rules.publishes_before_it_unlocks

    def _others(self, etcd: Etcd, number: int) -> list[Entry]:
        return [entry for at, entry in enumerate(etcd.entries) if at != number]

    def _host_steps(self, state: State, number: int) -> Iterator[tuple[str, State]]:
        """A host takes in as many revisions as it needs for a step, with it: to be behind in between leaves
        it all that it may do."""
        found: set[tuple[Any, ...]] = set()
        seen = state.hosts[number].seen
        for at, etcd in enumerate(state.past[seen:], seen):
            known = etcd.guard, etcd.entries, etcd.value
            if known in found:
                continue
            found.add(known)
            ahead = state if at == seen else self._with(state, number, seen=at)
            for label, after in self._decisions(ahead, number):
                what = label, after.hosts[number][1:]
                if what not in found:
                    found.add(what)
                    taken = f" takes in {at - seen} and" if at > seen else ""
                    yield f"host {number}{taken} {label}", after

    def _decisions(self, state: State, number: int) -> Iterator[tuple[str, State]]:
        host = state.hosts[number]
        if host.flight is not None:
            if host.flight.answer is not None:
                yield f"hears how {host.flight.kind} ended", self._heard(state, number)
            return
        if not host.valid:
            return
        seen, claim = state.past[host.seen], self._claims[number]
        others = self._others(seen, number)
        dirty = host.value != host.base
        held = (claim,) if host.phase in (INSIDE, WRITTEN) else ()
        wanted = (claim,) if host.phase == WANTING else ()
        if host.phase == WANTING and not is_covered(host.mine, claim):
            if is_blocked(others, claim):
                if not host.mine.wanted:
                    yield from self._send(
                        state, number, "put", Entry(False, host.mine.held, wanted)
                    )
            else:
                yield from self._send(state, number, "grow", Entry(not any(others), (claim,)))
        if dirty and host.phase != LOST:
            yield from self._send(state, number, "publish", NOTHING)
        exact = Entry(False, held, wanted)
        is_unused = bool(host.mine.held) and host.phase in (IDLE, LOST)
        if any(others) if host.mine.sole else is_unused:
            yield from self._send(state, number, "put", exact)
        if host.mine and not (held or wanted or any(others)):
            yield from self._send(state, number, "remove", NOTHING)

    def _send(
        self, state: State, number: int, kind: str, entry: Entry
    ) -> Iterator[tuple[str, State]]:
        host = state.hosts[number]
        guard = state.past[host.seen].guard if kind in ("grow", "remove") else 0
        base, value = (host.base, host.value) if kind == "publish" else (0, 0)
        flight = Flight(kind, host.lease, guard, entry, base, value)
        mine = host.mine
        if kind in ("put", "remove") and self.rules.shrinks_before_it_says_so:
            mine = entry
        yield f"sends {kind} {entry}", self._with(state, number, flight=flight, mine=mine)

    def _heard(self, state: State, number: int) -> State:
        host = state.hosts[number]
        flight = host.flight
        assert flight is not None
        assert flight.answer is not None
        succeeded, revision = flight.answer
        lost = state.etcd.leases[number] != host.lease
        changes: dict[str, Any] = {"flight": None}
        if flight.kind == "publish":
            if succeeded:
                changes["base"] = flight.value
        elif flight.kind == "grow" and succeeded:
            changes["mine"] = flight.entry
            if self.rules.growth_waits_for_its_revision:
                at = next(i for i, etcd in enumerate(state.past) if etcd.revision >= revision)
                changes["seen"] = max(host.seen, at)
            else:
                at = host.seen
            fresh = state.past[max(host.seen, at)].value
            changes["value"] = changes["base"] = fresh
            granted = self._with(state, number, **changes)
            if host.phase == WANTING and self._may_grant(granted, number):
                changes["phase"] = INSIDE
                self._check_session(state, number)
        elif flight.kind == "remove" and not succeeded and not lost:
            changes["mine"] = state.etcd.entries[number]  # as it was
        elif flight.kind in ("put", "remove") and succeeded:
            changes["mine"] = flight.entry
        return self._with(state, number, **changes)


_ONCE, _SHARED = Bounds(rounds=1), Bounds(writers=1, readers=1, rounds=1)
_TWICE, _CUT_OFF = Bounds(rounds=2), Bounds(rounds=1, losses=1)
KEPT = {"exclusive": _ONCE, "shared": _SHARED}
# Some seconds, together.
BOUNDED = {
    "hosts that come back for the lock": _TWICE,
    "a session that ends": _CUT_OFF,
    "a session of two that share the lock ends": _SHARED._replace(losses=1),
}
# The others are needed where there are three hosts (test_protocols.py).
NEEDED = {
    "growth_compares_guard": _ONCE,
    "grants_within_session_only": _CUT_OFF,
    "shrinks_before_it_says_so": _TWICE,
    "publishes_before_it_unlocks": _ONCE,
    "publish_compares_session": _CUT_OFF,
    "growth_waits_for_its_revision": _ONCE,
}
