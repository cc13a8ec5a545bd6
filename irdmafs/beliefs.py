"""What the kernel of this host believes without asking us, on a mount whose tree others change, too.

In a directory that the mount follows (backend/remote/leases) an answer says for how long the kernel
may believe it. Whoever changes something there waits for this mount, which first makes the kernel
forget what is not so any more; what is remembered here is only which names and attributes that may be.

An answer can be on its way into the kernel while the change is told:

- A name is dropped under its directory's lock. An answer that makes a name known is taken in under
  that lock, too; one that confirms a name is taken in for the one that is dropped.
- Attributes: the kernel drops answers to questions older than what it was told to forget, if it knows
  the inode. If not, one may be about to make it known: under the directory's lock, which is waited
  for, and then it is told again. Answers to changes of its own (create, link, setattr) the kernel
  does not compare so; their attributes are not to be believed at all.

The directory's lock is also held while a program here changes the directory, until all who follow it
know of that change. Two mounts that change one directory and believed in what the other one changes
would wait for each other: so nobody waits longer than the kernel believes.
"""

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator

import trio

from .backend.namespace import ROOT_INO, Inode, Namespace
from .cache import KernelCache, Name
from .nodes import NodeTable

log = logging.getLogger(__name__)

# What was said longer ago than this (seconds) is not believed any more: far longer than any answer
# says, because a caller may be kept from its processor before it takes the answer in.
_REMEMBERED_S = 2.0
_GRACE_S = 0.1
# A directory whose lock could not be had in time is one that is changed from two sides.
_CROWDED_S = 10.0
# The kernel keeps what it looked up, and we a node for it, until it wants the memory for something else.
# What is gone it is made to drop, so many names (at most) at a time, when they were collected so long.
_COLLECT_S = 1.0
_COLLECTED_MAX = 1 << 16


class _Batch:
    """What the kernel is to be told at once, and until when it would believe it otherwise."""

    __slots__ = ("done", "inodes", "names", "until")

    def __init__(self) -> None:
        self.names: set[Name] = set()
        self.inodes: dict[int, list[Name]] = {}  # with the names that may make them known
        self.until = 0.0
        self.done = trio.Event()


class _Said:
    """Names and attributes that the kernel was told, and until when (time.monotonic())."""

    __slots__ = ("attributes", "names", "names_of")

    def __init__(self) -> None:
        self.names: dict[Name, tuple[int, float]] = {}
        self.names_of: dict[int, set[Name]] = {}
        self.attributes: dict[int, float] = {}


class Beliefs:
    """Told by the store of every change (a store's Watcher), makes the kernel forget."""

    def __init__(self, namespace: Namespace, nodes: NodeTable, kernel: KernelCache) -> None:
        self._namespace = namespace
        self._nodes = nodes
        self._kernel = kernel
        self._said, self._said_before = _Said(), _Said()
        self._turns_at = 0.0
        self._own: dict[Name, tuple[Name, ...]] = {}
        self._crowded: dict[int, float] = {}
        self._open: _Batch | None = None
        self._batches: list[_Batch] = []
        self._changed_names: list[tuple[Name, int]] = []
        self._changed_inodes: list[tuple[Inode | None, Inode | None]] = []
        self._left: set[Name] = set()
        self._collecting = False
        self.told_names = self.told_inodes = self.gave_up = 0

    # -- what the kernel is told in answers --------------------------------------------------------

    def may_name(self, directory: int) -> bool:
        """Whether the kernel could be made to forget names of the directory of late."""
        until = self._crowded.get(directory) if self._crowded else None
        if until is None:
            return True
        if time.monotonic() < until:
            return False
        del self._crowded[directory]
        return True

    def name(self, parent: int, name: bytes, ino: int, seconds: float) -> None:
        """An answer says that a name leads to an inode for so long."""
        said, now = self._now_saying()
        key = (parent, name)
        known = said.names.get(key)
        if known is None or known[0] != ino:
            said.names_of.setdefault(ino, set()).add(key)
        said.names[key] = ino, now + seconds

    def attributes(self, ino: int, seconds: float) -> None:
        """An answer says that an inode has its attributes for so long."""
        said, now = self._now_saying()
        said.attributes[ino] = now + seconds

    def _now_saying(self) -> tuple[_Said, float]:
        now = time.monotonic()
        if now > self._turns_at:
            self._said_before, self._said = self._said, _Said()
            self._turns_at = now + _REMEMBERED_S
        return self._said, now

    # -- changes -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def changing(self, *names: Name) -> Iterator[None]:
        """A program here changes these names: the kernel sees to it by itself if that succeeds. It
        then believes in the new name of what is renamed as it did in the old one."""
        self._own.update(dict.fromkeys(names, names))
        try:
            yield
        except BaseException:
            # It may have happened all the same.
            until = max(map(self._take_name, names))
            self._tell_soon(names if until else (), (), until)
            raise
        else:
            left_s = max(map(self._take_name, names)) - time.monotonic()
            for parent, name in names if left_s > -_REMEMBERED_S else ():
                with contextlib.suppress(OSError):  # the directory is gone
                    if (inode := self._namespace.lookup(parent, name)) is not None:
                        self.name(parent, name, inode.ino, left_s)
        finally:
            for key in names:
                self._own.pop(key, None)

    def name_changed(self, parent: int, name: bytes, old_ino: int) -> None:
        self._changed_names.append(((parent, name), old_ino))

    def inode_changed(self, old: Inode | None, new: Inode | None) -> None:
        self._changed_inodes.append((old, new))

    def transaction(self, *, ours: bool) -> None:
        """What changed since the last call changed at once; `ours`: by a program on this mount."""
        names: set[Name] = set()
        inodes: set[int] = set()
        until = 0.0
        for key, old_ino in self._changed_names:
            keys = self._own.get(key, (key,))
            if ours and key in self._own:
                continue
            believed = max(map(self._take_name, keys))
            if believed:
                names.update(keys)
                until = max(until, believed)
            elif old_ino:
                self._collect(key, old_ino)
        for old, new in self._changed_inodes:
            known = new or old
            assert known is not None
            published = new is not None and old is not None and new.version != old.version
            if (published or not ours) and (believed := self._take_attributes(known.ino)):
                inodes.add(known.ino)
                until = max(until, believed)
            if old is None or new is None:
                continue
            if new.is_dir and new.parent != old.parent:
                believed_names, believed_inodes = self._below(new.ino)
                for ino in believed_inodes:
                    until = max(until, self._take_attributes(ino))
                inodes.update(believed_inodes)
            elif published and not ours:
                # Another version is another node.
                believed_names = self._names_of(new.ino)
            else:
                continue
            for key in believed_names:
                until = max(until, self._take_name(key))
            names.update(believed_names)
        self._changed_names.clear()
        self._changed_inodes.clear()
        self._tell_soon(names, inodes, until)

    def _take_name(self, key: Name) -> float:
        """Until when the kernel believes in a name, 0.0: it does not. It is about to forget it."""
        until = 0.0
        for said in (self._said, self._said_before):
            found = said.names.pop(key, None)
            if found is not None:
                until = max(until, found[1])
        return until

    def _take_attributes(self, ino: int) -> float:
        return max(self._said.attributes.pop(ino, 0.0), self._said_before.attributes.pop(ino, 0.0))

    def _names_of(self, ino: int) -> list[Name]:
        return [
            key
            for said in (self._said, self._said_before)
            for key in said.names_of.get(ino, ())
            if said.names.get(key, (0,))[0] == ino
        ]

    def _below(self, directory: int) -> tuple[list[Name], list[int]]:
        """Names and inodes that were believed because of where the directory was."""
        inodes = self._namespace.inodes
        below: dict[int, bool] = {directory: True, ROOT_INO: False}

        def lies_below(ino: int) -> bool:
            if ino not in below:
                inode = inodes.get(ino)
                below[ino] = False
                below[ino] = inode is not None and lies_below(inode.parent)
            return below[ino]

        names = {*self._said.names, *self._said_before.names}
        numbers = {*self._said.attributes, *self._said_before.attributes}
        parents_of = self._namespace.parents_of
        return (
            [key for key in names if lies_below(key[0])],
            [ino for ino in numbers if ino == directory or any(map(lies_below, parents_of(ino)))],
        )

    # -- telling the kernel ------------------------------------------------------------------------

    def _tell_soon(self, names: Iterable[Name], inodes: Iterable[int], until: float) -> None:
        if not names and not inodes:
            return
        if self._open is None:
            # All of a burst goes into one.
            batch = _Batch()
            if not self._kernel.start_soon(self._tell, batch):
                return
            self._batches.append(batch)
            self._open = batch
        batch = self._open
        batch.names.update(names)
        for ino in inodes:
            batch.inodes[ino] = self._names_of(ino)
        batch.until = max(batch.until, until)

    async def _tell(self, batch: _Batch) -> None:
        self._open = None
        nodes = [
            (node.id, names)
            for ino, names in batch.inodes.items()
            for node in self._nodes.of(ino)
            if node.lookups > 0
        ]
        self.told_names += len(batch.names)
        self.told_inodes += len(nodes)
        try:
            patience_s = max(0.0, batch.until - time.monotonic()) + _GRACE_S
            with trio.move_on_after(patience_s) as waiting:
                await self._kernel.forget(list(batch.names), nodes)
            if waiting.cancelled_caught:
                self.gave_up += 1
                crowded = {parent for parent, _ in batch.names}
                log.info("directories %s are changed from two sides", sorted(crowded))
                self._crowded.update(dict.fromkeys(crowded, time.monotonic() + _CROWDED_S))
        finally:
            self._batches.remove(batch)
            batch.done.set()

    def _collect(self, name: Name, ino: int) -> None:
        """A name does not lead to an inode any more that the kernel may have looked up by it."""
        if len(self._left) < _COLLECTED_MAX and any(node.lookups for node in self._nodes.of(ino)):
            self._left.add(name)
            if not self._collecting:
                self._collecting = self._kernel.start_soon(self._drop_collected)

    async def _drop_collected(self) -> None:
        try:
            while self._left:
                await trio.sleep(_COLLECT_S)
                names, self._left = list(self._left), set()
                with trio.move_on_after(_COLLECT_S):
                    await self._kernel.forget(names, [])
        finally:
            self._collecting = False

    def count(self) -> dict[str, int]:
        """Figures for `irdmafs status`: what the kernel was made to forget, and how often in vain."""
        return {
            "names_told": self.told_names,
            "inodes_told": self.told_inodes,
            "tellings_given_up": self.gave_up,
        }

    async def told(self) -> None:
        """Return when the kernel believes nothing that has been changed up to now."""
        for batch in list(self._batches):
            await batch.done.wait()
