"""Names that are made exclusively, at the pace of others that make the same names on other hosts."""

import contextlib
import os
import random
import time
from pathlib import Path

DIRECTORIES = 4
# Hosts make the name that it is time for. They are ahead of it or late by at most so many names.
NAMES_PER_S = 40
AHEAD_MAX = 30


def name_of(number: int) -> str:
    return f"directory{number // 50 % DIRECTORIES}/name{number}"


def _make(directory: Path, host: str, number: int) -> str:
    """Return how far it came: "taken", "failed" (before or after it was made), or "made", which is after a
    close that returned 0."""
    try:
        fd = os.open(directory / name_of(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return "taken"
    except OSError:
        return "failed"
    with contextlib.suppress(OSError):  # its close fails, too
        os.write(fd, host.encode())
    try:
        os.close(fd)
    except OSError:
        return "failed"
    return "made"


def make_names(directory: Path, host: str, seed: int, end: Path) -> list[tuple[int, str]]:
    """Make names until there is a file `end`. Return what came of each."""
    chooser = random.Random(f"{seed} {host}")
    began = time.monotonic()
    number, outcomes = 0, list[tuple[int, str]]()
    while not end.exists():
        due = int((time.monotonic() - began) * NAMES_PER_S)
        number = max(number, due - chooser.randrange(AHEAD_MAX))
        for _ in range(chooser.randrange(1, AHEAD_MAX)):
            outcomes.append((number, _make(directory, host, number)))
            number += 1
        time.sleep(max(0.0, (number - due) / NAMES_PER_S - AHEAD_MAX / NAMES_PER_S))
    return outcomes
