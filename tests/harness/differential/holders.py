"""The files that each process has open in a differential test."""

import os
from collections.abc import Iterator
from typing import Any

from harness.differential.steps import Step

Value = Any
Holder = tuple[str, int, int]  # "slot" or "map", the process, the number there


class Holders:
    """The descriptors and mappings of each process, with their files and the flags that they were opened
    with. Inodes are numbered as in results."""

    def __init__(self) -> None:
        self.inodes: dict[Holder, int] = {}
        self.flags: dict[Holder, int] = {}
        self._closed_by_exec: set[Holder] = set()

    @property
    def writers(self) -> Iterator[Holder]:
        """What a file can be written through."""
        for holder, flags in self.flags.items():
            if flags & os.O_ACCMODE and not flags & os.O_PATH:
                yield holder

    def note(self, step: Step, tmpfs: Value) -> None:
        """Follow what a step opened or closed."""
        follow = getattr(self, f"_note_{step.op}", None)
        if follow is not None:
            follow(step, tmpfs[0] if isinstance(tmpfs, tuple) else tmpfs)

    def of(self, step: Step, key: str) -> int | None:
        """The inode in one of the step's slots."""
        if key not in step.arguments:
            return None
        return self.inodes.get(slot_of(step, key))

    def all_of(self, step: Step) -> set[int | None]:
        """The inodes that the step names by slots and mappings."""
        named = {self.of(step, key) for key in ("slot", "source", "target")}
        if "where" in step.arguments:
            named.add(self.inodes.get(("map", step.actor, step.arguments["where"])))
        return named

    def opened(self) -> set[int]:
        """Return the inodes that have a descriptor through which they can be read or written."""
        return {
            ino
            for holder, ino in self.inodes.items()
            if holder[0] == "slot" and not self.flags[holder] & os.O_PATH
        }

    def mapped(self) -> set[int]:
        """Return the inodes that have a mapping."""
        return {ino for holder, ino in self.inodes.items() if holder[0] == "map"}

    def _hold(self, holder: Holder, ino: int, flags: int, *, cloexec: bool = False) -> None:
        self.inodes[holder], self.flags[holder] = ino, flags
        (self._closed_by_exec.add if cloexec else self._closed_by_exec.discard)(holder)

    def _drop(self, holder: Holder) -> None:
        self.inodes.pop(holder, None)
        self.flags.pop(holder, None)

    def _note_open(self, step: Step, result: Value) -> None:
        if isinstance(result, tuple):
            flags = step.arguments["flags"]
            self._hold(slot_of(step), result[1][1], flags, cloexec=bool(flags & os.O_CLOEXEC))

    _note_reopen = _note_open

    def _note_close(self, step: Step, _result: Value) -> None:
        self._drop(slot_of(step))

    def _note_dup(self, step: Step, _result: Value) -> None:
        ino, source = self.of(step, "source"), slot_of(step, "source")
        if ino is not None:
            self._hold(slot_of(step), ino, self.flags[source])

    def _note_mmap(self, step: Step, result: Value) -> None:
        if isinstance(result, tuple):
            where = ("map", step.actor, step.arguments["where"])
            self._hold(where, result[1][1], self.flags[slot_of(step)], cloexec=True)

    def _note_munmap(self, step: Step, _result: Value) -> None:
        self._drop(("map", step.actor, step.arguments["where"]))

    def _note_fork(self, step: Step, _result: Value) -> None:
        for holder, ino in list(self.inodes.items()):
            kind, actor, number = holder
            if actor == step.actor:
                copy = (kind, step.arguments["child"], number)
                cloexec = holder in self._closed_by_exec
                self._hold(copy, ino, self.flags[holder], cloexec=cloexec)

    def _note_exec(self, step: Step, _result: Value) -> None:
        for holder in [one for one in self.inodes if one in self._closed_by_exec]:
            if holder[1] == step.actor:
                self._drop(holder)

    def _note_exit(self, step: Step, _result: Value) -> None:
        for holder in [one for one in self.inodes if one[1] == step.actor]:
            self._drop(holder)


def slot_of(step: Step, key: str = "slot") -> Holder:
    return ("slot", step.actor, step.arguments[key])
