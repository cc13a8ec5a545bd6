"""Sections of a cluster's configuration: their keys, the values that these may have, and their meaning."""

import os
import re
import stat
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from .config_values import ConfigError, Seconds, Size, split_host_port

if TYPE_CHECKING:
    from ..kv.etcd import EtcdEngine
    from ..transport.verbs.rdma import Choice
    from ..trust.security import Credentials, Role

__all__ = [
    "ClusterSection",
    "LogFormat",
    "LogSection",
    "MountSection",
    "NodeSection",
    "RdmaMode",
    "Section",
]

ETCD_PORT = 2379
STREAMS_MAX = 64
RDMA_QUEUE_PAIRS_MAX = 4
_ROLE = "{role}"

LogFormat = Literal["text", "json"]
RdmaMode = Literal["auto", "off", "require"]
LogLevel = Literal["debug", "info", "warning", "error"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys with their defaults; unknown ones are refused."""


class ClusterSection(Section, frozen=True, kw_only=True):
    """`etcd` are endpoints HOST:PORT. `ca`, `cert` and `key` are this process's credentials towards
    nodes and mounts; towards etcd they are `etcd_*`. In the paths of certificates and keys, "{role}"
    stands for node, mount, reader or admin, so that one file serves all. `insecure`: without credentials,
    talk over the network all the same. `rdma`: move parameters by RDMA verbs where this host and a peer
    can ("auto"), never ("off"), or not start without ("require"); through `rdma_device` and `gid_index`
    (names, with commas between) instead of what is on the way to the peer, from `rdma_threshold` bytes on;
    over `rdma_queue_pairs` for each pair of ports."""

    name: str = "default"
    etcd: tuple[str, ...] = ()
    etcd_user: str | None = None
    etcd_password_file: str | None = None
    etcd_ca: str | None = None
    etcd_cert: str | None = None
    etcd_key: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    insecure: bool = False
    rdma: RdmaMode = "auto"
    rdma_device: str | None = None
    gid_index: int | None = None
    rdma_threshold: Size = Size(64 << 10)
    rdma_queue_pairs: int = 1

    def __post_init__(self) -> None:
        if self.gid_index is not None and not 0 <= self.gid_index < 1 << 16:
            raise ValueError("gid_index must be from 0 to 65535")
        if not 1 <= self.rdma_queue_pairs <= RDMA_QUEUE_PAIRS_MAX:
            raise ValueError(f"rdma_queue_pairs must be from 1 to {RDMA_QUEUE_PAIRS_MAX}")
        if self.rdma_threshold < 1:
            raise ValueError("rdma_threshold must be at least 1")
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"name: {self.name!r} is not a cluster's name; take letters, digits, '.', '_', '-'"
            )
        for endpoint in self.etcd:
            if "://" in endpoint:
                raise ValueError(
                    f"etcd: write {endpoint.partition('://')[2]!r} instead of {endpoint!r} "
                    "(TLS is used where etcd_ca is set)"
                )
            _, port = _checked("etcd", split_host_port, endpoint, ETCD_PORT)
            if port == 0:
                raise ValueError(f"etcd: {endpoint!r} has no port")
        if bool(self.etcd_user) != bool(self.etcd_password_file):
            raise ValueError("etcd_user and etcd_password_file go together: set both or none")
        if bool(self.etcd_cert) != bool(self.etcd_key):
            raise ValueError("etcd_cert and etcd_key go together: set both or none")
        if len({bool(self.ca), bool(self.cert), bool(self.key)}) > 1:
            raise ValueError("ca, cert and key go together: set all of them or none")

    @property
    def endpoints(self) -> tuple[tuple[str, int], ...]:
        return tuple(split_host_port(endpoint, ETCD_PORT) for endpoint in self.etcd)

    @property
    def secured(self) -> bool:
        """Return whether there are credentials for nodes and mounts."""
        return self.cert is not None

    def credentials(self, role: "Role") -> "Credentials | None":
        """Return those of a process of this role; None if the cluster has none. Raises ConfigError when
        they are missing, damaged, expired or of another role."""
        from ..trust.security import Credentials

        if self.ca is None or self.cert is None or self.key is None:
            return None
        credentials = Credentials(
            self.ca, self.cert.replace(_ROLE, role), self.key.replace(_ROLE, role)
        )
        identity = credentials.check()
        if identity.role != role:
            raise ConfigError(
                f"{credentials.cert} is the certificate of a {identity.role}, not of a {role}; make one "
                f"with: irdmafs cluster cert NAME --role {role}"
            )
        return credentials

    @property
    def mount_role(self) -> "Role":
        """Return "reader" if the certificate for mounts of this host has that role, otherwise "mount"."""
        from ..trust.security import identity_in

        if self.cert is None:
            return "mount"
        wanted: tuple[Role, ...] = ("mount", "reader")
        for role in wanted:
            path = self.cert.replace(_ROLE, role)
            if os.path.exists(path):
                found = identity_in(path)
                return "reader" if found is not None and found.role == "reader" else "mount"
        return "mount"

    def identity(self, role: "Role") -> tuple[str, str]:
        """Name and role in the certificate of a process of this role, "" without. Raises ConfigError."""
        credentials = self.credentials(role)
        if credentials is None:
            return "", ""
        found = credentials.check()
        return found.name, found.role

    def serial(self, role: "Role") -> str:
        """The number of the certificate of a process of this role, "" without. Raises ConfigError."""
        credentials = self.credentials(role)
        return credentials.check().serial if credentials is not None else ""

    def rdma_choice(self, encrypt_data: bool) -> "Choice":
        """Return the choice of devices. Raises ConfigError for a combination that is impossible."""
        from ..transport.verbs.rdma import Choice

        mode = self.rdma
        if encrypt_data:
            # Devices do not encrypt, and what has to be must not go out in plain because a card is there.
            if mode == "require":
                raise ConfigError(
                    'rdma = "require" and encrypt_data exclude each other: RDMA does not encrypt'
                )
            mode = "off"
        return Choice(
            mode, self.rdma_device, self.gid_index, self.rdma_threshold,
            queue_pairs=self.rdma_queue_pairs,
        )  # fmt: skip

    def engine(self, role: "Role", timeout_s: float = 60.0) -> "EtcdEngine":
        """The cluster's part of etcd, not opened yet. Raises ConfigError."""
        from ..kv.etcd import EtcdEngine
        from ..trust.security import identity_in

        etcd_cert = self.etcd_cert and self.etcd_cert.replace(_ROLE, role)
        shown = identity_in(etcd_cert) if etcd_cert and os.path.exists(etcd_cert) else None
        try:
            return EtcdEngine(
                self.etcd,
                f"/irdmafs/{self.name}/".encode(),
                user=self.etcd_user,
                password=self.etcd_password(),
                ca=self.etcd_ca,
                cert=etcd_cert,
                key=self.etcd_key and self.etcd_key.replace(_ROLE, role),
                timeout_s=timeout_s,
                owner=shown.owner if shown is not None and self.etcd_user is None else 0,
                reader=role == "reader",
            )
        except OSError as error:
            raise ConfigError(
                f"cannot read etcd's credentials {error.filename}: {error.strerror}"
            ) from error
        except ValueError as error:
            raise ConfigError(f"etcd: {error}") from error

    def etcd_password(self) -> str | None:
        """Raises ConfigError when the file cannot be read, or others can read it too."""
        path = self.etcd_password_file
        if path is None:
            return None
        try:
            with open(path) as file:
                if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                    raise ConfigError(f"{path} can be read by others; run: chmod 600 {path}")
                password = file.read(4096).strip()
        except OSError as error:
            raise ConfigError(f"cannot read the password file {path}: {error.strerror}") from error
        if not password:
            raise ConfigError(f"the password file {path} is empty")
        return password


class NodeSection(Section, frozen=True, kw_only=True):
    """`listen` is ADDR or ADDR:PORT, empty: see `Listen`. `zone`, `rack` and `host` are failure domains;
    processes of equal `host` share memory. `size` limits a tmpfs store (None: what the directory has).
    `rebalance_rate` is in bytes per second. A node that is gone for `rereplicate_after` is given up:
    its groups get other members. Extents that nothing names are kept for `quarantine` (None: a week on a
    disk, an hour in memory), or until room is wanted. `encrypt_data`: TLS for the data streams too, not
    only for control. Everything that is kept is read and compared with its digests once in
    `scrub_period` (0: only when told to), `scrub_rate` bytes per second at most."""

    store: str | None = None
    listen: str = ""
    zone: str = ""
    rack: str = ""
    host: str = msgspec.field(default_factory=lambda: os.uname().nodename)
    weight: float = 1.0
    size: Size | None = None
    metrics_port: int | None = None
    metrics_address: str = "127.0.0.1"
    rebalance_rate: Size = Size(256 << 20)
    rereplicate_after: Seconds = Seconds(60)
    quarantine: Seconds | None = None
    scrub_rate: Size = Size(32 << 20)
    scrub_period: Seconds = Seconds(7 * 86400)
    streams: int = 4
    encrypt_data: bool = False

    def __post_init__(self) -> None:
        if self.listen:
            _checked("listen", split_host_port, self.listen, 0)
        if not self.host:
            raise ValueError("host must not be empty")
        if not 0 < self.weight <= 1000:
            raise ValueError("weight must be more than 0 and at most 1000")
        _check_port("metrics_port", self.metrics_port)
        _check_streams(self.streams)

    @property
    def labels(self) -> dict[str, str]:
        """The failure domains that are set."""
        domains = {"zone": self.zone, "rack": self.rack, "host": self.host}
        return {name: value for name, value in domains.items() if value}


class MountSection(Section, frozen=True, kw_only=True):
    """`cache_size` limits what is kept of other hosts' files (None: the cache directory's own default).
    Files up to `small_file` bytes travel inside control messages. `follow` are directories, as paths
    within the filesystem, whose new versions are fetched when they are published. `timeout`: how long a
    call waits for etcd or store nodes before it fails. `verify`: digests of what is published go into its
    record, and what is fetched is checked by them."""

    cache_size: Size | None = None
    host: str = msgspec.field(default_factory=lambda: os.uname().nodename)
    follow: tuple[str, ...] = ()
    metrics_port: int | None = None
    metrics_address: str = "127.0.0.1"
    streams: int = 4
    small_file: Size = Size(64 << 10)
    encrypt_data: bool = False
    timeout: Seconds = Seconds(60)
    verify: bool = True

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("host must not be empty")
        if self.small_file > 1 << 20:
            raise ValueError("small_file must be at most 1M: it travels in one message")
        if not 1 <= self.timeout <= 86400:
            raise ValueError("timeout must be from 1 s to 1 day")
        for path in self.follow:
            if ".." in path.split("/"):
                raise ValueError(f"follow: {path!r} is not a path within the filesystem")
        _check_port("metrics_port", self.metrics_port)
        _check_streams(self.streams)


class LogSection(Section, frozen=True, kw_only=True):
    format: LogFormat = "text"
    level: LogLevel = "info"
    file: str | None = None


def _checked(key: str, parse: Any, *arguments: object) -> Any:
    try:
        return parse(*arguments)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _check_port(key: str, port: int | None) -> None:
    if port is not None and not 0 <= port < 1 << 16:
        raise ValueError(f"{key} must be from 0 to 65535")


def _check_streams(streams: int) -> None:
    if not 1 <= streams <= STREAMS_MAX:
        raise ValueError(f"streams must be from 1 to {STREAMS_MAX}")
