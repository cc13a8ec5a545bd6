"""A mount and a tmpfs side by side: the same steps on both, and every result compared.

As a program it is the long run:

    python tests/differential.py --session kernel --steps 200000 --seed 1
    python tests/differential.py --session kernel --replay FILE
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from differences import Leniency
from differential_sides import Died, Hang, Side, Value
from differential_steps import ACTORS, Program, Step, Vocabulary, parse

# These are carried out alone: more than one process goes on behind them, or another program.
_ALONE = ("fork", "exec", "exit")
_BATCH_MAX_STEPS = 16


class Difference(Exception):
    """The mount did something else than the tmpfs."""

    def __init__(self, number: int, step: Step, tmpfs: Value, mount: Value) -> None:
        super().__init__(f"step {number}, {step}\n  tmpfs: {tmpfs}\n  mount: {mount}")
        self.number = number
        self.step = step
        self.tmpfs = tmpfs
        self.mount = mount


class Pair:
    """Both sides. A context manager.

    `leniency` is the mount's: which differences are allowed there. `times`: compare whether times move.
    """

    def __init__(self, mount: Path, tmpfs: Path, leniency: Leniency, *, times: bool = True) -> None:
        self._tops = tmpfs, mount
        self._leniency = leniency
        self._with_times = times
        self._sides: list[Side] = []
        self._programs = 0
        self.steps = 0

    def run(self, program: Program) -> None:
        """Carry out a program on both sides. Raises Difference."""
        if not self._sides:
            self._sides = [Side(top, times=self._with_times) for top in self._tops]
        self._leniency.begin()
        self._programs += 1
        try:
            self._run(self._sides, program)
        except BaseException:
            self.close()
            for top in self._tops:
                for left in top.iterdir():
                    shutil.rmtree(left, ignore_errors=True)
            raise

    def _run(self, sides: list[Side], program: Program) -> None:
        for side in sides:
            side.begin(f"p{self._programs}", program.actors)
        number = 0
        for batch in self._batches(sides[0], program.steps):
            self._both(sides, batch, observed=program.observed)
            number = batch[-1][0]
        living = [actor for actor in range(ACTORS) if sides[0].is_alive(actor)]
        for actor in living:
            self._both(sides, [(number, Step(actor, "holdings", {}))])
        self._compare(number, Step(0, "tree", {}), *[side.tree() for side in sides])
        for actor in living:
            self._both(sides, [(number, Step(actor, "exit", {}))])
        closed = Step(0, "tree when all is closed", {})
        self._compare(number, closed, *[side.tree() for side in sides])
        for side in sides:
            side.end()

    def _batches(self, side: Side, steps: list[Step]) -> Iterator[list[tuple[int, Step]]]:
        """Steps with their numbers that one process carries out before another one does anything."""
        batch: list[tuple[int, Step]] = []
        for number, step in enumerate(steps):
            alone = step.op in _ALONE
            if batch and (
                alone or batch[-1][1].actor != step.actor or len(batch) == _BATCH_MAX_STEPS
            ):
                yield batch
                batch = []
            if not side.is_alive(step.actor):
                continue
            if step.op == "fork" and side.is_alive(step.arguments["child"]):
                continue
            self.steps += 1
            batch.append((number, step))
            if alone:
                yield batch
                batch = []
        if batch:
            yield batch

    def _both(
        self, sides: list[Side], batch: list[tuple[int, Step]], *, observed: bool = False
    ) -> None:
        steps = [step for _, step in batch]
        for side in sides:
            side.send(steps, observed=observed)
        results: list[list[Value]] = []
        for side in sides:
            try:
                results.append(side.receive(steps))
            except (Hang, Died) as error:
                results.append([repr(error)] * len(steps))
        for (number, step), tmpfs, mount in zip(batch, *results, strict=True):
            self._compare(number, step, tmpfs, mount)

    def _compare(self, number: int, step: Step, tmpfs: Value, mount: Value) -> None:
        self._leniency.note(step, tmpfs)
        if tmpfs != mount and not self._leniency.allows(step, tmpfs, mount):
            raise Difference(number, step, tmpfs, mount)

    def close(self) -> None:
        for side in self._sides:
            side.close()
        self._sides = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def difference(pair: Pair, program: Program) -> Difference | None:
    """What is different when a program runs, if anything is."""
    try:
        pair.run(program)
    except Difference as found:
        return found
    return None


def shrink(program: Program, fails: Callable[[Program], Difference | None]) -> Program:
    """Return a program, shortened, that fails as well: Zeller's ddmin, then simpler arguments."""
    found = fails(program)
    assert found is not None, "the difference does not come again"
    steps = program.steps[: found.number + 1]

    def still(steps: list[Step]) -> bool:
        return fails(program._replace(steps=steps)) is not None

    if not still(steps):
        steps = program.steps
    size = max(1, len(steps) // 2)
    while True:
        at = 0
        removed = False
        while at < len(steps):
            shorter = steps[:at] + steps[at + size :]
            if still(shorter):
                steps, removed = shorter, True
            else:
                at += size
        if size == 1 and not removed:
            break
        size = max(1, size // 2)
    for at, step in enumerate(steps):
        for simpler in _simpler(step):
            shorter = [*steps[:at], simpler, *steps[at + 1 :]]
            if still(shorter):
                steps = shorter
    return program._replace(steps=steps)


def _simpler(step: Step) -> Iterator[Step]:
    for key, value in step.arguments.items():
        if key == "user":
            rest = {name: one for name, one in step.arguments.items() if name != "user"}
            yield step._replace(arguments=rest)
        elif key in ("offset", "from_offset", "to_offset", "length", "size") and value:
            yield step._replace(
                arguments={**step.arguments, key: 1 if key in ("length", "size") else 0}
            )
        elif key == "flags" and step.op in ("open", "reopen"):
            for bit in (os.O_CLOEXEC, os.O_EXCL, os.O_NOFOLLOW, os.O_APPEND, os.O_TRUNC):
                if value & bit:
                    yield step._replace(arguments={**step.arguments, key: value & ~bit})


def programs(seed: int, vocabulary: Vocabulary) -> Iterator[Program]:
    """Draw programs for ever; the same ones for the same seed."""
    number = 0
    while True:
        yield vocabulary.program(random.Random(f"{seed}/{number}"))
        number += 1


def saved(program: Program) -> str:
    """A program as text that `loaded` reads."""
    head = json.dumps([program.actors, program.observed])
    return "\n".join([head, *(step.line() for step in program.steps), ""])


def loaded(text: str) -> Program:
    head, *lines = text.splitlines()
    actors, observed = json.loads(head)
    return Program([parse(line) for line in lines if line], actors, observed)


@contextlib.contextmanager
def tmpfs_directory() -> Iterator[Path]:
    """An empty directory on a tmpfs."""
    path = Path(tempfile.mkdtemp(prefix="test-irdmafs-tmpfs-", dir="/dev/shm"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def main() -> int:
    from conftest import make_mount

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--session", default="kernel", help="kernel, pyfuse3 or cluster")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--without", default="", help="operations to leave out, by commas")
    parser.add_argument("--replay", type=Path, help="a program that was written down")
    parser.add_argument("--findings", type=Path, help="write programs that differ there, and go on")
    parser.add_argument("-o", action="append", default=[], help="mount options")
    options = parser.parse_args()
    without = frozenset(options.without.split(","))
    words = ["allow_other", *options.o]
    leniency = Leniency(options.session, isolated="isolation=off" not in words)
    with (
        make_mount(options.session, "-o", ",".join(words)) as mount,
        tmpfs_directory() as tmpfs,
        Pair(mount.path, tmpfs, leniency, times="times" not in without) as pair,
    ):
        if options.replay:
            found = difference(pair, loaded(options.replay.read_text()))
            print(found or "no difference")
            return found is not None
        print(f"seed {options.seed}", flush=True)
        kinds: dict[str, int] = {}
        for number, program in enumerate(programs(options.seed, Vocabulary(without))):
            if pair.steps >= options.steps:
                break
            found = difference(pair, program)
            if found is None:
                continue
            short = shrink(program, lambda one: difference(pair, one))
            found = difference(pair, short) or found
            print(f"program {number} differs:\n{short}\n{found}\n", flush=True)
            if not options.findings:
                return 1
            options.findings.mkdir(exist_ok=True)
            (options.findings / f"{options.seed}-{number}").write_text(f"{saved(short)}")
            kinds[found.step.op] = kinds.get(found.step.op, 0) + 1
        print(f"{pair.steps} steps, differences: {kinds}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
