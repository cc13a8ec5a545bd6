"""The protocol of docs/training.md as a state machine, for explorer.explore.

Workers push; coordinators and reducers make versions. Each step of a process is one operation on files,
which is atomic there, and happens at any time: so a process that stops anywhere, for as long as others
take its place, is every order of steps. Locks are left out: any number of coordinators and reducers may
believe that the part is theirs.

The decisions are irdmafs.train.plan's, not copies of them. `Rules` names what the protocol demands; taking
one away must lead to a push that counts twice, or never, or to a version made from two plans.
"""

from collections.abc import Iterable, Iterator
from itertools import permutations, product
from typing import NamedTuple, TypeVar

from explorer import Broken

from irdmafs.train.config import TrainConfig
from irdmafs.train.plan import Push, next_plan, pending

# A push: its worker and its step.
Key = tuple[str, int]
T = TypeVar("T")


class Rules(NamedTuple):
    plan_is_made_once: bool = True
    commit_never_replaces: bool = True
    only_pending_pushes_count: bool = True
    tidies_only_what_counted: bool = True
    commits_when_all_shards_are_there: bool = True


class Bounds(NamedTuple):
    """`workers` push `steps` each; `coordinators` and, for each of `shards`, `reducers` make
    versions. `again`: a worker that does not know that its push was acknowledged may push it again."""

    workers: int = 2
    steps: int = 1
    coordinators: int = 2
    shards: int = 1
    reducers: int = 1
    sync: str = "async"
    again: bool = False


class Made(NamedTuple):
    """A plan, and by which plan each shard was made: None, not yet. `pushes` is None where the directory is
    there and the plan is not."""

    pushes: tuple[Key, ...] | None
    clocks: tuple[tuple[str, int], ...]
    shards: tuple[tuple[Key, ...] | None, ...]


class Process(NamedTuple):
    """A coordinator or a reducer: how far it is, the newest version that it knows, and what it read."""

    phase: str = "idle"
    newest: int = 0
    read: tuple[Key, ...] = ()


class State(NamedTuple):
    """`acknowledged`: pushes whose rename returned; `present`: files in push/. `versions` and `next`: the
    directories, by number."""

    acknowledged: frozenset[Key]
    present: frozenset[Key]
    versions: tuple[tuple[int, Made], ...]
    next: tuple[tuple[int, Made], ...]
    coordinators: tuple[Process, ...]
    reducers: tuple[Process, ...]


class Model:
    """A machine for explorer.explore."""

    def __init__(self, bounds: Bounds, rules: Rules | None = None) -> None:
        self._bounds = bounds
        self._rules = rules or Rules()
        self._config = TrainConfig(sync=bounds.sync, workers=bounds.workers)

    def initial(self) -> State:
        bounds = self._bounds
        first = Made((), (), ((),) * bounds.shards)
        return State(
            frozenset(), frozenset(), ((0, first),), (),
            (Process(),) * bounds.coordinators, (Process(),) * (bounds.reducers * bounds.shards),
        )  # fmt: skip

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        for number in range(self._bounds.workers):
            done = sum(worker == f"w{number}" for worker, _ in state.acknowledged)
            if done < self._bounds.steps:
                key = (f"w{number}", done + 1)
                yield (
                    f"worker {number} pushes {done + 1}",
                    state._replace(
                        acknowledged=state.acknowledged | {key}, present=state.present | {key}
                    ),
                )
        if self._bounds.again:
            for key in sorted(state.acknowledged - state.present):
                yield f"{key} is pushed again", state._replace(present=state.present | {key})
        for number, process in enumerate(state.coordinators):
            for label, after, now in self._coordinate(state, process):
                processes = _with(after.coordinators, number, now)
                yield f"coordinator {number} {label}", after._replace(coordinators=processes)
        for number, process in enumerate(state.reducers):
            shard = number % self._bounds.shards
            for label, after, now in self._reduce(state, process, shard):
                processes = _with(after.reducers, number, now)
                yield f"reducer {number} {label}", after._replace(reducers=processes)

    # -- a coordinator -----------------------------------------------------------------------------

    def _coordinate(self, state: State, me: Process) -> Iterator[tuple[str, State, Process]]:
        versions, nexts = dict(state.versions), dict(state.next)
        if me.phase == "idle":
            newest = max(versions)
            yield f"sees version {newest}", state, Process("tidies", newest)
        elif me.phase == "tidies":
            gone = set(versions[me.newest].pushes or ())
            if not self._rules.tidies_only_what_counted:
                gone = set(state.present)
            after = state._replace(
                present=state.present - gone,
                next=tuple(item for item in state.next if item[0] > me.newest),
            )
            yield "tidies", after, me._replace(phase="looks")
        elif me.phase == "looks":
            found = nexts.get(me.newest + 1)
            if found is not None and found.pushes is not None:
                yield "reads the plan", state, me._replace(phase="commits", read=found.pushes)
            else:
                listed = tuple(sorted(state.present))
                yield "lists pushes", state, me._replace(phase="plans", read=listed)
        elif me.phase == "plans":
            yield from self._plan(state, me)
        elif me.phase == "commits":
            yield from self._commit(state, me)

    def _plan(self, state: State, me: Process) -> Iterator[tuple[str, State, Process]]:
        clocks = dict(dict(state.versions)[me.newest].clocks)
        if not self._rules.only_pending_pushes_count:
            clocks = {}
        pushes = [Push(worker, step, f"{worker}@{step}") for worker, step in me.read]
        plan = next_plan(self._config, me.newest, clocks, pushes, ())
        if plan is None:
            yield "finds too few", state, Process()
            return
        nexts = dict(state.next)
        there = nexts.get(plan.version)
        if there is not None and there.pushes is not None and self._rules.plan_is_made_once:
            yield "finds a plan", state, Process()
            return
        keys = tuple((push.worker, push.step) for push in plan.pushes)
        shards = there.shards if there is not None else (None,) * self._bounds.shards
        nexts[plan.version] = Made(keys, tuple(sorted(plan.clocks.items())), shards)
        yield "plans", state._replace(next=tuple(sorted(nexts.items()))), Process()

    def _commit(self, state: State, me: Process) -> Iterator[tuple[str, State, Process]]:
        versions, nexts = dict(state.versions), dict(state.next)
        number = me.newest + 1
        made = nexts.get(number)
        complete = made is not None and made.pushes is not None and None not in made.shards
        if made is None or not (complete or not self._rules.commits_when_all_shards_are_there):
            yield "finds shards missing", state, Process()
        elif number in versions and self._rules.commit_never_replaces:
            yield "finds the version there", state, Process()
        else:
            del nexts[number]
            versions[number] = made
            yield (
                "commits",
                state._replace(
                    versions=tuple(sorted(versions.items())), next=tuple(sorted(nexts.items()))
                ),
                Process(),
            )

    # -- a reducer ---------------------------------------------------------------------------------

    def _reduce(
        self, state: State, me: Process, shard: int
    ) -> Iterator[tuple[str, State, Process]]:
        nexts = dict(state.next)
        if me.phase == "idle":
            newest = max(number for number, _ in state.versions)
            found = nexts.get(newest + 1)
            if found is not None and found.pushes is not None and found.shards[shard] is None:
                yield "reads the plan", state, Process("writes", newest, found.pushes)
        elif me.phase == "writes":
            target = nexts.get(me.newest + 1)
            if target is None:
                yield "finds its directory gone", state, Process()
                return
            shards = _with(target.shards, shard, me.read)
            nexts[me.newest + 1] = target._replace(shards=shards)
            yield "writes its shard", state._replace(next=tuple(sorted(nexts.items()))), Process()

    # -- promises ----------------------------------------------------------------------------------

    def check(self, state: State) -> None:
        counted: list[Key] = []
        for number, made in state.versions:
            if any(shard != made.pushes for shard in made.shards):
                raise Broken(f"version {number} is made from more than one plan")
            counted += made.pushes or ()
        if len(counted) != len(set(counted)):
            raise Broken("a push counts twice")
        clocks = dict(state.versions[-1][1].clocks)
        lost = state.acknowledged - set(counted) - state.present
        if lost:
            raise Broken(f"{sorted(lost)} will never count")
        waiting = pending((Push(*key, "") for key in state.present), clocks)
        kept = {(push.worker, push.step) for push in waiting}
        if state.acknowledged - set(counted) - kept:
            raise Broken("a push that is there is not pending, and does not count")

    def reduced(self, state: State) -> State:
        return state

    def canonical(self, state: State) -> State:
        """Sort the processes that have no part of their own."""
        shards = self._bounds.shards
        groups = [sorted(state.reducers[shard::shards]) for shard in range(shards)]
        reducers = tuple(group[turn] for turn in range(self._bounds.reducers) for group in groups)
        return state._replace(coordinators=tuple(sorted(state.coordinators)), reducers=reducers)

    def alike(self, state: State) -> Iterable[State]:
        shards = self._bounds.shards
        groups = [permutations(state.reducers[shard::shards]) for shard in range(shards)]
        for coordinators, *chosen in product(permutations(state.coordinators), *groups):
            reducers = tuple(
                group[turn] for turn in range(self._bounds.reducers) for group in chosen
            )
            yield state._replace(coordinators=coordinators, reducers=reducers)


def _with(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])
