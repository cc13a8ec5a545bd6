"""Files that are cloned and changed at random, in a directory that one or several mounts show."""

import contextlib
import mmap
import os
import random
from collections.abc import Sequence
from pathlib import Path

from irdmafs import client

NAMES = [f"f{number}" for number in range(6)]
_SIZES = (0, 100, 5000, 70_000, 300_000)
_READERS_MAX = 8


class ClonedFiles:
    """A model of the directory, and readers of its files. A file is the list of all contents it has had: a
    reader of it sees one of these, and never another file's."""

    def __init__(self, places: Sequence[Path], source: random.Random) -> None:
        self._places = places
        self._random = source
        self._files: dict[str, list[bytes]] = {}
        self._readers: list[tuple[int, list[bytes]]] = []

    def close(self) -> None:
        while self._readers:
            os.close(self._readers.pop()[0])

    def step(self) -> None:
        """Do one thing on one of the mounts, and look at a file and at all readers there are."""
        choose, place = self._random, self._places[self._random.randrange(len(self._places))]
        name = choose.choice(NAMES)
        if name not in self._files:
            do = self._write
        else:
            do = choose.choice([
                self._clone, self._clone, self._clone, self._write, self._store, self._truncate,
                self._store_mapped, self._rename, self._unlink, self._keep_open, self._close_a_reader,
            ])  # fmt: skip
        do(place, name)
        self.check(choose.choice(self._places), choose.choice(NAMES))
        for fd, seen in self._readers:
            assert os.pread(fd, 1 << 20, 0) in seen

    def check(self, place: Path, name: str) -> None:
        """Open a file: stat(2) may see for milliseconds what another host has removed."""
        try:
            found = (place / name).read_bytes()
        except FileNotFoundError:
            assert name not in self._files
        else:
            assert found == self._files[name][-1], name

    def check_all(self) -> None:
        for place in self._places:
            for name in NAMES:
                self.check(place, name)

    def _clone(self, place: Path, name: str) -> None:
        other = self._random.choice(NAMES)
        client.clone(place / name, place / other)
        self._files[other] = [self._files[name][-1]]

    def _write(self, place: Path, name: str) -> None:
        data = self._random.randbytes(self._random.choice(_SIZES))
        (place / name).write_bytes(data)
        self._files.setdefault(name, []).append(data)

    def _changed(self, name: str, change: bytes, at: int) -> None:
        """Note that bytes were stored in place: who has the file open may see any number of them."""
        before = self._files[name][-1]
        self._files[name].append(before[:at].ljust(at, b"\0") + change + before[at + len(change) :])

    def _store(self, place: Path, name: str) -> None:
        """Write in place at the beginning, or append."""
        data, at = self._random.randbytes(700), self._random.choice((0, len(self._files[name][-1])))
        with (place / name).open("ab" if at else "r+b") as file:
            file.write(data)
        self._changed(name, data, at)

    def _truncate(self, place: Path, name: str) -> None:
        size = self._random.choice(_SIZES)
        os.truncate(place / name, size)
        self._files[name].append(self._files[name][-1][:size].ljust(size, b"\0"))

    def _store_mapped(self, place: Path, name: str) -> None:
        size = len(self._files[name][-1])
        if size:
            at, data = self._random.randrange(size), b"#"
            with (place / name).open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                memory[at : at + 1] = data
                memory.flush()
            self._changed(name, data, at)

    def _rename(self, place: Path, name: str) -> None:
        other = self._random.choice(NAMES)
        os.rename(place / name, place / other)
        self._files[other] = self._files.pop(name)

    def _unlink(self, place: Path, name: str) -> None:
        (place / name).unlink()
        del self._files[name]

    def _keep_open(self, place: Path, name: str) -> None:
        self._readers.append((os.open(place / name, os.O_RDONLY), self._files[name]))
        if len(self._readers) > _READERS_MAX:
            os.close(self._readers.pop(0)[0])

    def _close_a_reader(self, place: Path, name: str) -> None:
        with contextlib.suppress(IndexError):
            os.close(self._readers.pop(self._random.randrange(_READERS_MAX))[0])
