"""Visit every state of a machine, breadth first, and tell the shortest way to a bad one."""

import gc
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeVar

State = TypeVar("State", bound=Hashable)
Item = TypeVar("Item")

STATES_MAX = 10_000_000


def with_item(row: tuple[Item, ...], at: int, item: Item) -> tuple[Item, ...]:
    """Return a row with another item at one place."""
    return (*row[:at], item, *row[at + 1 :])


class Machine(Protocol[State]):
    def initial(self) -> State: ...

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """What may happen next, in words, and what is then. Raises Broken."""
        ...

    def check(self, state: State) -> None:
        """Raises Broken if an invariant does not hold."""
        return

    def reduced(self, state: State) -> State:
        """Return the state without what makes no difference to the future."""
        return state

    def canonical(self, state: State) -> State:
        """Return one of those that are the same but for the names of things."""
        return state

    def wider(self, state: State) -> Iterable[State]:
        """Return others that check the same, and from which all can happen that can from this one."""
        return ()


class Broken(Exception):
    """An invariant does not hold. `trace` are the steps that led there."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.trace: list[str] = []

    def __str__(self) -> str:
        steps = [f"{number:3}. {step}" for number, step in enumerate(self.trace, 1)]
        return "\n".join([self.args[0], *steps])


class Explored(NamedTuple):
    """`complete`: every state within the bounds was visited. `depth` is the longest way from the
    beginning that is not a detour."""

    states: int
    steps: int
    depth: int
    complete: bool


@contextmanager
def _without_collection() -> Iterator[None]:
    """Stop the collector of cycles, which would go through millions of states that have none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_collection()
def explore(model: Machine[State]) -> Explored:
    """Visit all states, at most STATES_MAX. Raises Broken with the shortest trace to a bad one."""
    start = model.canonical(model.initial())
    # Also has states as they were before they were reduced, so that each of these is reduced once.
    came_from: dict[State, State | None] = {start: None}
    frontier = deque([start])
    states = known = 1
    steps = depth = 0
    level_end: State = start
    while frontier:
        state = frontier.popleft()
        try:
            model.check(state)
            for _, after in model.steps(state):
                steps += 1
                came_from.setdefault(after, state)
                if len(came_from) == known:
                    continue
                known += 1
                least = model.canonical(model.reduced(after))
                if least is not after and least != after:
                    came_from.setdefault(least, state)
                    if len(came_from) == known:
                        continue
                    known += 1
                if any(wider in came_from for wider in model.wider(least)):
                    continue
                states += 1
                frontier.append(least)
        except Broken as broken:
            broken.trace = _trace(model, came_from, state)
            raise
        if state is level_end and frontier:
            depth += 1
            level_end = frontier[-1]
        if states > STATES_MAX:
            return Explored(states, steps, depth, False)
    return Explored(states, steps, depth, True)


def _trace(model: Machine[State], came_from: dict[State, State | None], state: State) -> list[str]:
    """The steps from the beginning, in which everything keeps its name."""
    path = [state]
    while (before := came_from[path[-1]]) is not None:
        path.append(before)
    labels = []
    here = model.initial()
    for wanted in path[-2::-1]:
        wanted = model.canonical(model.reduced(wanted))
        for label, after in model.steps(here):
            after = model.reduced(after)
            if model.canonical(after) == wanted:
                labels.append(label)
                here = after
                break
        else:
            raise AssertionError("what should be alike is not")
    return labels
