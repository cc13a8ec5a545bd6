"""A model of a tree of files, and random changes of it that can be carried out on a mount.

It needs nothing that takes long to import: each process that is to be killed starts with it.
"""

import copy
import dataclasses
import os
import random
from collections.abc import Iterator
from typing import Any

from harness.patterns import pattern

SIZES = [0, 100, 4096, 50_000, 1_000_000]
Change = tuple[Any, ...]


@dataclasses.dataclass
class File:
    content: tuple[int, int]
    mode: int = 0o644
    label: bytes | None = None


@dataclasses.dataclass
class Tree:
    """Names of files (hard links share a File), symlinks (str) and directories (None)."""

    names: dict[str, File | str | None] = dataclasses.field(default_factory=dict)

    def _below(self, directory: str) -> Iterator[str]:
        return (name for name in self.names if name.startswith(directory + "/"))

    def apply(self, change: Change) -> None:
        kind, name, *rest = change
        there = self.names.get(name)
        if kind == "write":
            if isinstance(there, File):
                there.content = rest[0]
            else:
                self.names[name] = File(rest[0])
        elif kind == "mkdir":
            self.names[name] = None
        elif kind in ("unlink", "rmdir"):
            del self.names[name]
        elif kind == "symlink":
            self.names[name] = rest[0]
        elif kind == "link":
            self.names[rest[0]] = there
        elif kind == "chmod":
            assert isinstance(there, File)
            there.mode = rest[0]
        elif kind == "setxattr":
            assert isinstance(there, File)
            there.label = rest[0]
        elif kind == "rename":
            target = rest[0]
            if not (isinstance(there, File) and there is self.names.get(target)):
                moved = [name, *self._below(name)]
                for old in moved:
                    self.names[target + old[len(name) :]] = self.names.pop(old)

    def after(self, change: Change) -> "Tree":
        changed = copy.deepcopy(self)
        changed.apply(change)
        return changed

    def look(self) -> dict[str, object]:
        """Return what a walk of the tree must find; files with the names that share them."""
        found: dict[str, object] = {}
        for name, there in self.names.items():
            if isinstance(there, File):
                links = sorted(n for n, other in self.names.items() if other is there)
                found[name] = (there.content, there.mode, there.label, links)
            else:
                found[name] = there
        return found

    def propose(self, rng: random.Random, version: int) -> Change:
        """A change that succeeds on this tree."""
        files = [name for name, there in self.names.items() if isinstance(there, File)]
        links = [name for name, there in self.names.items() if isinstance(there, str)]
        directories = ["", *(name for name, there in self.names.items() if there is None)]
        empty = [d for d in directories[1:] if not any(self._below(d))]
        free = f"{rng.choice(directories)}/n{rng.randrange(40)}".lstrip("/")
        content = (version, rng.choice(SIZES))
        taken = free in self.names
        changes: list[Change] = []
        if files:
            file = rng.choice(files)
            changes += [("write", file, content)] * 6
            changes += [("unlink", file), ("chmod", file, rng.choice([0o600, 0o755]))]
            changes += [("rename", file, rng.choice(files))] * 3
            changes += [("setxattr", file, b"%d" % version)]
            if not taken:
                changes += [("link", file, free), ("rename", file, free), ("rename", file, free)]
        if links:
            changes.append(("unlink", rng.choice(links)))
        if empty:
            changes.append(("rmdir", rng.choice(empty)))
        if len(directories) > 1 and not taken:
            directory = rng.choice(directories[1:])
            if not free.startswith(directory + "/") and free.count("/") < 4:
                changes.append(("rename", directory, free))
        if not taken:
            changes += [("write", free, content)] * (4 if len(files) < 40 else 0)
            changes.append(("symlink", free, f"target{version}"))
            if len(directories) < 8 and free.count("/") < 4:
                changes.append(("mkdir", free))
        return rng.choice(changes) if changes else ("mkdir", f"d{version}")


def carry_out(change: Change, top: str, rng: random.Random) -> None:
    """Make a change in the tree on `top`. Raises OSError."""
    kind, name, *rest = change
    path = f"{top}/{name}"
    if kind == "write":
        how = rng.choice(["truncate", "truncate", "fsync"])
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            data = memoryview(pattern(*rest[0]))
            while data:
                data = data[os.write(fd, data) :]
            if how == "fsync":
                os.fsync(fd)
        except BaseException:
            # Only what dies in the middle may lose its write; close() would publish half of it.
            os._exit(1)
        os.close(fd)
    elif kind == "setxattr":
        os.setxattr(path, "user.label", rest[0])
    elif kind in ("rename", "link"):
        getattr(os, kind)(path, f"{top}/{rest[0]}")
    elif kind == "symlink":
        os.symlink(rest[0], path)
    else:
        getattr(os, kind)(path, *rest)
