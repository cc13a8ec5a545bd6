"""Sections of a cluster's configuration: their keys, the values that these may have, and their meaning."""

import os
import re
import socket
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ..model.options import declare
from ..model.values import ConfigError, Seconds, Size, split_host_port
from ..observe.logs import LogFormat, LogLevel

if TYPE_CHECKING:
    from ..etcd.client import Client
    from ..etcd.engine import EtcdEngine
    from ..transport.verbs.rdma import Choice
    from ..trust.security import Credentials, Role

ETCD_PORT = 2379
STREAMS_MAX = 64
_ROLE = "{role}"
_HOST_NAME: Any = socket.gethostname  # made when a section is

RdmaMode = Literal["auto", "off", "require"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
# Options by the commands that have them as flags, and files, which no command has.
_serve = partial(declare, commands=("serve",))
_mount = partial(declare, commands=("mount",))
_rdma = partial(declare, commands=("mount", "serve", "doctor"))
_file = partial(declare, is_path=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSection:
    """The cluster's name, its etcd, and this process's credentials.

    "{role}" in paths of certificates and keys stands for the role, so one file serves all processes."""

    name: str = _serve("default", "The cluster's name", "NAME")
    etcd: tuple[str, ...] = _serve((), "Where etcd listens", "HOST:PORT[,...]", commas=True)
    etcd_ca: str | None = _file(None, "CA of etcd's certificate: talk TLS to etcd")
    etcd_cert: str | None = _file(None, "This process's certificate towards etcd")
    etcd_key: str | None = _file(None, "Its key")
    ca: str | None = _file(None, "CA of the certificates of nodes and mounts")
    cert: str | None = _file(None, "This process's certificate towards nodes and mounts")
    key: str | None = _file(None, "Its key")
    nodes: tuple[str, ...] = _mount(
        (),
        "Store nodes by which a reader reaches the cluster; it does not talk to etcd",
        "HOST:PORT[,...]",
        commas=True,
    )
    insecure: bool = _serve(
        False, "Without credentials, talk over the network all the same: anybody may read and write"
    )
    rdma: RdmaMode = _rdma(  # noqa: RUF009 - a field
        "auto",
        "Move parameters by RDMA verbs: where it can be done, never, or refuse to start without",
    )
    rdma_device: str | None = _rdma(
        None, "Only through these RDMA devices", "NAME,...", "all on a network with the peer"
    )
    rdma_threshold: Size = declare(Size(64 << 10), "Extents from this size on move by RDMA")

    def __post_init__(self) -> None:
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
        for node in self.nodes:
            if _checked("nodes", split_host_port, node, 0)[1] == 0:
                raise ValueError(
                    f"nodes: {node!r} has no port; start the node with --listen ADDR:PORT"
                )
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

    def files(self, role: "Role") -> "Credentials | None":
        """Return the credentials of a role, whose files may not be there; None if the cluster has none."""
        from ..trust.security import Credentials

        if self.ca is None or self.cert is None or self.key is None:
            return None
        return Credentials(self.ca, self.cert.replace(_ROLE, role), self.key.replace(_ROLE, role))

    def credentials(self, role: "Role") -> "Credentials | None":
        """Return the credentials of a process of this role; None if the cluster has none. Raises
        ConfigError if they are missing, damaged, expired or of another role."""
        credentials = self.files(role)
        if credentials is None:
            return None
        identity = credentials.identity
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

    def rdma_choice(self, encrypt_data: bool) -> "Choice":
        """Return the choice of devices. Raises ConfigError for a combination that is impossible."""
        from ..transport.verbs.rdma import Choice

        mode = self.rdma
        if encrypt_data:
            # Devices do not encrypt, and encrypt_data must hold whatever devices there are.
            if mode == "require":
                raise ConfigError(
                    'rdma = "require" and encrypt_data exclude each other: RDMA does not encrypt'
                )
            mode = "off"
        return Choice(mode, self.rdma_device, self.rdma_threshold)

    def engine(self, role: "Role", timeout_s: float = 60.0) -> "EtcdEngine":
        """Return the engine of the cluster's keys, not opened; a reader asks nodes. Raises ConfigError."""
        from ..etcd.engine import EtcdEngine

        if role == "reader":
            client, owner = self._relay()
        else:
            client, owner = self.etcd_client(role)
        return EtcdEngine(
            (), self.prefix, client=client, timeout_s=timeout_s, owner=owner,
            reader=role == "reader",
        )  # fmt: skip

    @property
    def prefix(self) -> bytes:
        """Return the prefix of the cluster's keys in etcd."""
        return f"/irdmafs/{self.name}/".encode()

    def _relay(self) -> "tuple[Client, int]":
        """Return the way to etcd by store nodes, and the number of the certificate. Raises ConfigError."""
        from ..transport.relay import Relay

        credentials = self.credentials("reader")
        if credentials is None:
            raise ConfigError(
                "only a certificate makes a reader; set ca, cert and key in [cluster]"
            )
        if not self.nodes:
            raise ConfigError(
                "a reader reaches the cluster by its store nodes: name some of them in [cluster], "
                'nodes = ["HOST:PORT", ...] (irdmafs cluster cert says which there are)'
            )
        nodes = [split_host_port(node, 0) for node in self.nodes]
        return Relay(nodes, credentials), credentials.identity.owner

    def etcd_client(self, role: "Role") -> "tuple[Client, int]":
        """Return a client of etcd, and its number there (0: it has none). Raises ConfigError."""
        from ..etcd.client import DirectClient
        from ..trust.security import Credentials, check_user, identity_in

        etcd_ca, etcd_cert, etcd_key = (
            path and path.replace(_ROLE, role)
            for path in (self.etcd_ca, self.etcd_cert, self.etcd_key)
        )
        shown = identity_in(etcd_cert) if etcd_cert and os.path.exists(etcd_cert) else None

        def check() -> None:
            if etcd_ca and etcd_cert and etcd_key and shown is not None:
                found = Credentials(etcd_ca, etcd_cert, etcd_key).check()
                check_user(etcd_cert, shown, found)

        try:
            client = DirectClient(
                self.etcd, ca=etcd_ca, cert=etcd_cert, key=etcd_key, check_renewed=check
            )
        except OSError as error:
            raise ConfigError(
                f"cannot read etcd's credentials {error.filename}: {error.strerror}"
            ) from error
        except ValueError as error:
            raise ConfigError(f"etcd: {error}") from error
        return client, shown.owner if shown is not None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSection:
    """The store of a node, its place in the cluster, and its rates."""

    store: str | None = _file(None, "The store directory; `serve` is always given one")
    listen: str = _serve(
        "",
        "Where to listen",
        "ADDR[:PORT]",
        "the address that reaches etcd; without credentials loopback",
    )
    zone: str = _serve("", "Failure domain: replicas are kept in different ones")
    rack: str = _serve("", "Failure domain, as zone")
    host: str = _serve(
        _HOST_NAME,
        "Failure domain, as zone; processes of equal hosts share memory",
        shown="the host name",
    )
    weight: float = _serve(1.0, "Share of the data, relative to other nodes'")
    size: Size | None = _serve(
        None, "Limit of the extents kept: 512M, 8G, 50%", shown="the room in the directory"
    )
    metrics_port: int | None = _serve(None, "Serve Prometheus metrics on this port", "PORT")
    metrics_address: str = declare("127.0.0.1", "Where metrics are served")
    rebalance_rate: Size = _serve(Size(256 << 20), "Bytes per second for filling groups")
    rereplicate_after: Seconds = declare(
        Seconds(60), "A node that is gone for so long is replaced in its groups by others"
    )
    quarantine: Seconds | None = declare(
        None,
        "How long extents without a name are kept, unless room is wanted",
        shown="a week on a disk, an hour in memory",
    )
    scrub_rate: Size = declare(Size(32 << 20), "Bytes per second for reading extents again")
    scrub_period: Seconds = declare(
        Seconds(7 * 86400),
        "How often everything kept is compared with its digests; 0: only on request",
    )
    streams: int = _serve(4, "Data connections to each peer")
    encrypt_data: bool = _serve(False, "TLS for data, not only for control; switches RDMA off")

    def __post_init__(self) -> None:
        if self.listen:
            _checked("listen", split_host_port, self.listen, 0)
        if not 0 < self.weight <= 1000:
            raise ValueError(f"weight must be more than 0 and at most 1000, not {self.weight:g}")
        _check_process(self)

    @property
    def labels(self) -> dict[str, str]:
        """Return the failure domains that are set."""
        domains = {"zone": self.zone, "rack": self.rack, "host": self.host}
        return {name: value for name, value in domains.items() if value}


@dataclass(frozen=True, slots=True, kw_only=True)
class MountSection:
    """The cache of a mount, the directories that it follows, its checks and its time-out."""

    cache_size: Size | None = _mount(
        None, "How much of other hosts' files to keep here", "SIZE", "3/4 of --size"
    )
    host: str = _mount(
        _HOST_NAME,
        "This host's name; processes of equal hosts share memory",
        "NAME",
        "the host name",
    )
    follow: tuple[str, ...] = _mount(
        (),
        "Fetch new versions below this directory of the filesystem when they are published",
        "PATH",
    )
    metrics_port: int | None = _mount(None, "Serve Prometheus metrics on this port", "PORT")
    metrics_address: str = declare("127.0.0.1", "Where metrics are served")
    streams: int = declare(4, "Data connections to each store node")
    small_file: Size = declare(
        Size(64 << 10), "Files up to this size travel inside control messages"
    )
    names_ahead: int = declare(
        100_000,
        "Of more names than this (-1: always) a mount reads directories when they are used; 0: it reads "
        "all",
    )
    encrypt_data: bool = declare(False, "TLS for data, not only for control; switches RDMA off")
    timeout: Seconds = _mount(
        Seconds(60),
        "How long a call waits for etcd or store nodes that do not answer before it fails: "
        "30, 90s, 5m",
        "DURATION",
    )
    verify: bool = _mount(True, "Publish digests of contents, and compare fetched bytes with them")

    def __post_init__(self) -> None:
        if self.small_file > 1 << 20:
            raise ValueError(
                f"small_file must be at most 1M, not {self.small_file}: it travels in one message"
            )
        if self.names_ahead < -1:
            raise ValueError(f"names_ahead must be at least -1, not {self.names_ahead}")
        if not 1 <= self.timeout <= 86400:
            raise ValueError(f"timeout must be from 1s to 1d, not {self.timeout}")
        for path in self.follow:
            if ".." in path.split("/"):
                raise ValueError(f"follow: {path!r} is not a path within the filesystem")
        _check_process(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSection:
    """The log of a process: its format, level and file."""

    format: LogFormat = _serve("text", "Lines of text, or of JSON")  # noqa: RUF009 - a field
    level: LogLevel = _serve("info", "How much to log")  # noqa: RUF009 - a field
    file: str | None = _serve(
        None,
        "Where to log",
        "FILE",
        "irdmafs.log in the store; in the foreground stderr",
        is_path=True,
    )


SECTIONS: dict[str, type[ClusterSection | NodeSection | MountSection | LogSection]] = {
    "cluster": ClusterSection,
    "node": NodeSection,
    "mount": MountSection,
    "log": LogSection,
}


def _checked(key: str, parse: Any, *arguments: object) -> Any:
    try:
        return parse(*arguments)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _check_process(section: NodeSection | MountSection) -> None:
    """Check what nodes and mounts have alike. Raises ValueError."""
    port = section.metrics_port
    if not section.host:
        raise ValueError("host must not be empty")
    if port is not None and not 0 <= port < 1 << 16:
        raise ValueError(f"metrics_port must be from 0 to 65535, not {port}")
    if not 1 <= section.streams <= STREAMS_MAX:
        raise ValueError(f"streams must be from 1 to {STREAMS_MAX}, not {section.streams}")
