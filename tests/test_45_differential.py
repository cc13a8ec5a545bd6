"""A mount does what a tmpfs does: the same steps of several processes on both, every answer compared.

differences.py lists what may differ. `python tests/differential.py --help` is the long run.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from differences import Leniency
from differential import (
    Difference,
    Pair,
    difference,
    loaded,
    programs,
    saved,
    shrink,
    tmpfs_directory,
)
from differential_sides import Normal
from differential_steps import Program, Vocabulary
from mountpoint import run_checked

PROGRAMS_AT_ONCE = 20


@pytest.fixture
def reference() -> Iterator[Path]:
    """An empty directory on a tmpfs."""
    with tmpfs_directory() as path:
        yield path


def test_two_directories_of_a_tmpfs_do_not_differ(reference: Path) -> None:
    with tmpfs_directory() as other, Pair([other], reference, Leniency("plain")) as pair:
        for _, program in zip(range(PROGRAMS_AT_ONCE), programs(1, Vocabulary()), strict=False):
            pair.run(program)
        assert pair.steps > 10 * PROGRAMS_AT_ONCE


def test_a_difference_is_found_and_shrunk_to_the_steps_that_make_it(
    reference: Path, tmp_path: Path
) -> None:
    """A tmpfs that is full after 64 KiB is the one that differs."""
    run_checked("mount", "-t", "tmpfs", "-o", "size=64k", "none", tmp_path)
    try:
        with Pair([tmp_path], reference, Leniency("plain"), times=False) as pair:
            for program in programs(1, Vocabulary(frozenset({"fork", "exec"}))):
                if difference(pair, program):
                    break
            short = shrink(program, lambda shorter: difference(pair, shorter))
            with pytest.raises(Difference, match=r"ENOSPC|size"):
                pair.run(short)
    finally:
        run_checked("umount", "-l", tmp_path)
    assert len(short.steps) <= 4


def test_steps_before_a_difference_that_do_not_matter_are_left_out() -> None:
    program = Vocabulary().program(random.Random(5))
    wanted = {3, len(program.steps) - 1}

    def fails(shorter: Program) -> Difference | None:
        has = [step for step in shorter.steps if step in [program.steps[one] for one in wanted]]
        return Difference(len(shorter.steps), has[0], 1, 2) if len(has) >= len(wanted) else None

    assert len(shrink(program, fails).steps) == len(wanted)


def test_a_program_that_was_written_down_is_the_same_when_read() -> None:
    program = Vocabulary().program(random.Random(1))
    assert loaded(saved(program)) == program


def test_every_part_of_a_program_can_be_run(reference: Path) -> None:
    """Shrinking relies on it."""
    with tmpfs_directory() as other, Pair([other], reference, Leniency("plain")) as pair:
        chance = random.Random(2)
        for _, program in zip(range(PROGRAMS_AT_ONCE), programs(2, Vocabulary()), strict=False):
            pair.run(
                program._replace(steps=[step for step in program.steps if chance.random() < 0.5])
            )


def test_a_time_that_goes_back_is_told_from_one_that_moves_on() -> None:
    normal = Normal()

    def look(mtime_ns: int, ctime_ns: int) -> object:
        seen = normal.value(("stat", 7, 0o100644, 1, 0, 0, 5, 0, mtime_ns, ctime_ns))
        return seen.get("mtime"), seen.get("ctime")

    now = 10**18
    assert look(now, now) == ("now", None)
    assert look(now, now + 1) == ("now", "later")
    assert look(now + 2, now + 1) == ("later", "same")
    assert look(now + 1, now) == ("EARLIER", "EARLIER")
    assert look(5, now + 1) == (5, "later")
