"""A content: one run of bytes that descriptors on this host share, in one extent.

Its state says which opens get it and what its bytes are. docs/sharing.md has the rule and a picture of the
states. Every change of state is a method of `Content`, and nothing outside this module assigns its
attributes, except the extent (table) and counters, by those who count. A change that `State` does not allow
is an assertion.
"""

from enum import Enum
from typing import Final

import trio

from ..backend.model.records import NO_CONTENT
from ..backend.namespace import Inode

Stamp = tuple[int, int]  # size in bytes, time of modification in nanoseconds
# A stamp, and the time of change in nanoseconds, which no program can set.
Mark = tuple[int, int, int]


class State(Enum):
    """The states of a content. `writable`: its extent may be written, as nobody else relies on its bytes.
    `ended`: no further open gets it; the descriptors that have it open keep it. `following`: the states
    that may follow."""

    # Current: opens for reading and in place get it. A file has at most one current content on a host.
    VERSION = "a version, which nobody writes; or a file without a version and without bytes"
    NEW = "a file that has no version yet, being written"
    IN_PLACE = "written in place, by everybody who has the file open"
    LEFT = "left by its last writer, and seen on this host only: he was killed, or it has no name any more"
    # Private: opens for writing without O_TRUNC get the newest one.
    REPLACING = "it replaces the file when it is published"
    # Ended.
    SUPERSEDED = "an old version"
    OVERTAKEN = (
        "superseded while it may still be written: a close that finds it written publishes it"
    )
    GIVEN_UP = "given up by its writer: it is never published"

    writable: bool
    ended: bool
    following: tuple["State", ...]


_WRITABLE: Final = (
    State.NEW, State.IN_PLACE, State.LEFT, State.REPLACING, State.OVERTAKEN, State.GIVEN_UP,
)  # fmt: skip
_ENDED: Final = (State.SUPERSEDED, State.OVERTAKEN, State.GIVEN_UP)
_FOLLOWING: Final = {
    State.VERSION: (State.NEW, State.IN_PLACE, State.SUPERSEDED),
    State.NEW: (State.VERSION, State.IN_PLACE, State.LEFT, State.OVERTAKEN, State.GIVEN_UP),
    State.IN_PLACE: (State.VERSION, State.LEFT, State.OVERTAKEN),
    State.LEFT: (State.VERSION, State.IN_PLACE, State.OVERTAKEN, State.GIVEN_UP),
    State.REPLACING: (State.VERSION, State.IN_PLACE, State.OVERTAKEN, State.GIVEN_UP),
    State.SUPERSEDED: (State.VERSION, State.OVERTAKEN),
    State.OVERTAKEN: (State.VERSION, State.IN_PLACE, State.GIVEN_UP),
    State.GIVEN_UP: (),
}
for _state in State:
    _state.writable, _state.ended = _state in _WRITABLE, _state in _ENDED
    _state.following = _FOLLOWING[_state]


class Content:
    """One content. `base` is the inode as of the version that the content is, or was made of.

    `extent` keeps the bytes, 0 while there are none; `fd` may be open on it while it is written, else -1.
    `holds` counts handles and promised opens, `opens` and `writers` handles alone; `leaving` counts writers
    whose last descriptor is closed and whose release is not carried out yet; `preparing` those that are
    about to make the content writable; `awaited` those who join it and whose promised open has not come
    yet. `leaves`: a store node is adopting its very file.

    `dirty`: a request to the daemon changed it since it was published. `seen` is the stamp at its last
    publication, or when it was first opened in place; None if it was never published. `begun` is the stamp
    when it began to be written, and `found_full` what `ExtentStore.look_for_room` said then, if it replaces
    its file. `moved`: its stamp and the time of its last change when its file got another number, as the
    file's own time of change moves then as if it were written. `mapped`: a program could map it for
    writing. `whole`: every writer began with an empty file, so a writer that is killed publishes nothing.
    `refused`: the error of a write for which it was given up, else 0. `with_rename`: closing it leaves it
    to the next rename of a directory above.
    """

    __slots__ = (
        "awaited", "base", "begun", "dirty", "extent", "fd", "found_full", "holds", "ino", "leaves",
        "leaving", "lock", "mapped", "moved", "opens", "preparing", "refused", "seen", "state", "whole",
        "with_rename", "writers",
    )  # fmt: skip

    def __init__(self, inode: Inode, *, replaces: bool = False) -> None:
        self.ino = inode.ino
        self.base = inode
        self.state = State.VERSION
        self.extent = inode.extent
        self.fd = -1
        self.holds = self.opens = self.writers = 0
        self.leaving = self.preparing = self.awaited = self.refused = self.found_full = 0
        self.leaves = self.dirty = self.mapped = self.whole = self.with_rename = False
        self.seen: Stamp | None = None
        self.begun: Stamp | None = None
        self.moved: tuple[Stamp, int] | None = None
        self.lock: trio.Lock | None = None
        if replaces:
            self.state, self.extent, self.whole = State.REPLACING, NO_CONTENT, True

    def __repr__(self) -> str:
        return f"<Content ino={self.ino} v{self.base.version} {self.state.name} extent={self.extent:x}>"

    # -- what it is ------------------------------------------------------------------------------

    @property
    def own(self) -> bool:
        """Return whether no version names its extent, which is freed with this object."""
        return self.extent not in (NO_CONTENT, self.base.extent)

    @property
    def is_changing(self) -> bool:
        """Return whether its size and times are those of its extent, and not of a published version."""
        return self.writers > 0 or self.state is State.REPLACING or self.state is State.LEFT

    @property
    def is_busy(self) -> bool:
        """Return whether it is being published, or made writable."""
        return self.preparing > 0 or (self.lock is not None and self.lock.locked())

    def locked(self) -> trio.Lock:
        """Return the lock that is held while it is published, or made writable."""
        if self.lock is None:
            self.lock = trio.Lock()
        return self.lock

    # -- changes of state ------------------------------------------------------------------------

    def _become(self, state: State) -> None:
        assert state is self.state or state in self.state.following, f"{self} becomes {state.name}"
        self.state = state

    def begin_empty(
        self, stamp: Stamp, found_full: int, *, has_version: bool, whole: bool = False
    ) -> None:
        """Begin to be written, in an extent of its own that is empty. `has_version`: so is the file's
        version."""
        self.begun, self.found_full = stamp, found_full
        if self.state is State.REPLACING:
            return
        self.seen, self.whole = stamp if has_version else None, whole
        if self.state.ended:
            self._become(State.OVERTAKEN)
        else:
            self._become(State.IN_PLACE if has_version else State.NEW)

    def begin_in_place(self, stamp: Stamp, inode: Inode) -> None:
        """Begin to be written where the version's bytes are: maybe another extent, as the inode says."""
        if inode.version == self.base.version:
            self.base = inode
        self.seen = self.begun = stamp
        self._become(State.OVERTAKEN if self.state.ended else State.IN_PLACE)

    def go_on_in_place(self, stamp: Stamp, changed_ns: int) -> None:
        """Begin to be written again, after it was written since it was published. `changed_ns`: the time of
        its last change, which is still to be published."""
        self.moved = stamp, changed_ns
        self._become(State.OVERTAKEN if self.state.ended else State.IN_PLACE)

    def touch(self) -> None:
        """Note that a request to the daemon changes it."""
        self.dirty = True

    def retime(self, stamp: Stamp) -> None:
        """Note that a program has set the times of a content that nobody wrote."""
        if self.seen is not None:
            self.seen = stamp
        else:
            self.begun = stamp

    def be_published(self, inode: Inode, stamp: Stamp, *, by_copy: bool, relied_on: bool) -> None:
        """Note that a version holds the bytes that the content had at `stamp`: it is the content's very
        file or, `by_copy`, a copy. `relied_on`: the file must not be written any more."""
        self.base, self.seen, self.dirty = inode, stamp, False
        if by_copy and self.state is State.REPLACING:
            return  # readers see whole versions only
        self.whole = self.with_rename = False
        writable = self.state.writable and not relied_on
        self._become(State.IN_PLACE if writable else State.VERSION)

    def become_version(self, inode: Inode) -> None:
        """Note that its very file has become a version, which its publisher will be told later."""
        self.base = inode
        self._become(State.VERSION)

    def be_set_aside(self, stamp: Stamp) -> None:
        """Note that another file has what was written until `stamp`."""
        self.seen, self.dirty = stamp, False

    def show_newest(self, inode: Inode, stamp: Stamp) -> None:
        """Note that the bytes of a newer version were copied into its extent."""
        assert self.state.writable, self
        self.base, self.seen, self.dirty = inode, stamp, False

    def be_left(self) -> None:
        """Stay on this host as it is, although its last writer has gone and it is no version."""
        self._become(State.LEFT)

    def supersede(self) -> None:
        """Be kept only by the descriptors that have it open."""
        if not self.state.ended:
            self._become(State.OVERTAKEN if self.state.writable else State.SUPERSEDED)

    def give_up(self, refused: int) -> None:
        """Be given up by its writer, or as a write was refused with this error."""
        self._become(State.GIVEN_UP)
        self.refused = refused

    def rest(self) -> None:
        """Be the version's again: nobody has it open, and it is unchanged."""
        self.mapped = False
        self._become(State.VERSION)

    def be_mapped(self) -> None:
        """Note that a program may map it for writing."""
        self.mapped = True

    def be_unmapped(self) -> None:
        """Take its only writer's word that no mapping of it is left."""
        self.mapped = False

    def wait_for_rename(self) -> None:
        """Be published, once it is closed, by the next rename of a directory above."""
        self.with_rename = True

    def be_joined(self) -> None:
        """Note that a writer has opened it who did not begin with an empty file."""
        self.whole = False
