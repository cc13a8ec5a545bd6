"""Refused pushes: the reason of each is kept as a small file in refused/, and shown in the file status."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from .directory import COMPLAINT, TrainDirectory, read_small, replace
from .errors import BadPush, Refused, TrainError
from .folders import Directory

_KEPT = 32
_SHOWN = 8
_TEXT_MAX = 500


class Refusal(msgspec.Struct, frozen=True):
    """A refused push. `path`: its name in push/; `made_s`: seconds since 1970; `code`: the error code.
    `counts`: it was refused when it was in a plan, and counts with weight 0."""

    path: str
    reason: str
    made_s: float
    code: int = errno.EINVAL
    counts: bool = False


def note(
    train: TrainDirectory, path: str, refused: Refused | TrainError, *, counts: bool = False
) -> str:
    """Keep the reason of a refusal, and return the name of its file. A filesystem that is full or read-only
    does not keep it.

    Only files of refused/ itself are touched: somebody may have put a link there.
    """
    code, reason = errno.EINVAL, str(refused)
    if isinstance(refused, Refused):
        code, reason = refused.errno or code, refused.strerror or reason
    refusal = Refusal(one_line(path), one_line(reason), time.time(), code, counts)
    name = f"{time.time_ns()}.{os.uname().nodename}.{os.getpid()}"
    with contextlib.suppress(OSError):
        folder = Directory(train.path / "refused")
        new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(folder.file(name), new, 0o644), "wb") as file:
            file.write(msgspec.json.encode(refusal))
        for old in sorted(os.listdir(folder.path))[:-_KEPT]:
            with contextlib.suppress(OSError):
                folder.file(old).unlink()
    return name


def one_line(text: str) -> str:
    """Return a text that others chose as one short line."""
    return repr(text[:_TEXT_MAX])[1:-1]


def names(train: TrainDirectory) -> list[str]:
    """Return the names of the files of refusals, oldest first. Whoever put something else in the place of
    refused/ is told nothing."""
    with contextlib.suppress(OSError):
        return sorted(os.listdir(train.refused))
    return []


def read(train: TrainDirectory, files: Iterable[str]) -> list[Refusal]:
    """Return what files of these names say, as far as they are there and say it."""
    found = []
    for name in files:
        with contextlib.suppress(OSError, TrainError, msgspec.MsgspecError):
            found.append(msgspec.json.decode(read_small(train.refused / name), type=Refusal))
    return found


def newest(train: TrainDirectory) -> list[Refusal]:
    """Return the newest refusals, oldest first."""
    return read(train, names(train)[-_SHOWN:])


def complain(target: Path, shard: str, bad: BadPush) -> None:
    """Tell the coordinator of a push of a plan that a reducer cannot sum. `target`: the directory of the
    version that is being made. Raises OSError."""
    replace(target / f"{COMPLAINT}{shard}", msgspec.json.encode({bad.path: bad.reason}))


def complaints(target: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the reasons of the complaints about a plan, by the names of the pushes. `names`: of all that
    is in the directory of the version. Raises OSError."""
    found: dict[str, str] = {}
    for name in names:
        if name.startswith(COMPLAINT):
            with contextlib.suppress(TrainError, msgspec.MsgspecError):
                found |= msgspec.json.decode(read_small(target / name), type=dict[str, str])
    return found
