"""Models as programs load them: taken into a training, made of each version, and given back at the end.

A version has the files of its models, and those that were beside them when the training began, such as a
configuration and a tokenizer. A model in several files has an index, which names the file of each
parameter. The index in a version names the files beside it. The one that the directory of the models shows
is of a version, too, and names the files of that version by their paths from there: whoever reads it once
loads one version.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from ..client import FormatError, _files
from ..client._dtypes import Array, code_of
from ..client._files import StrPath
from ..client._safetensors import encode
from .arithmetic import CODES
from .config import TrainConfig
from .directory import (
    FOLDERS,
    NOT_KEPT,
    PARAMS,
    PLAN,
    STATE,
    ShardFile,
    TrainDirectory,
    hidden,
    make_new,
    make_part,
    params_of,
    read_small,
    remove,
)
from .errors import TrainError
from .layout import ModelLayout, Parameter, Shard, canonical
from .placement import shard_names
from .plan import first_plan
from .reduction import first_state
from .shard_files import gather
from .trees import Folder, look

# Other files of the models' directory are kept up to this size and number: each version has links to them.
_KEPT_MAX_BYTES = 64 << 20
_KEPT_MAX = 64
# A file that gets its name with its content costs a transaction less, and a copy.
_COPIED_MAX_BYTES = 4 << 20
_WEIGHT_MAP = "weight_map"
_PLACEMENT = "user.irdmafs.placement"
_FOLLOW = "user.irdmafs.follow"
_AWAITS = "user.irdmafs.awaits"
# A reducer that goes on adds one file at most after each removal: it ends as soon as it finds no version.
_REMOVALS_MAX = 20


# -- the files of a version --------------------------------------------------------------------------


def assemble(train: TrainDirectory, number: int, version: Path, there: Folder) -> None:
    """Make the model's files of a version from its shards. `there`: what is in its directory. Raises
    OSError."""
    layout = train.layout
    files, shards = layout.files, layout.shards
    if len(files) == len(shards) == 1:
        with contextlib.suppress(FileExistsError):
            os.link(params_of(version, shards[0]), version / files[0])
    else:

        def open_shard(shard: Shard) -> ShardFile:
            ino = there.folder(shard.part, PARAMS).ino
            folder = train.directories.get(ino, params_of(version, shard).parent)
            return ShardFile(shard.name, folder, version=number)

        values = gather(layout, shards, open_shard)
        for file in files:
            tensors = {one.name: values[one.name] for one in layout.parameters if one.file == file}
            contents = list(encode(tensors, {"format": "pt"}))
            _replace(version / file, contents)
    for name in layout.indices:
        index = _parse_index(train.kept_files / name)
        file_of = index[_WEIGHT_MAP]
        index[_WEIGHT_MAP] = {one: f".train/versions/{number}/{file_of[one]}" for one in file_of}
        _replace(version / shown(name), [memoryview(msgspec.json.encode(index))])


def _replace(path: Path, contents: list[memoryview]) -> None:
    if sum(map(len, contents)) <= _COPIED_MAX_BYTES:
        with contextlib.suppress(FileExistsError):
            make_new(path, contents)
            return
    _files.replace_file(os.fspath(path), contents, versioned=True)


def shown(index: str) -> str:
    """Return the name of the index, in a version, that the directory of the models shows."""
    return f"{index}.shown"


def _parse_index(path: Path) -> dict[str, Any]:
    try:
        index = msgspec.json.decode(read_small(path), type=dict[str, Any])
        msgspec.convert(index.get(_WEIGHT_MAP), dict[str, str])
    except msgspec.MsgspecError as error:
        raise TrainError(f"{path} is not the index of a model in several files: {error}") from None
    return index


def keep_files(train: TrainDirectory) -> list[str]:
    """Copy other files of the models' directory for all versions; return their names. Raises OSError."""
    layout = train.layout
    ours = {PLAN, STATE, *layout.parts, *map(shown, layout.indices)}
    kept = [
        path
        for path in sorted(train.models.iterdir())
        if path.is_file()
        and not path.name.startswith(NOT_KEPT)
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


# -- beginning and end -------------------------------------------------------------------------------


def begin(directory: StrPath, config: TrainConfig, *, shards: int | None = None) -> ModelLayout:
    """Train the models in a directory: all its .safetensors files. They become links to the newest
    version.

    `shards`: how many parts are reduced apart; None: as placement says. Raises TrainError and
    OSError, after which the directory is as it was.
    """
    train = TrainDirectory(directory)
    if not train.models.is_dir():
        raise TrainError(f"{train.models} is not a directory")
    if not _files.is_versioned(train.models):
        raise TrainError(f"{train.models} is not on a mount of irdmafs")
    if train.path.exists():
        raise _begun(train)
    files = sorted(train.models.glob("*.safetensors"))
    if not files:
        raise TrainError(f"{train.models} has no .safetensors file: put the model there first")
    values = _read_models(files)
    indexed = _read_indices(train.models, {file.name for file in files})
    made = TrainDirectory(directory, hidden(train.path).name)
    try:
        layout = _make(made, config, values, tuple(indexed), shards)
        # Whole from the moment when it has its name, which fails if another has it.
        os.rename(made.path, train.path)
    except BaseException as error:
        remove(made.path)
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise _begun(train) from None
        raise
    try:
        for index in indexed:
            _lead(train.models / index, shown(index))
        in_index = {name for names in indexed.values() for name in names}
        for file in files:
            if file.name in in_index:
                file.unlink()
            else:
                _lead(file, file.name)
    except BaseException:
        end(directory)
        raise
    return layout


def _lead(path: Path, name: str) -> None:
    """Make a file a link to one of the newest version. Raises OSError."""
    link = hidden(path)
    link.symlink_to(f".train/since/0/{name}")
    os.replace(link, path)


def _begun(train: TrainDirectory) -> TrainError:
    return TrainError(f"{train.models} is trained in already: irdmafs train status {train.models}")


def _make(
    train: TrainDirectory,
    config: TrainConfig,
    values: dict[str, tuple[Parameter, Array]],
    indices: tuple[str, ...],
    shards: int | None,
) -> ModelLayout:
    """Make the files of a training and its first version. Raises OSError."""
    train.path.mkdir()
    os.setxattr(train.path, _PLACEMENT, b"together")
    # A step changes more names here than it reads, from several hosts: neither following nor claiming pays.
    os.setxattr(train.path, _FOLLOW, b"off")
    for name in FOLDERS:
        (train.path / name).mkdir()
    os.setxattr(train.since, _AWAITS, os.fsencode(train.versions.name))
    parameters = canonical(parameter for parameter, _ in values.values())
    size = sum(parameter.size * parameter.type.itemsize for parameter in parameters)
    names, parts = shard_names(train.path, shards, size)
    files = {one.file for one in parameters}
    if not parts:
        # One file is published in one transaction.
        names, parts = ([*files], 0) if len(files) == 1 and not indices else (names, 1)
    layout = ModelLayout(parameters, tuple(names), parts, indices)
    train.layout_path.write_bytes(msgspec.json.encode(layout))
    first = train.next / "0"
    first.mkdir()
    add_kept_files(train, keep_files(train), first)
    for part in layout.parts:
        make_part(first / part)
    plan = first_plan(config)
    arrays = {name: array for name, (_, array) in values.items()}
    for shard in layout.shards:
        first_state(first, shard, arrays, plan)
    if not layout.is_small:
        (first / PLAN).write_bytes(msgspec.json.encode(plan))
        assemble(train, 0, first, look(first))
    os.rename(first, train.version(0))
    train.config_path.write_text(config.toml())
    return layout


def _read_models(files: list[Path]) -> dict[str, tuple[Parameter, Array]]:
    found: dict[str, tuple[Parameter, Array]] = {}
    for path in files:
        try:
            file = ShardFile(path)
        except FormatError as error:
            raise TrainError(str(error)) from None
        for name, form in file.header.tensors.items():
            code = code_of(form.dtype)
            if code not in CODES:
                raise TrainError(f"{path}: {name!r} has the type {code}, which cannot be trained")
            if name in found:
                raise TrainError(f"{path}: {name!r} is in {found[name][0].file}, too")
            parameter = Parameter(name, code, form.shape, path.name)
            found[name] = (parameter, file.tensor(name))
    if not any(parameter.size for parameter, _ in found.values()):
        raise TrainError(f"{files[0].parent}: its models have no parameters")
    return found


def _read_indices(models: Path, files: set[str]) -> dict[str, frozenset[str]]:
    """Return the files that each index of a directory names. Raises TrainError."""
    found = {}
    for path in sorted(models.glob("*.safetensors.index.json")):
        found[path.name] = names = frozenset(_parse_index(path)[_WEIGHT_MAP].values())
        if missing := sorted(names - files):
            raise TrainError(f"{path} names {missing[0]}, which is not in {models}")
    return found


def end(directory: StrPath) -> int:
    """Stop training in a directory: its models become files again, of the newest version; return its
    number. Reducers and workers should have ended. Raises TrainError and OSError, also if the models are
    files again and something else of the training could not be removed."""
    train = TrainDirectory(directory)
    layout, newest = train.layout, train.newest_plan().version
    version = train.version(newest)
    assemble(train, newest, version, train.in_version(newest))
    for name in (*layout.files, *layout.indices):
        path = train.models / name
        kept = hidden(path)
        os.link(version / name, kept)
        os.replace(kept, path)
    ended = hidden(train.path)
    os.rename(train.path, ended)
    _remove_ended(ended)
    return newest


def _remove_ended(path: Path) -> None:
    """Remove a training that has ended. A reducer that has its directories open goes on until it misses one
    of them, and may add a file to a directory that is just being removed. Raises TrainError."""
    for _ in range(_REMOVALS_MAX):
        remove(path)
        if not os.path.lexists(path):
            return
    try:
        shutil.rmtree(path)
    except OSError as error:
        reason = f"{path} is left and can be removed: {error}"
        raise TrainError(f"training has ended in {path.parent}, but {reason}") from None
