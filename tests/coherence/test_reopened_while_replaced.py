"""A file that programs of one host replace, while others open descriptors of it once more for writing."""

import json
import os
import subprocess
import sys
from pathlib import Path

from harness.seeds import chosen_seed

CALLS = 90
PROGRAMS = 8

PROGRAM = r"""
import collections, errno, json, os, random, sys
path, seed, calls = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
random.seed(seed)

def replace():
    with open(path, "wb") as file:
        file.write(b"x" * 100)

def reopen():
    fd = os.open(path, os.O_RDONLY)
    try:
        os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR))  # as `> /dev/stdout` does
    finally:
        os.close(fd)

def cut():
    os.truncate(path, random.randrange(200))

failures = collections.Counter()
for _ in range(calls):
    call = random.choice((replace, reopen, cut))
    try:
        call()
    except OSError as error:
        failures[f"{call.__name__}: {errno.errorcode[error.errno]}"] += 1
print(json.dumps(failures))
"""


def test_nobody_meets_an_error_or_a_conflict(here: Path) -> None:
    seed = chosen_seed()
    path = here / "file"
    path.write_bytes(b"x" * 100)
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(path), str(seed + number), str(CALLS)],
            stdout=subprocess.PIPE,
        )
        for number in range(PROGRAMS)
    ]
    told = [json.loads(program.communicate(timeout=60)[0]) for program in programs]
    assert told == [{}] * PROGRAMS
    assert os.listdir(here) == ["file"]


def test_a_descriptor_is_opened_once_more_in_a_directory_that_is_not_followed(here: Path) -> None:
    """The open is refused once for each of two reasons: etcd has to be asked whether the file was removed,
    and another node shows what its writer writes."""
    os.setxattr(here, "user.irdmafs.follow", b"off")
    path = here / "file"
    path.write_bytes(b"first")
    with path.open("rb") as first:
        path.write_bytes(b"second")
        with path.open("wb") as writer, path.open("rb") as second:
            with open(f"/proc/self/fd/{second.fileno()}", "r+b") as again:
                assert again.read() == b"second"
            writer.write(b"third")
        assert first.read() == b"first"
    assert path.read_bytes() == b"third"
