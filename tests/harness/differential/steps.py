"""The vocabulary of a differential test: steps of several processes, meaningful whatever came before them.

Steps name slots and a few names of files, never results of other steps. So a program with any of its steps
left out is a program, too, and a failure can be shrunk. Which kinds of steps a program has, and how often,
is drawn for each program anew ("swarm testing", Groce et al., ISSTA 2012): a program of few kinds gets
further with them.
"""

import fcntl
import itertools
import json
import mmap
import os
import stat
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from harness.differential.actor import MAPS, SLOTS

ACTORS = 4
STRANGER = 1001  # a user who owns nothing at first
T = TypeVar("T")

NAMES = ("a", "b", "c", "d", "d/a", "d/b", "e", "e/a")
SIZES = (0, 1, 5, 100, 4095, 4096, 4097, 10_000, 70_000)
OFFSETS = (0, 0, 1, 50, 4096, 5000, 12_000)
LENGTHS = (0, 1, 7, 100, 4096, 5000, 70_000)
MODES = (0o644, 0o600, 0o666, 0o400, 0o755, 0o4755, 0o2755, 0o6777, 0o1777, 0o000, 0o2644)
OWNERS = ([-1, -1], [0, 0], [STRANGER, STRANGER], [STRANGER, -1], [-1, STRANGER])
XATTRS = ("user.a", "user.a", "user.a", "user.b", "trusted.c", "security.d")
ACCESS = (os.O_RDONLY, os.O_WRONLY, os.O_RDWR)
OPEN_FLAGS = (
    os.O_CREAT,
    os.O_CREAT,
    os.O_CREAT | os.O_EXCL,
    os.O_TRUNC,
    os.O_CREAT | os.O_TRUNC,
    os.O_APPEND,
    os.O_CREAT | os.O_APPEND,
    os.O_PATH,
    os.O_DIRECTORY,
    os.O_NOFOLLOW,
    os.O_CLOEXEC,
    0,
)
FLAG_NAMES = (
    *("O_CREAT", "O_EXCL", "O_TRUNC", "O_APPEND"),
    *("O_PATH", "O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC"),
)
FALLOCATE_MODES = (0, 0, 1, 1, 3, 2, 0x10, 0x11, 0x8, 0x20)
_USUAL_FALLOCATE_MODES = (0, 1, 3)
PAST_NS = (1, 86_400 * 10**9 + 123_456_789)
_MOSTLY: tuple[bool, ...] = (False, True, True, True, True)
_USUAL = ("create", "open", "open", "write", "close")
_SELDOM = ("exit", "exec", "umask", "unlink", "rmdir", "fork", "munmap")
_BY_OTHERS = ("link_fd", "reopen", "fchmod", "pwrite", "write", "ftruncate", "fallocate")


class Step(NamedTuple):
    """One call of one process."""

    actor: int
    op: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        words = [f"{key}={_in_words(self.op, key, value)}" for key, value in self.arguments.items()]
        return f"{self.actor}: {self.op} {' '.join(words)}".rstrip()

    def line(self) -> str:
        """The step as a line from which `parse` makes it again."""
        return json.dumps([self.actor, self.op, self.arguments])


class Program(NamedTuple):
    """Steps for processes of which `actors` exist at the beginning.

    `observed`: stat what each step named, behind it.
    """

    steps: list[Step]
    actors: int
    observed: bool

    def __str__(self) -> str:
        numbered = [f"{number:4}  {step}" for number, step in enumerate(self.steps)]
        return "\n".join([f"{self.actors} processes, observed={self.observed}", *numbered])


def parse(line: str) -> Step:
    actor, op, arguments = json.loads(line)
    return Step(actor, op, arguments)


def _in_words(op: str, key: str, value: Any) -> str:
    if key == "flags" and op in ("open", "reopen", "status_flags"):
        names = [("O_RDONLY", "O_WRONLY", "O_RDWR", "O_ACCMODE")[value & os.O_ACCMODE]]
        names += [name for name in FLAG_NAMES if value & getattr(os, name)]
        if value & os.O_TMPFILE == os.O_TMPFILE:
            names[names.index("O_DIRECTORY")] = "O_TMPFILE"
        return "|".join(names)
    return oct(value) if key in ("mode", "mask") and op != "fallocate" else repr(value)


class Source(Protocol):
    """Where choices come from: a random generator, or hypothesis."""

    def choice(self, options: Sequence[T], /) -> T: ...


# An argument is drawn from values, or by a method of the vocabulary.
Drawn = Sequence[Any] | Callable[["Vocabulary", Source], Any]
Arguments = dict[str, Drawn]


class Guess:
    """A guess of what a program may have made so far, so that most steps find something. It need not be
    right."""

    def __init__(self, actors: int) -> None:
        self.actor = 0
        self.held: dict[int, set[int]] = {actor: set() for actor in range(actors)}
        self.mapped: dict[int, set[int]] = {actor: set() for actor in range(actors)}
        self.made: set[str] = set()

    def note(self, step: Step) -> None:
        words, held = step.arguments, self.held.get(step.actor, set())
        if step.op in ("open", "reopen", "dup"):
            held.add(words["slot"])
        if step.op == "close":
            held.discard(words["slot"])
        if step.op in ("mmap", "munmap"):
            mapped = self.mapped[step.actor]
            (mapped.add if step.op == "mmap" else mapped.discard)(words["where"])
        if step.op == "fork" and words["child"] not in self.held:
            self.held[words["child"]] = set(held)
            self.mapped[words["child"]] = set(self.mapped[step.actor])
        if step.op == "exit":
            del self.held[step.actor], self.mapped[step.actor]
        if step.op in ("open", "mkdir", "symlink", "mknod"):
            self.made.add(words["path"])
        if "new" in words:
            self.made.add(words["new"])


class Vocabulary:
    """The steps that a program may have."""

    def __init__(self, without: frozenset[str] = frozenset()) -> None:
        """`without`: operations, "truncating opens", "set-group-id" modes or "touch" (times that are set to
        now) that are not to occur."""
        self._truncate = "truncating opens" not in without
        self._touch = "touch" not in without
        self._modes = [
            mode for mode in MODES if "set-group-id" not in without or not mode & stat.S_ISGID
        ]
        self._marks = itertools.count(1)
        self._slots: Sequence[int] = range(SLOTS)
        self._names: tuple[str, ...] = NAMES
        self._guess = Guess(1)
        self.ops = [op for op in ARGUMENTS if op not in without]

    def program(self, source: Source) -> Program:
        """Draw a whole program."""
        self._slots = range(source.choice((1, 2, 3, 4, SLOTS)))
        self._names = NAMES[: source.choice((1, 2, 3, 5, len(NAMES)))]
        self._marks = itertools.count(1)
        actors = source.choice((1, 2, 2, 3))
        self._guess = Guess(actors)
        kinds = source.choice((4, 8, 16, len(self.ops)))
        drawn = [source.choice(self.ops) for _ in range(kinds)]
        often = [op for op in drawn if op not in _SELDOM]
        usual = [op for op in _USUAL if op in self.ops]
        ops = (*usual, *drawn, *often, *often, *often)
        steps = self._beginning(source)
        for _ in range(source.choice((15, 40, 100))):
            step = self._step(source, ops)
            if step is not None:
                self._guess.note(step)
                steps.append(step)
        return Program(steps, actors, source.choice((False, True)))

    def _beginning(self, source: Source) -> list[Step]:
        """Files and directories that are there when the program begins, often."""
        steps = []
        for name in self._names[: source.choice((0, 1, 3, len(NAMES)))]:
            if name in ("d", "e"):
                steps.append(Step(0, "mkdir", {"path": name, "mode": 0o777}))
                continue
            flags = os.O_RDWR | os.O_CREAT
            steps.append(Step(0, "open", {"slot": 0, "path": name, "flags": flags, "mode": 0o666}))
            length = source.choice(LENGTHS)
            steps.append(Step(0, "write", {"slot": 0, "mark": next(self._marks), "length": length}))
            steps.append(Step(0, "close", {"slot": 0}))
        for step in steps:
            self._guess.note(step)
        return steps

    def _step(self, source: Source, ops: Sequence[str]) -> Step | None:
        op = source.choice(ops)
        living = tuple(self._guess.held)
        if self._guess.actor not in living or source.choice((False, False, True)):
            self._guess.actor = source.choice(living)
        actor = self._guess.actor
        if op == "exit" and len(living) == 1:
            return None
        if op in _OF_MAPS and not self._guess.mapped[actor] and source.choice(_MOSTLY):
            op = "mmap" if "mmap" in self.ops else op
        if op in _OF_SLOTS and not self._guess.held[actor] and source.choice(_MOSTLY):
            op = "create"
        arguments = {key: self._draw(source, drawn) for key, drawn in ARGUMENTS[op].items()}
        # The kernel takes set-id bits of a FUSE file before it asks whether this fallocate is known.
        is_odd = op == "fallocate" and arguments["mode"] not in _USUAL_FALLOCATE_MODES
        # It tells of a chown(2) to nobody in the same words as of a write by who has the file open.
        is_odd |= arguments.get("owner") == [-1, -1]
        if ("path" in arguments or op in _BY_OTHERS) and not is_odd:
            user = source.choice((0,) * 9 + (STRANGER,))
            if user:
                arguments["user"] = user
        return Step(actor, "open" if op in ("create", "tmpfile") else op, arguments)

    def _draw(self, source: Source, drawn: Drawn) -> Any:
        return drawn(self, source) if callable(drawn) else source.choice(drawn)

    def any_slot(self, source: Source) -> int:
        return source.choice(self._slots)

    def slot(self, source: Source) -> int:
        """Mostly one in which something is open."""
        held = tuple(self._guess.held[self._guess.actor])
        mostly = source.choice(_MOSTLY)
        return source.choice(held if held and mostly else self._slots)

    def where(self, source: Source) -> int:
        mapped = tuple(self._guess.mapped[self._guess.actor])
        return source.choice(mapped or range(MAPS))

    def any_name(self, source: Source) -> str:
        return source.choice(self._names)

    def new_name(self, source: Source) -> str:
        return source.choice((*self._names, "f", "g", "h"))

    def name(self, source: Source) -> str:
        """Mostly one that was made."""
        made = tuple(sorted(self._guess.made))
        mostly = source.choice(_MOSTLY)
        return source.choice(made if made and mostly else self._names)

    def flags(self, source: Source) -> int:
        flags = source.choice(ACCESS)
        for _ in range(source.choice((1, 1, 2, 3))):
            flags |= source.choice(OPEN_FLAGS)
        if flags & os.O_PATH:
            flags &= os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        return flags if self._truncate else flags & ~os.O_TRUNC

    def flags_of_reopen(self, source: Source) -> int:
        flags = self.flags(source) & ~(os.O_EXCL | os.O_CREAT | os.O_NOFOLLOW)
        # POSIX does not say what emptying a file does that is opened for reading.
        return flags if flags & os.O_ACCMODE else flags & ~os.O_TRUNC

    def mode(self, source: Source) -> int:
        return source.choice(self._modes)

    def mode_of_open(self, source: Source) -> int:
        return self.mode(source) if source.choice((0, 0, 1)) else 0o644

    def times(self, source: Source) -> list[int] | None:
        past = [*PAST_NS], [*PAST_NS[::-1]]
        return source.choice((None, *past) if self._touch else past)

    def mark(self, _source: Source) -> int:
        return next(self._marks)

    def directory(self, source: Source) -> str:
        return source.choice(("d", "e", self.any_name(source)))

    def made_directory(self, source: Source) -> str:
        return source.choice(("d", "e", self.name(source)))


_ANY_SLOT, _SLOT, _WHERE = Vocabulary.any_slot, Vocabulary.slot, Vocabulary.where
_FLAGS, _MODE, _MARK = Vocabulary.flags, Vocabulary.mode_of_open, Vocabulary.mark
_ANY_NAME, _NEW_NAME, _NAME = Vocabulary.any_name, Vocabulary.new_name, Vocabulary.name
_PLACE: Arguments = {"offset": OFFSETS, "length": LENGTHS}
_OF_MAP: Arguments = {"offset": (0, 100, 4000, 5000), "length": (10, 9000)}
_COPY: Arguments = {"source": _SLOT, "target": _SLOT, "length": LENGTHS}
_CREATES = (os.O_RDWR | os.O_CREAT, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_CREAT)
_TMPFILES = [os.O_TMPFILE | flags | more for flags in ACCESS for more in (0, 0, os.O_EXCL)]
_VALUE: Arguments = {"name": XATTRS, "mark": _MARK, "length": (0, 4, 300), "flags": (0, 0, 1, 2)}
_KINDS_OF_NODES = (stat.S_IFREG, stat.S_IFREG, stat.S_IFSOCK)
_NODES = [kind | mode for kind in _KINDS_OF_NODES for mode in (0o644, 0o600)]
_WHENCES = (os.SEEK_SET, os.SEEK_CUR, os.SEEK_END)
_RANGE: Arguments = {
    "kind": ("read", "write", "none"),
    "start": (0, 10, 100),
    "length": (0, 10, 95),
    "ofd": (False, True),
}
ARGUMENTS: dict[str, Arguments] = {
    # Opening and closing.
    "open": {"slot": _ANY_SLOT, "path": _NAME, "flags": _FLAGS, "mode": _MODE},
    "create": {"slot": _ANY_SLOT, "path": _ANY_NAME, "flags": _CREATES, "mode": (0o666,)},
    "tmpfile": {
        "slot": _ANY_SLOT,
        "path": (".", "d", "e", "a"),
        "flags": _TMPFILES,
        "mode": (0o644,),
    },
    "reopen": {"slot": _ANY_SLOT, "source": _SLOT, "flags": Vocabulary.flags_of_reopen},
    "close": {"slot": _SLOT},
    "dup": {"slot": _ANY_SLOT, "source": _SLOT},
    "status_flags": {"slot": _SLOT, "flags": (0, os.O_APPEND)},
    "fork": {"child": range(ACTORS)},
    "exec": {},
    "exit": {},
    # Reading and writing.
    "read": {"slot": _SLOT, "length": LENGTHS},
    "pread": {"slot": _SLOT, "offset": OFFSETS, "length": (100, 200_000)},
    "write": {"slot": _SLOT, "mark": _MARK, "length": LENGTHS},
    "pwrite": {"slot": _SLOT, "mark": _MARK, **_PLACE, "flags": (0, 0, 0, 0, os.RWF_APPEND)},
    "lseek": {"slot": _SLOT, "offset": (*OFFSETS, -1, -100), "whence": _WHENCES},
    "seek_data": {"slot": _SLOT, "offset": OFFSETS, "whence": (os.SEEK_DATA, os.SEEK_HOLE)},
    "copy_range": {**_COPY, "from_offset": (None, *OFFSETS), "to_offset": (None, *OFFSETS)},
    "sendfile": {**_COPY, "offset": (None, *OFFSETS)},
    "clone": {"source": _SLOT, "target": _SLOT},
    "ftruncate": {"slot": _SLOT, "size": SIZES},
    "truncate": {"path": _NAME, "size": SIZES},
    "fallocate": {"slot": _SLOT, "mode": FALLOCATE_MODES, **_PLACE},
    "fsync": {"slot": _SLOT, "data_only": (False, True)},
    # Mappings.
    "mmap": {
        "where": range(MAPS),
        "slot": _SLOT,
        "length": (4096, 16_384),
        "protection": (mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE),
        "flags": (mmap.MAP_SHARED, mmap.MAP_SHARED, mmap.MAP_PRIVATE),
    },
    "munmap": {"where": _WHERE},
    "load": {"where": _WHERE, **_OF_MAP},
    "store": {"where": _WHERE, "mark": _MARK, **_OF_MAP},
    "msync": {"where": _WHERE, "flags": (1, 4)},
    # Names.
    "rename": {"path": _NAME, "new": _NEW_NAME, "flags": (0, 0, 0, 0, 1, 2)},
    "link": {"path": _NAME, "new": _NEW_NAME},
    "link_fd": {"slot": _SLOT, "new": _NEW_NAME},
    "unlink": {"path": _NAME},
    "mkdir": {"path": Vocabulary.directory, "mode": (0o755, 0o777, 0o2777, 0o1777, 0o700)},
    "rmdir": {"path": Vocabulary.made_directory},
    "symlink": {"path": _NEW_NAME, "leads_to": ("a", "b", "d", "../a", "c")},
    "readlink": {"path": _NAME},
    "mknod": {"path": _NEW_NAME, "mode": _NODES},
    "listdir": {"path": (".", "d", "e")},
    # Attributes.
    "stat": {"path": _NAME},
    "lstat": {"path": (".", *NAMES)},
    "fstat": {"slot": _SLOT},
    "access": {"path": _NAME, "mode": (0, 1, 2, 4, 6)},
    "chmod": {"path": _NAME, "mode": Vocabulary.mode},
    "fchmod": {"slot": _SLOT, "mode": Vocabulary.mode},
    "chown": {"path": _NAME, "owner": OWNERS},
    "fchown": {"slot": _SLOT, "owner": OWNERS},
    "utimens": {"path": _NAME, "times": Vocabulary.times},
    "futimens": {"slot": _SLOT, "times": Vocabulary.times},
    "setxattr": {"path": _NAME, **_VALUE},
    "fsetxattr": {"slot": _SLOT, **_VALUE},
    "getxattr": {"path": _NAME, "name": XATTRS},
    "fgetxattr": {"slot": _SLOT, "name": XATTRS},
    "listxattr": {"path": _NAME},
    "removexattr": {"path": _NAME, "name": XATTRS},
    "umask": {"mask": (0o022, 0o077, 0)},
    # Locks.
    "flock": {"slot": _SLOT, "kind": (fcntl.LOCK_SH, fcntl.LOCK_EX, fcntl.LOCK_UN)},
    "lock": {"slot": _SLOT, **_RANGE},
    "lock_test": {"slot": _SLOT, **_RANGE},
}
_OF_MAPS = [op for op, arguments in ARGUMENTS.items() if _WHERE in arguments.values()]
_OF_SLOTS = [op for op, arguments in ARGUMENTS.items() if _SLOT in arguments.values()]
