"""The whole list of what a mount may do otherwise than a tmpfs, each entry with its reason and its test.

Some are plain rules. The others need to know who has which file open, which `Uncertain` follows.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from harness.differential.holders import Holder, Holders, slot_of
from harness.differential.steps import Step

Value = Any
_LOCK_OPS = ("flock", "lock", "lock_test")
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


def _seeks_in_directory(step: Step, tmpfs: Value, mount: Value) -> bool:
    """ENXIO instead of EINVAL for lseek(directory, SEEK_DATA)."""
    if step.op != "seek_data" or tmpfs[0] != "EINVAL" or mount[0] != "ENXIO":
        return False
    return bool(tmpfs[1] == mount[1])


def _keeps_pages(step: Step, tmpfs: Value, mount: Value) -> bool:
    """The same, but for pages that are gone from a mapping on the tmpfs only."""
    if tmpfs == "EFAULT" and isinstance(mount, tuple) and mount[:1] == ("bytes",):
        return True
    if isinstance(tmpfs, tuple) and isinstance(mount, tuple) and len(tmpfs) == len(mount):
        return all(_keeps_pages(step, *pair) for pair in zip(tmpfs, mount, strict=True))
    return bool(tmpfs == mount)


# Programs go without what a session cannot do. pyfuse3 does not hand fallocate and O_TMPFILE on (test:
# test_portable_session_refuses_what_pyfuse3_does_not_hand_on), nor that a time is to be now: the kernel
# sends that of its last tick. Under it the kernel keeps a set-group-id bit without the group's right to
# execute when others write to the file.
REFUSED = {"pyfuse3": frozenset({"fallocate", "tmpfile", "set-group-id", "touch"})}

ALLOWED: tuple[Allowed, ...] = (
    Allowed(
        "FUSE tells a filesystem whose lock is tested, but not of which kind it is: where POSIX locks and "
        "those of open file descriptions meet, the process in the answer is another one",
        "test_as_tmpfs_does.py, test_lock_in_the_way_is_told_by_range_of_any_kind",
        ("kernel", "cluster"),
        _differs_by_process,
    ),
    Allowed(
        "A published version of a cluster's file lies in an extent of its own: who has mapped one that is "
        "emptied goes on reading it where a tmpfs sends SIGBUS",
        "test_promises.py, test_mapping_survives_an_open_for_reading_that_truncates_the_file",
        ("cluster",),
        _keeps_pages,
    ),
    Allowed(
        "The kernel's FUSE knows of no data in a directory",
        "test_as_tmpfs_does.py, test_seeking_for_data_in_a_directory",
        ("kernel", "pyfuse3", "cluster"),
        _seeks_in_directory,
    ),
)


class Uncertain:
    """Files of which less is compared, and what follows from the steps and what the tmpfs answered.

    Contents, sizes, positions and times of a *parted* file are not compared; everything else is. That is
    allowed in three cases:

    - The file was replaced by an open with O_TRUNC. Until the descriptor that did it is closed, others see
      the content before by the file's name. Whoever has the file open then, keeps it. It is parted from the
      moment on in which two processes may see different contents.
      Test: test_promises.py, test_reader_and_mapping_keep_their_version_when_file_is_republished and others
      there.
    - The file is mapped, its last descriptor is closed, and it was empty once (in a cluster: in any case).
      An empty version has no extent, and in a cluster one that is published has another, so the map is
      that of a file which is gone. The kernel tells nobody of a map that passes through.
      Test: test_as_tmpfs_does.py, test_map_without_a_descriptor_keeps_its_extent.
    - O_APPEND was taken off a descriptor: writes that pass through go on appending (docs/sharing.md).

    The store nodes of a cluster keep what is named or open. What was written to a file without a name ends
    with the last descriptor that opened it: one that never did (O_PATH) shows size and times of the
    version before. Test: test_attributes.py,
    test_what_was_written_to_a_file_without_a_name_is_there_for_a_descriptor_that_never_opened_it.

    A map that passes through is one of the extent: it does not keep the description open through which
    it was made. So locks that belong to a description end when the last descriptor is closed, where on a
    tmpfs a map keeps them. From then on the file's locks are not compared. Nor are they when a descriptor
    for reading is closed: that may drop a process's locks or not (docs/sharing.md).
    Test: test_as_tmpfs_does.py, test_flock_ends_with_the_last_descriptor_whatever_is_mapped.
    """

    def __init__(self, *, isolated: bool, passes_through: bool, in_cluster: bool) -> None:
        """In a cluster what is written in place lies in another extent after it was published, and what was
        written to a file without a name is not kept for a descriptor that never opened it (O_PATH)."""
        self._isolated = isolated
        self._in_cluster = in_cluster
        self._passes_through = passes_through
        self._holders = Holders()
        self._known: set[int] = set()
        self._knows_too_little = False  # mknod(2) makes files whose inodes are not told
        self._private: set[int] = set()
        # They were private once: how their times move depends on who looked.
        self._replaced: set[int] = set()
        self._parted: set[int] = set()
        self._empty_maps: set[int] = set()
        self._locks_unknown: set[int | None] = set()

    def note(self, step: Step, tmpfs: Value) -> None:
        """Follow what a step opened or closed."""
        result = tmpfs[0] if isinstance(tmpfs, tuple) else tmpfs
        if self._isolated and step.op in ("open", "reopen") and isinstance(result, tuple):
            self._note_open(step, result[1][1])
        source, target = self._holders.of(step, "source"), self._holders.of(step, "target")
        if source in self._parted and target is not None:
            self._parted.add(target)
        self._knows_too_little |= step.op == "mknod"
        before, flags = self._holders.inodes.copy(), self._holders.flags.copy()
        self._holders.note(step, tmpfs)
        if self._passes_through:
            self._note_maps(step, result, before, flags)
            if step.op == "status_flags" and not step.arguments["flags"] & os.O_APPEND:
                ino = self._holders.of(step, "slot")
                if ino is not None and self._holders.flags[slot_of(step)] & os.O_APPEND:
                    self._parted.add(ino)
        self._private &= set(self._holders.inodes.values())
        if step.op in ("truncate", "rename", "link", "link_fd"):
            self._parted |= self._private

    def _note_open(self, step: Step, ino: int) -> None:
        flags = step.arguments["flags"]
        was_there = ino in self._known or self._knows_too_little or not flags & os.O_CREAT
        if flags & os.O_TRUNC and not flags & os.O_PATH and was_there:
            if ino in self._holders.inodes.values():
                self._parted.add(ino)
            self._private.add(ino)
            self._replaced.add(ino)
        elif ino in self._private:
            self._parted.add(ino)
        self._known.add(ino)

    def _note_maps(
        self, step: Step, result: Value, before: dict[Holder, int], flags: dict[Holder, int]
    ) -> None:
        if step.op == "mmap" and isinstance(result, tuple) and result[2] == 0:
            self._empty_maps.add(result[1][1])
        holders, mapped = self._holders.inodes, self._holders.mapped()
        closed = [holder for holder, ino in before.items() if holders.get(holder) != ino]
        if step.op in ("open", "reopen", "dup") and not isinstance(result, str):
            closed.append(slot_of(step))  # what was in the slot before
        self._locks_unknown |= mapped & {before.get(holder) for holder in closed}
        self._locks_unknown |= {
            before[holder]
            for holder in closed
            if holder in before and flags[holder] & os.O_ACCMODE == os.O_RDONLY
        }
        if not isinstance(result, str) and empties(step):
            self._empty_maps |= mapped
        self._empty_maps &= mapped
        lost = mapped if self._in_cluster else self._empty_maps
        self._parted |= lost - self._holders.opened()

    def allows(self, step: Step, tmpfs: Value, mount: Value) -> bool:
        """Return whether both are the same but for what may differ."""
        if step.op in _LOCK_OPS and self._holders.of(step, "slot") in self._locks_unknown:
            return True
        opened = self._holders.opened()

        def has_other_times(file: Value) -> bool:
            """Also, in a cluster, where it has neither a name nor a descriptor by which it can be read."""
            is_lost = not file["nlink"] and file["inode"] not in opened
            return file["inode"] in self._replaced or (self._in_cluster and is_lost)

        tmpfs, mount = (without_times(one, has_other_times) for one in (tmpfs, mount))
        uncertain = set(self._parted)
        if "slot" not in step.arguments or step.arguments.keys() & {"path", "new"}:
            uncertain |= self._private
        if self._holders.all_of(step) & self._parted:
            return without_contents(tmpfs) == without_contents(mount)
        return veiled(tmpfs, uncertain) == veiled(mount, uncertain)


def empties(step: Step) -> bool:
    """Return whether the step cuts a file to nothing, if it succeeds."""
    if step.op in ("truncate", "ftruncate"):
        return not step.arguments["size"]
    return step.op in ("open", "reopen") and bool(step.arguments["flags"] & os.O_TRUNC)


def veiled(value: Value, inodes: set[int]) -> object:
    """The value without contents, sizes and times of these files."""
    if isinstance(value, dict):
        return _bare(value) if value["inode"] in inodes else value
    if not isinstance(value, tuple):
        return value
    if any(_inode_of(part) in inodes for part in value):
        return without_contents(value)
    return tuple(veiled(part, inodes) for part in value)


def without_times(value: Value, is_chosen: Callable[[Value], bool]) -> object:
    """The value without times of the files that are chosen by their attributes."""
    if isinstance(value, dict) and is_chosen(value):
        return {key: one for key, one in value.items() if not key.endswith("time")}
    if isinstance(value, tuple):
        return tuple(without_times(part, is_chosen) for part in value)
    return value


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
    """Applies the list to one mount. `kind` is its session; `isolated`: it replaces files."""

    batch_max = 16  # steps of one process that are carried out without a look at the others

    def __init__(self, kind: str, *, isolated: bool = True) -> None:
        self._rules = [rule for rule in ALLOWED if kind in rule.sessions]
        self._begin = partial(
            Uncertain,
            isolated=isolated,
            passes_through=kind in ("kernel", "cluster"),
            in_cluster=kind == "cluster",
        )
        self._uncertain: Uncertain

    def begin(self, _root: Path, _number_of: NumberOf) -> None:
        """A program begins in an empty directory of the tmpfs. `number_of` numbers its inodes."""
        self._uncertain = self._begin()

    def before(self, _step: Step) -> list[Step]:
        """Return the steps to carry out before this one."""
        return []

    def lets(self, _step: Step) -> bool:
        """Return whether the step is to be carried out at all."""
        return True

    def note(self, step: Step, tmpfs: Value) -> None:
        """A step was carried out, and the tmpfs answered this."""
        self._uncertain.note(step, tmpfs)

    def allows(self, step: Step, tmpfs: Value, mount: Value) -> bool:
        """Return whether the list has the difference between these answers."""
        if any(rule.applies(step, tmpfs, mount) for rule in self._rules):
            return True
        return self._uncertain.allows(step, tmpfs, mount)
