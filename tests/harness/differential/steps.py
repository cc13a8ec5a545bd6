"""The vocabulary of a differential test: steps of several processes, meaningful whatever came before them.

Steps name slots and a few names of files, never results of other steps. So a program with any of its steps
left out is a program, too, and a failure can be shrunk. Which kinds of steps a program has, and how often,
is drawn for each program anew ("swarm testing", Groce et al., ISSTA 2012): a program of few kinds gets
further with them.
"""

import fcntl
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
OWNERS = ((-1, -1), (0, 0), (STRANGER, STRANGER), (STRANGER, -1), (-1, STRANGER))
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
FALLOCATE_MODES = (0, 0, 1, 1, 3, 2, 0x10, 0x11, 0x8, 0x20)
_USUAL_FALLOCATE_MODES = (0, 1, 3)
PAST_NS = (1, 86_400 * 10**9 + 123_456_789)
_MOSTLY: tuple[bool, ...] = (False, True, True, True, True)
_USUAL = ("create", "open", "open", "write", "close")
_SELDOM = ("exit", "exec", "umask", "unlink", "rmdir", "fork", "munmap")
_OF_MAPS = ("load", "store", "msync", "munmap")
_OF_SLOTS = (
    *("mmap", "read", "pread", "write", "pwrite", "lseek", "seek_data", "copy_range", "sendfile"),
    *(
        "clone",
        "ftruncate",
        "fallocate",
        "fsync",
        "fstat",
        "fchmod",
        "fchown",
        "futimens",
        "fsetxattr",
    ),
    *(
        "fgetxattr",
        "flock",
        "lock",
        "lock_test",
        "link_fd",
        "dup",
        "reopen",
        "status_flags",
        "close",
    ),
)
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
        names = ["O_RDONLY", "O_WRONLY", "O_RDWR", "O_ACCMODE"][
            value & os.O_ACCMODE : (value & 3) + 1
        ]
        for name in (
            "CREAT",
            "EXCL",
            "TRUNC",
            "APPEND",
            "PATH",
            "DIRECTORY",
            "NOFOLLOW",
            "CLOEXEC",
        ):
            if value & getattr(os, f"O_{name}"):
                names.append(f"O_{name}")
        if value & os.O_TMPFILE == os.O_TMPFILE:
            names[names.index("O_DIRECTORY")] = "O_TMPFILE"
        return "|".join(names)
    return oct(value) if key in ("mode", "mask") and op != "fallocate" else repr(value)


class Source(Protocol):
    """Where choices come from: a random generator, or hypothesis."""

    def choice(self, options: Sequence[T], /) -> T: ...


def _flags(source: Source, *, truncate: bool) -> int:
    flags = source.choice(ACCESS)
    for _ in range(source.choice((1, 1, 2, 3))):
        flags |= source.choice(OPEN_FLAGS)
    if flags & os.O_PATH:
        flags &= os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    if not truncate:
        flags &= ~os.O_TRUNC
    return flags


def _times(source: Source, *, touch: bool) -> tuple[int, int] | None:
    past = (PAST_NS[0], PAST_NS[1]), (PAST_NS[1], PAST_NS[0])
    return source.choice((None, *past) if touch else past)


def _mark() -> Callable[[], int]:
    numbers = iter(range(1, 1 << 30))
    return lambda: next(numbers)


class Guess:
    """A guess of what a program may have made so far, so that most steps find something. It need not be
    right."""

    def __init__(self, actors: int) -> None:
        self.actor = 0
        self.held: dict[int, set[int]] = {actor: set() for actor in range(actors)}
        self.mapped: dict[int, set[int]] = {actor: set() for actor in range(actors)}
        self.made: set[str] = set()

    def note(self, step: Step) -> None:
        """Note that a step was added to the program."""
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
        self._next_mark = _mark()
        self._slots: Sequence[int] = range(SLOTS)
        self._names: tuple[str, ...] = NAMES
        self._guess = Guess(1)
        makers = {
            name.removeprefix("_make_"): getattr(self, name)
            for name in dir(self)
            if name.startswith("_make_")
        }
        self.makers: dict[str, Callable[[Source], dict[str, Any]]] = {
            op: maker for op, maker in makers.items() if op not in without
        }

    def program(self, source: Source) -> Program:
        """Draw a whole program."""
        self._slots = range(source.choice((1, 2, 3, 4, SLOTS)))
        self._names = NAMES[: source.choice((1, 2, 3, 5, len(NAMES)))]
        self._next_mark = _mark()
        actors = source.choice((1, 2, 2, 3))
        self._guess = Guess(actors)
        kinds = source.choice((4, 8, 16, len(self.makers)))
        drawn = [source.choice(tuple(self.makers)) for _ in range(kinds)]
        often = [op for op in drawn if op not in _SELDOM]
        usual = [op for op in _USUAL if op in self.makers]
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
            steps.append(Step(0, "write", {"slot": 0, "mark": self._next_mark(), "length": length}))
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
            op = "mmap" if "mmap" in self.makers else op
        if op in _OF_SLOTS and not self._guess.held[actor] and source.choice(_MOSTLY):
            op = "create"
        arguments = self.makers[op](source)
        # The kernel takes set-id bits of a FUSE file before it asks whether this fallocate is known.
        is_odd = op == "fallocate" and arguments["mode"] not in _USUAL_FALLOCATE_MODES
        # It tells of a chown(2) to nobody in the same words as of a write by who has the file open.
        is_odd |= op in ("chown", "fchown") and arguments["uid"] == arguments["gid"] == -1
        if ("path" in arguments or op in _BY_OTHERS) and not is_odd:
            user = source.choice((0,) * 9 + (STRANGER,))
            if user:
                arguments["user"] = user
        return Step(actor, "open" if op in ("create", "tmpfile") else op, arguments)

    def _any_slot(self, source: Source) -> int:
        return source.choice(self._slots)

    def _slot(self, source: Source) -> int:
        """Mostly one in which something is open."""
        held = tuple(self._guess.held[self._guess.actor])
        mostly = source.choice(_MOSTLY)
        return source.choice(held if held and mostly else self._slots)

    def _where(self, source: Source) -> int:
        mapped = tuple(self._guess.mapped[self._guess.actor])
        return source.choice(mapped or range(MAPS))

    def _any_name(self, source: Source) -> str:
        return source.choice(self._names)

    def _new_name(self, source: Source) -> str:
        return source.choice((*self._names, "f", "g", "h"))

    def _name(self, source: Source) -> str:
        """Mostly one that was made."""
        made = tuple(sorted(self._guess.made))
        mostly = source.choice(_MOSTLY)
        return source.choice(made if made and mostly else self._names)

    # -- opening and closing ---------------------------------------------------------------------

    def _make_open(self, source: Source) -> dict[str, Any]:
        flags = _flags(source, truncate=self._truncate)
        mode = source.choice(self._modes) if source.choice((0, 0, 1)) else 0o644
        return {
            "slot": self._any_slot(source),
            "path": self._name(source),
            "flags": flags,
            "mode": mode,
        }

    def _make_create(self, source: Source) -> dict[str, Any]:
        flags = source.choice((os.O_RDWR, os.O_RDWR, os.O_WRONLY)) | os.O_CREAT
        return {
            "slot": self._any_slot(source),
            "path": self._any_name(source),
            "flags": flags,
            "mode": 0o666,
        }

    def _make_tmpfile(self, source: Source) -> dict[str, Any]:
        flags = source.choice(ACCESS) | os.O_TMPFILE | source.choice((0, 0, os.O_EXCL))
        path = source.choice((".", "d", "e", "a"))
        return {"slot": self._any_slot(source), "path": path, "flags": flags, "mode": 0o644}

    def _make_reopen(self, source: Source) -> dict[str, Any]:
        flags = _flags(source, truncate=self._truncate) & ~(os.O_EXCL | os.O_CREAT | os.O_NOFOLLOW)
        if not flags & os.O_ACCMODE:
            flags &= ~os.O_TRUNC  # POSIX does not say what that does
        return {"slot": self._any_slot(source), "source": self._slot(source), "flags": flags}

    def _make_close(self, source: Source) -> dict[str, Any]:
        return {"slot": self._slot(source)}

    def _make_dup(self, source: Source) -> dict[str, Any]:
        return {"slot": self._any_slot(source), "source": self._slot(source)}

    def _make_status_flags(self, source: Source) -> dict[str, Any]:
        return {"slot": self._slot(source), "flags": source.choice((0, os.O_APPEND))}

    def _make_fork(self, source: Source) -> dict[str, Any]:
        return {"child": source.choice(range(ACTORS))}

    def _make_exec(self, source: Source) -> dict[str, Any]:
        return {}

    def _make_exit(self, source: Source) -> dict[str, Any]:
        return {}

    # -- reading and writing ---------------------------------------------------------------------

    def _make_read(self, source: Source) -> dict[str, Any]:
        return {"slot": self._slot(source), "length": source.choice(LENGTHS)}

    def _make_pread(self, source: Source) -> dict[str, Any]:
        lengths = {"offset": source.choice(OFFSETS), "length": source.choice((100, 200_000))}
        return {"slot": self._slot(source), **lengths}

    def _make_write(self, source: Source) -> dict[str, Any]:
        length = source.choice(LENGTHS)
        return {"slot": self._slot(source), "mark": self._next_mark(), "length": length}

    def _make_pwrite(self, source: Source) -> dict[str, Any]:
        place = {"offset": source.choice(OFFSETS), "length": source.choice(LENGTHS)}
        flags = {"flags": os.RWF_APPEND} if source.choice((0, 0, 0, 0, 1)) else {}
        return {"slot": self._slot(source), "mark": self._next_mark(), **place, **flags}

    def _make_lseek(self, source: Source) -> dict[str, Any]:
        whence = source.choice((os.SEEK_SET, os.SEEK_CUR, os.SEEK_END))
        offset = source.choice((*OFFSETS, -1, -100))
        return {"slot": self._slot(source), "offset": offset, "whence": whence}

    def _make_seek_data(self, source: Source) -> dict[str, Any]:
        whence = source.choice((os.SEEK_DATA, os.SEEK_HOLE))
        return {"slot": self._slot(source), "offset": source.choice(OFFSETS), "whence": whence}

    def _make_copy_range(self, source: Source) -> dict[str, Any]:
        return {
            "source": self._slot(source),
            "target": self._slot(source),
            "length": source.choice(LENGTHS),
            "from_offset": source.choice((None, *OFFSETS)),
            "to_offset": source.choice((None, *OFFSETS)),
        }

    def _make_sendfile(self, source: Source) -> dict[str, Any]:
        return {
            "source": self._slot(source),
            "target": self._slot(source),
            "offset": source.choice((None, *OFFSETS)),
            "length": source.choice(LENGTHS),
        }

    def _make_clone(self, source: Source) -> dict[str, Any]:
        return {"source": self._slot(source), "target": self._slot(source)}

    def _make_ftruncate(self, source: Source) -> dict[str, Any]:
        return {"slot": self._slot(source), "size": source.choice(SIZES)}

    def _make_truncate(self, source: Source) -> dict[str, Any]:
        return {"path": self._name(source), "size": source.choice(SIZES)}

    def _make_fallocate(self, source: Source) -> dict[str, Any]:
        place = {"offset": source.choice(OFFSETS), "length": source.choice(LENGTHS)}
        return {"slot": self._slot(source), "mode": source.choice(FALLOCATE_MODES), **place}

    def _make_fsync(self, source: Source) -> dict[str, Any]:
        return {"slot": self._slot(source), "data_only": source.choice((False, True))}

    # -- mappings --------------------------------------------------------------------------------

    def _make_mmap(self, source: Source) -> dict[str, Any]:
        return {
            "where": source.choice(range(MAPS)),
            "slot": self._slot(source),
            "length": source.choice((4096, 16_384)),
            "protection": source.choice((mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE)),
            "flags": source.choice((mmap.MAP_SHARED, mmap.MAP_SHARED, mmap.MAP_PRIVATE)),
        }

    def _make_munmap(self, source: Source) -> dict[str, Any]:
        return {"where": self._where(source)}

    def _make_load(self, source: Source) -> dict[str, Any]:
        place = {"offset": source.choice((0, 100, 4000, 5000)), "length": source.choice((10, 9000))}
        return {"where": self._where(source), **place}

    def _make_store(self, source: Source) -> dict[str, Any]:
        place = {"offset": source.choice((0, 100, 4000, 5000)), "length": source.choice((10, 9000))}
        return {"where": self._where(source), "mark": self._next_mark(), **place}

    def _make_msync(self, source: Source) -> dict[str, Any]:
        return {"where": self._where(source), "flags": source.choice((1, 4))}

    # -- names -----------------------------------------------------------------------------------

    def _make_rename(self, source: Source) -> dict[str, Any]:
        flags = source.choice((0, 0, 0, 0, 1, 2))
        return {"path": self._name(source), "new": self._new_name(source), "flags": flags}

    def _make_link(self, source: Source) -> dict[str, Any]:
        return {"path": self._name(source), "new": self._new_name(source)}

    def _make_link_fd(self, source: Source) -> dict[str, Any]:
        return {"slot": self._slot(source), "new": self._new_name(source)}

    def _make_unlink(self, source: Source) -> dict[str, Any]:
        return {"path": self._name(source)}

    def _make_mkdir(self, source: Source) -> dict[str, Any]:
        mode = source.choice((0o755, 0o777, 0o2777, 0o1777, 0o700))
        return {"path": source.choice(("d", "e", self._any_name(source))), "mode": mode}

    def _make_rmdir(self, source: Source) -> dict[str, Any]:
        return {"path": source.choice(("d", "e", self._name(source)))}

    def _make_symlink(self, source: Source) -> dict[str, Any]:
        return {
            "path": self._new_name(source),
            "leads_to": source.choice(("a", "b", "d", "../a", "c")),
        }

    def _make_readlink(self, source: Source) -> dict[str, Any]:
        return {"path": self._name(source)}

    def _make_mknod(self, source: Source) -> dict[str, Any]:
        kind = source.choice((stat.S_IFREG, stat.S_IFREG, stat.S_IFSOCK))
        return {"path": self._new_name(source), "mode": kind | source.choice((0o644, 0o600))}

    def _make_listdir(self, source: Source) -> dict[str, Any]:
        return {"path": source.choice((".", "d", "e"))}

    # -- attributes ------------------------------------------------------------------------------

    def _make_stat(self, source: Source) -> dict[str, Any]:
        return {"path": self._name(source)}

    def _make_lstat(self, source: Source) -> dict[str, Any]:
        return {"path": source.choice((".", *NAMES))}

    def _make_fstat(self, source: Source) -> dict[str, Any]:
        return {"slot": self._slot(source)}

    def _make_access(self, source: Source) -> dict[str, Any]:
        return {"path": self._name(source), "mode": source.choice((0, 1, 2, 4, 6))}

    def _make_chmod(self, source: Source) -> dict[str, Any]:
        return {"path": self._name(source), "mode": source.choice(self._modes)}

    def _make_fchmod(self, source: Source) -> dict[str, Any]:
        return {"slot": self._slot(source), "mode": source.choice(self._modes)}

    def _make_chown(self, source: Source) -> dict[str, Any]:
        uid, gid = source.choice(OWNERS)
        return {"path": self._name(source), "uid": uid, "gid": gid}

    def _make_fchown(self, source: Source) -> dict[str, Any]:
        uid, gid = source.choice(OWNERS)
        return {"slot": self._slot(source), "uid": uid, "gid": gid}

    def _make_utimens(self, source: Source) -> dict[str, Any]:
        return {"path": self._name(source), "times": _times(source, touch=self._touch)}

    def _make_futimens(self, source: Source) -> dict[str, Any]:
        return {"slot": self._slot(source), "times": _times(source, touch=self._touch)}

    def _xattr(self, source: Source) -> dict[str, Any]:
        value = {"mark": self._next_mark(), "length": source.choice((0, 4, 300))}
        return {"name": source.choice(XATTRS), **value, "flags": source.choice((0, 0, 1, 2))}

    def _make_setxattr(self, source: Source) -> dict[str, Any]:
        return {"path": self._name(source), **self._xattr(source)}

    def _make_fsetxattr(self, source: Source) -> dict[str, Any]:
        return {"slot": self._slot(source), **self._xattr(source)}

    def _make_getxattr(self, source: Source) -> dict[str, Any]:
        return {"path": self._name(source), "name": source.choice(XATTRS)}

    def _make_fgetxattr(self, source: Source) -> dict[str, Any]:
        return {"slot": self._slot(source), "name": source.choice(XATTRS)}

    def _make_listxattr(self, source: Source) -> dict[str, Any]:
        return {"path": self._name(source)}

    def _make_removexattr(self, source: Source) -> dict[str, Any]:
        return {"path": self._name(source), "name": source.choice(XATTRS)}

    def _make_umask(self, source: Source) -> dict[str, Any]:
        return {"mask": source.choice((0o022, 0o077, 0))}

    # -- locks -----------------------------------------------------------------------------------

    def _make_flock(self, source: Source) -> dict[str, Any]:
        kind = source.choice((fcntl.LOCK_SH, fcntl.LOCK_EX, fcntl.LOCK_UN))
        return {"slot": self._slot(source), "kind": kind}

    def _range(self, source: Source) -> dict[str, Any]:
        return {
            "kind": source.choice(("read", "write", "none")),
            "start": source.choice((0, 10, 100)),
            "length": source.choice((0, 10, 95)),
            "ofd": source.choice((False, True)),
        }

    def _make_lock(self, source: Source) -> dict[str, Any]:
        return {"slot": self._slot(source), **self._range(source)}

    def _make_lock_test(self, source: Source) -> dict[str, Any]:
        return {"slot": self._slot(source), **self._range(source)}
