"""Deferred changes in a directory of which a host has an exclusive claim (backend/namespace/deferred.py),
as a state machine for explorer.explore.

A writer changes the directory, and counts what was answered; a reader looks, and counts what it sees. What
is atomic here is atomic there: a transaction in etcd, a host taking in one revision. All else happens in
any order. The writer may think its session over at any time, and only then etcd may end it; the reader may
stop waiting for the writer, and delete its claim. What is deferred then is stored later, unless the reader
has changed the same: then it is lost, and nothing else.

`Rules` names what the protocol demands; taking one away must lead to a look that misses an answered change,
or to a change of the reader that is undone.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from harness.models.explorer import Broken, Machine

NOBODY, ORDINARY, EXCLUSIVE = range(3)
NOTHING = -1


class Rules(NamedTuple):
    defers_unfollowed_only: bool = True
    defers_within_session_only: bool = True
    defers_what_it_knows_exclusive: bool = True
    looks_wait_for_holder: bool = True
    followers_heed_claims: bool = True
    stores_before_it_shares: bool = True
    stores_compare_without_claim: bool = True
    changes_wait_for_followers: bool = True


class Bounds(NamedTuple):
    """`follows`: how often the reader follows without a look that waits for the writer. `losses`: sessions
    that end, or claims that the reader deletes."""

    changes: int = 2
    looks: int = 1
    claims: int = 2
    follows: int = 1
    losses: int = 0


class Etcd(NamedTuple):
    """`claim` is the writer's, and `number` its revision. `changed`: by the reader, what is deferred."""

    claim: int = NOBODY
    number: int = 0
    changed: bool = False
    followed: bool = False  # by the reader
    stored: int = 0
    ended: bool = False

    @property
    def for_writer(self) -> tuple[int, int, bool]:
        """Return all that a writer may look at once it knows this state."""
        return self.claim, self.number, self.followed

    @property
    def for_reader(self) -> tuple[bool, int]:
        """Return all that a reader may look at once it knows this state: `claim` hides the directory."""
        return self.claim == EXCLUSIVE, self.stored


class Writer(NamedTuple):
    """Changes are `deferred` under the claim with the number `under`. `claim`: the one that a transaction
    compares which was sent. `waits_for`: what a follower has to know, of what is ahead of it, before so
    many changes are `done`; NOTHING: the writer does not wait."""

    valid: bool = True
    deferred: int = 0
    under: int = 0
    shares: bool = False
    sent: str = ""
    claim: int = 0
    waits_for: int = NOTHING
    done: int = 0


class Reader(NamedTuple):
    """`phase`: "" it does not look, "asks", or "waits" for what etcd had when it was asked. `must`: how
    many changes were answered when it began. `follows_from`: with which of what is ahead of it, or right
    after it, it learns that it follows; NOTHING: it has, or does not follow."""

    follows_from: int = NOTHING
    phase: str = ""
    until: int = 0
    must: int = 0


class State(NamedTuple):
    """`to_writer` and `to_reader`: what each of them knows, and then what it has still to take in. They are
    apart, as nothing depends on which of the two is behind the other."""

    etcd: Etcd
    to_writer: tuple[tuple[int, int, bool], ...]
    to_reader: tuple[tuple[bool, int], ...]
    writer: Writer
    reader: Reader
    answered: int  # of the stored changes
    left: Bounds

    @property
    def safe(self) -> int:
        """Changes that were answered and must be seen."""
        writer, etcd = self.writer, self.etcd
        is_held = etcd.claim == EXCLUSIVE and etcd.number == writer.under
        return self.answered + (writer.deferred if is_held else 0)


class Model(Machine[State]):
    def __init__(self, bounds: Bounds, rules: Rules | None = None) -> None:
        self.bounds = bounds
        self.rules = rules or Rules()

    def initial(self) -> State:
        return State(
            Etcd(), ((NOBODY, 0, False),), ((False, 0),), Writer(), Reader(), 0, self.bounds
        )

    def reduced(self, state: State) -> State:
        """Without what nobody looks at: under which claim nothing is deferred."""
        writer = state.writer
        return state if writer.deferred or not writer.under else self._writer(state, under=0)

    # -- what may happen -------------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """A host takes revisions in, as many as it needs, with a step for which it needs them: to be behind
        in between leaves it all that it may do."""
        writer, reader, left = state.writer, state.reader, state.left
        may_lose = left.losses or not writer.valid or state.etcd.changed
        if not (left.looks or reader.phase or may_lose):
            return  # No promise can be broken any more.
        if writer.sent:
            yield f"etcd answers {writer.sent}", self._answered(state)
        elif writer.waits_for != NOTHING:
            waited = state
            if self.rules.changes_wait_for_followers and state.etcd.followed:
                waited = self._reader_knows(state, writer.waits_for)
            waited = self._writer(waited, waits_for=NOTHING, done=0)
            answered = state.answered + writer.done
            yield "followers know the changes", waited._replace(answered=answered)
        else:
            for at, known in enumerate(state.to_writer):
                if known not in state.to_writer[:at]:
                    yield from self._writer_steps(state._replace(to_writer=state.to_writer[at:]))
        for at in range(len(state.to_reader)):
            yield from self._reader_steps(self._reader_knows(state, at))
        if left.losses and writer.valid:
            fewer = state._replace(left=left._replace(losses=left.losses - 1))
            yield "the writer thinks its session over", self._writer(fewer, valid=False)
        if not writer.valid and not state.etcd.ended:
            yield "etcd ends the writer's session", self._claim_gone(state, ended=True)
        if left.losses and state.etcd.claim == EXCLUSIVE and reader.phase == "waits":
            state = state._replace(left=left._replace(losses=left.losses - 1))
            yield "the reader deletes the claim", self._claim_gone(state)
            yield "the reader deletes the claim, and changes", self._claim_gone(state, changed=True)

    def _writer_steps(self, state: State) -> Iterator[tuple[str, State]]:
        rules, writer, left = self.rules, state.writer, state.left
        claim, number, followed = state.to_writer[0]
        mine = (claim, number) if rules.defers_what_it_knows_exclusive else state.etcd[:2]
        defers = mine[0] == EXCLUSIVE and not writer.shares
        if writer.deferred and writer.under != mine[1]:
            defers = False
        if rules.defers_unfollowed_only:
            defers = defers and not followed
        if rules.defers_within_session_only:
            defers = defers and writer.valid
        if left.changes:
            fewer = state._replace(left=left._replace(changes=left.changes - 1))
            if defers:
                if state.etcd.ended:
                    raise Broken("a change is deferred when the session is over")
                deferred = self._writer(fewer, deferred=writer.deferred + 1, under=mine[1])
                yield "a change is deferred", deferred
            elif not writer.deferred:
                yield "a change is sent", self._sent(fewer, "the change")
        if writer.deferred:
            yield "the deferred changes are sent", self._sent(state, "the deferred changes")
        may_claim = claim != EXCLUSIVE and not followed and writer.valid
        if may_claim and left.claims:
            fewer = state._replace(left=left._replace(claims=left.claims - 1))
            yield "a claim is sent", self._sent(fewer, "the claim")
        if claim == EXCLUSIVE and followed:
            if not writer.shares:
                yield "the writer notices a follower", self._writer(state, shares=True)
            elif not (writer.deferred and rules.stores_before_it_shares):
                yield "the writer shares its claim", self._sent(state, "that the claim is shared")

    def _reader_steps(self, state: State) -> Iterator[tuple[str, State]]:
        reader, left = state.reader, state.left
        hidden, _ = state.to_reader[0]
        if not reader.phase:
            if left.looks:
                fewer = state._replace(left=left._replace(looks=left.looks - 1))
                yield "the reader looks", self._reader(fewer, phase="asks", must=state.safe)
            if state.etcd.followed:
                ended = self._reader(state, follows_from=NOTHING)
                yield "the reader does not follow any more", self._changed(ended, followed=False)
            elif left.follows:
                fewer = state._replace(left=left._replace(follows=left.follows - 1))
                yield "the reader follows the directory", self._following(fewer)
            return
        if reader.phase == "asks":
            heeds = hidden and self.rules.followers_heed_claims
            if state.etcd.followed and reader.follows_from <= 0 and not heeds:
                told = self._reader(state, follows_from=NOTHING)
                yield "the reader looks as a follower", self._seen(told)
            if not state.etcd.followed or reader.follows_from >= 0 or heeds:
                newest = len(state.to_reader) - 1
                yield "etcd is asked", self._reader(state, phase="waits", until=newest)
        elif not reader.until:
            if not hidden or not self.rules.looks_wait_for_holder:
                yield "the look is answered", self._seen(state)
            elif not state.etcd.followed:
                yield "the reader follows the directory", self._following(state)

    def _following(self, state: State) -> State:
        state = self._changed(state, followed=True)
        return self._reader(state, follows_from=len(state.to_reader) - 1)

    def _reader_knows(self, state: State, at: int) -> State:
        """Return the state after the reader has taken in so much of what is ahead of it."""
        reader, waits_for = state.reader, state.writer.waits_for
        if waits_for != NOTHING:
            state = self._writer(state, waits_for=max(0, waits_for - at))
        until, follows_from = max(0, reader.until - at), max(NOTHING, reader.follows_from - at)
        state = self._reader(state, until=until, follows_from=follows_from)
        return state._replace(to_reader=state.to_reader[at:])

    def _seen(self, state: State) -> State:
        reader = state.reader
        _, seen = state.to_reader[0]
        if seen < reader.must:
            raise Broken(f"{reader.must} changes were answered, and the look shows {seen}")
        return self._reader(state, phase="", until=0, must=0)

    def _sent(self, state: State, what: str) -> State:
        _, number, _ = state.to_writer[0]
        compared = state.writer.under if what == "the deferred changes" else number
        return self._writer(state, sent=what, claim=compared)

    def _answered(self, state: State) -> State:
        """Return the state after a transaction was applied, or refused, and the writer has heard of it."""
        writer, etcd = state.writer, state.etcd
        what, holds = writer.sent, etcd.number == writer.claim
        state = self._writer(state, sent="", claim=0)
        if what == "the deferred changes":
            if not holds and etcd.changed:
                if self.rules.stores_compare_without_claim:
                    return self._writer(state, deferred=0)
                raise Broken("what the reader changed is undone")
            state = self._changed(state, stored=etcd.stored + writer.deferred)
            state = self._writer(state, deferred=0)
            if holds:
                return state._replace(answered=state.answered + writer.deferred)
            return self._writer(state, waits_for=len(state.to_reader) - 1, done=writer.deferred)
        if not holds:
            # The change is decided anew.
            left = state.left
            more = left._replace(changes=left.changes + (what == "the change"))
            return self._writer(state, shares=False)._replace(left=more)
        if what == "the change":
            state = self._changed(state, stored=etcd.stored + 1)
            return self._writer(state, waits_for=len(state.to_reader) - 1, done=1)
        if what == "the claim":
            return state if etcd.ended else self._claimed(state, EXCLUSIVE)
        return self._writer(self._claimed(state, ORDINARY), shares=False)

    def _claimed(self, state: State, claim: int) -> State:
        return self._changed(state, claim=claim, number=state.etcd.number + 1)

    def _claim_gone(self, state: State, **changes: Any) -> State:
        """Return the state in which what is deferred is lost: nobody has to see it any more."""
        number = state.etcd.number + 1
        state = self._changed(state, claim=NOBODY, number=number, **changes)
        return self._reader(state, must=min(state.reader.must, state.safe))

    def _changed(self, state: State, **changes: Any) -> State:
        etcd = state.etcd._replace(**changes)
        to_writer, to_reader = state.to_writer, state.to_reader
        if etcd.for_writer != to_writer[-1]:
            to_writer = (*to_writer, etcd.for_writer)
        if etcd.for_reader != to_reader[-1]:
            to_reader = (*to_reader, etcd.for_reader)
        return state._replace(etcd=etcd, to_writer=to_writer, to_reader=to_reader)

    def _writer(self, state: State, **changes: Any) -> State:
        return state._replace(writer=state.writer._replace(**changes))

    def _reader(self, state: State, **changes: Any) -> State:
        return state._replace(reader=state.reader._replace(**changes))


KEPT = {"two hosts": Bounds(), "a claim is lost": Bounds(changes=1, losses=1)}
# Some rules are not needed as long as every session lives.
NEEDED = dict.fromkeys(Rules._fields, Bounds()) | dict.fromkeys(
    ("defers_within_session_only", "stores_compare_without_claim"), Bounds(changes=1, losses=1)
)
