"""Membership in a cluster: mutual TLS with the cluster's own certificate authority.

A certificate names its owner in CN, with a number that no other certificate has, and the owner's role in
OU. Every process that has a certificate signed by the cluster's CA is a member; there is no other list. A
"reader" is a mount that changes nothing. Addresses of nodes and mounts change, so the peer's role is
checked and not its DNS name. A mount's certificate may name the subvolume that it is kept to.

A reader's certificate is for store nodes only. It has a critical extension of our own: etcd, as every TLS
server that follows RFC 5280, must refuse a certificate with a critical extension that it does not know.

Certificates and keys are read again when their files change, while the process runs. The value that was
loaded before stays in use until the files are valid again, so that they can be copied one by one.
"""

import contextlib
import datetime
import logging
import os
import re
import ssl
import stat
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, get_args

import trio

from ..model.values import ConfigError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

log = logging.getLogger(__name__)

Role = Literal["node", "mount", "reader", "admin", "etcd"]
ROLES: tuple[Role, ...] = get_args(Role)

# How often files of credentials are checked.
LOOK_S = 10.0
_FILE_LIMIT_BYTES = 1 << 20
# OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED.
_TIME_CODES = (9, 10)
# Reasons of OpenSSL for a failed handshake, in words that say what to do.
_UNKNOWN_CA = "the peer does not know our CA: its credentials are of another cluster"
_NOT_SHOWN = "no certificate was shown; set ca, cert and key in [cluster]"
_NO_TLS = "the peer speaks no TLS; one of the two sides has no credentials configured"
_REASONS = {
    "TLSV1_ALERT_UNKNOWN_CA": _UNKNOWN_CA,
    "TLSV1_ALERT_DECRYPT_ERROR": _UNKNOWN_CA,
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the peer says that our certificate has expired",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": _NOT_SHOWN,
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": _NOT_SHOWN,
    "WRONG_VERSION_NUMBER": _NO_TLS,
    "HTTP_REQUEST": _NO_TLS,
}
_OWNER_MARK = "#"
OWNER_BITS = 24
# The critical extension of readers' certificates, in the arc for experiments.
READER_OID = "1.3.6.1.3.105.114.1"
# The extension with the number of a subvolume, an OCTET STRING of 8 bytes.
SUBVOLUME_OID = "1.3.6.1.3.105.114.2"
_SUBVOLUME_DER = b"\x04\x08"
# OpenSSL's X509_V_FLAG_IGNORE_CRITICAL: accept critical extensions that it does not know.
_IGNORE_CRITICAL = 0x10
_OWNER = re.compile(r"[0-9a-f]{6}", re.ASCII)

T = TypeVar("T")

# For each file: inode number, size, mtime and ctime; None: it does not exist.
_Stamps = tuple[tuple[int, int, int, int] | None, ...]


class CredentialsError(ConfigError):
    """Certificates or keys cannot be used; the text names the file and the remedy."""


class Identity(NamedTuple):
    """`owner` is the number of the certificate in etcd, 0 if it has none; `serial` is in hexadecimal, and
    `expires_s` in seconds since 1970. `subvolume` is what a mount is kept to, 0: nothing."""

    role: Role
    name: str
    owner: int = 0
    serial: str = ""
    expires_s: int = 0
    subvolume: int = 0

    @property
    def user(self) -> str:
        """Return the name of this user in etcd: the certificate's CN."""
        return f"{self.name}{_OWNER_MARK}{self.owner:06x}" if self.owner else self.name


class Renewable(Generic[T]):
    """A value that `load` makes of files: `current`. `load` gets its former value, at first None. It raises
    OSError, ValueError or ConfigError if the files cannot be used; then `problem` says why."""

    def __init__(self, files: Iterable[str], load: Callable[[T | None], T]) -> None:
        self._files = tuple(files)
        self._load = load
        self._seen = self._failed = self._stamps()
        self.current: T = load(None)
        self.problem = ""

    def renew(self, *, at_once: bool = False) -> None:
        """Load the files again if they have changed. `at_once` does so in any case. For a worker thread."""
        stamps = self._stamps()
        if stamps == self._seen and not at_once:
            return
        try:
            self.current = self._load(self.current)
        except (OSError, ValueError, ConfigError) as error:
            # Files that are copied one after the other do not match for a moment: try once more.
            if stamps != self._failed and not at_once:
                self._failed = stamps
                return
            self.problem = str(error)
            log.error("%s; what was read before stays in use", error)
        else:
            self.problem = ""
            log.info("%s: read again, new connections use them", ", ".join(self._files))
        self._seen = stamps

    def _stamps(self) -> _Stamps:
        return tuple(map(_stamp, self._files))


class Renewal:
    """Keeps the values of files in one process up to date."""

    def __init__(self, renewables: Iterable[Renewable[Any]]) -> None:
        self._renewables = tuple(renewables)
        self._asked = trio.Event()

    def ask(self) -> None:
        """Read all files again now. For the event loop."""
        self._asked.set()

    def problems(self) -> list[str]:
        """Return why some files cannot be used as they are now."""
        return [each.problem for each in self._renewables if each.problem]

    async def run(self) -> None:
        """Check the files periodically."""
        while self._renewables:
            with trio.move_on_after(LOOK_S):
                await self._asked.wait()
            at_once = self._asked.is_set()
            self._asked = trio.Event()
            for each in self._renewables:
                await trio.to_thread.run_sync(partial(each.renew, at_once=at_once))


def _stamp(path: str) -> tuple[int, int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class _Loaded(NamedTuple):
    identity: Identity
    client: ssl.SSLContext
    server: ssl.SSLContext


class Credentials:
    """Files in PEM: the cluster's CA (or several, while it is being replaced, the newest first), and the
    certificate and private key of this process.

    They are read when they are needed first, and again by `renewable`, if they are of the same user then.
    """

    def __init__(self, ca: str, cert: str, key: str) -> None:
        self.ca = ca
        self.cert = cert
        self.key = key
        self._renewable: Renewable[_Loaded] | None = None

    @property
    def renewable(self) -> Renewable[_Loaded]:
        """Return the contents of the files. Raises CredentialsError if they cannot be used at first."""
        if self._renewable is None:
            self._renewable = Renewable((self.ca, self.cert, self.key), self._load)
        return self._renewable

    @property
    def identity(self) -> Identity:
        """Return who this process is, by the certificate in use. Raises CredentialsError."""
        return self.renewable.current.identity

    def client_context(self) -> ssl.SSLContext:
        """Return the TLS context for connecting to nodes. Raises CredentialsError."""
        return self.renewable.current.client

    def server_context(self) -> ssl.SSLContext:
        """Return the TLS context for accepting peers with a certificate. Raises CredentialsError."""
        return self.renewable.current.server

    def _load(self, before: _Loaded | None) -> _Loaded:
        identity = self.check()
        if before is not None:
            check_user(self.cert, before.identity, identity)
        try:
            client = self._context(ssl.PROTOCOL_TLS_CLIENT)
            server = self._context(ssl.PROTOCOL_TLS_SERVER)
        except ssl.SSLError as error:
            text = f"{self.cert} and {self.key}: {error.reason or error}"
            raise CredentialsError(text) from error
        return _Loaded(identity, client, server)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.verify_flags |= ssl.VerifyFlags(_IGNORE_CRITICAL)
        context.load_verify_locations(cafile=self.ca)
        context.load_cert_chain(self.cert, self.key)
        return context

    def check(self) -> Identity:
        """Return the identity of these credentials. Raises CredentialsError if they cannot be used: a file
        is missing or damaged, others can read the key, the certificate has expired or does not fit."""
        from cryptography.exceptions import InvalidSignature

        key = load_key(self.key)
        cert, ca = load_certificate(self.cert), None
        for trusted in load_certificates(self.ca):
            with contextlib.suppress(ValueError, TypeError, InvalidSignature):
                cert.verify_directly_issued_by(trusted)
                ca = trusted
        if ca is None:
            raise CredentialsError(
                f"{self.cert} was not issued by the CA in {self.ca}; take the ca.pem of the cluster "
                "that issued it, or make a certificate there: irdmafs cluster cert"
            )
        if key.public_key() != cert.public_key():
            raise CredentialsError(
                f"{self.key} is not the key of the certificate {self.cert}; copy both again"
            )
        for path, certificate in ((self.cert, cert), (self.ca, ca)):
            check_time(path, certificate)
        identity = _identity_of(cert)
        if identity is None:
            raise CredentialsError(
                f"{self.cert} names no role of a cluster (OU one of {', '.join(ROLES)}); make one "
                "with: irdmafs cluster cert"
            )
        return identity

    def days_left(self) -> float:
        """Return the days until the certificate or the CA expires, whichever is first."""
        now = datetime.datetime.now(datetime.UTC)
        ends = (load_certificate(path).not_valid_after_utc for path in (self.cert, self.ca))
        return (min(ends) - now).total_seconds() / 86400


def check_user(path: str, before: Identity | None, now: Identity | None) -> None:
    """Raise CredentialsError if a running process's new certificate is of another user."""
    if (before and (before.role, before.user)) == (now and (now.role, now.user)):
        return
    remedy = "start this process again to use it"
    if before is not None:
        name = f"{before.name} --role {before.role}"
        remedy += f", or put one here that was made with: irdmafs cluster cert {name} --renew"
    raise CredentialsError(
        f"the certificate {path} is of another user of etcd than the one before: {remedy}"
    )


def peer_identity(connection: "ssl.SSLSocket | trio.SSLStream[Any]") -> Identity | None:
    """Return the peer's identity in TLS after the handshake; None for a certificate without a role."""
    from cryptography import x509

    shown = connection.getpeercert(True)
    return _identity_of(x509.load_der_x509_certificate(shown)) if shown else None


def identity_in(path: str) -> Identity | None:
    """Return the identity in a certificate's file. None: it has no role. Raises CredentialsError."""
    return _identity_of(load_certificate(path))


def describe_tls_error(error: ssl.SSLError) -> str:
    """Describe a failed handshake in words that say what to do."""
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        what = error.verify_message
        if error.verify_code in _TIME_CODES:
            return f"the peer's certificate is not valid now ({what}); renew it, or set the clock"
        return f"the peer's certificate is not of this cluster's CA, or not for this use ({what})"
    if reason in _REASONS:
        return _REASONS[reason]
    # The class of the error depends on the bytes received so far.
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return (
            "the peer broke off: it may not trust our certificate, as its CA is another cluster's"
        )
    return reason.replace("_", " ").lower() or str(error)


def is_final(error: ssl.SSLError) -> bool:
    """Return whether a handshake that failed so will fail again until the credentials of one side are
    changed. A peer that broke off may just have ended."""
    return isinstance(error, ssl.SSLCertVerificationError) or error.reason in _REASONS


def read_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_FILE_LIMIT_BYTES)
    except OSError as error:
        raise CredentialsError(f"cannot read {path}: {error.strerror}") from error


def load_certificate(path: str) -> "x509.Certificate":
    """Return the first certificate of a file."""
    return load_certificates(path)[0]


def load_certificates(path: str) -> "list[x509.Certificate]":
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(read_file(path))
    except ValueError as error:
        raise CredentialsError(f"{path} holds no usable certificate: {error}") from error


def load_key(path: str) -> "PrivateKeyTypes":
    """Return a private key. Raises CredentialsError, also if others can read it."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        status = os.stat(path)
    except OSError as error:
        raise CredentialsError(f"cannot read {path}: {error.strerror}") from error
    # Containers and services get secrets as files of root that a group can read.
    forbidden = 0o027 if status.st_uid == 0 else 0o077
    if stat.S_IMODE(status.st_mode) & forbidden:
        raise CredentialsError(f"{path} can be read by others; run: chmod 600 {path}")
    try:
        return load_pem_private_key(read_file(path), None)
    except (ValueError, TypeError) as error:
        raise CredentialsError(f"{path} holds no usable private key: {error}") from error


def check_time(path: str, certificate: "x509.Certificate") -> None:
    now = datetime.datetime.now(datetime.UTC)
    if now > certificate.not_valid_after_utc:
        identity = _identity_of(certificate)
        made = f"{identity.name} --role {identity.role}" if identity else "NAME --role ROLE"
        raise CredentialsError(
            f"the certificate {path} expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; "
            f"remove it and its key, and make another with: irdmafs cluster cert {made}"
        )
    if now < certificate.not_valid_before_utc:
        raise CredentialsError(
            f"the certificate {path} is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} "
            "UTC only; is this host's clock right?"
        )


def _identity_of(certificate: "x509.Certificate") -> Identity | None:
    from cryptography.x509.oid import NameOID

    def values(oid: "x509.ObjectIdentifier") -> list[str]:
        return [str(found.value) for found in certificate.subject.get_attributes_for_oid(oid)]

    units, names = values(NameOID.ORGANIZATIONAL_UNIT_NAME), values(NameOID.COMMON_NAME)
    if len(units) != 1 or len(names) != 1 or units[0] not in ROLES:
        return None
    name, _, number = names[0].partition(_OWNER_MARK)
    owner = int(number, 16) if _OWNER.fullmatch(number) else 0
    expires_s = int(certificate.not_valid_after_utc.timestamp())
    serial = f"{certificate.serial_number:x}"
    return Identity(units[0], name, owner, serial, expires_s, _subvolume_of(certificate))


def subvolume_extension(subvolume: int) -> "x509.UnrecognizedExtension":
    from cryptography import x509

    value = _SUBVOLUME_DER + subvolume.to_bytes(8, "big")
    return x509.UnrecognizedExtension(x509.ObjectIdentifier(SUBVOLUME_OID), value)


def _subvolume_of(certificate: "x509.Certificate") -> int:
    from cryptography import x509

    for extension in certificate.extensions:
        value = extension.value
        if extension.oid.dotted_string == SUBVOLUME_OID and isinstance(
            value, x509.UnrecognizedExtension
        ):
            return int.from_bytes(value.value[len(_SUBVOLUME_DER) :], "big")
    return 0
