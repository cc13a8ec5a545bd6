"""Mount namespaces that tests make beside those of other tests."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# A namespace begins with a copy of every mount. While it has one of a mount that another test unmounts,
# the daemon of that mount goes on, and `irdmafs umount` says so. So it is made under a lock (descriptor 9).
_LOCK = Path(tempfile.gettempdir()) / f"irdmafs-test-namespaces-{os.geteuid()}"
_MAKE = 'exec 9>>"$1"; flock 9; shift; exec unshare --mount --propagation private "$@"'
_LET_GO = r"""
keep=$1; shift
mounts='s/^[^ ]* [^ ]* [^ ]* [^ ]* \([^ ]*\) .* - fuse\.irdmafs .*/\1/p'
LC_ALL=C sed -n "$mounts" /proc/self/mountinfo | while read -r target; do
    target=$(printf %b "$target")
    [ "$target" != "$keep" ] || continue
    # The mount ends here, too, when a process of another namespace unmounts it and removes its directory.
    said=$(umount -il "$target" 2>&1) || ! findmnt -M "$target" >/dev/null || echo "$said" >&2
done
exec 9>&-
exec "$@"
"""


def in_new_mount_namespace(*command: str, keep: Path | None = None) -> list[str]:
    """Return what runs `command` in a mount namespace of its own, with no irdmafs mount but `keep`."""
    script = ("sh", "-c", _LET_GO, "sh", str(keep or ""))
    return ["sh", "-c", _MAKE, "sh", str(_LOCK), *script, *command]


@contextmanager
def none_is_made() -> Iterator[None]:
    """No test makes a namespace meanwhile."""
    with _LOCK.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield
