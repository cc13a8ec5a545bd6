"""The checker of histories accepts what may happen and names what may not."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.mountpoint import Mount
from harness.seeds import seeded
from harness.storms.history import (
    EMPTY,
    LATE_NS,
    Operation,
    Workers,
    check,
    content_of,
    tiny_content,
    value_of,
)

SECOND = 1e9


class Script:
    """A history made by hand: each line is an operation on one file, with times in seconds."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def add(self, kind: str, start: float, end: float, **changes: Any) -> None:
        values: dict[str, Any] = {
            "worker": len(self.operations),
            "number": 1,
            "host": "a",
            "kind": kind,
            "path": "file",
            "began": changes.pop("began", start) * SECOND,
            "start": start * SECOND,
            "end": end * SECOND,
            "outcome": "ok",
        }
        self.operations.append(Operation(**(values | changes)))

    def write(self, value: str, start: float, end: float, **changes: Any) -> None:
        self.add("write", start, end, value=value, **changes)

    def create(self, value: str, start: float, end: float, **changes: Any) -> None:
        self.add("create", start, end, value=value, **changes)

    def replace(self, value: str, start: float, end: float, **changes: Any) -> None:
        self.add("replace", start, end, value=value, **changes)

    def unlink(self, start: float, end: float, **changes: Any) -> None:
        self.add("unlink", start, end, **changes)

    def read(self, value: str, start: float, end: float, **changes: Any) -> None:
        self.add("read", start, end, value=value, **changes)

    def absent(self, start: float, end: float, **changes: Any) -> None:
        self.add("read", start, end, outcome="absent", **changes)

    def kinds(self, **options: bool) -> set[str]:
        return {violation.kind for violation in check(self.operations, **options)}


@pytest.fixture
def script() -> Script:
    return Script()


# -- what may happen


def test_reads_of_the_last_version_are_right(script: Script) -> None:
    script.absent(0, 1)
    script.write("1", 2, 3)
    script.read("1", 4, 5)
    script.replace("2", 6, 7)
    script.read("2", 8, 9, final=True)
    assert script.kinds() == set()


def test_a_read_during_a_write_may_see_either_version(script: Script) -> None:
    script.write("1", 0, 1)
    script.write("2", 2, 9)
    script.read("2", 3, 4)
    script.read("2", 6, 7, host="b")
    assert script.kinds() == set()
    script.operations[2:] = []
    script.read("1", 3, 4)
    script.read("1", 6, 7, host="b")
    assert script.kinds() == set()


def test_two_writes_at_a_time_may_come_in_either_order(script: Script) -> None:
    script.write("1", 0, 5)
    script.write("2", 1, 4, host="b")
    script.read("1", 6, 7)
    assert script.kinds() == set()
    script.operations[2:] = []
    script.read("2", 6, 7)
    assert script.kinds() == set()


def test_a_write_that_failed_may_be_seen_or_not(script: Script) -> None:
    script.write("1", 0, 1)
    script.write("2", 2, 3, outcome="failed")
    script.read("1", 4, 5)
    assert script.kinds() == set()
    script.read("2", 6, 7)
    assert script.kinds() == set()


def test_a_write_that_never_returned_may_be_seen_late(script: Script) -> None:
    script.write("1", 0, 1)
    script.write("2", 2, math.inf, outcome="unknown")
    script.read("1", 100, 101)
    script.read("2", 200, 201)
    assert script.kinds() == set()


def test_a_file_unlinked_while_it_was_written_stays_absent(script: Script) -> None:
    script.write("1", 4, 5, began=0)
    script.unlink(1, 2, host="b")
    script.absent(6, 7)
    assert script.kinds() == set()


def test_a_new_file_is_empty_until_it_is_published(script: Script) -> None:
    script.write("1", 4, 5, began=0)
    script.absent(0, 1)
    script.read(EMPTY, 2, 3)
    script.read("1", 6, 7)
    assert script.kinds() == set()


def test_a_file_whose_creator_failed_may_stay_empty(script: Script) -> None:
    script.create("1", 1, 2, began=0, outcome="failed")
    script.read(EMPTY, 5, 6)
    script.absent(7, 8)
    assert script.kinds() == set()


def test_an_unlink_that_failed_may_have_happened(script: Script) -> None:
    script.write("1", 0, 1)
    script.unlink(2, 3, outcome="failed")
    script.read("1", 4, 5)
    script.absent(6, 7)
    assert script.kinds() == set()


# -- what may not


def test_mixed_content_is_torn(script: Script) -> None:
    script.add("read", 0, 1, outcome="torn", detail="of two versions")
    assert script.kinds() == {"torn"}


def test_content_that_nobody_wrote_is_torn(script: Script) -> None:
    script.read("9", 0, 1)
    assert script.kinds() == {"torn"}


def test_reading_what_is_written_later_is_from_the_future(script: Script) -> None:
    script.read("1", 0, 1)
    script.write("1", 2, 3)
    assert script.kinds() == {"future"}


def test_reading_the_old_version_after_close_is_stale(script: Script) -> None:
    script.write("1", 0, 1)
    script.write("2", 2, 3)
    script.read("1", 4, 5, host="b")
    assert script.kinds() == {"stale"}


def test_reading_the_old_version_again_is_going_back(script: Script) -> None:
    script.write("1", 0, 1)
    script.write("2", 2, 9)
    script.read("2", 3, 4)
    script.read("1", 5, 6)
    assert "back" in script.kinds()


def test_a_failed_write_that_was_seen_does_not_go_away(script: Script) -> None:
    script.write("1", 0, 1)
    script.write("2", 2, 3, outcome="failed")
    script.read("2", 4, 5)
    script.read("1", 6, 7)
    assert script.kinds() == {"back"}


def test_hosts_may_learn_of_a_write_in_turn_but_none_goes_back(script: Script) -> None:
    script.write("1", 0, 1)
    script.write("2", 2, 9, host="c")
    script.read("2", 3, 4, host="a")
    script.read("1", 5, 6, host="b")
    assert script.kinds(across_hosts=False) == set()
    script.read("1", 7, 8, host="a")
    assert script.kinds(across_hosts=False) == {"back"}


def test_a_new_file_is_seen_on_its_own_host_before_it_is_closed(script: Script) -> None:
    script.write("new", 3, 4, began=1)
    script.read("new", 2, 2.5)
    assert script.kinds() == set()
    script.read("new", 2, 2.5, host="b")
    assert script.kinds() == {"future"}


def test_a_part_is_seen_only_on_the_host_that_makes_the_file(script: Script) -> None:
    script.write("new", 3, 4, began=1)
    script.add("read", 2, 2.5, outcome="torn")
    assert script.kinds() == set()
    script.add("read", 2, 2.5, outcome="torn", host="b")
    assert script.kinds() == {"torn"}


def test_a_part_of_a_file_that_is_overwritten_is_not_seen(script: Script) -> None:
    script.write("old", 0, 1)
    script.write("new", 4, 5, began=2)
    script.add("read", 3, 3.5, outcome="torn")
    assert script.kinds() == {"torn"}


def test_an_overwritten_file_is_not_seen_on_its_own_host_before_it_is_closed(
    script: Script,
) -> None:
    script.write("old", 0, 1)
    script.write("new", 4, 5, began=2)
    script.read("new", 3, 3.5)
    assert script.kinds() == {"future"}


def test_what_its_own_host_reads_of_a_new_file_need_not_be_published_yet(script: Script) -> None:
    script.write("new", 1, 5)
    script.read("new", 2, 2.5)
    script.write("other", 3, 3.5, host="b")
    script.read("new", 4, 6)
    assert script.kinds(across_hosts=False) == set()
    # On another host it was published when it was read.
    script.read("new", 2, 2.5, host="b")
    script.read("new", 4, 4.5, host="b")
    assert script.kinds(across_hosts=False) == {"stale"}


def test_an_acknowledged_file_does_not_vanish(script: Script) -> None:
    script.write("1", 0, 1)
    script.absent(2, 3, final=True)
    assert script.kinds() == {"vanished"}


def test_a_file_does_not_vanish_for_a_moment(script: Script) -> None:
    script.unlink(0, 1, outcome="failed")
    script.write("1", 2, 3)
    script.read("1", 4, 5)
    script.absent(6, 7)
    script.read("1", 8, 9)
    assert script.kinds() == {"vanished"}


def test_a_file_written_after_an_unlink_does_not_vanish(script: Script) -> None:
    script.write("1", 0, 1)
    script.unlink(2, 3)
    script.write("2", 4, 5)
    script.absent(6, 7)
    assert script.kinds() == {"vanished"}


def test_a_file_that_was_published_is_not_empty(script: Script) -> None:
    script.write("1", 0, 1)
    script.read(EMPTY, 2, 3)
    assert script.kinds() == {"vanished"}


def test_an_unlinked_file_does_not_come_back(script: Script) -> None:
    script.write("1", 0, 1)
    script.unlink(2, 3)
    script.read("1", 4, 5)
    assert script.kinds() == {"resurrected"}


def test_only_one_exclusive_creator_wins(script: Script) -> None:
    script.create("1", 1, 2, began=0)
    script.create("2", 4, 5, began=3, host="b")
    assert script.kinds() == {"vanished"}


def test_what_is_acknowledged_can_be_read_at_the_end(script: Script) -> None:
    script.write("1", 0, 1)
    script.add("read", 2, 3, outcome="failed", detail="EIO", final=True)
    assert script.kinds() == {"unreadable"}


def test_a_failed_operation_does_not_excuse_what_happens_much_later(script: Script) -> None:
    late_s = LATE_NS / SECOND
    script.unlink(0, 1, outcome="failed")
    script.write("1", 2 + late_s, 3 + late_s)
    script.absent(4 + late_s, 5 + late_s)
    assert script.kinds() == {"vanished"}


# -- compared with trying all orders


def _has_an_order(operations: list[Operation]) -> bool:
    """Whether a register could have answered so: the definition, taken literally."""
    for order in itertools.permutations(operations):
        value = None
        for i, operation in enumerate(order):
            if any(later.end < operation.start for later in order[i + 1 :]):
                break
            if operation.kind == "read" and operation.value != value:
                break
            value = operation.value
        else:
            return True
    return False


def test_the_checker_agrees_with_trying_all_orders() -> None:
    source = seeded()
    verdicts = Counter[bool]()
    for _ in range(1500):
        script = Script()
        script.write("1", 0, 1)
        for value in ("2", "3"):
            start = source.randrange(2, 12)
            script.write(value, start, start + source.randrange(1, 8))
        for _ in range(source.randrange(1, 4)):
            start = source.randrange(2, 20)
            script.read(source.choice("123"), start, start + source.randrange(1, 6))
        # No two moments are the same, so that no order depends on whether "before" means "not after".
        for i, operation in enumerate(script.operations):
            script.operations[i] = replace(
                operation, start=operation.start + i + 1, end=operation.end + i + 11
            )
        allowed = _has_an_order(script.operations)
        assert (not check(script.operations)) == allowed, script.operations
        verdicts[allowed] += 1
    assert min(verdicts[True], verdicts[False]) > 100


def test_what_a_register_did_is_always_allowed() -> None:
    """Histories of one that is written, unlinked and read at a moment within each operation."""
    source = seeded()
    for _ in range(200):
        moments = sorted(source.uniform(0, 100) for _ in range(40))
        script, value = Script(), None
        for number, moment in enumerate(moments):
            around = moment - source.uniform(0, 15), moment + source.uniform(0, 15)
            kind = source.choice(["replace", "replace", "unlink", "read", "read", "read"])
            if kind == "replace":
                value = str(number)
                script.replace(value, *around)
            elif kind == "unlink" and value is not None:
                value = None
                script.unlink(*around)
            elif value is None:
                script.absent(*around)
            else:
                script.read(value, *around)
        assert not check(script.operations)


# -- contents


@pytest.mark.parametrize("size", [24, 4095, 4096, 4097, 100_000])
def test_a_content_says_who_wrote_it(size: int) -> None:
    assert value_of(content_of(3, 17, size)) == "3.17"


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: content[:8192] + content_of(3, 18, len(content))[8192:],
        lambda content: content[:50_000] + bytes(1) + content[50_001:],
        lambda content: content[4096:8192] + content[4096:],
    ],
    ids=["short", "long", "mixed", "changed byte", "page twice"],
)
def test_a_content_that_is_not_whole_is_noticed(damage: Callable[[bytes], bytes]) -> None:
    with pytest.raises(AssertionError, match=r"."):
        value_of(damage(content_of(3, 17, 100_000)))


def test_tiny_contents_of_different_workers_differ() -> None:
    contents = [tiny_content(worker, 5, count, 1) for worker in range(5) for count in range(51)]
    assert len({content for content in contents if content}) == 255
    assert tiny_content(0, 5, 52, 1) is None


# -- workers


def _work(workers: Workers) -> list[Operation]:
    with workers:
        workers.wait()
        workers.final_reads()
        return workers.operations()


def test_files_that_are_written_in_place_fail_the_check(memory: Path) -> None:
    """A tmpfs shows every write at once; readers and the checker do notice, sooner or later."""
    for seed in range(20):
        folder = memory / f"files-{seed}"
        folder.mkdir()
        logs = memory / f"logs-{seed}"
        workers = Workers({"a": folder}, logs, seed=seed, names=2, pause_s=0, operations=500)
        kinds = {violation.kind for violation in check(_work(workers))}
        if kinds & {"torn", "vanished"}:
            return
    raise AssertionError("no reader has seen a half-written file")


def test_programs_on_one_mount_see_a_history_that_is_allowed(
    new_mount: Callable[..., Mount], memory: Path
) -> None:
    with new_mount() as mount:
        folder = mount.path / "files"
        folder.mkdir()
        workers = Workers({"a": folder}, memory / "logs", seed=2, pause_s=0, operations=300)
        operations = _work(workers)
    assert not check(operations)
    assert sum(operation.outcome in ("ok", "absent") for operation in operations) > 400
    assert {operation.kind for operation in operations} == {
        *("write", "create", "replace", "unlink", "read")
    }
