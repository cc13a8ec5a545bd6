"""The files that each process has open in a differential test."""

import os
from typing import Any

from differential_steps import Step

Value = Any
Holder = tuple[str, int, int]  # "slot" or "map", the process, the number there


class Holders:
    """The descriptors and mappings of each process, with their files. Inodes are numbered as in
    results."""

    def __init__(self) -> None:
        self.inodes: dict[Holder, int] = {}
        self.writers: set[Holder] = set()
        self._closed_by_exec: set[Holder] = set()

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

    def _hold(self, holder: Holder, ino: int, *, writes: bool, cloexec: bool = False) -> None:
        self.inodes[holder] = ino
        (self.writers.add if writes else self.writers.discard)(holder)
        (self._closed_by_exec.add if cloexec else self._closed_by_exec.discard)(holder)

    def _drop(self, holder: Holder) -> None:
        self.inodes.pop(holder, None)
        self.writers.discard(holder)

    def _note_open(self, step: Step, result: Value) -> None:
        if isinstance(result, tuple):
            flags = step.arguments["flags"]
            writes = bool(flags & os.O_ACCMODE) and not flags & os.O_PATH
            cloexec = bool(flags & os.O_CLOEXEC)
            self._hold(slot_of(step), result[1][1], writes=writes, cloexec=cloexec)

    _note_reopen = _note_open

    def _note_close(self, step: Step, _result: Value) -> None:
        self._drop(slot_of(step))

    def _note_dup(self, step: Step, _result: Value) -> None:
        ino, source = self.of(step, "source"), slot_of(step, "source")
        if ino is not None:
            self._hold(slot_of(step), ino, writes=source in self.writers)

    def _note_mmap(self, step: Step, result: Value) -> None:
        if isinstance(result, tuple):
            where = ("map", step.actor, step.arguments["where"])
            writes = slot_of(step) in self.writers
            self._hold(where, result[1][1], writes=writes, cloexec=True)

    def _note_munmap(self, step: Step, _result: Value) -> None:
        self._drop(("map", step.actor, step.arguments["where"]))

    def _note_fork(self, step: Step, _result: Value) -> None:
        for holder, ino in list(self.inodes.items()):
            kind, actor, number = holder
            if actor == step.actor:
                copy = (kind, step.arguments["child"], number)
                cloexec = holder in self._closed_by_exec
                self._hold(copy, ino, writes=holder in self.writers, cloexec=cloexec)

    def _note_exec(self, step: Step, _result: Value) -> None:
        for holder in [one for one in self.inodes if one in self._closed_by_exec]:
            if holder[1] == step.actor:
                self._drop(holder)

    def _note_exit(self, step: Step, _result: Value) -> None:
        for holder in [one for one in self.inodes if one[1] == step.actor]:
            self._drop(holder)


def slot_of(step: Step, key: str = "slot") -> Holder:
    return ("slot", step.actor, step.arguments[key])
