"""The extended attributes user.irdmafs.…: which exist, and who may set which to what.

Some are kept with an inode, and some report. The rest are requests of programs (docs/mount.md says why
these are attributes): `changes.N.S` and `tree.N.S` wait, `read_into.M.L` reads into memory whose
descriptors the mount takes from the caller, `keeps_no_pages` announces an open, `prefetch_now` begins a
prefetch, and setting `discard` gives a written content up.
"""

import errno
import logging
import math
import os
import re
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final

from ..backend.namespace import Inode, Namespace, fail
from ..backend.namespace.attributes import AWAITS, AWAITS_TIMEOUT, FOLLOW, ISOLATION, NAMES, check
from ..backend.namespace.quotas import QUOTA_NAMES
from ..coherence.cache import Cache
from ..coherence.content import Content
from ..coherence.nodes import NodeTable

log = logging.getLogger(__name__)

PREFIX: Final = b"user.irdmafs."
# The counter of changes below a directory; followed by ".N" or ".N.SECONDS", once it is not N.
CHANGES: Final = PREFIX + b"changes"
# All that is below a directory (listing.py); followed as CHANGES is, once its counter is not N.
TREE: Final = PREFIX + b"tree"
DISCARD: Final = PREFIX + b"discard"
# The progress of a prefetch, which reading PREFETCH_NOW begins: that takes no right to write.
PREFETCH: Final = PREFIX + b"prefetch"
# Reading it announces an open for reading that keeps no reference to pages (coherence/references.py).
KEEPS_NO_PAGES: Final = PREFIX + b"keeps_no_pages"
PREFETCH_NOW: Final = PREFIX + b"prefetch_now"
# Followed by the numbers of two descriptors of the caller: ".5.6".
READ_INTO: Final = PREFIX + b"read_into"
STATUS: Final = PREFIX + b"status"
# Which store nodes keep a file, in a cluster.
NODES: Final = PREFIX + b"nodes"
VERSION: Final = PREFIX + b"version"
VERSIONS: Final = PREFIX + b"versions"
QUOTA_USED_BYTES: Final = PREFIX + b"quota_used_bytes"
QUOTA_USED_INODES: Final = PREFIX + b"quota_used_inodes"

_TELLING = {
    *(CHANGES, TREE, STATUS, NODES, VERSION, VERSIONS, PREFETCH),
    *(QUOTA_USED_BYTES, QUOTA_USED_INODES),
}
_OF_DIRECTORIES = {FOLLOW, ISOLATION, AWAITS, AWAITS_TIMEOUT, *NAMES, *QUOTA_NAMES}
# The attributes of array files (irdmafs.client), and those by which a directory rules everything below it.
_KEPT = {PREFIX + b"dtype", PREFIX + b"shape", *_OF_DIRECTORIES}
_SETTABLE = {DISCARD, *_KEPT}
_REFUSALS_MAX: Final = 4
_TOLD_FOR_S: Final = 600
_SHOWN_BYTES: Final = 64
_CHANGED_SINCE: Final = re.compile(rb"\.([0-9]{1,20})(?:\.([0-9]+(?:\.[0-9]+)?))?")


class Refusals:
    """The attributes that were refused lately. Callers get only an error code; the log and the warnings of
    the mount say which value is wrong, and what is allowed."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        # The newest ones, with the time at which each came, in seconds of time.monotonic().
        self._newest: deque[tuple[float, str]] = deque(maxlen=_REFUSALS_MAX)

    @contextmanager
    def saying_why(self, inode: Inode, name: bytes, value: bytes, pid: int) -> Iterator[None]:
        """Note why an attribute is refused, if it is."""
        try:
            yield
        except OSError as error:
            shown = os.fsdecode(value[:_SHOWN_BYTES])
            what = f"{os.fsdecode(name)!r} is refused: {error.strerror}"
            log.info(
                "%s: %s (process %d gave %r)", self._namespace.describe(inode.ino), what, pid, shown
            )
            self._newest.append((time.monotonic(), f"{what} (process {pid} gave {shown!r}"))
            raise

    def warnings(self) -> list[str]:
        """Return a line for each of the last minutes. They name no directory: everybody may read them."""
        now = time.monotonic()
        return [
            f"{what} {now - then:.0f} s ago; the log names the directory)"
            for then, what in self._newest
            if now - then < _TOLD_FOR_S
        ]


def refuse_nonsense(inode: Inode, name: bytes, value: bytes) -> None:
    """Raise OSError EINVAL or EPERM for an unknown attribute or value, so that typing errors are not
    stored."""
    if name in _TELLING:
        raise fail(errno.EPERM, "it tells something, and cannot be set")
    if name not in _KEPT:
        known = ", ".join(sorted(map(os.fsdecode, _SETTABLE)))
        raise fail(errno.EINVAL, f"it means nothing; there are {known}")
    if name in _OF_DIRECTORIES:
        if not inode.is_dir:
            raise fail(errno.EINVAL, "only directories have it, for what is below")
        try:
            check(name, value)
        except ValueError as error:
            raise fail(errno.EINVAL, str(error)) from None


def changes_asked(name: bytes, attribute: bytes) -> tuple[int, float] | None:
    """Return which counter of changes a request waits out, and for how many seconds, by a name that begins
    with CHANGES or TREE; None: it does not wait. Raises OSError EINVAL."""
    asked = name.removeprefix(attribute)
    if not asked:
        return None
    found = _CHANGED_SINCE.fullmatch(asked)
    if found is None:
        raise fail(errno.EINVAL)
    count, seconds = found.groups()
    return int(count), float(seconds) if seconds is not None else math.inf


def versions(inode: Inode, cache: Cache, nodes: NodeTable) -> dict[str, Any]:
    """Return every content of a file that is kept, newest first, and who keeps it."""
    openers: dict[Content, list[int]] = {}
    for handle in nodes.handles.values():
        if handle.content is not None and handle.node.ino == inode.ino:
            openers.setdefault(handle.content, []).append(handle.pid)
    working: list[dict[str, Any]] = []
    old: list[dict[str, Any]] = []
    current_openers: set[int] = set()
    for content, pids in openers.items():
        if not content.is_changing and not content.state.ended:
            current_openers.update(pids)
            continue
        size, _, mtime_ns, _ = cache.looks.look_of(content, inode)
        row = _version_row(
            None if content.is_changing else content.base.version, size, mtime_ns,
            "working" if content.is_changing else "open", pids,
        )  # fmt: skip
        (working if content.is_changing else old).append(row)
    current = _version_row(inode.version, inode.size, inode.mtime_ns, "current", current_openers)
    old.sort(key=lambda row: row["version"] or 0, reverse=True)
    return {"ino": inode.ino, "versions": [*working, current, *old]}


def _version_row(
    version: int | None, size: int, mtime_ns: int, state: str, pids: Collection[int]
) -> dict[str, Any]:
    return {
        "version": version,
        "size": size,
        "mtime_ns": mtime_ns,
        "state": state,
        "openers": sorted(set(pids)),
    }
