"""The checker of histories accepts what may happen and names what may not."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness.mountpoint import Mount
from harness.seeds import seeded
from harness.storms.history import (
    LATE_NS,
    Operation,
    Workers,
    check,
    content_of,
    tiny_content,
    value_of,
)

SECOND = 1e9
LATE_S = LATE_NS / SECOND


def operation(kind: str, value: str | None, start: float, end: float, **changes: Any) -> Operation:
    """Return an operation on one file, with times in seconds."""
    began = changes.pop("began", start) * SECOND
    values: dict[str, Any] = {"worker": 0, "number": 1, "host": "a", "path": "file"}
    values |= {"kind": kind, "value": value, "outcome": "ok"} | changes
    return Operation(began=began, start=start * SECOND, end=end * SECOND, **values)


write = partial(operation, "write")
read = partial(operation, "read")


def history_of(text: str) -> list[Operation]:
    """Read operations such as "write 1 2 3 began=0 failed b", or "unlink 2 3": what is done, the content
    ("-" is empty), start and end, and what is unusual: when it began, its outcome, its host, "final"."""
    found = []
    for kind, *words in map(str.split, text.split("; ")):
        value = words.pop(0).strip("-") if kind not in ("unlink", "absent", "torn") else None
        start, end, *unusual = words
        changes: dict[str, Any] = {}
        if kind in ("absent", "torn"):
            kind, changes["outcome"] = "read", kind
        for word in unusual:
            match word.split("="):
                case ["began", began]:
                    changes["began"] = float(began)
                case ["final"]:
                    changes["final"] = True
                case ["failed" | "unknown"]:
                    changes["outcome"] = word
                case [host]:
                    changes["host"] = host
        found.append(operation(kind, value, float(start), float(end), **changes))
    return found


def kinds(history: list[Operation], **options: bool) -> set[str]:
    by_workers = [dataclasses.replace(one, worker=number) for number, one in enumerate(history)]
    return {violation.kind for violation in check(by_workers, **options)}


MAY_HAPPEN = {
    "reads of the last version are right":
        "absent 0 1; write 1 2 3; read 1 4 5; replace 2 6 7; read 2 8 9 final",
    "a write that failed may be seen, and need not":
        "write 1 0 1; write 2 2 3 failed; read 1 4 5; read 2 6 7",
    "a write that never returned may be seen late":
        "write 1 0 1; write 2 2 inf unknown; read 1 100 101; read 2 200 201",
    "a file unlinked while it was written stays absent":
        "write 1 4 5 began=0; unlink 1 2 b; absent 6 7",
    "a new file is empty until it is published":
        "write 1 4 5 began=0; absent 0 1; read - 2 3; read 1 6 7",
    "a file whose creator failed may stay empty":
        "create 1 1 2 began=0 failed; read - 5 6; absent 7 8",
    "an unlink that failed may have happened":
        "write 1 0 1; unlink 2 3 failed; read 1 4 5; absent 6 7",
    "a new file is seen on its own host before it is closed":
        "write new 3 4 began=1; read new 2 2.5",
    "a part is seen on the host that makes the file":
        "write new 3 4 began=1; torn 2 2.5",
}  # fmt: skip
MAY_NOT = {
    "mixed content is torn": ("torn", "torn 0 1"),
    "content that nobody wrote is torn": ("torn", "read 9 0 1"),
    "reading what is written later is from the future": ("future", "read 1 0 1; write 1 2 3"),
    "reading the old version after close is stale":
        ("stale", "write 1 0 1; write 2 2 3; read 1 4 5 b"),
    "a failed write that was seen does not go away":
        ("back", "write 1 0 1; write 2 2 3 failed; read 2 4 5; read 1 6 7"),
    "a part of a file that is overwritten is not seen":
        ("torn", "write old 0 1; write new 4 5 began=2; torn 3 3.5"),
    "an overwritten file is not seen on its own host before it is closed":
        ("future", "write old 0 1; write new 4 5 began=2; read new 3 3.5"),
    "reading the old version again is going back":
        ("back", "write 1 0 1; write 2 2 9; read 2 3 4; read 1 5 6"),
    "an acknowledged file does not vanish": ("vanished", "write 1 0 1; absent 2 3 final"),
    "a file does not vanish for a moment":
        ("vanished", "unlink 0 1 failed; write 1 2 3; read 1 4 5; absent 6 7; read 1 8 9"),
    "a file written after an unlink does not vanish":
        ("vanished", "write 1 0 1; unlink 2 3; write 2 4 5; absent 6 7"),
    "a file that was published is not empty": ("vanished", "write 1 0 1; read - 2 3"),
    "an unlinked file does not come back": ("resurrected", "write 1 0 1; unlink 2 3; read 1 4 5"),
    "only one exclusive creator wins":
        ("vanished", "create 1 1 2 began=0; create 2 4 5 began=3 b"),
    "what is acknowledged can be read at the end":
        ("unreadable", "write 1 0 1; read 1 2 3 failed final"),
    "a new file is not seen on another host before it is closed":
        ("future", "write new 3 4 began=1; read new 2 2.5; read new 2 2.5 b"),
    "a part is not seen on another host":
        ("torn", "write new 3 4 began=1; torn 2 2.5; torn 2 2.5 b"),
    "a failed operation does not excuse what happens much later":
        ("vanished", f"unlink 0 1 failed; write 1 {2 + LATE_S} {3 + LATE_S}; "
         f"absent {4 + LATE_S} {5 + LATE_S}"),
}  # fmt: skip


@pytest.mark.parametrize("history", MAY_HAPPEN.values(), ids=MAY_HAPPEN)
def test_a_history_that_may_happen_is_accepted(history: str) -> None:
    assert kinds(history_of(history)) == set()


@pytest.mark.parametrize(("kind", "history"), MAY_NOT.values(), ids=MAY_NOT)
def test_a_history_that_may_not_happen_is_refused(kind: str, history: str) -> None:
    assert kinds(history_of(history)) == {kind}


def test_hosts_may_learn_of_a_write_in_turn_but_none_goes_back() -> None:
    history = [write("1", 0, 1), write("2", 2, 9, host="c")]
    history += [read("2", 3, 4, host="a"), read("1", 5, 6, host="b")]
    assert kinds(history, across_hosts=False) == set()
    history.append(read("1", 7, 8, host="a"))
    assert kinds(history, across_hosts=False) == {"back"}


def test_what_its_own_host_reads_of_a_new_file_need_not_be_published_yet() -> None:
    history = [write("new", 1, 5), read("new", 2, 2.5)]
    history += [write("other", 3, 3.5, host="b"), read("new", 4, 6)]
    assert kinds(history, across_hosts=False) == set()
    # On another host it was published when it was read.
    history += [read("new", 2, 2.5, host="b"), read("new", 4, 4.5, host="b")]
    assert kinds(history, across_hosts=False) == {"stale"}


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
        history = [write("1", 0, 1)]
        for value in ("2", "3"):
            start = source.randrange(2, 12)
            history.append(write(value, start, start + source.randrange(1, 8)))
        for _ in range(source.randrange(1, 4)):
            start = source.randrange(2, 20)
            value = source.choice("123")
            history.append(read(value, start, start + source.randrange(1, 6)))
        # No two moments are the same, so that no order depends on whether "before" means "not after".
        history = [
            dataclasses.replace(one, start=one.start + i + 1, end=one.end + i + 11)
            for i, one in enumerate(history)
        ]
        allowed = _has_an_order(history)
        assert (not kinds(history)) == allowed, history
        verdicts[allowed] += 1
    assert min(verdicts[True], verdicts[False]) > 100


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
        workers = Workers({"a": folder}, logs, seed=seed, names=1, pause_s=0, operations=100)
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
        options: dict[str, Any] = {"pause_s": 0, "largest_bytes": 4 << 20, "operations": 300}
        workers = Workers({"a": folder}, memory / "logs", seed=2, **options)
        operations = _work(workers)
    assert not check(operations)
    assert sum(operation.outcome in ("ok", "absent") for operation in operations) > 400
    assert {operation.kind for operation in operations} == {
        *("write", "create", "replace", "unlink", "read")
    }
