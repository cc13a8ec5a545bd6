"""Directory policy: extended attributes that define how files created below are stored.

    user.irdmafs.replicas      1..8: copies on different store nodes
    user.irdmafs.stripe_size   "64M"; 0: not striped
    user.irdmafs.placement     see policy.parse_policy
    user.irdmafs.isolation     on or off; for existing files, too: mounts look it up at each open
    user.irdmafs.follow        off: hosts do not follow what is below (backend.store.remote.leases) because
                               it is read often, nor claim it (backend.store.remote.claims); for what
                               exists, too
    user.irdmafs.drafts        see drafts
    user.irdmafs.quota_bytes, user.irdmafs.quota_inodes     see quotas
    user.irdmafs.awaits        the name of a directory beside this one: names in this one lead to names in
                               that one, also to those that are yet to come (irdmafs.posix.since)
    user.irdmafs.awaits_timeout    seconds that a reader waits for such a name

The nearest directory that has an attribute decides; a file keeps what it was created with. Quotas of all
directories above hold. `awaits` and `awaits_timeout` are those of the directory itself.
"""

import errno
import re
from contextlib import suppress

from ..model.policy import REPLICAS_MAX, Policy, parse_policy
from ..model.records import Settings
from ..model.values import parse_size
from . import drafts
from .drafts import DRAFTS
from .inode import ROOT_INO, Inode, fail, is_name, upwards
from .namespace import Namespace
from .quotas import QUOTA_NAMES, parse_limit

REPLICAS = b"user.irdmafs.replicas"
STRIPE_SIZE = b"user.irdmafs.stripe_size"
PLACEMENT = b"user.irdmafs.placement"
NAMES = (REPLICAS, STRIPE_SIZE, PLACEMENT)
# "on": an overwrite of a file there becomes visible when the file is closed (irdmafs.coherence.sharing).
ISOLATION = b"user.irdmafs.isolation"
FOLLOW = b"user.irdmafs.follow"
AWAITS = b"user.irdmafs.awaits"
AWAITS_TIMEOUT = b"user.irdmafs.awaits_timeout"

STRIPE_MIN_BYTES = 1 << 20
_AWAITS_TIMEOUT_S = 600.0


def check(name: bytes, value: bytes) -> None:
    """Check a value. Raises ValueError, which says what is wrong."""
    if name == REPLICAS:
        _replicas(value)
    elif name == STRIPE_SIZE:
        _stripe_bytes(value)
    elif name == PLACEMENT:
        parse_policy(_text(value))
    elif name in QUOTA_NAMES:
        parse_limit(name, value)
    elif name in (ISOLATION, FOLLOW) and value not in (b"on", b"off"):
        raise ValueError(f"{_text(name)} is on or off, not {_text(value)!r}")
    elif name == AWAITS and not is_name(value):
        raise ValueError(
            f"user.irdmafs.awaits is the name of a directory beside this one, not {_text(value)!r}"
        )
    elif name == DRAFTS:
        drafts.check(value)
    elif name == AWAITS_TIMEOUT:
        _seconds(value)


def directory_with(namespace: Namespace, name: bytes, directory: int) -> int:
    """Return the nearest directory, from this one upwards, that has an attribute; 0 if none has it."""
    found = (one.ino for one in upwards(namespace.inodes, directory) if name in one.xattrs)
    return next(found, 0)


def of(namespace: Namespace, directory: int, settings: Settings) -> tuple[int, int, Policy]:
    """Return replicas, stripe size in bytes and placement of new files in a directory. Raises OSError EIO
    for attributes that no mount would have set."""
    found: dict[bytes, bytes] = {}
    with suppress(KeyError):  # a directory that is gone
        while len(found) < len(NAMES):
            inode = namespace.inodes[directory]
            if inode.xattrs:
                for name in NAMES:
                    if name in inode.xattrs:
                        found.setdefault(name, inode.xattrs[name])
            if directory == ROOT_INO:
                break
            directory = inode.parent
    replicas, stripe_bytes, policy = settings.replicas, settings.stripe_bytes, Policy()
    try:
        if REPLICAS in found:
            replicas = _replicas(found[REPLICAS])
        if STRIPE_SIZE in found:
            stripe_bytes = _stripe_bytes(found[STRIPE_SIZE])
        if PLACEMENT in found:
            policy = parse_policy(_text(found[PLACEMENT]))
    except ValueError as error:
        raise fail(errno.EIO, str(error)) from None
    return replicas, stripe_bytes, policy


def awaits_timeout_s(directory: Inode) -> float:
    """Return how many seconds a reader waits for a name in a directory. Raises as `of`."""
    try:
        return _seconds(directory.xattrs.get(AWAITS_TIMEOUT, b""))
    except ValueError as error:
        raise fail(errno.EIO, str(error)) from None


def _seconds(value: bytes) -> float:
    text = _text(value)
    if not text:
        return _AWAITS_TIMEOUT_S
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        raise ValueError(f"user.irdmafs.awaits_timeout is a number of seconds, not {text!r}")
    return float(text)


def _text(value: bytes) -> str:
    return value.decode("ascii", errors="replace").strip()


def _replicas(value: bytes) -> int:
    text = _text(value)
    if not text.isdigit() or not 1 <= int(text) <= REPLICAS_MAX:
        raise ValueError(f"user.irdmafs.replicas is from 1 to {REPLICAS_MAX}, not {text!r}")
    return int(text)


def _stripe_bytes(value: bytes) -> int:
    text = _text(value)
    size = 0 if text == "0" else parse_size(text)
    if size and size < STRIPE_MIN_BYTES:
        raise ValueError(f"user.irdmafs.stripe_size is 0 or at least 1M, not {text!r}")
    return size
