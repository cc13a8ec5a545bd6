"""The whole list of what a mount may do otherwise than a tmpfs, each entry with its reason and its test.

All but the first are plain rules. The first needs to know who has which file open, which `Replaced`
follows from the steps and what the tmpfs answered.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from differential_holders import Holders
from differential_steps import Step

Value = Any
NumberOf = Callable[[int], int | None]


class Allowed(NamedTuple):
    """One difference that is meant. `applies` is given the step, and what tmpfs and mount answered."""

    reason: str
    test: str
    sessions: tuple[str, ...]
    applies: Callable[[Step, Value, Value], bool]


def _differs_by_process(step: Step, tmpfs: Value, mount: Value) -> bool:
    """Only the process that holds a lock is another one, or the question was for no lock at all."""
    if step.op != "lock_test":
        return False
    if step.arguments["kind"] == "none":
        return True
    return tuple(tmpfs[0][:-1]) == tuple(mount[0][:-1]) and bool(tmpfs[1] == mount[1])


def _keeps_pages(step: Step, tmpfs: Value, mount: Value) -> bool:
    """The same, but for pages that are gone from a mapping on the tmpfs only."""
    if tmpfs == "EFAULT" and isinstance(mount, tuple) and mount[:1] == ("bytes",):
        return True
    if isinstance(tmpfs, tuple) and isinstance(mount, tuple) and len(tmpfs) == len(mount):
        return all(_keeps_pages(step, *pair) for pair in zip(tmpfs, mount, strict=True))
    return bool(tmpfs == mount)


# Programs go without what a session cannot do. pyfuse3 does not hand fallocate and O_TMPFILE on (test:
# test_portable_session_refuses_what_pyfuse3_does_not_hand_on), and under it the kernel keeps a
# set-group-id bit without the group's right to execute when others write to the file.
REFUSED = {"pyfuse3": frozenset({"fallocate", "tmpfile", "set-group-id"})}

ALLOWED: tuple[Allowed, ...] = (
    Allowed(
        "FUSE tells a filesystem whose lock is tested, but not of which kind it is: where POSIX locks and "
        "those of open file descriptions meet, the process in the answer is another one",
        "test_45_differential.py, test_lock_in_the_way_is_told_by_its_range_whatever_its_kind",
        ("kernel", "cluster"),
        _differs_by_process,
    ),
    Allowed(
        "A published version of a cluster's file lies in an extent of its own: who has mapped one that is "
        "emptied goes on reading it where a tmpfs sends SIGBUS",
        "test_45_differential.py, test_map_of_a_file_that_is_emptied_can_still_be_read",
        ("cluster",),
        _keeps_pages,
    ),
)


class Replaced:
    """Files that were replaced by an open with O_TRUNC.

    Allowed: until the descriptor that did it is closed, others see the content before by the file's name.
    Whoever has the file open then, keeps it. So from the moment on in which two processes may see different
    contents, the contents, sizes, positions and times of that file are not compared; everything else is.

    Test: test_20_promises.py, test_reader_keeps_its_version_when_file_is_republished and others there.
    """

    def __init__(self) -> None:
        self._holders = Holders()
        self._known: set[int] = set()
        self._private: set[int] = set()
        self._parted: set[int] = set()

    def note(self, step: Step, tmpfs: Value) -> None:
        """Follow what a step opened or closed."""
        result = tmpfs[0] if isinstance(tmpfs, tuple) else tmpfs
        if step.op in ("open", "reopen") and isinstance(result, tuple):
            self._note_open(step, result[1][1])
        source, target = self._holders.of(step, "source"), self._holders.of(step, "target")
        if source in self._parted and target is not None:
            self._parted.add(target)
        self._holders.note(step, tmpfs)
        self._private &= set(self._holders.inodes.values())
        if step.op in ("truncate", "rename", "link"):
            self._parted |= self._private

    def _note_open(self, step: Step, ino: int) -> None:
        flags = step.arguments["flags"]
        if flags & os.O_PATH:
            pass
        elif flags & os.O_TRUNC and ino in self._known:
            if ino in self._holders.inodes.values():
                self._parted.add(ino)
            self._private.add(ino)
        elif ino in self._private:
            self._parted.add(ino)
        self._known.add(ino)

    def allows(self, step: Step, tmpfs: Value, mount: Value) -> bool:
        """Return whether both are the same but for contents that may differ."""
        uncertain = set(self._parted)
        if "slot" not in step.arguments or "path" in step.arguments:
            uncertain |= self._private
        if self._holders.all_of(step) & self._parted:
            return without_contents(tmpfs) == without_contents(mount)
        return veiled(tmpfs, uncertain) == veiled(mount, uncertain)


def veiled(value: Value, inodes: set[int]) -> object:
    """The value without contents, sizes and times of these files."""
    if isinstance(value, dict):
        return _bare(value) if value["inode"] in inodes else value
    if not isinstance(value, tuple):
        return value
    if any(_inode_of(part) in inodes for part in value):
        return without_contents(value)
    return tuple(veiled(part, inodes) for part in value)


def _inode_of(value: Value) -> int | None:
    if isinstance(value, dict):
        return int(value["inode"])
    if isinstance(value, tuple) and len(value) == 2 and value[0] == "inode":
        return int(value[1])
    return None


def _bare(status: dict[str, Value]) -> Value:
    return {key: status[key] for key in ("inode", "mode", "nlink", "owner")}


def without_contents(value: Value) -> object:
    """Only what a replacement does not change: names, link counts, modes, owners."""
    if isinstance(value, dict):
        return _bare(value)
    if not isinstance(value, tuple) or value[:1] == ("bytes",):
        return None
    return tuple(without_contents(part) for part in value)


class Leniency:
    """Applies the list to one mount. `kind` is its session; `isolated`: it replaces as `Replaced` says."""

    batch_max = 16  # steps of one process that are carried out without a look at the others

    def __init__(self, kind: str, *, isolated: bool = True) -> None:
        self._rules = [rule for rule in ALLOWED if kind in rule.sessions]
        self._isolated = isolated
        self._replaced: Replaced | None = None

    def begin(self, _root: Path, _number_of: NumberOf) -> None:
        """A program begins in an empty directory of the tmpfs. `number_of` numbers its inodes."""
        self._replaced = Replaced() if self._isolated else None

    def before(self, _step: Step) -> list[Step]:
        """Return the steps to carry out before this one."""
        return []

    def lets(self, _step: Step) -> bool:
        """Return whether the step is to be carried out at all."""
        return True

    def note(self, step: Step, tmpfs: Value) -> None:
        """A step was carried out, and the tmpfs answered this."""
        if self._replaced is not None:
            self._replaced.note(step, tmpfs)

    def allows(self, step: Step, tmpfs: Value, mount: Value) -> bool:
        """Return whether the list has the difference between these answers."""
        if any(rule.applies(step, tmpfs, mount) for rule in self._rules):
            return True
        return self._replaced is not None and self._replaced.allows(step, tmpfs, mount)
