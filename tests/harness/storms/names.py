"""A program that makes names exclusively, at the pace of others that make the same names on other hosts.

    python names.py DIRECTORY HOST SEED LOG

It ends when its standard input does. Each line of the log is JSON: the name and how far it came: "taken",
"failed" (before or after it was made) or "made", which is after a close that returned 0.
"""

import contextlib
import json
import os
import random
import select
import sys
import time

DIRECTORIES = 4
# Hosts make the name that it is time for. They are ahead of it or late by at most so many names.
NAMES_PER_S = 40
AHEAD_MAX = 30


def name_of(number: int) -> str:
    return f"directory{number // 50 % DIRECTORIES}/name{number}"


def make(directory: str, host: str, number: int) -> str:
    try:
        fd = os.open(f"{directory}/{name_of(number)}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
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


def main(directory: str, host: str, seed: str, log: str) -> None:
    chooser = random.Random(f"{seed} {host}")
    began = time.monotonic()
    number = 0
    with open(log, "w", buffering=1) as file:
        while not select.select([sys.stdin], [], [], 0)[0]:
            due = int((time.monotonic() - began) * NAMES_PER_S)
            number = max(number, due - chooser.randrange(AHEAD_MAX))
            for _ in range(chooser.randrange(1, AHEAD_MAX)):
                print(json.dumps([number, make(directory, host, number)]), file=file)
                number += 1
            time.sleep(max(0.0, (number - due) / NAMES_PER_S - AHEAD_MAX / NAMES_PER_S))


if __name__ == "__main__":
    main(*sys.argv[1:])
