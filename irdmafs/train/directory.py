"""A training directory as files: names, versions, locks, and waiting for a change."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from ..client import FormatError, _files
from ..client._dtypes import Array, DType
from ..client._safetensors import HEADER_MAX_BYTES, Header, header_text, parse_header
from .config import TrainConfig
from .errors import TrainError
from .layout import ModelLayout, Shard
from .plan import Plan
from .trees import NOTHING, WALKED, Directories, Directory, Folder, Seen, count_changes, look, seen

T = TypeVar("T")

# The directories of .train.
FOLDERS = (
    "push", "staging", "since", "versions", "next", "ahead", "aside", "workers", "reducers",
    "refused", "files",
)  # fmt: skip

# The lock of the reducer that plans.
COORDINATOR = "coordinator"
# The plan of a version lies in its directory from the beginning.
PLAN = "version.json"
# Until a version is made, its directory also has the norms of its parts, and what reducers complain of. The
# names of these files begin so, and end with the part's.
NORM, COMPLAINT = "version.norm.", "version.bad."
# Names in the directory of a version that begin so are not of the version.
NOT_KEPT = (".", NORM, COMPLAINT)
# In the metadata of a file with parameters or state: the number of the version that it is of.
VERSION = "version"
# The directories of a part of a version, with a file for each shard. A small run has no PARAMS.
PARAMS, STATE = "params", "state"
# The end of a worker or a reducer is no event: their locks are looked at this often.
LOOK_S = 1.0
# The largest config.toml, layout.json or plan: 10,000 workers and 100,000 parameters fit.
_SMALL_MAX_BYTES = 16 << 20
# So many plans are not read again.
_PLANS_KEPT = 8


class TrainDirectory:
    """The paths of a training directory, and what they hold."""

    def __init__(
        self, directory: str | os.PathLike[str], name: str = ".train", *, keeps_open: bool = False
    ) -> None:
        """`name`: of the directory of a training that has not begun yet. `keeps_open`: a mount in a cluster
        is asked for each name of a path, each time; the directories are opened once instead. They are the
        same when the training is moved."""
        self.models = Path(directory)
        self.path = self.models / name
        self._keeps_open = keeps_open
        self.reopen()

    def close(self) -> None:
        """Keep the directories open no longer. Their paths are the ordinary ones from now on."""
        self._keeps_open = False
        self.reopen()

    def reopen(self) -> None:
        """Open the directories anew, as their mount may have been. Raises OSError."""
        self.opened: dict[str, Directory] = {}
        # The directories of pushes and parts that this process keeps open.
        self.directories = Directories()
        self._config: tuple[Seen, TrainConfig] | None = None
        self._layout: ModelLayout | None = None
        # Plans by their files: the last ones that were read. A plan never changes.
        self._plans: dict[Seen, Plan] = {}
        # The parameters of a small run that told the last one.
        self._told: ShardFile | None = None
        # The names below versions/ when they were looked at last; whether they are too many for one answer.
        self._versions, self._are_many = NOTHING, False
        # The clocks of the newest plan that was read.
        self._clocks: dict[str, int] = {}
        self.push = self._folder("push")
        self.staging = self._folder("staging")
        self.since = self._folder("since")
        self.versions = self._folder("versions")
        self.next = self._folder("next")
        self.ahead = self._folder("ahead")
        self.aside = self._folder("aside")
        self.workers = self._folder("workers")
        self.reducers = self._folder("reducers")
        self.refused = self._folder("refused")
        self.kept_files = self._folder("files")
        self._files = self._folder(".")
        self.config_path = self._files / "config.toml"
        self.layout_path = self._files / "layout.json"

    def _folder(self, name: str) -> Path:
        if self._keeps_open:
            # If the directory is not there, its first use raises an error that names it.
            with contextlib.suppress(OSError):
                self.opened[name] = Directory(self.path / name)
                return self.opened[name].path
        return self.path / name

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Have errors name files by their paths in the directory."""
        try:
            yield
        except OSError as error:
            if isinstance(error.filename, str):
                error.filename = self.shown(error.filename)
            raise
        except TrainError as error:
            raise TrainError(self.shown(str(error))) from error.__cause__

    def shown(self, text: str) -> str:
        """Return a text in which files have their paths in the directory."""
        names = {str(opened.fd): name for name, opened in self.opened.items()}

        def known(found: re.Match[str]) -> str:
            name = names.get(found[1])
            return found[0] if name is None else os.fspath(self.path / name)

        return re.sub(r"/proc/self/fd/(\d+)", known, text) if names else text

    @property
    def is_current(self) -> bool:
        """Return whether the directories that were opened are still those of the training."""
        try:
            return os.path.samestat(self.path.stat(), self._files.stat())
        except OSError:
            return False

    @property
    def has_ended(self) -> bool:
        """Return whether there is no training any more. A mount that does not answer tells nothing."""
        try:
            self.path.lstat()
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.ENOTDIR)
        return False

    def config(self) -> TrainConfig:
        """Return what config.toml holds, which is read again if it has changed. Raises OSError and
        TrainError."""
        with self._having_begun():
            now = seen(_files.look_up(os.stat, self.config_path))
            if self._config is None or self._config[0] != now:
                shown = self.path / self.config_path.name
                self._config = (now, TrainConfig.read(shown, read_small(self.config_path)))
        return self._config[1]

    @property
    def layout(self) -> ModelLayout:
        """Return what layout.json holds, which never changes. Raises OSError and TrainError."""
        if self._layout is None:
            with self._having_begun():
                self._layout = _decode(self.layout_path, ModelLayout, read_small)
        return self._layout

    @contextlib.contextmanager
    def _having_begun(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            how = f"irdmafs train init {self.models} begins"
            raise TrainError(f"{self.models} is not trained in: {how}") from None

    def version_numbers(self) -> list[int]:
        """Return the numbers of the versions that are there, in order."""
        return sorted(int(name) for name in os.listdir(self.versions) if name.isdecimal())

    def newest(self) -> int:
        """Return the number of the newest version, which since/0 leads to. Raises OSError."""
        return int(os.path.basename(_files.look_up(os.readlink, self.since / "0")))

    def version(self, number: int) -> Path:
        return self.versions / str(number)

    def plan_of(self, number: int) -> Plan:
        """Read the plan that a version was made by. Raises FileNotFoundError."""
        plan = self._plan(self.version(number), self._versions.folder(str(number)))
        if plan.version != number:
            # Its directory was taken away while the file was looked up.
            raise FileNotFoundError(errno.ENOENT, "Gone", os.fspath(self.version(number)))
        return plan

    def _plan(self, directory: Path, there: Folder) -> Plan:
        """Read the plan in a directory, unless it was read elsewhere. `there`: what the directory has."""
        is_small = self.layout.is_small
        name = self.layout.shards[0].name if is_small else PLAN
        path, file = directory / name, there.files.get(name)
        plan = self._plans.get(file) if file is not None else None
        if plan is None:
            if is_small:
                path = self.directories.get(there.ino, directory).path / name
            plan = _decode(path, Plan, self._told_plan if is_small else read_small)
            if file is not None:
                self._plans[file] = plan
            if len(self._plans) > _PLANS_KEPT:
                del self._plans[next(iter(self._plans))]
        return plan

    def _told_plan(self, path: Path) -> str:
        """Return the plan that the parameters of a small run tell, in JSON, and keep these: they are used
        next. Raises FormatError and OSError."""
        self._told = ShardFile(path, shown=True)
        return self._told.header.metadata.get(PLAN, "")

    def parameters(self, number: int, shard: Shard, *, shown: bool = False) -> ShardFile:
        """Open the parameters of a shard of a version, unless they are kept. `shown`, and what it raises:
        see ShardFile."""
        told = self._told
        if told is not None and told.header.metadata.get(VERSION) == str(number):
            return told
        return ShardFile(shard.name, self.directory(number, shard), version=number, shown=shown)

    def look_at_versions(self, after: int | None = None, timeout_s: float = 0.0) -> Folder:
        """Return what is below versions/, or of very many versions the newest; if `after` is a counter,
        once it is another one, or after a while. Raises OSError, InterruptedError too."""
        if not self._are_many:
            try:
                return look(self.versions, after, timeout_s, levels=0)
            except OSError as error:
                if error.errno not in WALKED:
                    raise
                self._are_many = True
        counter, newest = count_changes(self.versions, after, timeout_s), str(self.newest())
        found = {newest: look(self.versions / newest)}
        return Folder(0, {}, (), found, found.keys(), counter)

    def newest_plan(self, versions: Folder | None = None) -> Plan:
        """Return the plan of the newest version that the mount has been told of. `versions`: what is below
        versions/, if it was just looked at. Raises TrainError."""
        missed = None
        while True:
            self._versions = versions or self.look_at_versions()
            number = max(map(int, filter(str.isdecimal, self._versions.folders)), default=0)
            # It may have gone since it was seen.
            with contextlib.suppress(FileNotFoundError):
                self._clocks = (plan := self.plan_of(number)).clocks
                return plan
            if number == missed:
                raise TrainError(f"{self.version(number)} has no {PLAN}")
            versions, missed = None, number

    def has_counted(self, worker: str, step: int) -> bool:
        """Return whether a push has counted. Versions are asked for only if it had not before."""
        if self._clocks.get(worker, 0) < step:
            self.newest_plan()
        return self._clocks.get(worker, 0) >= step

    def in_version(self, number: int) -> Folder:
        """Return what is in a version. Raises FileNotFoundError if it is gone."""
        known = self._versions.folders.get(str(number))
        return look(self.version(number)) if known is None else known

    def directory(self, number: int, shard: Shard, kind: str = PARAMS) -> Directory:
        """Return the directory of a version with a shard's parameters, or state. Raises OSError."""
        kind = kind if shard.part or kind == STATE else ""
        ino = self.in_version(number).folder(shard.part, kind).ino
        return self.directories.get(ino, self.version(number) / shard.part / kind)

    def making(self, version: int, below: Folder) -> tuple[Path, Plan] | None:
        """Return the directory in next/ where a version is being made, and its plan: of its attempts, of
        which N.1 is the second, the last. None if there is no plan yet. `below`: what is in next/."""
        names = [one for one in below.folders if re.fullmatch(rf"{version}(\.[1-9][0-9]*)?", one)]
        for name in sorted(names, key=lambda name: (len(name), name), reverse=True):
            with contextlib.suppress(FileNotFoundError):
                return self.next / name, self._plan(self.next / name, below.folder(name))
        return None

    def member_clocks(self, clocks: Mapping[str, int]) -> dict[str, int]:
        """Return the workers that take part, each with its clock among these, or that when it joined."""
        found = {}
        for name in os.listdir(self.workers):
            with contextlib.suppress(OSError, ValueError, TrainError):
                if not name.startswith("."):
                    found[name] = clocks.get(name) or int(read_small(self.workers / name))
        return found

    # -- what goes, and what only one process writes -----------------------------------------------

    def put_aside(self, path: Path) -> Path | None:
        """Take a file or directory away, at once and whole, to be removed later, and return where it is;
        None if it was gone. Raises OSError."""
        gone = self.aside / secrets.token_hex(8)
        with contextlib.suppress(FileNotFoundError):
            move(path, gone)
            return gone
        return None

    def discard(self, path: Path) -> None:
        """Remove a push or a worker's directory in staging/, as remove_aside does. Raises OSError."""
        gone = self.staging / f"@{secrets.token_hex(8)}"
        with contextlib.suppress(FileNotFoundError):
            move(path, gone)
            remove_aside(gone)

    def make_home(self, owner: str, *, is_part: bool) -> Path:
        """Make a directory in ahead/, for a part, or else in staging/, that only this process writes in.
        Take the directories of earlier processes of the same part or worker away: if such a process was
        only stopped, it can publish nothing any more. Raises OSError."""
        folder, take_away = (
            (self.ahead, self.put_aside) if is_part else (self.staging, self.discard)
        )
        for name in os.listdir(folder):
            if owner_of(name) == owner:
                take_away(folder / name)
        path = folder / f"{owner}@{secrets.token_hex(8)}"
        path.mkdir()
        return path


class ShardFile:
    """A .safetensors file in memory: its header, and its bytes, mapped."""

    def __init__(
        self,
        path: str | Path,
        directory: Directory | None = None,
        *,
        version: int | None = None,
        shown: bool = False,
        header_max_bytes: int = HEADER_MAX_BYTES,
    ) -> None:
        """`path`: from `directory`, if that is given, whose files are opened as the mount knows them.
        `version`: the one that the file has to be of, as files are written anew. `shown`: its arrays are
        given to programs, which may send them from where they lie; otherwise nobody does, which is promised
        by a path in a private view. Raises FileNotFoundError, also if it is of another version, and
        FormatError, also for a longer header. No link is followed: it may lead to what is the owner's."""
        view = None if shown or directory is None else directory.view
        name = os.path.join((view or directory.path) if directory is not None else "", path)
        privately = view is None and not shown
        self.shown = shown
        with _files.open_to_read(name, os.O_NOFOLLOW, privately=privately) as (fd, status):
            self.seen = seen(status)
            self.header = read_header(name, fd, status.st_size, header_max_bytes)
            if version is not None and self.header.metadata.get(VERSION) != str(version):
                raise FileNotFoundError(errno.ENOENT, f"Not of version {version}", name)
            self._data = _files.Mapping(name, fd, status.st_size).bytes

    def elements(self, dtype: DType, offset: int, count: int) -> Array:
        """Return elements of this type from a place in the file on."""
        return self._data[offset : offset + count * dtype.itemsize].view(dtype)

    def tensor(self, name: str) -> Array:
        """Return a tensor as it lies in the file, read-only. Raises KeyError."""
        return _files.view(name, self._data, self.header.tensors[name])

    @property
    def tensors(self) -> dict[str, Array]:
        """Return all tensors, as they lie in the file."""
        return {name: self.tensor(name) for name in self.header.tensors}


def _decode(path: Path, kind: type[T], read: Callable[[Path], bytes | str]) -> T:
    """Return what `read` says of a file, in JSON. Raises TrainError, and as that does."""
    try:
        return msgspec.json.decode(read(path), type=kind)
    except (FormatError, msgspec.MsgspecError) as error:
        raise TrainError(f"{path}: {error}") from None


def read_header(path: str, fd: int, size: int, most: int = HEADER_MAX_BYTES) -> Header:
    """Read the header of an open .safetensors file, of `most` bytes at most. Raises FormatError."""
    text = header_text(path, lambda count: _files.read_at(fd, count, 0), size, most)
    return parse_header(path, text, size)


def read_small(path: Path) -> bytes:
    """Read a file of a run other than those of tensors. Whoever may write in the run can put a FIFO in its
    place, which would be waited for. Raises FileNotFoundError, other OSErrors, and TrainError."""
    fd = _files.look_up(os.open, path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise TrainError(f"{path} is not a regular file")
        if status.st_size > _SMALL_MAX_BYTES:
            raise TrainError(f"{path} has {status.st_size} bytes, more than {_SMALL_MAX_BYTES}")
        return _files.read_at(fd, status.st_size, 0)
    finally:
        os.close(fd)


def hidden(path: Path) -> Path:
    """Return a path beside this one that nobody else has, as other containers may have a process id."""
    return path.with_name(f".{path.name.strip('.')[:200]}.{secrets.token_hex(8)}")


def move(path: Path, target: Path) -> None:
    """Rename a directory. Another host may have moved it to `path`, or something else to `target`. Raises
    FileExistsError if something is there, and OSError."""
    try:
        _files.rename(path, target)
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        raise


def replace(path: Path, data: bytes) -> None:
    """Replace a small file, whole, or make it. Raises OSError."""
    flags = os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = _files.look_up(os.open, path, flags)
    except FileNotFoundError:
        make_new(path, [memoryview(data)])
        return
    with open(fd, "wb") as file:
        file.write(data)


def make_new(path: Path, contents: Iterable[memoryview]) -> None:
    """Make a file, whole when it gets its name. Raises OSError, FileExistsError if the name is taken."""
    try:
        fd = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
        temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
        temporary.write_bytes(b"".join(contents))
        _files.rename(temporary, path, _files.RENAME_NOREPLACE)
        return
    try:
        _files.write_all(fd, contents)
        # With a descriptor of a directory it is linkat(2), which follows the link.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd)
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Remove a file, or a directory that only this process has and all that is in it; it may be gone, or go
    meanwhile. Others may have a directory, or be about to: see `TrainDirectory.put_aside`."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            path.unlink()
            return
        try:
            path.rmdir()
        except OSError:
            with contextlib.suppress(RecursionError):  # it is very deep: see remove_aside
                shutil.rmtree(path, ignore_errors=True)


def remove_aside(path: Path) -> None:
    """Remove what was put aside. Raises OSError.

    Another process that was stopped, or a request of its that is still on its way, may be about to rename a
    directory that is in there: to where its files count, or are written anew. It has the outer directory
    open, so it finds the inner one by its name whatever the outer one is called by now. If the rename came
    while the files of the inner directory are being removed, it would publish the rest of them. So each
    inner directory gets another name first: the other process renames it whole, or does not find it.
    """
    # A file has no tree. A link that a member has put there would lead to that of somebody else.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, TrainError):
        opened = Directory(path)
        there = look(opened.path)
        for name in there.folders:
            gone = path.with_name(f"@{secrets.token_hex(8)}")
            with contextlib.suppress(FileNotFoundError):
                move(opened.path / name, gone)
                remove(gone)
        for name in there.files:
            with contextlib.suppress(OSError):
                os.unlink(opened.path / name)
    remove(path)


def owner_of(name: str) -> str:
    """Return the worker or part that has a directory of staging/ or ahead/: NAME@TOKEN."""
    return name.rpartition("@")[0]


def make_part(path: Path) -> None:
    """Make the directories of a part. Raises OSError."""
    for name in ("", PARAMS, STATE):
        (path / name).mkdir()


def params_of(version: Path, shard: Shard) -> Path:
    """Return the file with the parameters of a shard of a version."""
    return version / shard.part / (PARAMS if shard.part else "") / shard.name
