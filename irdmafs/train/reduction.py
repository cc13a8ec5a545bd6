"""The updates of a plan in one shard, and the version that they make: a function of files to files."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import numpy as np

from ..client import FormatError
from ..client._dtypes import Array
from ..client._safetensors import head_of
from .arithmetic import F32, Blocks, accumulate, count_nonfinite, scratch, square_sum, to_float32
from .directory import PARAMS, PLAN, STATE, VERSION, ShardFile, TrainDirectory, params_of
from .errors import BadPush, Refused
from .layout import Run, Shard, runs_of
from .plan import Plan, PushInPlan
from .pushes import check_finite
from .rules import Rule, make_rule
from .shard_files import NewFile
from .trees import Directories, Directory, Folder

MASTER = "master"
# The value of "state" in the metadata of params/K where there is no state/K.
NOTHING = "none"


class PartFolders(NamedTuple):
    """The directories of a part of a version, and the names in the second one when they were opened."""

    params: Directory
    state: Directory
    kept: Collection[str] = ()

    @classmethod
    def open(cls, opened: Directories, path: Path, there: Folder, params: str = PARAMS) -> Self:
        """Open those in a directory. `params`: "" if it has the parameters itself. Raises OSError."""
        of, state = there.folder(params), there.folder(STATE)
        below = opened.get(state.ino, path / STATE)
        return cls(opened.get(of.ino, path / params), below, state.names)


class _Term(NamedTuple):
    """Elements of a push: the name of the push, their file and their place in it, and their factor."""

    path: str
    file: ShardFile
    run: Run
    weight: float

    def elements(self, first: int, count: int) -> Array:
        """Return elements of the shard, from `first` on, as they lie in the file."""
        offset = self.run.offset + (first - self.run.at) * self.run.dtype.itemsize
        return self.file.elements(self.run.dtype, offset, count)


class _Span(NamedTuple):
    """Elements [start, stop) of a shard that all lie in the same pushes. `terms`: those of each update."""

    start: int
    stop: int
    terms: tuple[tuple[_Term, ...], ...]


class Reduction:
    """The work of one shard for one plan."""

    def __init__(
        self,
        shard: Shard,
        plan: Plan,
        blocks: Blocks,
        train: TrainDirectory,
        open_push: Callable[[str], ShardFile],
    ) -> None:
        """`train`: has the version before. `open_push`: returns the checked file with the shard of the push
        that has a name; raises Refused, FormatError and OSError. A push with NaN or infinity is bad: if the
        plan skips it, it is found here, if it refuses it, by write(). Raises FileNotFoundError for a push
        that is gone, and BadPush for a bad one and for one that does not fit the parameters."""
        self._open_push = open_push
        self._shard = shard
        self._plan = plan
        self._blocks = blocks
        self.rule: Rule = make_rule(plan.rule, plan.options)
        last = plan.version - 1
        is_kept = True
        if shard.is_fp32:
            params = train.parameters(last, shard)
            # Its parameters lie one after the other.
            first = min((found.offset for found in params.header.tensors.values()), default=0)
            self._master = params.elements(np.dtype(np.float32), first, shard.size)
            is_kept = bool(self.rule.state) and params.header.metadata.get(STATE) != NOTHING
        self._kept: dict[str, Array] = {}
        if is_kept:
            state = ShardFile(shard.name, train.directory(last, shard, STATE), version=last)
            self._kept = state.tensors
        if not shard.is_fp32:
            self._master = self._kept[MASTER]
        self._updates = plan.each_update()
        terms = [list(self._terms(update.pushes)) for update in self._updates]
        self._spans = _spans(shard.size, terms, mean=self.rule.combine == "mean")
        # The sum of the only update. Those of many updates may need more memory than there is.
        self._combined: F32 | None = None

    def _terms(self, pushes: Iterable[PushInPlan]) -> Iterable[_Term]:
        for counted in pushes:
            if not counted.weight:
                continue
            try:
                file = self._open_push(counted.path)
                if self._plan.nonfinite == "skip":
                    check_finite(file.tensors)
            except FormatError as error:
                raise BadPush(counted.path, f"shard {self._shard.name}: {error.defect}") from None
            except Refused as error:
                raise BadPush(counted.path, str(error)) from None
            for run in runs_of(self._shard, file.header):
                yield _Term(counted.path, file, run, counted.weight)

    def square_norms(self) -> list[float]:
        """Return the sum of squares of each update's combined pushes, however many threads there are."""
        norms = []
        for number in range(len(self._updates)):
            combined = np.zeros(self._shard.size, np.float32)
            for span in self._spans:
                fill = partial(_combine_into, combined, span, number)
                self._blocks.each(span.stop - span.start, fill)
            norms.append(square_sum(combined, self._blocks))
        if len(norms) == 1:
            self._combined = combined
        return norms

    def write(self, folders: PartFolders, square_norms: Sequence[float] = ()) -> None:
        """Write params/K and state/K of the next version into the directories of their part.
        `square_norms`: of all shards together, one for each update, if the plan clips. Raises OSError."""
        scales = [1.0] * len(self._updates)
        if square_norms:
            # As torch.nn.utils.clip_grad_norm_ does.
            scales = [
                min(1.0, self._plan.clip_norm / (math.sqrt(square) + 1e-6))
                for square in square_norms
            ]
        with _ShardFiles(folders, self._shard, self.rule, self._plan) as files:
            self._fill(files, scales)

    def _fill(self, files: _ShardFiles, scales: Sequence[float]) -> None:
        kept = self._kept

        def step(span: _Span, part: slice) -> None:
            first, last = span.start + part.start, span.start + part.stop
            master = scratch.block(MASTER, last - first)
            np.copyto(master, self._master[first:last])
            state = {}
            # The rule may have been changed since the last version: what it did not keep begins with zeros.
            for key in self.rule.state:
                state[key] = scratch.block(key, last - first)
                np.copyto(state[key], kept[key][first:last] if key in kept else np.float32(0))
            for update, terms, scale in zip(self._updates, span.terms, scales, strict=True):
                if not terms:
                    continue
                gradient = self._gradient(terms, first, last)
                if self._plan.nonfinite == "refuse":
                    _check_finite(gradient, terms, first)
                if scale != 1:
                    gradient = gradient * np.float32(scale)
                self.rule.apply(update.number, update.lr, gradient, master, state)
            files.write_state(state, first)
            files.write_master(master, first)

        for span in self._spans:
            self._blocks.each(span.stop - span.start, partial(step, span))

    def _gradient(self, terms: Sequence[_Term], first: int, last: int) -> F32:
        if self._combined is not None:
            return self._combined[first:last]
        return _combine(terms, first, scratch.block("gradient", last - first))


def _spans(size: int, updates: Sequence[Sequence[_Term]], *, mean: bool) -> list[_Span]:
    """Cut a shard where the parts of pushes begin and end, with their final weights."""
    runs = [term.run for terms in updates for term in terms]
    edges = sorted({0, size, *(edge for run in runs for edge in (run.at, run.at + run.size))})
    return [
        _Span(start, stop, tuple(_weighted(terms, start, stop, mean=mean) for terms in updates))
        for start, stop in itertools.pairwise(edges)
    ]


def _weighted(terms: Sequence[_Term], start: int, stop: int, *, mean: bool) -> tuple[_Term, ...]:
    """Return the terms that have these elements, with their final weights."""
    here = [t for t in terms if t.run.at <= start and stop <= t.run.at + t.run.size]
    total = math.fsum(t.weight for t in here) if mean else 1.0
    return tuple(t._replace(weight=t.weight / total) for t in here if total)


def _combine(terms: Sequence[_Term], first: int, out: F32) -> F32:
    """Sum up the elements of a shard from `first` on, which all terms have, in the order of the plan."""
    accumulate(out, [(term.elements(first, len(out)), term.weight) for term in terms])
    return out


def _check_finite(combined: F32, terms: Sequence[_Term], first: int) -> None:
    """Raises BadPush for one with NaN or infinity among the elements that were combined."""
    with np.errstate(all="ignore"):
        if np.isfinite(np.add.reduce(combined)):
            return
    # Large numbers may have made the sum infinite.
    for term in terms:
        if bad := count_nonfinite(term.elements(first, len(combined))):
            raise BadPush(term.path, f"it has {bad} elements that are NaN or infinite")


def _combine_into(combined: F32, span: _Span, update: int, block: slice) -> None:
    first, last = span.start + block.start, span.start + block.stop
    _combine(span.terms[update], first, combined[first:last])


class _ShardFiles:
    """params/K of a version that is being made, and state/K if anything is kept there. All elements are to
    be written, by any threads; the files are published at the end of the block, unless that raises."""

    def __init__(self, folders: PartFolders, shard: Shard, rule: Rule, plan: Plan) -> None:
        self._shard = shard
        self._files: list[NewFile] = []
        kept = rule.state if shard.is_fp32 else (MASTER, *rule.state)
        said = {VERSION: str(plan.version)}
        of_params = said if kept else said | {STATE: NOTHING}
        if not shard.part:
            of_params = of_params | {"format": "pt", PLAN: msgspec.json.encode(plan).decode()}
        state = dict.fromkeys(kept, ("F32", (shard.size,)))
        params = {part.parameter.name: (part.parameter.dtype, part.shape) for part in shard.slices}
        heads = {folders.params: head_of(params, of_params)}
        if kept:
            heads[folders.state] = head_of(state, said)
        elif shard.name in folders.kept:
            # The files are written anew, and the rule that wrote them had a state.
            (folders.state.path / shard.name).unlink(missing_ok=True)
        with contextlib.ExitStack() as stack:
            for folder, head in heads.items():
                # Nobody looks for those of a small run before their directory is renamed.
                file = NewFile(folder, shard.name, head, with_rename=not shard.part)
                stack.callback(file.discard)
                self._files.append(file)
            stack.pop_all()
        self.params, *self._state = self._files

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Closing a file sends it to its node and tells the cluster: do it for both at the same time.
        end = NewFile.publish if kind is None else NewFile.discard
        with ThreadPoolExecutor(len(self._files)) as pool:
            list(pool.map(end, self._files))

    def write_state(self, state: Mapping[str, F32], first: int) -> None:
        """Write elements from `first` on of arrays of state/K. Raises OSError."""
        for file in self._state:
            for key, values in state.items():
                file.write(key, values, first)

    def write_master(self, master: F32, first: int) -> None:
        """Write master weights from element `first` on, and the parameters they make. Raises OSError."""
        if self._shard.is_fp32:
            self.params.write_flat(master, first)
            return
        self.write_state({MASTER: master}, first)
        for part in self._shard.slices:
            start, stop = max(first, part.at), min(first + len(master), part.at + part.size)
            if start < stop:
                with np.errstate(all="ignore"):
                    converted = master[start - first : stop - first].astype(part.parameter.type)
                self.params.write(part.parameter.name, converted, start - part.at)


def first_state(version: Path, shard: Shard, arrays: Mapping[str, Array], plan: Plan) -> None:
    """Write params/K and state/K of version 0 from the model's parameters. Raises OSError."""
    state, rule = version / shard.part / STATE, make_rule(plan.rule, plan.options)
    state.mkdir(exist_ok=True)
    folders = PartFolders(Directory(params_of(version, shard).parent), Directory(state))
    with _ShardFiles(folders, shard, rule, plan) as files:
        files.write_state(dict.fromkeys(rule.state, np.zeros(shard.size, np.float32)), 0)
        for part in shard.slices:
            flat = arrays[part.parameter.name].reshape(-1)[part.start : part.stop]
            files.params.write(part.parameter.name, flat)
            if not shard.is_fp32:
                master = np.empty(part.size, np.float32)
                to_float32(flat, master)
                files.write_state({MASTER: master}, part.at)
