"""A version as programs load it: the files of its models, and those that were beside them when the training
began, such as a configuration and a tokenizer.

A model in several files has an index, which names the file of each parameter. The index in a version names
the files beside it. The one that the directory of the models shows is of a version, too, and names the
files of that version by their paths from there: whoever reads it once loads one version.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ..client import _files
from ..client._safetensors import encode
from .directory import COMPLAINT, NORM, PLAN, TrainDirectory, make_new, params_of, read_small
from .errors import TrainError
from .layout import ModelLayout, Shard
from .shard_files import ShardFile, gather
from .trees import Directory

# Other files of the models' directory are kept if they are no larger, and so many of them: each version
# has a name for each.
_KEPT_MAX_BYTES = 64 << 20
_KEPT_MAX = 64
# A file that gets its name with its content costs a transaction less, and a copy.
_COPIED_MAX_BYTES = 4 << 20
_WEIGHT_MAP = "weight_map"


def assemble(train: TrainDirectory, layout: ModelLayout, number: int, version: Path) -> None:
    """Make the model's files of a version, which lies there, from its shards. Raises OSError."""
    files = layout.files
    shards = layout.shards
    if len(files) == len(shards) == 1:
        with contextlib.suppress(FileExistsError):
            os.link(params_of(version, shards[0]), version / files[0])
    else:
        values = gather(layout, partial(_open_shard, version, number))
        for file in files:
            parameters = [one.name for one in layout.parameters if one.file == file]
            tensors = {name: values[name] for name in parameters}
            _replace(version / file, list(encode(tensors, {"format": "pt"})))
    for name in layout.indices:
        index = _read_index(train.kept_files / name)
        index[_WEIGHT_MAP] = {
            parameter: f".train/versions/{number}/{file}"
            for parameter, file in index[_WEIGHT_MAP].items()
        }
        _replace(version / shown(name), [memoryview(msgspec.json.encode(index))])


def _open_shard(version: Path, number: int, shard: Shard) -> ShardFile:
    path = params_of(version, shard)
    return ShardFile(path.name, Directory(path.parent), version=number)


def _replace(path: Path, contents: list[memoryview]) -> None:
    if sum(map(len, contents)) <= _COPIED_MAX_BYTES:
        with contextlib.suppress(FileExistsError):
            make_new(path, contents)
            return
    _files.replace_file(os.fspath(path), contents, versioned=True)


def shown(index: str) -> str:
    """Return the name of the index, in a version, that the directory of the models shows."""
    return f"{index}.shown"


def files_of_index(path: Path) -> frozenset[str]:
    """Return the names of the files that an index names. Raises TrainError and OSError."""
    return frozenset(_read_index(path)[_WEIGHT_MAP].values())


def _read_index(path: Path) -> dict[str, Any]:
    try:
        index = msgspec.json.decode(read_small(path), type=dict[str, Any])
        msgspec.convert(index.get(_WEIGHT_MAP), dict[str, str])
    except msgspec.MsgspecError as error:
        raise TrainError(f"{path} is not the index of a model in several files: {error}") from None
    return index


def keep_files(train: TrainDirectory, layout: ModelLayout) -> list[str]:
    """Copy the other files of the models' directory: they are in each version. Return their names. Raises
    OSError."""
    ours = {PLAN, *layout.parts, *map(shown, layout.indices)}
    kept = [
        path
        for path in sorted(train.models.iterdir())
        if path.is_file()
        and not path.name.startswith((".", NORM, COMPLAINT))
        and not path.name.endswith(".safetensors")
        and path.name not in ours
        and path.stat().st_size <= _KEPT_MAX_BYTES
        and os.access(path, os.R_OK)
    ]
    kept.sort(key=lambda path: path.name not in layout.indices)
    for path in kept[:_KEPT_MAX]:
        shutil.copy(path, train.kept_files / path.name)
    return [path.name for path in kept[:_KEPT_MAX]]


def add_kept_files(train: TrainDirectory, names: Iterable[str], version: Path) -> None:
    """Give a version that is begun the files that were kept. Raises OSError."""
    for name in names:
        # Somebody may have removed it, or have begun the version already.
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            os.link(train.kept_files / name, version / name)
