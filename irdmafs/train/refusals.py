"""Refused pushes: the reason of each is kept as a small file in refused/, and shown in the file status."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

from .directory import TrainDirectory, read_small, replace
from .errors import BadPush, Refused, TrainError

__all__ = ["Refusal", "complain", "complaints", "note", "one_line", "read"]

_COMPLAINT = "bad."
_KEPT = 32
_SHOWN = 8
_TEXT_MAX = 500


class Refusal(msgspec.Struct, frozen=True):
    """A refused push. `path`: its name in push/; `made_s`: seconds since 1970."""

    path: str
    reason: str
    made_s: float


def note(train: TrainDirectory, path: str, refused: Refused | TrainError) -> None:
    """Keep the reason of a refusal. A filesystem that is full or read-only does not keep it.

    Only files of refused/ itself are touched: somebody may have put a link there.
    """
    refusal = Refusal(one_line(path), one_line(str(refused)), time.time())
    with contextlib.suppress(OSError):
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = os.open(train.path / "refused", flags)
        try:
            _keep(folder, msgspec.json.encode(refusal))
        finally:
            os.close(folder)


def one_line(text: str) -> str:
    """Return a text that others chose as one short line."""
    return repr(text[:_TEXT_MAX])[1:-1]


def _keep(folder: int, data: bytes) -> None:
    """Add a file, and remove the oldest ones. Raises OSError."""
    name = f"{time.time_ns()}.{os.uname().nodename}.{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(name, flags, 0o644, dir_fd=folder)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)
    for old in sorted(os.listdir(folder))[:-_KEPT]:
        with contextlib.suppress(OSError):
            os.unlink(old, dir_fd=folder)


def read(train: TrainDirectory) -> list[Refusal]:
    """Return the newest refusals, oldest first. Raises OSError."""
    found = []
    for name in sorted(os.listdir(train.refused))[-_SHOWN:]:
        with contextlib.suppress(OSError, TrainError, msgspec.MsgspecError):
            found.append(msgspec.json.decode(read_small(train.refused / name), type=Refusal))
    return found


def complain(target: Path, shard: str, bad: BadPush) -> None:
    """Tell the coordinator of a push of a plan that a reducer cannot sum. `target`: the directory of the
    version that is being made. Raises OSError."""
    replace(target / f"{_COMPLAINT}{shard}", msgspec.json.encode({bad.path: bad.reason}))


def complaints(target: Path) -> dict[str, str]:
    """Return the reasons of the complaints about a plan, by the names of the pushes. Raises OSError."""
    found: dict[str, str] = {}
    for name in os.listdir(target):
        if name.startswith(_COMPLAINT):
            with contextlib.suppress(TrainError, msgspec.MsgspecError):
                found |= msgspec.json.decode(read_small(target / name), type=dict[str, str])
    return found
