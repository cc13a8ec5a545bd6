"""The protocol of docs/training.md as a state machine, for explorer.explore.

Workers push; coordinators and reducers make versions. Each step of a process is one operation on files,
which is atomic there, and happens at any time: so a process that stops anywhere, for as long as others
take its place, is every order of steps. Locks are left out: any number of coordinators and reducers may
believe that the part is theirs.

The decisions are irdmafs.train.plan's, not copies of them. `Rules` names what the protocol demands; taking
one away must lead to a push that counts twice, or never, or to a version made from two plans.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

import msgspec

from harness.models.explorer import Broken, Machine, with_item
from irdmafs.train.config import TrainConfig
from irdmafs.train.plan import Push, first_plan, next_plan, pending


class Key(NamedTuple):
    """A push: its worker and its step, which process of that name made it, and the step that its file was
    made for, where pushes are written into the files of others."""

    worker: str
    step: int
    by: int = 0
    file: int = 0

    @property
    def path(self) -> str:
        return f"{self.worker}@{self.step};by={self.by}"


class Rules(NamedTuple):
    plan_is_made_once: bool = True
    commit_never_replaces: bool = True
    only_pending_pushes_count: bool = True
    tidies_only_what_counted: bool = True
    commits_when_all_shards_are_there: bool = True
    attempts_have_directories_of_their_own: bool = True
    joining_removes_what_is_staged: bool = True
    joining_lists_pushes_after_removing: bool = True
    joining_reads_clocks_after_listing: bool = True
    sums_ahead_are_of_the_planned_files: bool = True
    writes_anew_only_what_counted: bool = True
    leaves_the_last_one_to_who_takes_part: bool = True
    looks_again_when_the_worker_has_ended: bool = True


class Bounds(NamedTuple):
    """`workers` push `steps` each; `coordinators` and, for each of `shards`, `reducers` make
    versions. `again`: a worker that does not know that its push was acknowledged may push it again.
    `removals`: pushes that somebody removes who should not. `replaced`: the first worker may be stopped
    for a while, and another process takes its place. `ahead`: reducers sum what is staged before there is
    a plan. `anew`: as in small runs, workers write pushes into the file of their last one, and coordinators
    remove files by their names; a worker ends with its last push."""

    workers: int = 2
    steps: int = 1
    coordinators: int = 2
    shards: int = 1
    reducers: int = 1
    sync: str = "async"
    again: bool = False
    removals: int = 0
    replaced: bool = False
    ahead: bool = False
    anew: bool = False


class Made(NamedTuple):
    """A plan, and by which plan each shard was made: None, not yet. `skipped`: pushes that were gone when
    this attempt was planned, and count for nothing."""

    pushes: tuple[Key, ...]
    clocks: tuple[tuple[str, int], ...]
    shards: tuple[tuple[Key, ...] | None, ...]
    skipped: tuple[Key, ...] = ()


class Process(NamedTuple):
    """A coordinator or a reducer: how far it is, the newest version that it knows, and what it read.
    `attempt`: whose plan that is."""

    phase: str = "idle"
    newest: int = 0
    read: tuple[Key, ...] = ()
    attempt: int = 0


class Worker(NamedTuple):
    """A process with the name of the worker that is replaced. `step`: the last one that it knows to be
    pushed; `joined`: how many of the operations of joining it has done."""

    phase: str = "idle"
    step: int = 0
    joined: int = 0


class State(NamedTuple):
    """`acknowledged`: pushes whose rename returned; `present`: files in push/; `removed`: those that were
    removed while they had to count. `versions` and `next`: the directories, by number, and in next by
    number and attempt."""

    acknowledged: frozenset[Key]
    present: frozenset[Key]
    removed: frozenset[Key]
    versions: tuple[tuple[int, Made], ...]
    next: tuple[tuple[tuple[int, int], Made], ...]
    coordinators: tuple[Process, ...]
    reducers: tuple[Process, ...]
    replaced: tuple[Worker, ...] = ()


class Model(Machine[State]):
    """A machine for explorer.explore."""

    def __init__(self, bounds: Bounds, rules: Rules | None = None) -> None:
        self._bounds = bounds
        self._rules = rules or Rules()
        self._checked: set[tuple[object, ...]] = set()  # without processes
        self._config = TrainConfig(sync=bounds.sync, workers=bounds.workers)
        self._planned = cache(self._as_planned)
        self._joining = ["removes", "lists", "reads clocks"]
        if not self._rules.joining_removes_what_is_staged:
            self._joining.remove("removes")
        elif not self._rules.joining_lists_pushes_after_removing:
            self._joining = ["lists", "removes", "reads clocks"]
        elif not self._rules.joining_reads_clocks_after_listing:
            self._joining = ["removes", "reads clocks", "lists"]

    def initial(self) -> State:
        bounds = self._bounds
        first = Made((), (), ((),) * bounds.shards)
        return State(
            frozenset(), frozenset(), frozenset(), ((0, first),), (),
            (Process(),) * bounds.coordinators, (Process(),) * (bounds.reducers * bounds.shards),
            (Worker(joined=len(self._joining)), Worker("joins")) if bounds.replaced else (),
        )  # fmt: skip

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        for number, worker in enumerate(state.replaced):
            for label, after, then in self._work(state, worker, number):
                workers = with_item(after.replaced, number, then)
                yield f"process {number} of worker 0 {label}", after._replace(replaced=workers)
        for number in range(self._bounds.replaced, self._bounds.workers):
            done = self._done(state, f"w{number}")
            if done < self._bounds.steps:
                key, there = Key(f"w{number}", done + 1), state.present
                if self._bounds.anew:
                    key, there = self._anew(state, key)
                acknowledged, present = state.acknowledged | {key}, there | {key}
                after = state._replace(acknowledged=acknowledged, present=present)
                yield f"worker {number} pushes {done + 1}", after
        if self._bounds.again:
            for key in sorted(state.acknowledged - state.present):
                yield f"{key} is pushed again", state._replace(present=state.present | {key})
        if len(state.removed) < self._bounds.removals:
            for key in sorted(state.present):
                present, removed = state.present - {key}, state.removed | {key}
                after = state._replace(present=present, removed=removed)
                yield f"{key} is removed by its user", after
        for number, process in enumerate(state.coordinators):
            for label, after, now in self._coordinate(state, process):
                processes = with_item(after.coordinators, number, now)
                yield f"coordinator {number} {label}", after._replace(coordinators=processes)
        for number, process in enumerate(state.reducers):
            shard = number % self._bounds.shards
            for label, after, now in self._reduce(state, process, shard):
                processes = with_item(after.reducers, number, now)
                yield f"reducer {number} {label}", after._replace(reducers=processes)

    def _done(self, state: State, worker: str) -> int:
        return sum(key.worker == worker for key in state.acknowledged)

    def _anew(self, state: State, key: Key) -> tuple[Key, frozenset[Key]]:
        """Return a push in the file that it is written into, and the other pushes that are there."""
        clock = dict(state.versions[-1][1].clocks).get(key.worker, 0)
        file = key.step
        if key.step > 1 and (
            clock >= key.step - 1 or not self._rules.writes_anew_only_what_counted
        ):
            file = next(
                one.file for one in state.acknowledged if one[:2] == (key.worker, key.step - 1)
            )
        key = key._replace(file=file)
        return key, _without_files(state.present, [key])

    # -- a worker that is replaced -----------------------------------------------------------------

    def _work(self, state: State, me: Worker, number: int) -> Iterator[tuple[str, State, Worker]]:
        if me.phase == "ended":
            return
        if me.joined < len(self._joining):
            label = self._joining[me.joined]
            after, step = state, me.step
            if label == "removes":
                # The other is stopped, or will find its directory gone.
                after = state._replace(replaced=with_item(state.replaced, 0, Worker("ended")))
            elif label == "lists":
                step = max([step, *(key.step for key in state.present if key.worker == "w0")])
            else:
                step = max(step, dict(state.versions[-1][1].clocks).get("w0", 0))
            joined = me.joined + 1
            phase = "idle" if joined == len(self._joining) else me.phase
            yield label, after, Worker(phase, step, joined)
        elif me.phase == "idle" and me.step < self._bounds.steps:
            yield "writes a push", state, me._replace(phase="publishes")
        elif me.phase == "publishes":
            key = Key("w0", me.step + 1, number)
            after = state._replace(
                acknowledged=state.acknowledged | {key}, present=state.present | {key}
            )
            yield f"publishes {key.step}", after, me._replace(phase="idle", step=key.step)

    # -- a coordinator -----------------------------------------------------------------------------

    def _coordinate(self, state: State, me: Process) -> Iterator[tuple[str, State, Process]]:
        versions = dict(state.versions)
        if me.phase == "idle":
            newest = max(versions)
            yield f"sees version {newest}", state, Process("tidies", newest)
        elif me.phase == "tidies" and self._bounds.anew:
            yield (
                "lists pushes",
                state,
                me._replace(phase="asks", read=tuple(sorted(state.present))),
            )
        elif me.phase == "asks":
            clocks = dict(versions[me.newest].clocks)
            read = tuple(key for key in me.read if self._is_done_with(state, key, clocks))
            yield "asks who takes part", state, me._replace(phase="looks again", read=read)
        elif me.phase == "looks again":
            read = me.read
            if self._rules.looks_again_when_the_worker_has_ended:
                read = tuple(key for key in read if key in state.present)
            yield "looks again", state, me._replace(phase="removes", read=read)
        elif me.phase == "removes":
            after = state._replace(present=_without_files(state.present, me.read))
            yield "removes files", after, me._replace(phase="looks", read=())
        elif me.phase == "tidies":
            gone = {*versions[me.newest].pushes, *versions[me.newest].skipped}
            if not self._rules.tidies_only_what_counted:
                gone = set(state.present)
            after = state._replace(
                present=state.present - gone,
                next=tuple(item for item in state.next if item[0][0] > me.newest),
            )
            yield "tidies", after, me._replace(phase="looks")
        elif me.phase == "looks":
            made = _making(state, me.newest + 1)
            if made is not None:
                attempt, _ = made
                yield "reads the plan", state, me._replace(phase="commits", attempt=attempt)
            else:
                # The listing itself is not kept: only the plan made from it matters later.
                planned = self._planned(versions[me.newest].clocks, state.present)
                if planned is None:
                    yield "lists pushes and finds too few", state, Process()
                else:
                    yield "lists pushes", state, me._replace(phase="plans", read=planned.pushes)
        elif me.phase == "plans":
            planned = self._planned(versions[me.newest].clocks, frozenset(me.read))
            assert planned is not None
            assert planned.pushes == me.read
            yield from self._write(state, (me.newest + 1, 0), planned)
        elif me.phase == "commits":
            yield from self._commit(state, me)
        elif me.phase == "tries again":
            yield from self._try_again(state, me)

    def _is_done_with(self, state: State, key: Key, clocks: dict[str, int]) -> bool:
        if key.step == clocks.get(key.worker) and self._rules.leaves_the_last_one_to_who_takes_part:
            return self._done(state, key.worker) == self._bounds.steps
        return key.step <= clocks.get(key.worker, 0)

    def _as_planned(
        self, clocks: tuple[tuple[str, int], ...], present: frozenset[Key]
    ) -> Made | None:
        """Return the plan of the version after one with these clocks. None: there are too few pushes."""
        read = {key.path: key for key in sorted(present)}
        pushes = [Push(key.worker, key.step, path) for path, key in read.items()]
        known = dict(clocks) if self._rules.only_pending_pushes_count else {}
        newest = msgspec.structs.replace(first_plan(self._config), clocks=known)
        plan = next_plan(self._config, newest, pushes, ())
        if plan is None:
            return None
        keys = tuple(read[push.path] for push in plan.pushes)
        return Made(keys, tuple(sorted(plan.clocks.items())), (None,) * self._bounds.shards)

    def _write(
        self, state: State, target: tuple[int, int], made: Made
    ) -> Iterator[tuple[str, State, Process]]:
        nexts = dict(state.next)
        there = nexts.get(target)
        if there is not None and self._rules.plan_is_made_once:
            yield "finds a plan", state, Process()
            return
        nexts[target] = made if there is None else made._replace(shards=there.shards)
        yield "plans", state._replace(next=tuple(sorted(nexts.items()))), Process()

    def _commit(self, state: State, me: Process) -> Iterator[tuple[str, State, Process]]:
        versions, nexts = dict(state.versions), dict(state.next)
        number = me.newest + 1
        made = nexts.get((number, me.attempt))
        complete = made is not None and None not in made.shards
        if made is None:
            yield "finds the directory gone", state, Process()
        elif not (complete or not self._rules.commits_when_all_shards_are_there):
            gone = bool(set(made.pushes) - state.present)
            after = me._replace(phase="tries again", read=tuple(sorted(state.present)))
            yield "finds shards missing", state, after if gone else Process()
        elif number in versions and self._rules.commit_never_replaces:
            yield "finds the version there", state, Process()
        else:
            del nexts[number, me.attempt]
            versions[number] = made
            made_now, made_next = tuple(sorted(versions.items())), tuple(sorted(nexts.items()))
            yield "commits", state._replace(versions=made_now, next=made_next), Process()

    def _try_again(self, state: State, me: Process) -> Iterator[tuple[str, State, Process]]:
        """Plan without the pushes that were gone."""
        target = (me.newest + 1, me.attempt)
        made = dict(state.next).get(target)
        if made is None or max(number for number, _ in state.versions) > me.newest:
            yield "finds the directory gone", state, Process()
            return
        kept = tuple(key for key in made.pushes if key in me.read)
        skipped = (*made.skipped, *(key for key in made.pushes if key not in me.read))
        again = Made(kept, made.clocks, (None,) * self._bounds.shards, skipped)
        if self._rules.attempts_have_directories_of_their_own:
            yield from self._write(state, (target[0], target[1] + 1), again)
            return
        nexts = dict(state.next)
        nexts[target] = again._replace(shards=made.shards)
        yield "plans again", state._replace(next=tuple(sorted(nexts.items()))), Process()

    # -- a reducer ---------------------------------------------------------------------------------

    def _reduce(
        self, state: State, me: Process, shard: int
    ) -> Iterator[tuple[str, State, Process]]:
        if me.phase == "idle":
            newest = max(number for number, _ in state.versions)
            found = _making(state, newest + 1)
            if found is not None:
                attempt, made = found
                if made.shards[shard] is None and state.present.issuperset(made.pushes):
                    read = Process("writes", newest, made.pushes, attempt)
                    yield "reads the plan and its pushes", state, read
            elif self._bounds.ahead:
                foreseen = self._foresee(state, newest)
                if foreseen:
                    yield "sums ahead", state, Process("foresaw", newest, foreseen)
        elif me.phase == "foresaw":
            yield from self._take_what_was_foreseen(state, me, shard)
        elif me.phase == "writes":
            nexts = dict(state.next)
            target = nexts.get((me.newest + 1, me.attempt))
            if target is None:
                yield "finds its directory gone", state, Process()
                return
            shards = with_item(target.shards, shard, me.read)
            nexts[me.newest + 1, me.attempt] = target._replace(shards=shards)
            yield "writes its shard", state._replace(next=tuple(sorted(nexts.items()))), Process()

    def _foresee(self, state: State, newest: int) -> tuple[Key, ...]:
        """Return the pushes of the next plan, if nothing changes that is there or staged."""
        staged = [
            Key("w0", worker.step + 1, number)
            for number, worker in enumerate(state.replaced)
            if worker.phase == "publishes"
        ]
        planned = self._planned(dict(state.versions)[newest].clocks, state.present.union(staged))
        return planned.pushes if planned is not None else ()

    def _take_what_was_foreseen(
        self, state: State, me: Process, shard: int
    ) -> Iterator[tuple[str, State, Process]]:
        found = _making(state, me.newest + 1)
        if found is None:
            if max(number for number, _ in state.versions) > me.newest:
                yield "finds the version there", state, Process()
            return
        attempt, made = found
        planned, summed = made.pushes, me.read
        if not self._rules.sums_ahead_are_of_the_planned_files:
            # The names are the same: another process of the worker may have made the files.
            planned, summed = (
                tuple(key._replace(by=0) for key in keys) for keys in (planned, summed)
            )
        if planned == summed and made.shards[shard] is None:
            yield "has what the plan wants", state, me._replace(phase="writes", attempt=attempt)
        else:
            yield "has something else", state, Process()

    # -- promises ----------------------------------------------------------------------------------

    def check(self, state: State) -> None:
        if state[:4] in self._checked:
            return
        self._checked.add(state[:4])
        counted: list[Key] = []
        for number, made in state.versions:
            if any(shard != made.pushes for shard in made.shards):
                raise Broken(f"version {number} is made from more than one plan")
            counted += made.pushes
            if not state.removed.issuperset(made.skipped):
                raise Broken(f"version {number} lacks a push that nobody removed")
        if len(counted) != len(set(counted)):
            raise Broken("a push counts twice")
        clocks = dict(state.versions[-1][1].clocks)
        expected = state.acknowledged - state.removed
        lost = expected - set(counted) - state.present
        if lost:
            raise Broken(f"{sorted(lost)} will never count")
        there = [Push(key.worker, key.step, key.path) for key in state.present]
        kept = {push.path for push in pending(there, clocks)}
        if {key.path for key in expected - set(counted)} - kept:
            raise Broken("a push that is there is not pending, and does not count")

    def reduced(self, state: State) -> State:
        """Return the state without what no process looks at.

        No version is made twice. So a process that knows an older version can make nothing that counts, and
        is as good as idle when it has tidied; nor do directories for such a version matter. To tidy when
        no push is left that counted is to do nothing, unless a push may come again."""
        if self._rules != Rules():
            return state
        newest, made = state.versions[-1]
        has_tidied = not self._bounds.again and state.present.isdisjoint(made.pushes + made.skipped)

        def seen(one: Process) -> Process:
            if has_tidied and one == Process("tidies", newest):
                return Process("looks", newest)
            tidies = one.phase in ("tidies", "asks", "looks again", "removes")
            return one if one.newest == newest or tidies else Process()

        return state._replace(
            coordinators=tuple(map(seen, state.coordinators)),
            reducers=tuple(map(seen, state.reducers)),
            next=tuple(item for item in state.next if item[0][0] > newest),
        )

    def canonical(self, state: State) -> State:
        """Sort the processes that have no part of their own."""
        shards = self._bounds.shards
        groups = [sorted(state.reducers[shard::shards]) for shard in range(shards)]
        reducers = tuple(group[turn] for turn in range(self._bounds.reducers) for group in groups)
        return state._replace(coordinators=tuple(sorted(state.coordinators)), reducers=reducers)


def _without_files(present: frozenset[Key], keys: Iterable[Key]) -> frozenset[Key]:
    files = {(key.worker, key.file) for key in keys}
    return frozenset(key for key in present if (key.worker, key.file) not in files)


def _making(state: State, number: int) -> tuple[int, Made] | None:
    """Return the last attempt to make a version."""
    attempts = [(key[1], made) for key, made in state.next if key[0] == number]
    return attempts[-1] if attempts else None


KEPT = {
    "two coordinators": Bounds(steps=2),
    "two reducers of a shard": Bounds(workers=1, steps=3, reducers=2),
    "two shards": Bounds(shards=2),
    "a coordinator that was stopped for long": Bounds(coordinators=3, reducers=2),
    "bsp": Bounds(sync="bsp", steps=2),
    "quorum": Bounds(sync="quorum:1", steps=2),
    "pushes that are repeated": Bounds(workers=1, steps=2, again=True, reducers=2),
    "a push that is removed": Bounds(removals=1),
    "a push that is removed between two shards": Bounds(workers=1, removals=1, shards=2),
    "a worker that is replaced": Bounds(workers=1, steps=3, coordinators=1, replaced=True),
    "a worker that is replaced beside another": Bounds(steps=2, coordinators=1, replaced=True),
    "sums ahead of the plan": Bounds(steps=2, coordinators=1, reducers=2, sync="bsp", ahead=True),
    "sums ahead, of a worker that is replaced": Bounds(
        workers=1, steps=2, coordinators=1, replaced=True, ahead=True
    ),
    "sums ahead, of a push that is removed": Bounds(removals=1, sync="bsp", ahead=True),
    "pushes written anew": Bounds(workers=1, steps=3, anew=True),
    "pushes written anew beside another's": Bounds(steps=2, coordinators=1, anew=True),
}
NEEDED = {
    "plan_is_made_once": Bounds(),
    "commit_never_replaces": Bounds(coordinators=3, reducers=2),
    "only_pending_pushes_count": Bounds(workers=1, again=True),
    "tidies_only_what_counted": Bounds(),
    "commits_when_all_shards_are_there": Bounds(),
    "attempts_have_directories_of_their_own": Bounds(workers=1, removals=1, shards=2),
    "joining_removes_what_is_staged": Bounds(workers=1, steps=2, coordinators=1, replaced=True),
    "joining_lists_pushes_after_removing": Bounds(workers=1, coordinators=1, replaced=True),
    "joining_reads_clocks_after_listing": Bounds(workers=1, coordinators=1, replaced=True),
    "sums_ahead_are_of_the_planned_files": Bounds(
        workers=1, coordinators=1, replaced=True, ahead=True
    ),
    "writes_anew_only_what_counted": Bounds(workers=1, steps=2, coordinators=1, anew=True),
    "leaves_the_last_one_to_who_takes_part": Bounds(workers=1, steps=3, anew=True),
    "looks_again_when_the_worker_has_ended": Bounds(workers=1, steps=2, anew=True),
}
