"""Keys and records of a cluster in its key-value engine, besides the namespace.

    key                              value              leased by
    "c"                              Settings
    "s"                              id of the newest transaction (kept by the engine)
    "u"                              next free inode number (8 bytes BE; taken in blocks)
    "U" + subvolume (8 bytes BE)     the same of a subvolume (see namespace/numbers)
    "x" + owner (3) + 8 random bytes ""                 the engine of a process: its fence
    "N" + node (8 bytes BE)          NodeRecord         (stays: every node ever admitted and not removed)
    "n" + node (8 bytes BE)          NodeAddress        the node: it is alive
    "m" + lease (8 bytes BE)         MountRecord        the mount: its session
    "g" + group (4 bytes BE)         GroupConfig
    "K" + serial number (hex)        CertificateRecord  (stays: every certificate ever issued)
    "P" + policy (8 bytes BE)        placement rule (text, stays; see policy)
    "T" + pool (8 bytes BE)          placement.Targets: where the pool's groups should be
    "w" + pool (8 BE)                b""                (stays: a mount wants the groups of this pool)
    "p" + lease (8) + content (8)    b""                the mount that pins this content
    "f" + lease (8) + directory ino (8)   b""           the mount that follows the directory
    "D" + directory ino (8)          lease (8 BE)       the mount that has the claim of the directory
    "W" + directory ino (8) + lease (8)   b""           the mount that wants it to be given up
    "l" + inode (8)                  b""                (stays: guard of its locks, lock_claims.py)
    "L" + lease (8) + inode (8)      lock_claims.Entry  the mount: what its processes have locked
    "a" + lease (8)                  revision (8 BE)    the follower: what it has seen and told its kernel
    "E"                              Epoch: which history this is
    "R" + node (8 bytes BE)          Report: the node found that etcd went back in time

The namespace's own keys are "d", "i" and "t" (see namespace).

A *session* is the revision at which a mount's "m" key was put: unique, growing, and gone for ever when
the key is. A session's own keys begin with its lease, and a lease with the number of the certificate that
etcd was shown, its *owner*: so etcd keeps others from changing them (see etcd_rights).
A *content* is the bytes of one version: session << 24 | number. Its extents on store nodes
are its stripes, (content, stripe index).
"""

import struct
from collections.abc import Callable
from functools import partial
from typing import Annotated, Final, NamedTuple, NewType, TypeVar

import msgspec

GROUP_BUCKET_BITS = 16
CONTENT_NUMBER_BITS = 24
# A transaction compares the configuration of every group it wrote to; etcd accepts 128 compares.
STRIPE_GROUPS_MAX = 64
# More stripes would share groups, and make records of digests longer. Mounts did not always cut so few.
STRIPES_MAX = STRIPE_GROUPS_MAX
# The longest content, in bytes. A version is digested, holes included: about 1 s for so many of them.
SIZE_MAX = 16 << 40

# The number of a content: in a cluster the session that wrote it, and a counter; on a store of one host a
# counter. The content's file in a store directory has this name, in hexadecimal.
ContentId = NewType("ContentId", int)
NO_CONTENT = ContentId(0)  # of an empty file

SETTINGS_KEY = b"c"
NEXT_INO_KEY = b"u"
NEXT_INO_OF = b"U"
EPOCH_KEY = b"E"
REPORT = b"R"
CLAIM, WISH = b"D", b"W"
FOLLOWED = b"f"


def key_of(kind: bytes, *numbers: int) -> bytes:
    """Return the key of a one-letter kind and 8-byte numbers."""
    return kind + struct.pack(f">{len(numbers)}Q", *numbers)


# The keys of a placement rule, and of a pool that is wanted and its targets, by their numbers.
policy_key: Final = partial(key_of, b"P")
pool_key: Final = partial(key_of, b"w")
targets_key: Final = partial(key_of, b"T")


def group_key(group: int) -> bytes:
    return b"g" + group.to_bytes(4, "big")


def pin_key(content: int, lease: int) -> bytes:
    """Return the key that is present while the mount with this lease pins the content."""
    return key_of(b"p", lease, content)


# The key whose value is the lease of the mount that has the claim of a directory, by its number.
claim_key: Final = partial(struct.Struct(f">{len(CLAIM)}sQ").pack, CLAIM)


def wish_key(directory: int, lease: int) -> bytes:
    """Return the key that is present while the mount with this lease waits for a directory's claim to be
    given up."""
    return key_of(WISH, directory, lease)


def certificate_key(serial: str) -> bytes:
    return b"K" + serial.encode()


def session_of(content: int) -> int:
    return content >> CONTENT_NUMBER_BITS


# The values of records: a number without a sign, one of 63 bits, a port, a text of a line or two.
Number = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]


class Settings(msgspec.Struct, array_like=True, frozen=True):
    """The settings that were chosen when the cluster was made. `buckets`: groups per number of replicas."""

    format: int
    cluster_id: Text
    replicas: Annotated[int, msgspec.Meta(ge=1, le=255)]
    buckets: Annotated[int, msgspec.Meta(ge=1, le=1 << GROUP_BUCKET_BITS)]
    stripe_bytes: Count
    lease_ttl_s: Annotated[int, msgspec.Meta(ge=1, le=86400)]


class NodeRecord(msgspec.Struct, array_like=True, frozen=True):
    """`state` is "up" or "draining"; `labels` are failure domains: zone, rack, host."""

    state: Text
    weight: Annotated[float, msgspec.Meta(ge=0, le=2**63)]
    labels: dict[Text, Text]


class NodeAddress(msgspec.Struct, array_like=True, frozen=True):
    """The address of a live node. `host` is equal for processes that can share memory; `store` is the
    node's store directory there, `name` the one in its certificate. Space is in bytes, as of the last
    registration."""

    address: Text
    control_port: Port
    data_port: Port
    transports: list[Text]
    host: Text
    store: Text
    total_bytes: Count
    free_bytes: Count
    version: Text
    name: Text = ""

    @property
    def endpoint(self) -> str:
        """Return the address and control port as HOST:PORT."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.control_port}"


class MountRecord(msgspec.Struct, array_like=True, frozen=True):
    """`name` and `role` are those of the certificate that the mount shows to store nodes, "" without.
    `key_digest` is the SHA-256 of the key by which it shows them that the session is its own: certificates
    may be shared."""

    host: Text
    mountpoint: Text
    pid: Count
    version: Text
    name: Text = ""
    role: Text = ""
    key_digest: Annotated[bytes, msgspec.Meta(max_length=64)] = b""

    @property
    def maker(self) -> int:
        """Return the number by which inodes name the mount, in all of its sessions (Inode.maker)."""
        return int.from_bytes(self.key_digest[:8], "big") >> 1


class CertificateRecord(msgspec.Struct, array_like=True, frozen=True):
    """`owner` is its number in etcd. Times are in seconds since 1970; `revoked_s` 0: it is not revoked.
    `subvolume` is what a mount is kept to, 0: nothing; its path was `root`."""

    name: Text
    role: Text
    owner: Count
    issued_s: Count
    expires_s: Count
    revoked_s: Count = 0
    subvolume: Count = 0
    root: Text = ""


class GroupConfig(msgspec.Struct, array_like=True, frozen=True):
    """The members of a placement group. `in_sync` hold every named extent, the primary first; `joining` are
    being filled and are written to as well. The epoch grows with every change; the fence is the
    record's mod_revision, which each publish compares."""

    epoch: Count
    in_sync: tuple[Number, ...]
    joining: tuple[Number, ...] = ()

    def check(self) -> None:
        """Raise msgspec.ValidationError for a configuration that no group has."""
        if not self.in_sync or len({*self.members}) < len(self.members):
            raise msgspec.ValidationError("it has no member in sync, or one twice")

    @property
    def members(self) -> tuple[int, ...]:
        return self.in_sync + self.joining


class Epoch(msgspec.Struct, array_like=True, frozen=True):
    """A history of etcd that counts. It begins when an administrator accepts that etcd's newest data are
    lost, at a revision above `floor`, which is above all that were seen before."""

    number: Count = 0
    nonce: Text = ""
    floor: Count = 0


class Report(msgspec.Struct, array_like=True, frozen=True):
    """A node had `seen` a revision of the epoch number `epoch`, and found etcd at `found`, at `time_s`
    (seconds since 1970)."""

    seen: Count
    found: Count
    epoch: Count
    time_s: Annotated[float, msgspec.Meta(ge=0, le=1 << 37)]


class Layout(NamedTuple):
    """The placement of a content's stripes. `stripe_bytes` 0: one stripe, however long. `policy` is the
    number of a placement rule, 0 the default."""

    replicas: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0
    stripe_bytes: Count = 0
    seed: Number = 0
    policy: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0

    def stripes(self, size: int) -> int:
        """Return how many stripes `size` bytes have; an empty content has none."""
        if not size:
            return 0
        return -(-size // self.stripe_bytes) if self.stripe_bytes else 1

    def for_size(self, size: int) -> "Layout":
        """Return the layout for `size` bytes: with larger stripes if there would be more than
        STRIPES_MAX."""
        stripe_bytes = self.stripe_bytes
        while stripe_bytes * STRIPES_MAX < size and stripe_bytes:
            stripe_bytes *= 2
        return self._replace(stripe_bytes=stripe_bytes)

    def span(self, size: int, stripe: int) -> tuple[int, int]:
        """Return offset and length in bytes of a stripe within the file."""
        if not self.stripe_bytes:
            return 0, size
        offset = stripe * self.stripe_bytes
        return offset, min(self.stripe_bytes, size - offset)


T = TypeVar("T")

encode: Final[Callable[[msgspec.Struct], bytes]] = msgspec.msgpack.Encoder().encode


def decode(value: bytes, kind: type[T]) -> T:
    """Return a record. Raises msgspec.DecodeError (a ValueError) if it is damaged."""
    try:
        record = msgspec.msgpack.decode(value, type=kind)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error
    check = getattr(record, "check", None)
    if check is not None:
        check()
    return record
