"""Random changes of a tree of files, to be carried out on a mount and on a tmpfs, which is its model.

It needs nothing that takes long to import: each process that is to be killed starts with it.
"""

import os
import random
import stat
from collections import defaultdict
from pathlib import Path
from typing import Any

from harness.patterns import pattern

SIZES = [0, 100, 4096, 50_000, 1_000_000]
Change = tuple[Any, ...]


def propose(top: Path, rng: random.Random, version: int) -> Change:
    """Return a change that succeeds on a tree."""
    names: dict[int, list[str]] = defaultdict(list)
    for path in sorted(top.rglob("*")):
        names[stat.S_IFMT(path.lstat().st_mode)].append(str(path.relative_to(top)))
    files, links, directories = (names[kind] for kind in (stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR))
    empty = [name for name in directories if not os.listdir(top / name)]
    free = f"{rng.choice(['', *directories])}/n{rng.randrange(40)}".lstrip("/")
    content = (version, rng.choice(SIZES))
    taken = os.path.lexists(top / free)
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
    if directories and not taken:
        directory = rng.choice(directories)
        if not free.startswith(directory + "/") and free.count("/") < 4:
            changes.append(("rename", directory, free))
    if not taken:
        changes += [("write", free, content)] * (4 if len(files) < 40 else 0)
        changes.append(("symlink", free, f"target{version}"))
        if len(directories) < 7 and free.count("/") < 4:
            changes.append(("mkdir", free))
    return rng.choice(changes) if changes else ("mkdir", f"d{version}")


def carry_out(change: Change, top: Path, rng: random.Random) -> None:
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
