"""Reading names by directory, from an engine that other processes change, too.

The tree of a mount has all names if they are not many. Of many it has those in directories into which
somebody has looked: they are read at the revision that the tree shows, while no change is applied to it,
and followed from then on. Changes of others are passed over. So what a mount keeps, and reads when it
starts or has missed changes, depends on what it uses.

To say who follows a directory, those above it have to be known, without their names: what another mount
moves into a directory that was not read, directories that anybody follows, and those whose records change.
The records of inodes say which directory holds them.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from ..kv import Event, KeyValue
from ..model.records import FOLLOWED
from ..unwrap import first_alone, for_each
from .events import differences, load_order
from .inode import (
    FIRST_VIRTUAL_INO,
    ROOT_INO,
    Unread,
    inode_key,
    led_to,
    name_key,
    time_key,
    told_of,
    upwards,
)
from .tree import Tree

if TYPE_CHECKING:
    from ..etcd.engine import EtcdEngine

# The kinds of keys that names, inodes and times have.
_KINDS: Final = ((b"d", b"e"), (b"i", b"j"), (b"t", b"u"))
_AT_ONCE = 8
# Records of inodes whose numbers are as near as this are read together, with those between them.
_GAP_MAX = 64
# Other records are read so many at a time: the largest ones fit into a message to a reader.
_RECORDS_AT_ONCE = 60

_Range = tuple[bytes, bytes]


class Reader:
    """Reads names into a tree, all of them if there are `ahead` or fewer, or that is 0. `followed()` are
    the directories that anybody follows, `own` is one that always has to be known; 0: there is none.
    Methods raise OSError. `prepare` and `catch_up` have nothing to do when everything is `known`."""

    def __init__(
        self,
        tree: Tree,
        engine: "EtcdEngine",
        ahead: int,
        followed: Callable[[], Iterable[int]],
        own: int = 0,
    ) -> None:
        self._tree = tree
        self.known = tree.known
        self._engine = engine
        self._ahead = ahead
        self._followed = followed
        self._own = {own} - {0}
        self._sought: set[int] = set()  # inodes without a record to which names lead
        self._has_begun = False

    async def snapshot(self, start: bytes, end: bytes) -> tuple[int, list[KeyValue]]:
        """Return the records in a range, but of names and inodes only those of what is known, and the
        revision that they are of."""
        if not self._has_begun:
            ahead = self._ahead
            is_much = ahead != 0 and await self._engine.has_more(*_KINDS[0], ahead)
            self.known.everything = not is_much
            self._has_begun = True
        if self.known.everything:
            return await self._engine.snapshot(start, end)
        ends = [start, *(end for kind in _KINDS for end in kind), end]
        revision, found = 0, list[KeyValue]()
        for others in [*pairwise(ends)][::2]:
            revision, some = await self._engine.snapshot(*others, revision)
            found += some
        return revision, found + await self._known_records(revision)

    async def settle(self, revision: int) -> None:
        """Read what else has to be known, when the tree has a snapshot of this revision: where inodes are
        whose names were lost with changes that were missed, too."""
        if not self.known.everything:
            inodes = self._tree.inodes.items()
            lost = {ino for ino, inode in inodes if inode.revision and not inode.name} - {ROOT_INO}
            await self._place(lost.union(self._own, self._followed()), revision)
            await self.catch_up(revision)

    async def prepare(self, applied: int, events: Sequence[Event]) -> None:
        """Have the tree, which shows revision `applied`, know what it needs to apply the next events."""
        known, inodes = self.known, self._tree.inodes
        parents, is_one_removed = dict[int, int](), False
        for _, key, value in events:
            if key[:1] == b"d" and value is not None:
                parents[led_to(value)] = int.from_bytes(key[1:9], "big")
            elif key[:1] == b"d":
                is_one_removed = True
        wanted, moved = [parent for ino, parent in parents.items() if ino in inodes], list[bytes]()
        is_followed = any(True for _ in self._followed())
        for _, key, value in events:
            if value is not None and key[:1] == FOLLOWED:
                wanted.append(int.from_bytes(key[9:], "big"))
            elif value is not None and key[:1] == b"i":
                ino = int.from_bytes(key[1:9], "big")
                is_looked_for = is_followed and (ino not in parents or is_one_removed)
                is_shown = parents.get(ino, 0) in inodes
                if (is_looked_for or is_shown) and ino not in inodes and told_of(value)[0]:
                    if is_looked_for:
                        wanted.append(ino)
                    if is_shown:
                        moved.append(time_key(ino))
        needed, places = set[int](), set[int]()
        while wanted:
            ino = wanted.pop()
            if ino in inodes or ino in needed:
                continue
            places.add(ino)
            if ino in parents:  # maybe it was made just now
                needed.add(ino)
                wanted.append(parents[ino])
        if places:
            await self._place(places, applied)
        if moved:
            self._take(await self._records(moved, applied))
        known.needed = needed

    async def catch_up(self, revision: int) -> None:
        """Read what came to be below directories below which all is to be known; and inodes of which a
        change told the name alone, once."""
        if self._tree.damaged or self._sought:
            inodes = self._tree.inodes
            alone = {ino for ino in self._tree.damaged if not inodes[ino].revision}
            if new := alone - self._sought:
                self._take(await self._inodes(new, revision))
            self._sought = alone
        while self.known.behind:
            await self._learn_below(next(iter(self.known.behind)), revision)

    async def learn(self, unread: Unread, revision: int) -> None:
        """Have the tree, which shows this revision, know what somebody asked for."""
        directory, known = unread.directory, self.known
        if not directory:
            await self._learn_rest(revision)
        elif unread.below:
            await self._learn_below(directory, revision)
            known.whole.add(directory)
        elif directory in known.unread:
            await self._learn([directory], revision)

    # -- what the tree takes -----------------------------------------------------------------------

    async def _learn(self, directories: Sequence[int], revision: int) -> None:
        """Read the names in directories, and the inodes that they lead to."""
        names = await self._names(directories, revision)
        inodes = self._tree.inodes
        unknown = {ino for one in names if (ino := led_to(one.value)) not in inodes}
        records = names + await self._inodes(unknown, revision)
        self.known.unread.difference_update(directories)
        self.known.behind.difference_update(directories)
        self._take(records)

    async def _learn_below(self, directory: int, revision: int) -> None:
        todo = [directory]
        while todo:
            if unread := [one for one in todo if one in self.known.unread]:
                await self._learn(unread, revision)
            below = (ino for one in todo for _, ino in self._tree.below(one))
            found = filter(None, map(self._tree.inodes.get, below))
            todo = [inode.ino for inode in found if inode.is_dir]

    async def _learn_rest(self, revision: int) -> None:
        if not self.known.everything:
            records = await self._read(_KINDS, revision)
            self.known.learn_all()
            self._tree.take(differences(self._tree, records, revision))

    async def _place(self, numbers: Iterable[int], revision: int) -> None:
        """Have the tree know which directories hold inodes whose names are not known."""
        inodes, places, found = self._tree.inodes, dict[int, int](), list[KeyValue]()
        todo = {ino for ino in numbers if ino not in inodes or not inodes[ino].name} - {ROOT_INO}
        while todo:
            records = await self._inodes(todo, revision)
            found += records
            more = {
                int.from_bytes(one.key[1:], "big"): told_of(one.value)[1]
                for one in records
                if one.key[:1] == b"i"
            }
            if 0 in more.values():  # a version that did not write this made one of them
                await self._learn_rest(revision)
                return
            places |= more
            todo = {one for one in more.values() if one not in inodes and one not in places}
        sound = {ino for ino in places if self._leads_up(ino, places)}
        records = [one for one in found if int.from_bytes(one.key[1:], "big") in sound]
        self._take(records, [(ino, places[ino]) for ino in sound])

    def _leads_up(self, ino: int, places: dict[int, int]) -> bool:
        """Return whether inodes to be placed lie below a directory that is known, and none below itself."""
        passed = set[int]()
        while ino in places and ino not in passed:
            passed.add(ino)
            ino = places[ino]
        above = {inode.ino for inode in upwards(self._tree.inodes, ino)}
        return bool(above) and passed.isdisjoint(above)

    def _take(self, records: Iterable[KeyValue], places: Iterable[tuple[int, int]] = ()) -> None:
        events = (Event(one.mod_revision, one.key, one.value) for one in load_order(records))
        self._tree.take(events, places)

    # -- reading -----------------------------------------------------------------------------------

    async def _known_records(self, revision: int) -> list[KeyValue]:
        """Return the records of what is known, and of all that directories have which were read."""
        tree, unread = self._tree, self.known.unread
        read, keys = {ROOT_INO}, list[bytes]()
        numbers = {ROOT_INO}
        for ino, inode in tree.inodes.items():
            numbers.add(ino)
            if inode.is_dir and ino not in unread:
                read.add(ino)
            keys += [name_key(*name) for name in tree.names_of(ino) if name[0] in unread]
        found = await self._names(read, revision) + await self._records(keys, revision)
        numbers.update(led_to(one.value) for one in found)
        return found + await self._inodes(numbers, revision)

    async def _names(self, directories: Iterable[int], revision: int) -> list[KeyValue]:
        ranges = [(name_key(one, b""), name_key(one + 1, b"")) for one in directories]
        return await self._read(ranges, revision)

    async def _inodes(self, numbers: set[int], revision: int) -> list[KeyValue]:
        """Return the records and times of inodes."""
        runs = list[list[int]]()
        for ino in sorted(numbers):
            if 0 < ino < FIRST_VIRTUAL_INO:
                if runs and ino - runs[-1][1] <= _GAP_MAX:
                    runs[-1][1] = ino
                else:
                    runs.append([ino, ino])
        ranges, keys = list[_Range](), list[bytes]()
        for key in (inode_key, time_key):
            ranges += [(key(first), key(last + 1)) for first, last in runs if first < last]
            keys += [key(first) for first, last in runs if first == last]
        found = await self._read(ranges, revision) + await self._records(keys, revision)
        return [one for one in found if int.from_bytes(one.key[1:], "big") in numbers]

    async def _read(self, ranges: Iterable[_Range], revision: int) -> list[KeyValue]:
        found = list[KeyValue]()
        with first_alone():
            await for_each([*ranges], partial(self._add, found, revision), at_once=_AT_ONCE)
        return found

    async def _records(self, keys: Sequence[bytes], revision: int) -> list[KeyValue]:
        found = list[KeyValue]()
        for start in range(0, len(keys), _RECORDS_AT_ONCE):
            found += await self._engine.records(keys[start : start + _RECORDS_AT_ONCE], revision)
        return found

    async def _add(self, found: list[KeyValue], revision: int, some: _Range) -> None:
        found += (await self._engine.snapshot(*some, revision))[1]
