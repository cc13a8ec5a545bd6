"""A cluster in an etcd that speaks TLS and checks who asks, as `irdmafs cluster init` makes it."""

import os
import subprocess
from pathlib import Path
from typing import Self

from harness import forks
from harness.etcd_server import EtcdServer
from irdmafs.backend.cluster.config import ClusterConfig
from irdmafs.backend.cluster.membership import followed_key, seen_key
from irdmafs.backend.etcd.engine import EtcdEngine
from irdmafs.backend.model import records
from irdmafs.backend.model.records import key_of
from irdmafs.backend.namespace.inode import ROOT_INO, name_key
from irdmafs.backend.trust.security import Role

# Keys in etcd, by what they are.
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


class SecureEtcd(EtcdServer):
    """etcd with the certificates that the command made in a directory."""

    def __init__(self, directory: Path, quota_bytes: int = 0) -> None:
        super().__init__(credentials=directory, quota_bytes=quota_bytes)


class SecureCluster:
    """A context manager; `directory` holds cluster.toml, the CA and one certificate of each role. etcd's
    quota is `quota_bytes`; 0: etcd's own."""

    def __init__(self, directory: Path, quota_bytes: int = 0) -> None:
        self.directory = directory
        self._quota_bytes = quota_bytes
        self.file = directory / "cluster.toml"

    def __enter__(self) -> Self:
        unknown = "127.0.0.1:1"
        self._init(unknown, "--prepare")
        self.etcd = SecureEtcd(self.directory, self._quota_bytes).__enter__()
        try:
            # Only the port is not known before it runs.
            self.file.write_text(self.file.read_text().replace(unknown, self.etcd.endpoint))
            self._init(self.etcd.endpoint)
        except BaseException:
            self.etcd.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.etcd.close()

    def _init(self, endpoint: str, *more: str) -> None:
        done = self.irdmafs(
            *("init", "--etcd", endpoint, "--out", str(self.directory), "--buckets", "4"),
            *("--replicas", "1", "--lease-ttl", "3", *more),
            config=False,
        )
        assert done.returncode == 0, done

    def irdmafs(self, *arguments: str, config: bool = True) -> subprocess.CompletedProcess[str]:
        """`irdmafs cluster ARGUMENTS`."""
        named = ("--cluster", str(self.file)) if config else ()
        return forks.run([*forks.PREFIX, "cluster", *arguments, *named], timeout_s=60)

    def cert(self, name: str, role: Role) -> None:
        done = self.irdmafs("cert", name, "--role", role)
        assert done.returncode == 0, done

    def config_of(self, name: str, role: Role) -> Path:
        """A configuration file for who has the certificate of this name."""
        own = self.directory / f"{name}.toml"
        stem = role if name == role else f"{role}-{name}"
        text = self.file.read_text().replace("{role}", stem)
        own.write_text(text)
        return own

    def engine(self, name: str, role: Role, timeout_s: float = 10.0) -> EtcdEngine:
        """etcd, as the owner of a certificate sees it."""
        config = ClusterConfig.load(os.fspath(self.config_of(name, role)))
        return config.cluster.engine(role, timeout_s)
