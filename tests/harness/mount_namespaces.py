"""Mount namespaces that tests make beside those of other tests."""

from pathlib import Path

# A namespace begins with a copy of every mount. While it has one of a mount that another test unmounts,
# the daemon of that mount goes on, and `irdmafs umount` says so.
_LET_GO = """
keep=$1; shift
findmnt --list --noheadings --output TARGET,FSTYPE | while read -r target type; do
    case $type in fuse.irdmafs) [ "$target" = "$keep" ] || umount -il "$target" ;; esac
done
exec "$@"
"""


def in_new_mount_namespace(*command: str, keep: Path | None = None) -> list[str]:
    """Return what runs `command` in a mount namespace of its own, with no irdmafs mount but `keep`."""
    script = ("sh", "-c", _LET_GO, "sh", str(keep or ""))
    return ["unshare", "--mount", "--propagation", "private", *script, *command]
