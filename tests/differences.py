"""What a mount may do otherwise than a tmpfs: the whole list, each entry with its reason and its test.

All but the first are plain rules. The first needs to know who has which file open, which `Replaced`
follows from the steps and what the tmpfs answered.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from differential_steps import Step

Value = Any
Holder = tuple[str, int, int]  # "slot" or "map", the process, the number there


class Allowed(NamedTuple):
    """One difference that is meant. `applies` is given the step, and what tmpfs and mount answered."""

    reason: str
    test: str
    sessions: tuple[str, ...]
    applies: Callable[[Step, Value, Value], bool]


def _is_refused(*ops: str) -> Callable[[Step, Value, Value], bool]:
    """The mount says that it cannot do this."""
    return lambda step, _tmpfs, mount: step.op in ops and mount[0] == "ENOTSUP"


ALLOWED: tuple[Allowed, ...] = (
    Allowed(
        "pyfuse3 does not hand fallocate requests on",
        "test_45_differential.py, test_portable_session_refuses_what_it_cannot_do",
        ("pyfuse3",),
        _is_refused("fallocate"),
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
        self._holders: dict[Holder, int] = {}
        self._closed_by_exec: set[Holder] = set()
        self._known: set[int] = set()
        self._private: set[int] = set()
        self._parted: set[int] = set()

    def note(self, step: Step, tmpfs: Value) -> None:
        """Follow what a step opened or closed."""
        follow = getattr(self, f"_note_{step.op}", None)
        if follow is not None:
            follow(step, tmpfs[0] if isinstance(tmpfs, tuple) else tmpfs)
        held = set(self._holders.values())
        self._private &= held
        for key in ("source", "slot"):
            if self._ino(step, key) in self._parted and "target" in step.arguments:
                self._part(self._ino(step, "target"))
        if step.op in ("truncate", "rename", "link"):
            self._parted |= self._private

    def _ino(self, step: Step, key: str) -> int | None:
        if key not in step.arguments:
            return None
        return self._holders.get(("slot", step.actor, step.arguments[key]))

    def _part(self, ino: int | None) -> None:
        if ino is not None:
            self._parted.add(ino)

    def _note_open(self, step: Step, result: Value) -> None:
        if not isinstance(result, tuple):
            return
        ino, flags = result[1][1], step.arguments["flags"]
        others = ino in self._holders.values()
        if flags & os.O_PATH:
            pass
        elif flags & os.O_TRUNC and flags & os.O_ACCMODE and ino in self._known:
            if others:
                self._part(ino)
            self._private.add(ino)
        elif ino in self._private:
            self._part(ino)
        self._known.add(ino)
        self._hold(("slot", step.actor, step.arguments["slot"]), ino, flags)

    _note_reopen = _note_open

    def _hold(self, holder: Holder, ino: int, flags: int = 0) -> None:
        self._holders[holder] = ino
        self._closed_by_exec.discard(holder)
        if flags & os.O_CLOEXEC or holder[0] == "map":
            self._closed_by_exec.add(holder)

    def _note_close(self, step: Step, _result: Value) -> None:
        self._holders.pop(("slot", step.actor, step.arguments["slot"]), None)

    def _note_dup(self, step: Step, _result: Value) -> None:
        ino = self._ino(step, "source")
        if ino is not None:
            self._hold(("slot", step.actor, step.arguments["slot"]), ino)

    def _note_mmap(self, step: Step, result: Value) -> None:
        if isinstance(result, tuple):
            self._hold(("map", step.actor, step.arguments["where"]), result[1][1])

    def _note_munmap(self, step: Step, _result: Value) -> None:
        self._holders.pop(("map", step.actor, step.arguments["where"]), None)

    def _note_fork(self, step: Step, _result: Value) -> None:
        child = step.arguments["child"]
        for holder, ino in list(self._holders.items()):
            kind, actor, number = holder
            if actor == step.actor:
                self._hold((kind, child, number), ino)
                if holder in self._closed_by_exec:
                    self._closed_by_exec.add((kind, child, number))

    def _note_exec(self, step: Step, _result: Value) -> None:
        for holder in list(self._holders):
            if holder[1] == step.actor and holder in self._closed_by_exec:
                del self._holders[holder]

    def _note_exit(self, step: Step, _result: Value) -> None:
        for holder in list(self._holders):
            if holder[1] == step.actor:
                del self._holders[holder]

    def allows(self, step: Step, tmpfs: Value, mount: Value) -> bool:
        """Whether both are the same but for contents that may differ."""
        words = step.arguments
        uncertain = set(self._parted)
        if "slot" not in words or "path" in words:
            uncertain |= self._private
        named = {self._ino(step, key) for key in ("slot", "source", "target")}
        if "where" in words:
            named.add(self._holders.get(("map", step.actor, words["where"])))
        if named & self._parted:
            return bool(_without_contents(tmpfs) == _without_contents(mount))
        return bool(_veiled(tmpfs, uncertain) == _veiled(mount, uncertain))


def _veiled(value: Value, inodes: set[int]) -> Value:
    """The value without contents, sizes and times of these files."""
    if isinstance(value, dict):
        return _bare(value) if value["inode"] in inodes else value
    if not isinstance(value, tuple):
        return value
    if any(_inode_of(part) in inodes for part in value):
        return _without_contents(value)
    return tuple(_veiled(part, inodes) for part in value)


def _inode_of(value: Value) -> int | None:
    if isinstance(value, dict):
        return int(value["inode"])
    if isinstance(value, tuple) and len(value) == 2 and value[0] == "inode":
        return int(value[1])
    return None


def _bare(status: dict[str, Value]) -> Value:
    return {key: status[key] for key in ("inode", "mode", "nlink", "owner")}


def _without_contents(value: Value) -> Value:
    """Only what a replacement does not change: names, link counts, modes, owners."""
    if isinstance(value, dict):
        return _bare(value)
    if not isinstance(value, tuple) or value[:1] == ("bytes",):
        return None
    return tuple(_without_contents(part) for part in value)


class Leniency:
    """Applies the list to one mount. `kind` is its session; `isolated`: it replaces as `Replaced` says."""

    def __init__(self, kind: str, *, isolated: bool = True) -> None:
        self._rules = [rule for rule in ALLOWED if kind in rule.sessions]
        self._isolated = isolated
        self._replaced: Replaced | None = None

    def begin(self) -> None:
        """A program begins in an empty directory."""
        self._replaced = Replaced() if self._isolated else None

    def note(self, step: Step, tmpfs: Value) -> None:
        """A step was carried out, and the tmpfs answered this."""
        if self._replaced is not None:
            self._replaced.note(step, tmpfs)

    def allows(self, step: Step, tmpfs: Value, mount: Value) -> bool:
        """Whether the list has the difference between these answers."""
        if any(rule.applies(step, tmpfs, mount) for rule in self._rules):
            return True
        return self._replaced is not None and self._replaced.allows(step, tmpfs, mount)
