"""The directory in which a worker writes its pushes before anybody sees them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from ..client import _files
from ..client._dtypes import Array
from ..client._safetensors import encode
from .directory import SPARE, TrainDirectory, discard, make_home
from .folders import Directories, Directory
from .layout import Shard
from .pushes import check_finite, slices_of


class Staging:
    """A worker's directory in staging/, in which nobody else writes."""

    def __init__(self, train: TrainDirectory, worker: str) -> None:
        """Make the directory, and remove those of workers that had the name before. Raises OSError."""
        self._train = train
        self.path = make_home(train.staging, worker, partial(discard, train))
        self._directories = Directories()

    def begin(self, name: str) -> tuple[Path, Directory]:
        """Return a directory for the files of a push. It is that of a push that has counted, if the worker
        has got one back: writing its files anew costs half of making new ones. Raises OSError."""
        path = self.path / name
        try:
            os.rename(self.path / SPARE, path)
        except FileNotFoundError:
            path.mkdir()
        return path, self._directories.open(path)

    def write(
        self,
        path: Path,
        directory: Directory,
        shard: Shard,
        values: Mapping[str, Array],
        more: Mapping[str, str],
        *,
        finite: bool,
    ) -> None:
        """Publish the file of a shard in a directory that has this path; `more`: its metadata; `finite`:
        NaN and infinity are refused. Raises Refused and OSError."""
        slices = slices_of(shard, values)
        if finite:
            check_finite(slices)
        contents = list(encode(slices, more))
        try:
            name = os.fspath(directory.file(shard.name))
            os.close(_files.write_version(name, contents, directory.view))
        except OSError as error:
            error.filename = self._train.shown(os.fspath(path / shard.name))
            raise

    def drop(self, path: Path) -> None:
        """Remove a push that was begun. Errors are ignored: the next worker of the name removes it."""
        with contextlib.suppress(OSError):
            discard(self._train, path)

    def remove(self) -> None:
        """Remove the directory. Raises OSError."""
        self._directories.close()
        discard(self._train, self.path)
