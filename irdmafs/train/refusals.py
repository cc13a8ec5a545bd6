"""Refused pushes: the reason of each is kept as a small file in refused/, and shown in the file status."""

from __future__ import annotations

import contextlib
import os
import time

import msgspec

from .directory import TrainDirectory, remove, replace
from .errors import Refused

__all__ = ["Refusal", "note", "read"]

_KEPT = 32
_SHOWN = 8


class Refusal(msgspec.Struct, frozen=True):
    """A refused push. `path`: its name in push/; `made_s`: seconds since 1970."""

    path: str
    reason: str
    made_s: float


def note(train: TrainDirectory, path: str, refused: Refused) -> None:
    """Keep the reason of a refusal. A filesystem that is full or read-only does not keep it."""
    refusal = Refusal(path, str(refused), time.time())
    with contextlib.suppress(OSError):
        name = f"{time.time_ns()}.{os.uname().nodename}.{os.getpid()}"
        replace(train.refused / name, msgspec.json.encode(refusal))
        for old in sorted(os.listdir(train.refused))[:-_KEPT]:
            remove(train.refused / old)


def read(train: TrainDirectory) -> list[Refusal]:
    """Return the newest refusals, oldest first. Raises OSError."""
    found = []
    for path in train.refused.iterdir():
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=Refusal))
        except (FileNotFoundError, msgspec.MsgspecError):
            continue
    return sorted(found, key=lambda one: one.made_s)[-_SHOWN:]
