"""A cluster that is nothing but etcd, and keys that etcd protects there, by what they are."""

from harness.cluster import Plan
from irdmafs.backend.cluster.membership import followed_key, seen_key
from irdmafs.backend.model import records
from irdmafs.backend.model.records import key_of
from irdmafs.backend.namespace.inode import ROOT_INO, name_key

ONLY_ETCD = Plan(nodes=0, mounts=0, replicas=1, buckets=4, tls=True, namespaces=False)
NODE_RECORDS = {"a node's address": key_of(b"n", 7), "a node's record": key_of(b"N", 7)}
PLACEMENT = {
    "a group's configuration": records.group_key(1),
    "a pool's targets": records.targets_key(1),
}
CLUSTER = {
    "the settings": records.SETTINGS_KEY,
    "a certificate's record": records.certificate_key("12ab"),
}
NAMESPACE = {
    "a name": name_key(ROOT_INO, b"file"),
    "an inode": key_of(b"i", 9),
    "a directory's times": key_of(b"t", 9),
    "the next inode number": records.NEXT_INO_KEY,
    "a placement rule": records.policy_key(3),
    "the last transaction": b"s",
}


def keys_within(lease: int) -> dict[str, bytes]:
    """Return the keys that a mount puts within its session."""
    return {
        "a pin": records.pin_key(5, lease),
        "a followed directory": followed_key(1, lease),
        "what was seen": seen_key(lease),
    }
