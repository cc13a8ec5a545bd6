"""A mount and a tmpfs side by side: the same steps on both, and every result compared.

As a program it is the long run, and replays what differed:

    python tests/harness/differential/command.py --session kernel --steps 200000 --found DIRECTORY
    python tests/harness/differential/command.py --session kernel -o isolation=off --replay FILE
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

# Run by its path: what `harness` is must be found beside this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from conftest import make_mount

from harness.closing import Closing
from harness.clusters import Cluster, Plan
from harness.differential.differences import REFUSED, Leniency
from harness.differential.hosts import LEFT_OUT, Hosts
from harness.differential.sides import Died, Hang, Side, Value
from harness.differential.steps import ACTORS, Program, Step, Vocabulary, parse
from harness.scratch import scratch

# These are carried out alone: more than one process goes on behind them, or another program.
_ALONE = ("fork", "exec", "exit")


REPLAY = "to replay it:\n"


class Difference(Exception):
    """The mount did something else than the tmpfs."""

    def __init__(self, number: int, step: Step, tmpfs: Value, mount: Value) -> None:
        super().__init__(f"step {number}, {step}\n  tmpfs: {tmpfs}\n  mount: {mount}")
        self.number = number
        self.step = step
        self.tmpfs = tmpfs
        self.mount = mount


class Pair(Closing):
    """Both sides. A context manager.

    `mounts` are those of one filesystem, on one or more hosts. `leniency`: which differences are allowed
    there. `times`: compare whether times move.
    """

    def __init__(
        self, mounts: Sequence[Path], tmpfs: Path, leniency: Leniency, *, times: bool = True
    ) -> None:
        self._tops = [tmpfs], mounts
        self._leniency = leniency
        self._with_times = times
        self._sides: list[Side] = []
        self._programs = 0
        self.steps = 0

    def run(self, program: Program) -> None:
        """Carry out a program on both sides. Raises Difference."""
        if not self._sides:
            self._sides = [Side(tops, times=self._with_times) for tops in self._tops]
        self._programs += 1
        try:
            self._run(self._sides, program)
        except BaseException:
            self.close()
            for tops in self._tops:
                for left in tops[0].iterdir():
                    if left.is_dir() and not left.is_symlink():
                        shutil.rmtree(left, ignore_errors=True)
                    else:
                        left.unlink()
            raise

    def _run(self, sides: list[Side], program: Program) -> None:
        for side in sides:
            side.begin(f"p{self._programs}", program.actors)
        root = self._tops[0][0] / f"p{self._programs}"
        self._leniency.begin(root, sides[0].normal.known)
        number = 0
        for batch in self._batches(sides[0], program.steps):
            self._both(sides, batch, observed=program.observed)
            number = batch[-1][0]
        living = [actor for actor in range(ACTORS) if sides[0].is_alive(actor)]
        for actor in living:
            holdings = Step(actor, "holdings", {})
            for step in (*self._leniency.before(holdings), holdings):
                self._both(sides, [(number, step)])
        self._trees(sides, number, "tree")
        for actor in living:
            self._both(sides, [(number, Step(actor, "exit", {}))])
        self._trees(sides, number, "tree when all is closed")
        for side in sides:
            side.end()

    def _trees(self, sides: list[Side], number: int, what: str) -> None:
        for host in range(len(self._tops[1])):
            self._compare(number, Step(host, what, {}), sides[0].tree(), sides[1].tree(host))

    def _batches(self, side: Side, steps: list[Step]) -> Iterator[list[tuple[int, Step]]]:
        """Steps with their numbers that one process carries out before another one does anything."""
        batch: list[tuple[int, Step]] = []
        for number, step in enumerate(steps):
            alone = step.op in _ALONE
            if batch and (
                alone or batch[-1][1].actor != step.actor or len(batch) >= self._leniency.batch_max
            ):
                yield batch
                batch = []
            if not side.is_alive(step.actor) or not self._leniency.lets(step):
                continue
            if step.op == "fork" and side.is_alive(step.arguments["child"]):
                continue
            self.steps += 1
            batch += [(number, one) for one in (*self._leniency.before(step), step)]
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
            self._leniency.note(step, tmpfs)
            self._compare(number, step, tmpfs, mount)

    def _compare(self, number: int, step: Step, tmpfs: Value, mount: Value) -> None:
        if tmpfs != mount and not self._leniency.allows(step, tmpfs, mount):
            raise Difference(number, step, tmpfs, mount)

    def close(self) -> None:
        for side in self._sides:
            side.close()
        self._sides = []


def difference(pair: Pair, program: Program) -> Difference | None:
    """Return the difference that shows when a program runs, or None."""
    try:
        pair.run(program)
    except Difference as found:
        return found
    return None


def shrink(program: Program, fails: Callable[[Program], Difference | None]) -> Program:
    """Return a program that fails as well, without steps that it needs not, then with simpler arguments."""
    found = fails(program)
    if found is None:
        return program
    steps = program.steps[: found.number + 1]

    def still(steps: list[Step]) -> bool:
        return fails(program._replace(steps=steps)) is not None

    if not still(steps):
        steps = program.steps
    for size in (64, 16, 4, 1, 1, 1):
        at = 0
        while at < len(steps):
            shorter = steps[:at] + steps[at + size :]
            if still(shorter):
                steps = shorter
            else:
                at += size
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
def mounts_of(session: str, options: Sequence[str]) -> Iterator[tuple[list[Path], Leniency]]:
    """Yield what to compare with a tmpfs: a mount of that session, or for "hosts" two mounts of a
    cluster."""
    words = ",".join(["allow_other", *options])
    if session != "hosts":
        isolated = "isolation=off" not in words
        with make_mount(session, "-o", words) as mount:
            yield [mount.path], Leniency(session, isolated=isolated)
        return
    words += ",isolation=off"  # else what a host sees depends on what its programs have open
    with Cluster(Plan(nodes=2, mounts=0)) as cluster:
        mounts = [cluster.add_mount("-o", words) for _ in range(2)]
        yield [mount.path for mount in mounts], Hosts(len(mounts))


def reports(pair: Pair, vocabulary: Vocabulary, seed: int, steps: int) -> Iterator[str]:
    """Run that many steps of programs drawn from the seed. Yields the shortest program found for each that
    differs."""
    until = pair.steps + steps
    for program in programs(seed, vocabulary):
        if pair.steps >= until:
            return
        found = difference(pair, program)
        if found is not None:
            # A difference that does not come again depends on time. Then the whole program is told.
            again = difference(pair, program) is not None
            short = shrink(program, lambda one: difference(pair, one)) if again else program
            found = difference(pair, short) or found
            yield f"seed {seed}:\n{short}\n{found}\n{REPLAY}{saved(short)}"


def compare(pair: Pair, vocabulary: Vocabulary, seed: int, steps: int) -> None:
    """The same. Raises AssertionError with the first report."""
    for report in reports(pair, vocabulary, seed, steps):
        raise AssertionError(report)


def _long_run(pair: Pair, vocabulary: Vocabulary, seed: int, steps: int, found: Path | None) -> int:
    """Print what differs, or write it into files of a directory and go on. Returns how much differed."""
    print(f"seed {seed}", flush=True)
    start = time.monotonic()
    count = 0
    for report in reports(pair, vocabulary, seed, steps):
        count += 1
        if found is None:
            print(report)
            break
        (found / f"{seed}-{count}").write_text(report)
    rate = pair.steps / (time.monotonic() - start)
    print(f"{pair.steps} steps, {rate:.0f} a second, {count or 'no'} differences")
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--session", default="kernel", help="kernel, pyfuse3, cluster or hosts")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument(
        "--without", default="", help="operations to leave out, by commas, or times"
    )
    parser.add_argument("--replay", type=Path, help="a program that was written down")
    parser.add_argument("--found", type=Path, help="a directory for what differs; then go on")
    parser.add_argument("-o", dest="options", action="append", default=[], help="mount options")
    given = parser.parse_args()
    without = frozenset(given.without.split(",")) | REFUSED.get(given.session, frozenset())
    if given.session == "hosts":
        without |= LEFT_OUT
    with (
        mounts_of(given.session, given.options) as (mounts, leniency),
        scratch() as tmpfs,
        Pair(mounts, tmpfs, leniency, times="times" not in without) as pair,
    ):
        if given.replay:
            _, _, steps = given.replay.read_text().rpartition(REPLAY)
            found = difference(pair, loaded(steps))
            print(found or "no difference")
            return found is not None
        count = _long_run(pair, Vocabulary(without), given.seed, given.steps, given.found)
    return bool(count)


if __name__ == "__main__":
    sys.exit(main())
