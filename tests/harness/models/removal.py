"""The directory of a push, which one process removes while others move it, as a state machine for
explorer.explore (docs/training.md, "Tidy").

A removal opens the directory and then unlinks its files one by one, wherever the directory is by then. A
rename finds the directory by its name in another directory, whatever that one is called. So a request of a
process that was stopped may come at any time. `Rules` names what the protocol demands.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from harness.models.explorer import Broken, Machine

FILES = 2


class Rules(NamedTuple):
    renames_before_removing: bool = True


class State(NamedTuple):
    """`place`: the directory that has the name of the push's directory; `files`: how many of its files are
    there; `counted`: its version is there. `publishes`: the rename to push/ by a worker that was stopped is
    on its way; `taken`: how far the worker that replaced it is with removing its directory. `gives_back`:
    so is the rename to the worker's spare/ by a coordinator that was stopped; `tidied`: how far the other
    one is. `again`: the worker has written its next push there."""

    place: str = "home"
    files: int = FILES
    counted: bool = False
    publishes: bool = True
    taken: str = "begins"
    gives_back: bool = True
    tidied: str = "begins"
    again: bool = False


class Model(Machine[State]):
    """A machine for explorer.explore."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def initial(self) -> State:
        return State()

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        if state.publishes:
            after = state._replace(publishes=False)
            yield (
                "the stopped worker's rename to push/ is carried out",
                after._replace(place="push") if state.place == "home" else after,
            )
        yield from self._remove(state, state.taken, "taken", "home", "the worker that replaced it")
        if state.place == "push" and not state.counted and state.files == FILES:
            yield "it counts", state._replace(counted=True)
        if state.counted or state.tidied == "opened":
            yield from self._remove(state, state.tidied, "tidied", "push", "the other coordinator")
        if state.counted and state.gives_back:
            after = state._replace(gives_back=False)
            yield (
                "the stopped coordinator's rename to spare/ is carried out",
                after._replace(place="spare") if state.place == "push" else after,
            )
        if state.place == "spare":
            yield (
                "the worker writes its next push there, and publishes it",
                state._replace(place="push", files=FILES, counted=False, again=True),
            )

    def _remove(
        self, state: State, phase: str, field: str, where: str, who: str
    ) -> Iterator[tuple[str, State]]:
        """Find the directory where it is not wanted, open it, and unlink its files."""
        if phase == "begins" and state.place == where:
            opened: dict[str, Any] = {field: "opened"}
            if self._rules.renames_before_removing:
                yield f"{who} renames it", state._replace(place=f"aside of {field}", **opened)
            else:
                yield f"{who} opens it", state._replace(**opened)
        elif phase == "opened" and state.files:
            yield f"{who} unlinks a file", state._replace(files=state.files - 1)

    def check(self, state: State) -> None:
        if state.place == "push" and not state.counted and state.files < FILES:
            raise Broken(f"a push was published with {state.files} of {FILES} files")
