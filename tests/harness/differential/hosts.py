"""Several hosts that take turns: then they see one filesystem, close-to-open, and a tmpfs is its model.

A turn ends when what a host has written is closed. Steps that do not wait for their turn are left out:
those that touch a file which another host has open for writing. Whoever has a file open when another host
writes it keeps it as it was; such descriptors are only closed.
"""

import contextlib
import os
from pathlib import Path

from harness.differential.actor import SLOTS
from harness.differential.differences import Leniency, NumberOf, Value, veiled
from harness.differential.holders import Holder, Holders, slot_of
from harness.differential.steps import Step

# Locks and stores through mappings reach other hosts in ways of their own, which other tests check; and
# each host has a clock of its own.
LEFT_OUT = frozenset({"lock", "lock_test", "flock", "mmap", "times"})
_ALWAYS = frozenset({"close", "exit", "fork", "exec", "umask"})
_WRITES = {"write": "slot", "pwrite": "slot", "ftruncate": "slot", "fallocate": "slot"}
_WRITES |= {"copy_range": "target", "sendfile": "target"}


class Hosts(Leniency):
    """Which steps on `count` hosts may be compared. Process N begins on host N modulo `count`."""

    batch_max = 1

    def __init__(self, count: int) -> None:
        super().__init__("cluster", isolated=False)
        self._count = count

    def begin(self, root: Path, number_of: NumberOf) -> None:
        super().begin(root, number_of)
        self._root = root
        self._number_of = number_of
        self._holders = Holders()
        self._stale: set[Holder] = set()
        self._last_host = 0
        self._hosts: dict[int, int] = {}

    def _host(self, actor: int) -> int:
        return self._hosts.setdefault(actor, actor % self._count)

    def before(self, step: Step) -> list[Step]:
        """Have a host hear of what others did: opening a directory waits for the newest names."""
        host = self._host(step.actor)
        if host == self._last_host or step.op in _ALWAYS:
            return []
        self._last_host = host
        return [Step(step.actor, "listdir", {"path": "."})]

    def _named(self, step: Step) -> set[int | None]:
        """The inodes that the step names by paths."""
        found: set[int | None] = set()
        for key in ("path", "new"):
            if key in step.arguments:
                for look in (os.stat, os.lstat):
                    with contextlib.suppress(OSError):
                        found.add(self._number_of(look(self._root / step.arguments[key]).st_ino))
        return found

    def _foreign_writers(self, host: int) -> set[int]:
        """Inodes that others than this host have open for writing."""
        return {
            self._holders.inodes[holder]
            for holder in self._holders.writers
            if self._host(holder[1]) != host
        }

    def lets(self, step: Step) -> bool:
        """Return whether it is this host's turn to do this."""
        if step.op in _ALWAYS:
            return True
        for key in ("slot", "source", "target"):
            opens = key == "slot" and step.op in ("open", "reopen", "dup")
            if key in step.arguments and not opens and slot_of(step, key) in self._stale:
                return False
        concerned = self._named(step) | (self._holders.all_of(step) - {None})
        return not concerned & self._foreign_writers(self._host(step.actor))

    def note(self, step: Step, tmpfs: Value) -> None:
        super().note(step, tmpfs)
        result = tmpfs[0] if isinstance(tmpfs, tuple) else tmpfs
        before = self._holders.inodes.copy()
        self._holders.note(step, tmpfs)
        if step.op == "fork":
            self._forked(step.actor, step.arguments["child"])
        if step.op in ("open", "reopen", "dup") and self._holders.inodes != before:
            self._stale.discard(slot_of(step))
        written: set[int | None] = set()
        if step.op in _WRITES:
            written = {self._holders.of(step, _WRITES[step.op])}
        elif step.op == "truncate" or (step.op == "open" and step.arguments["flags"] & os.O_TRUNC):
            written = self._named(step)
        elif step.op == "reopen" and isinstance(result, tuple):
            written = {result[1][1]} if step.arguments["flags"] & os.O_TRUNC else set()
        host = self._host(step.actor)
        for holder, ino in self._holders.inodes.items():
            if ino in written and self._host(holder[1]) != host:
                self._stale.add(holder)
        self._stale &= self._holders.inodes.keys()

    def _forked(self, parent: int, child: int) -> None:
        self._hosts[child] = self._host(parent)
        for slot in range(SLOTS):
            if ("slot", parent, slot) in self._stale:
                self._stale.add(("slot", child, slot))
            else:
                self._stale.discard(("slot", child, slot))

    def allows(self, step: Step, tmpfs: Value, mount: Value) -> bool:
        """Return whether the difference is that of a descriptor from before another host wrote, or of a
        file that another host has not closed yet."""
        host = step.actor if step.op.startswith("tree") else self._host(step.actor)
        uncertain = self._foreign_writers(host)
        uncertain |= {
            self._holders.inodes[holder] for holder in self._stale if holder[1] == step.actor
        }
        if veiled(tmpfs, uncertain) == veiled(mount, uncertain):
            return True
        return super().allows(step, tmpfs, mount)
