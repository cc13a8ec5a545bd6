"""Nodes, mounts, followers and certificates of a cluster, as the replica of etcd has them."""

import errno
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from ..etcd.engine import EtcdEngine
from ..etcd.leases import LEASE_BITS
from ..kv import Compare, Conflict, KeyValue, Put
from ..kv.faults import Faults
from ..model.placement import Placement, Targets, policy_of
from ..model.policy import NOT_UNDERSTOOD, POLICIES_MAX, Candidate, policy_of_rule
from ..model.records import (
    FOLLOWED,
    GROUP_BUCKET_BITS,
    SETTINGS_KEY,
    CertificateRecord,
    GroupConfig,
    MountRecord,
    NodeAddress,
    NodeRecord,
    Settings,
    decode,
    encode,
    key_of,
    policy_key,
)
from ..model.values import ConfigError
from ..trust.security import Credentials
from .config import ClusterConfig
from .lease import MOUNT, NODE, Session
from .record_keeper import RecordKeeper, call

log = logging.getLogger(__name__)

# A longer rule is not understood.
_RULE_BYTES_MAX = 4096

_NO_TARGETS = Targets("", (), 0, b"")


def followed_key(directory: int, lease: int) -> bytes:
    """Return the key that is present while the mount with this lease follows the directory."""
    return key_of(FOLLOWED, lease, directory)


def seen_key(lease: int) -> bytes:
    """Return the key with the revision that the following mount has applied and told its kernel."""
    return key_of(b"a", lease)


def removed_for_good(nodes: Iterable[int]) -> list[Compare]:
    """Return compares that hold while none of these nodes is alive, or may come back."""
    return [(key_of(kind, node), 0) for node in nodes for kind in (NODE, b"N")]


async def admit(engine: EtcdEngine, node: int, record: NodeRecord) -> bool:
    """Register a node at its store's first start. Return False if it is known already."""
    key = key_of(b"N", node)
    try:
        await engine.transact([(key, 0)], [Put(key, encode(record))])
    except Conflict:
        return False
    return True


async def read_settings(engine: EtcdEngine, config: ClusterConfig) -> Settings:
    """Return the settings of a cluster, which a mount or a node needs before anything else. Raises
    ConfigError if there is no such cluster, OSError if etcd cannot be read."""
    found = await engine.get(SETTINGS_KEY)
    if found is None:
        raise no_such_cluster(config)
    try:
        return decode(found.value, Settings)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"the settings of cluster {config.cluster.name!r} in etcd are damaged, or of another "
            f"version of irdmafs: {error}"
        ) from error


def no_such_cluster(config: ClusterConfig) -> ConfigError:
    """Return the error of a cluster that etcd does not know."""
    return ConfigError(
        f"etcd at {', '.join(config.cluster.etcd)} knows no cluster named "
        f"{config.cluster.name!r}; make it with: irdmafs cluster init"
    )


class _NewGroups(Placement):
    """The placement of new groups. If no node fits a rule, the error names the rule."""

    def target(self, group: int) -> tuple[int, ...]:
        """Return the nodes of a group. Raises EHOSTUNREACH if there is none."""
        nodes = super().target(group)
        if not nodes:
            raise OSError(errno.EHOSTUNREACH, self._misfit(self.rules.get(policy_of(group))))
        return nodes

    def _misfit(self, rule: str | None) -> str:
        if not self.candidates:
            return "no store node is up to keep data"
        if rule is None:
            return "the placement rule of the file is not known"
        for level, wanted in policy_of_rule(rule).only:
            found = {candidate.labels.get(level, "") for candidate in self.candidates}
            if not found & set(wanted):
                names = ", ".join(name or "none" for name in sorted(found))
                return (
                    f"no store node that is up fits the placement {rule!r}: it wants "
                    f"{level}={'|'.join(wanted)}, and they have {level} {names}"
                )
        return f"no store node that is up fits all of the placement {rule!r}, or all have weight 0"


class Members(RecordKeeper):
    """Nodes, mounts and followers. `own`, this process's session, learns from here that its key is deleted,
    whether or not its lease lives. `dead_since` is when this process saw a known node go, or first
    heard of it, in seconds of time.monotonic(). `targets` are by pool, each with its mod_revision."""

    prefixes = (SETTINGS_KEY, b"n", b"N", b"m", b"P", b"T", b"f", b"a")

    def __init__(self, own: Session | None = None, faults: Faults | None = None) -> None:
        super().__init__(faults)
        self._own = own
        self.known_settings: Settings | None = None
        self.lease_ttl_s = 0.0  # of the settings: a session lasts so long when its holder is silent
        self.nodes: dict[int, NodeAddress] = {}
        self.records: dict[int, NodeRecord] = {}
        self.policies: dict[int, str] = {}  # placement rules, by number
        self.targets: dict[int, tuple[Targets, int]] = {}
        self.dead_since: dict[int, float] = {}
        self.sessions: dict[int, MountRecord] = {}
        self._numbers: dict[int, int] = {}  # lease of a mount -> its session number
        self._followers: dict[int, set[int]] = {}  # directory ino -> leases
        self._seen: dict[int, int] = {}  # lease -> revision
        self._placement: Placement | None = None
        # Called with a node's id after its address or record changed, came or went.
        self.node_changed: list[Callable[[int], None]] = []
        # Called with a pool's number after its targets changed.
        self.targets_changed: list[Callable[[int], None]] = []
        # Called with the number of a mount's session that is gone for ever.
        self.session_gone: list[Callable[[int], None]] = []

    # --- what is known

    @property
    def settings(self) -> Settings:
        """Return the present settings, with which every member starts."""
        assert self.known_settings is not None, "the cluster has no settings yet"
        return self.known_settings

    def candidates(
        self, patience_s: float = 0.0, holders: Collection[int] = ()
    ) -> tuple[Candidate, ...]:
        """Return the nodes that groups should be on: not draining, and alive; or one of `holders` that died
        less than `patience_s` ago. A dead node is only kept, never brought in."""
        then = time.monotonic() - patience_s
        return tuple(
            Candidate(node, record.weight, record.labels)
            for node, record in sorted(self.records.items())
            if record.state == "up"
            and (node in self.nodes or (node in holders and self.dead_since.get(node, then) > then))
        )

    def placement(self) -> Placement:
        """Return the placement of new groups: the same object as long as it does not change."""
        candidates = self.candidates()
        if self._placement is None or self._placement.candidates != candidates:
            self._placement = _NewGroups(candidates, self.settings.buckets, self.policies)
        return self._placement

    def elected(self) -> int | None:
        """Return the elected node, which does the work that one does for all: the lowest live one, of
        those that are not draining if there is any. Other processes may see another for a moment."""
        up = (node for node, record in self.records.items() if record.state == "up")
        return min(self.nodes.keys() & up, default=min(self.nodes, default=None))

    def is_removed(self, node: int) -> bool:
        """Return whether a node is dead and was removed: it cannot come back unless admitted again."""
        return node not in self.nodes and node not in self.records

    def keeps_alone(self, node: int, config: GroupConfig) -> bool:
        """Return whether no other node that may come back has everything of a group."""
        others = set(config.in_sync) - {node}
        return node in config.in_sync and all(map(self.is_removed, others))

    def may_join(self, node: int, group: int) -> bool:
        """Return whether a node belongs to a group, of which it may or may not be a member now. It does if
        that is about to be decided: it has just come (back), or the group is new."""
        known = self.targets.get(group >> GROUP_BUCKET_BITS)
        if known is None or node not in known[0].nodes:
            record = self.records.get(node)
            return record is not None and record.state == "up"
        return node in known[0].target(group)

    def is_mounted(self, maker: int) -> bool:
        """Return whether the mount with this number has a session (MountRecord.maker)."""
        return any(record.maker == maker for record in self.sessions.values())

    def session_of(self, lease: int) -> int | None:
        """Return the session number of a live mount."""
        return self._numbers.get(lease)

    def leases_of(self, session: int) -> list[int]:
        """Return the lease of the live mount with this session; several if one transaction put them."""
        return [lease for lease, number in self._numbers.items() if number == session]

    def followers_of(self, directories: Iterable[int]) -> set[int]:
        """Return the leases of live mounts that follow one of the directories (a path, from the root)."""
        found = set[int]()
        for directory in directories if self._followers else ():
            found.update(self._followers.get(directory, ()))
        return found & self._numbers.keys()

    def followed(self) -> Iterable[int]:
        """Return the directories that are followed."""
        return self._followers.keys()

    def followers(self) -> set[int]:
        """Return the leases of live mounts that follow any directory."""
        return self.followers_of(self._followers)

    def acked(self, lease: int) -> int:
        """Return the newest revision that a follower has applied and told its kernel."""
        return self._seen.get(lease, 0)

    async def wait_acked(self, followers: Callable[[], Mapping[int, int]]) -> None:
        """Wait until each follower (lease) has acknowledged its revision, is none any more, or ended."""
        numbers, seen = self._numbers, self._seen
        while True:
            for lease, revision in followers().items():
                if lease in numbers and seen.get(lease, 0) < revision:
                    break
            else:
                return
            await self.changed()

    # --- consumer of the replica

    def load(self, records: Sequence[KeyValue], revision: int) -> None:
        super().load(records, revision)
        if self._own is not None and self._own.key not in self._keys:
            self._deleted(self._own.key, revision)

    def _deleted(self, key: bytes, revision: int) -> None:
        session = self._own
        # A node's key is the same for all of its sessions: this may be the end of an earlier one.
        if session is not None and session.key == key and session.number < revision:
            session.lose()

    def take(self, key: bytes, value: bytes | None, revision: int) -> None:
        if value is None:
            self._deleted(key, revision)
        kind, number = key[:1], int.from_bytes(key[1:9], "big")
        sound = self.faults.sound
        if key == SETTINGS_KEY:
            if value is not None:  # nobody deletes it while the cluster is in use
                self.known_settings = sound(key, value, Settings) or self.known_settings
                self.lease_ttl_s = float(self.settings.lease_ttl_s) if self.known_settings else 0.0
        elif kind == NODE:
            self._take_node(number, sound(key, value, NodeAddress))
        elif kind == b"N":
            self._take_record(number, sound(key, value, NodeRecord))
        elif kind == MOUNT:
            self._take_mount(number, sound(key, value, MountRecord), revision)
        elif kind == b"P":
            if value is not None:  # stays for ever, as groups are numbered by it
                self._take_policy(number, value)
        elif kind == b"T":
            self._take_targets(key, value, number, revision)
        elif kind == b"f":
            self._take_follower(int.from_bytes(key[9:], "big"), number, value is not None)
        elif kind == b"a":
            if value is None or len(value) != 8:
                self._seen.pop(number, None)
                if value is not None:
                    self.faults.add(key, "it is no revision")
            else:
                self._seen[number] = int.from_bytes(value, "big")

    def _take_node(self, node: int, address: NodeAddress | None) -> None:
        if address is not None:
            known = self.nodes.get(node)
            if known == address:
                return
            if known is None:
                log.info("store node %x is up at %s", node, address.address)
            self.nodes[node] = address
            self.dead_since.pop(node, None)
        elif self.nodes.pop(node, None) is not None:
            log.warning("store node %x is gone", node)
            if node in self.records:
                self.dead_since[node] = time.monotonic()
        call(self.node_changed, node)

    def _take_record(self, node: int, record: NodeRecord | None) -> None:
        if record is not None:
            self.records[node] = record
            if node not in self.nodes:
                self.dead_since.setdefault(node, time.monotonic())
        else:
            self.records.pop(node, None)
            self.dead_since.pop(node, None)
        call(self.node_changed, node)

    def _take_policy(self, number: int, value: bytes) -> None:
        """Take a placement rule. A rule that is not understood keeps its number, too."""
        rule = value[:_RULE_BYTES_MAX].decode(errors="replace")
        if not 0 < number <= POLICIES_MAX:
            self.faults.add(policy_key(number), "no rule has this number")
            return
        if policy_of_rule(rule) == NOT_UNDERSTOOD or len(value) > _RULE_BYTES_MAX:
            self.faults.add(policy_key(number), f"the rule {rule[:50]!r} is not understood")
        self.policies[number] = rule
        self._placement = None

    def _take_targets(self, key: bytes, value: bytes | None, pool: int, revision: int) -> None:
        if value is None:
            self.targets.pop(pool, None)
        else:
            # A damaged record can be replaced, if its revision is known.
            targets = self.faults.sound(key, value, Targets)
            self.targets[pool] = targets or _NO_TARGETS, revision
        call(self.targets_changed, pool)

    def _take_mount(self, lease: int, record: MountRecord | None, revision: int) -> None:
        known = self._numbers.get(lease)
        if record is not None:
            if known == revision:
                return
            self._numbers[lease] = revision
            self.sessions[revision] = record
        else:
            self._numbers.pop(lease, None)
        if known is not None:
            # Gone already, if two that one transaction put have the same number.
            self.sessions.pop(known, None)
            call(self.session_gone, known)

    def _take_follower(self, directory: int, lease: int, follows: bool) -> None:
        if follows:
            self._followers.setdefault(directory, set()).add(lease)
        elif (leases := self._followers.get(directory)) is not None:
            leases.discard(lease)
            if not leases:
                del self._followers[directory]


class Certificates(RecordKeeper):
    """The certificates that the cluster has issued, by serial number (hexadecimal), and which of them are
    revoked. `own` are this process's credentials.

    An admin writes them into etcd; nodes and mounts refuse peers that show a revoked one, and close the
    connections of peers that use it. A revoked certificate stays in the list, so another one can be issued
    under the same name; and it stays revoked while this process lives.
    """

    prefixes = (b"K",)

    def __init__(self, own: Credentials | None = None, faults: Faults | None = None) -> None:
        super().__init__(faults)
        self._own = own
        self.records: dict[str, CertificateRecord] = {}
        self._kept: dict[int, int] = {}  # owner -> subvolume
        # Called with the serial number of a certificate that was revoked.
        self.revoked: list[Callable[[str], None]] = []

    def is_revoked(self, serial: str) -> bool:
        found = self.records.get(serial)
        return found is not None and found.revoked_s > 0

    def kept_to(self, lease: int) -> int:
        """Return the subvolume that the mount with this lease is kept to, 0: none."""
        return self._kept.get(lease >> LEASE_BITS, 0)

    def take(self, key: bytes, value: bytes | None, revision: int) -> None:
        serial = key[1:].decode(errors="replace")
        record = self.faults.sound(key, value, CertificateRecord)
        if record is None:
            return
        before = self.is_revoked(serial)
        if before and not record.revoked_s:
            log.error("certificate %s is revoked in etcd no more: it stays so here", serial)
            return
        self.records[serial] = record
        self._kept[record.owner] = record.subvolume
        if record.revoked_s and not before:
            self._tell(serial, record)
            call(self.revoked, serial)

    def _tell(self, serial: str, record: CertificateRecord) -> None:
        if self._own is not None and serial == self._own.identity.serial:
            log.error(
                "our certificate was revoked: etcd and store nodes refuse us from now on; end this, and "
                "start it with another one (irdmafs cluster cert %s --role %s)",
                record.name, record.role,
            )  # fmt: skip
        elif self._keys:  # not when the first ones are loaded
            log.warning("the certificate of %s %r is revoked", record.role, record.name)
