"""POSIX access control lists, in the form that Linux gives them in extended attributes (posix_acl_xattr).

The kernel checks them. This module does the filesystem's part: it keeps the mode in step with an access
ACL, and hands down the default ACL of a directory (POSIX 1003.1e draft 17, 23.1.5 and 23.3; acl(5)).
Permissions are three bits, as in one digit of a mode.
"""

import errno
import stat
import struct
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

from .inode import Inode, fail

ACCESS: Final = b"system.posix_acl_access"
DEFAULT: Final = b"system.posix_acl_default"
NAMES: Final = frozenset({ACCESS, DEFAULT})

_VERSION: Final = struct.pack("<I", 2)
_ENTRY: Final = struct.Struct("<HHI")
_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
_ONCE: Final = (_USER_OBJ, _GROUP_OBJ, _OTHER)


class _Entry(NamedTuple):
    tag: int
    permissions: int
    id: int


def checked(value: bytes) -> list[_Entry]:
    """Return the entries of an ACL. Raises OSError EINVAL; EOPNOTSUPP for another version."""
    body = value[len(_VERSION) :]
    if len(value) < len(_VERSION) or len(body) % _ENTRY.size:
        raise fail(errno.EINVAL)
    if not value.startswith(_VERSION):
        raise fail(errno.EOPNOTSUPP)
    acl = [_Entry(*entry) for entry in _ENTRY.iter_unpack(body)]
    tags = [entry.tag for entry in acl]
    named = _USER in tags or _GROUP in tags
    ids = [entry[::2] for entry in acl if entry.tag in (_USER, _GROUP)]
    if (
        tags != sorted(tags)
        or any(tags.count(tag) != 1 for tag in _ONCE)
        or tags.count(_MASK) > 1
        or (named and _MASK not in tags)
        or len(ids) != len(set(ids))
        or any(entry.permissions > 0o7 for entry in acl)
        or not set(tags) <= {_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER}
    ):
        raise fail(errno.EINVAL)
    return acl


def access_mode(acl: Sequence[_Entry], mode: int) -> tuple[int, bytes]:
    """Return the mode of a file that gets an access ACL, and the ACL to be stored: none if the mode
    expresses all of it."""
    permissions = {entry.tag: entry.permissions for entry in acl}
    group = permissions.get(_MASK, permissions[_GROUP_OBJ])
    bits = permissions[_USER_OBJ] << 6 | group << 3 | permissions[_OTHER]
    return mode & ~0o777 | bits, b"" if len(acl) == len(_ONCE) else _encode(acl)


def put(inode: Inode, name: bytes, value: bytes, *, drop_set_gid: bool) -> None:
    """Give an inode, which may be changed, an ACL, and the mode that goes with it. Raises OSError EINVAL.

    `drop_set_gid`: the caller may not keep set-group-id."""
    acl = checked(value)
    if name == ACCESS:
        inode.mode, value = access_mode(acl, inode.mode)
        if drop_set_gid:
            inode.mode &= ~stat.S_ISGID
    remove(inode, name)
    if value:
        inode.xattrs = {**inode.xattrs, name: value}


def remove(inode: Inode, name: bytes) -> None:
    """Remove an ACL, or another attribute, from an inode, which may be changed and need not have it."""
    inode.xattrs = {key: data for key, data in inode.xattrs.items() if key != name}


def follow_chmod(inode: Inode) -> None:
    """Bring the access ACL of an inode, which may be changed, in step with its new mode, as chmod(2) does:
    the group's bits of a mode are the mask's."""
    if ACCESS in inode.xattrs:
        acl = _stored(ACCESS, inode.xattrs[ACCESS])
        bits = _bits(acl, inode.mode)
        changed = [entry._replace(permissions=bits.get(entry.tag, entry[1])) for entry in acl]
        inode.xattrs = {**inode.xattrs, ACCESS: _encode(changed)}


def inherited(default: bytes, mode: int) -> tuple[int, dict[bytes, bytes]]:
    """Return mode and ACLs of a new inode in a directory with this default ACL, where the umask is
    ignored."""
    acl = _stored(DEFAULT, default)
    asked = _bits(acl, mode)
    access = [
        entry._replace(permissions=entry.permissions & asked.get(entry.tag, 0o7)) for entry in acl
    ]
    mode, kept = access_mode(access, mode)
    acls = {ACCESS: kept} if kept else {}
    if stat.S_ISDIR(mode):
        acls[DEFAULT] = default
    return mode, acls


def grants(value: bytes, wanted: int, uid: int, group: int, groups: Collection[int]) -> bool:
    """Return whether an access ACL gives a user, other than the owner, all of the wanted permissions.
    `group` is the file's, `groups` are the user's (POSIX 1003.1e draft 17, 23.1.4)."""
    acl = _stored(ACCESS, value)
    mask = next((entry.permissions for entry in acl if entry.tag == _MASK), 0o7)

    def masked(entries: Iterable[_Entry]) -> list[bool]:
        return [entry.permissions & mask & wanted == wanted for entry in entries]

    as_user = masked(one for one in acl if one.tag == _USER and one.id == uid)
    as_member = masked(
        one for one in acl
        if (one.tag == _GROUP and one.id in groups) or (one.tag == _GROUP_OBJ and group in groups)
    )  # fmt: skip
    if as_user or as_member:
        return any(as_user or as_member)
    return any(one.tag == _OTHER and one.permissions & wanted == wanted for one in acl)


def _bits(acl: Sequence[_Entry], mode: int) -> dict[int, int]:
    """Return the permissions of a mode, by the tags of the entries that have them in an ACL."""
    group = _MASK if any(entry.tag == _MASK for entry in acl) else _GROUP_OBJ
    return {_USER_OBJ: mode >> 6 & 0o7, group: mode >> 3 & 0o7, _OTHER: mode & 0o7}


def _stored(name: bytes, value: bytes) -> list[_Entry]:
    """Return the entries of an ACL in a record. Raises OSError EIO if no mount would have put it there."""
    try:
        return checked(value)
    except OSError as error:
        raise fail(errno.EIO, f"{name.decode()} in a record is no ACL: {error.strerror}") from None


def _encode(acl: Sequence[_Entry]) -> bytes:
    return _VERSION + b"".join(_ENTRY.pack(*entry) for entry in acl)
