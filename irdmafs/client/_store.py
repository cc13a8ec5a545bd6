"""The store: arrays by name, and the files they lie in."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple, Self, overload

from . import _device, _files, _npy, _safetensors, _storing
from ._buffer import Buffer
from ._dtypes import Array, DeviceArray, Source, each_of, source_of
from ._files import Closing, look_up

NPY = ".npy"
SAFETENSORS = ".safetensors"
# How many parsed headers are kept: programs read a few files of many tensors again and again.
_HEADERS_MAX = 64


# -- names ------------------------------------------------------------------------------------------


def is_name(name: str) -> bool:
    """Return whether this is a name of an array, or can be a part of one."""
    return "\0" not in name and not {"", ".", ".."} & {*name.split("/")}


def check_name(name: str) -> None:
    """Raise ValueError for what is no name of an array."""
    if not is_name(name):
        raise ValueError(
            f"{name!r} is not a name: names are components joined by '/', "
            "without empty ones, '.' and '..'"
        )


def split_name(name: str) -> tuple[str, str | None]:
    """Return the file's name and, for a name in a .safetensors file, the tensor's. Raises ValueError."""
    check_name(name)
    parts = name.split("/")
    for index, part in enumerate(parts[:-1], start=1):
        if part.endswith(SAFETENSORS):
            return "/".join(parts[:index]), "/".join(parts[index:])
    return name, None


def walk(root: str, prefix: str) -> Iterator[str]:
    """Yield the path from ``root`` of every file of arrays below ``root``/``prefix``, in no order.
    Symbolic links to directories are not followed.

    Raises OSError where a directory cannot be read; one that vanishes meanwhile is passed over.
    """
    folders = [prefix]
    for folder in folders:
        place = os.path.join(root, folder)
        with contextlib.suppress(FileNotFoundError), look_up(os.scandir, place) as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                is_array = entry.name.endswith((NPY, SAFETENSORS))
                if entry.is_dir(follow_symlinks=False):
                    if not entry.name.endswith(SAFETENSORS):
                        folders.append(path)
                elif is_array and entry.is_file() and _size(entry):
                    yield path


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError:
        return 0


# -- arrays -----------------------------------------------------------------------------------------


class Store(MutableMapping[str, Array], Closing):
    """The arrays in a directory, by name. The package's documentation defines names.

    Every lookup opens the version that is current at that moment; an array obtained earlier keeps
    showing the version it was taken from. Lookups may be made from several threads. Lookups raise
    KeyError for what is missing or still empty, ValueError for a name that is none, FormatError
    for a damaged file; OSErrors pass through with the file's name in them.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # The path is looked at as it is given: "" would become the working directory.
        if not stat.S_ISDIR(os.stat(path).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", path)
        self.path = os.path.abspath(os.fsdecode(path))
        self._was_versioned = _files.is_versioned(self.path)
        self._closed = False

    def close(self) -> None:
        """End the use of the store; arrays obtained from it stay valid."""
        self._closed = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        return type(self), (self.path,)

    # Mapping would compare contents; a comparison of arrays has no truth value.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def versioned(self) -> bool:
        """Return whether the directory lies on an irdmafs mount, so that files have versions."""
        return _files.is_versioned(self._path(""))

    # -- reading ---------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Array:
        """Map the array ``name``: read-only, without copying it."""
        array: Array = self._array(name, None)
        return array

    def to_device(self, name: str, device: object = "cuda") -> Any:
        """Return the array ``name`` as a torch tensor in a device's memory ("cpu", "cuda", "cuda:1", a
        torch.device), its own and writable. Raises ImportError without torch, TypeError for elements
        that torch has no type for."""
        return _device.to_device({name: self[name]}, device)[name]

    def read_into(self, name: str, buffer: Buffer) -> Any:
        """Read the file of the array ``name``, whole, into ``buffer``, and return the array there: a numpy
        array, or a torch tensor if the buffer is a device's. The buffer's former contents are overwritten.

        Raises ValueError for a file that does not fit.
        """
        return self._array(name, buffer)

    @overload
    def state_dict(
        self, name: str = "", *, device: None = None, into: None = None
    ) -> dict[str, Array]: ...
    @overload
    def state_dict(
        self, name: str = "", *, device: object = None, into: Buffer | None = None
    ) -> dict[str, Any]: ...
    def state_dict(
        self, name: str = "", *, device: object = None, into: Buffer | None = None
    ) -> dict[str, Any]:
        """Return the tensors of a .safetensors file by their own names, or every array under a directory
        ("" is the whole store) by its name from there. Arrays of one file are of one version.
        With ``device``, torch tensors as of to_device(); small ones of a file share their memory.
        With ``into``, one .safetensors file is read into that buffer, as by read_into().

        Raises KeyError where there is neither, ValueError for a buffer that it does not fit into.
        """
        if into is not None:
            if device is not None:
                raise ValueError("a buffer is a device's by itself: give device or into")
            if not name:
                raise ValueError("a buffer takes one .safetensors file: name it")
            self._check_file(name)
            try:
                return self._tensors(name, None, into)
            except FileNotFoundError:
                raise KeyError(name) from None
        found: dict[str, Any] = {}
        for arrays in self._files_of(name):
            found |= arrays if device is None else _device.to_device(arrays, device)
        return found

    def _files_of(self, name: str) -> Iterator[dict[str, Array]]:
        """Yield the arrays of state_dict(), a dict for each file."""
        if not name:
            yield from self._load_tree("")
            return
        check_name(name)
        try:
            if name.endswith(SAFETENSORS):
                yield self._tensors(name)
                return
            is_directory = stat.S_ISDIR(look_up(os.stat, self._path(name)).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            is_directory = False
        if not is_directory:
            raise KeyError(name)
        yield from self._load_tree(name)

    def metadata(self, name: str) -> dict[str, str]:
        """Return the text that a .safetensors file carries beside its tensors. Raises KeyError."""
        check_name(name)
        try:
            return dict(self._header(name).metadata)
        except FileNotFoundError:
            raise KeyError(name) from None

    def version(self, name: str) -> int | None:
        """Return the version of the file that holds the array ``name``, or of the file ``name``; None on
        a filesystem other than irdmafs. Raises KeyError for a missing file."""
        file, tensor = split_name(name)
        for path in (self._path(file),) if tensor else (self._path(file + NPY), self._path(file)):
            try:
                if stat.S_ISREG(look_up(os.stat, path).st_mode):
                    return look_up(_files.read_version, path)
            except (FileNotFoundError, NotADirectoryError):
                continue
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        file, tensor = split_name(name)
        try:
            if tensor is not None:
                return tensor in self._header(file).tensors
            return self._has_array(file)
        except FileNotFoundError:
            return False

    def __iter__(self) -> Iterator[str]:
        """Yield every name, sorted. Tensors whose own name cannot be part of a name (one with an empty
        component, say) are left out; state_dict() has them."""
        names = set()
        for file in walk(self._path(""), ""):
            if file.endswith(NPY):
                names.add(file.removesuffix(NPY))
            else:
                try:
                    tensors = self._header(file).tensors
                except FileNotFoundError:
                    continue
                names.update(f"{file}/{tensor}" for tensor in tensors if is_name(tensor))
        return iter(sorted(names))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    # -- writing ---------------------------------------------------------------------------------

    def publish(self, name: str, array: object) -> None:
        """Make ``array`` the next version of ``name``, in the file ``name.npy``.

        ``array`` is a numpy array, a torch tensor, or anything numpy makes an array of; its memory
        is written as it lies. Directories are created. Readers see the version before, whole,
        until this returns. Raises TypeError for an array of Python objects, ValueError for a name
        inside a .safetensors file, and OSError (ENOSPC, EROFS; ENOTCONN if the store was opened on a mount
        that is gone), after which the version before is still the current one.
        """
        file, tensor = split_name(name)
        if tensor is not None:
            raise ValueError(
                f"{name!r} lies inside the file {file!r}, which is published as a whole: "
                "use publish_state_dict"
            )
        lying = source_of(array)
        self._replace(file + NPY, [lying], _npy.encode(lying))

    def publish_state_dict(
        self,
        state: Mapping[str, object],
        path: str = "model.safetensors",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Make the arrays of ``state`` the next version of the .safetensors file ``path``.

        Values are as for publish(); ``metadata`` is text by name, kept in the file. Raises
        TypeError and ValueError for what the format cannot hold, and OSError as publish() does.
        """
        self._check_file(path)
        for name in state:
            if not isinstance(name, str):
                raise TypeError(f"tensor names must be str, not {name!r}")
        arrays = each_of(source_of, state)
        self._replace(path, arrays.values(), _safetensors.encode(arrays, metadata))

    def publish_file(self, source: str | os.PathLike[str], path: str) -> None:
        """Make the bytes of the file ``source`` the next version of the .npy or .safetensors file
        ``path``. Raises OSError as publish() does."""
        self._check_file(path, (SAFETENSORS, NPY))
        with _files.open_to_read(os.fspath(source)) as (fd, status):
            size = status.st_size
            contents = [_files.Mapping(os.fspath(source), fd, size).bytes] if size else []
        self._replace(path, contents, [memoryview(b""), *(one.data for one in contents)])

    def __setitem__(self, name: str, array: object) -> None:
        self.publish(name, array)

    def __delitem__(self, name: str) -> None:
        """Remove the file that holds the array ``name``; arrays that show it keep it. Raises
        ValueError for one tensor of a .safetensors file."""
        file, tensor = split_name(name)
        if tensor is not None:
            raise ValueError(f"{name!r} cannot be removed from the file {file!r} it lies in")
        try:
            if not self._has_array(file):
                raise KeyError(name)
            os.unlink(self._path(file + NPY))
        except FileNotFoundError:
            raise KeyError(name) from None

    # -- files -----------------------------------------------------------------------------------

    def _path(self, file: str) -> str:
        if self._closed:
            raise ValueError(f"the store of {self.path} is closed")
        return os.path.join(self.path, file)

    def _check_file(self, path: str, suffixes: tuple[str, ...] = (SAFETENSORS,)) -> None:
        if split_name(path)[1] is not None or not path.endswith(suffixes):
            raise ValueError(f"{path!r} does not name a file that ends in {' or '.join(suffixes)}")

    def _replace(self, file: str, arrays: Collection[Source], contents: Iterable[Any]) -> None:
        """Replace a file by one of these contents: a head, and the bytes of the arrays."""
        path = self._path(file)
        if self._was_versioned and not self.versioned:
            raise OSError(errno.ENOTCONN, "Nothing is mounted there any more", self.path)
        directory = os.path.dirname(path)
        try:
            versioned = _files.is_versioned(directory)
        except FileNotFoundError:
            os.makedirs(directory, exist_ok=True)
            versioned = _files.is_versioned(directory)
        data_bytes = sum(array.nbytes for array in arrays)
        on_device = any(isinstance(array, DeviceArray) for array in arrays)
        if versioned and _storing.pays(data_bytes, on_device=on_device):
            rest = iter(contents)
            head = next(rest)
            _storing.replace_file(path, len(head) + data_bytes, chain([head], rest))
        else:
            _files.replace_file(path, _device.host_parts(contents), versioned=versioned)

    def _has_array(self, file: str) -> bool:
        """Return whether there is a .npy file of that name in which something was published. Raises
        FileNotFoundError where there is no file."""
        try:
            status = look_up(os.stat, self._path(file + NPY))
        except NotADirectoryError as error:
            raise FileNotFoundError(*error.args) from error
        return stat.S_ISREG(status.st_mode) and status.st_size > 0

    def _load_tree(self, prefix: str) -> Iterator[dict[str, Array]]:
        for file in sorted(walk(self._path(""), prefix)):
            name = file.removeprefix(f"{prefix}/") if prefix else file
            try:
                if file.endswith(SAFETENSORS):
                    tensors = self._tensors(file)
                    yield {f"{name}/{tensor}": array for tensor, array in tensors.items()}
                elif (found := _npy.load(self._path(file))) is not None:
                    yield {name.removesuffix(NPY): found}
            except FileNotFoundError:
                # The file was removed since the directory was read.
                continue

    def _array(self, name: str, buffer: Buffer | None) -> Any:
        """Return the array ``name``, mapped or read into a buffer. Raises KeyError."""
        file, tensor = split_name(name)
        try:
            if tensor is not None:
                return self._tensors(file, tensor, buffer)[tensor]
            path = self._path(file + NPY)
            if buffer is None:
                if (array := _npy.load(path)) is not None:
                    return array
            elif size := buffer.fill(path):
                return buffer.show(path, _npy.layout(path, buffer.head, size))
        except (FileNotFoundError, KeyError):
            pass
        raise KeyError(name)

    def _tensors(
        self, file: str, only: str | None = None, buffer: Buffer | None = None
    ) -> dict[str, Any]:
        """Return the tensors of a .safetensors file, or the one of this name, if it has that: mapped, or
        read into a buffer. Raises FileNotFoundError, also for an empty file."""
        path = self._path(file)
        if buffer is not None:
            size = buffer.fill(path)
            header = _safetensors.parse_header(path, _text(path, buffer.head, size), size)
            show = buffer.show
        else:
            with _files.open_to_read(path) as (fd, status):
                known, (text, header, mapped) = _parse(path, fd, status)
                mapping = mapped() if mapped is not None else None
                if mapping is None:
                    mapping = _files.Mapping(path, fd, status.st_size)
                    known.parsed = _Parsed(text, header, weakref.ref(mapping))
            show = partial(_files.view, data=mapping.bytes)
        wanted = header.tensors if only is None else header.tensors.keys() & {only}
        return {name: show(path, layout=header.tensors[name]) for name in wanted}

    def _header(self, file: str) -> _safetensors.Header:
        """Return the header of a .safetensors file. Raises as `_tensors`."""
        path = self._path(file)
        with _files.open_to_read(path) as (fd, status):
            return _parse(path, fd, status)[1].header


class _Parsed(NamedTuple):
    """A .safetensors file as it was last read. The mapping lives only as long as arrays of it."""

    text: bytes
    header: _safetensors.Header
    mapping: weakref.ref[_files.Mapping] | None = None


class _Known:
    """Holds a version as it was last read; elsewhere than on irdmafs an inode, which cannot be another
    file's as long as the mapping lives."""

    parsed: _Parsed | None = None


@lru_cache(_HEADERS_MAX)
def _known_of(device: int, ino: int, size: int, version: int | None) -> _Known:
    return _Known()


def _parse(path: str, fd: int, status: os.stat_result) -> tuple[_Known, _Parsed]:
    """Read an open .safetensors file, unless it is known. The header is compared, not assumed to be the
    same. Raises FileNotFoundError for an empty file, and FormatError."""
    size = status.st_size
    text = _text(path, partial(_files.read_at, fd, offset=0), size)
    known = _known_of(status.st_dev, status.st_ino, size, _files.read_version(fd))
    parsed = known.parsed
    if parsed is None or parsed.text != text:
        known.parsed = parsed = _Parsed(text, _safetensors.parse_header(path, text, size))
    return known, parsed


def _text(path: str, read: Callable[[int], bytes], size: int) -> bytes:
    """Return the header of a .safetensors file as text."""
    if size == 0:
        raise FileNotFoundError(errno.ENOENT, "The file is empty: nothing was published yet", path)
    return _safetensors.header_text(path, read, size)
