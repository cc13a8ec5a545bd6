"""Who may take part in a cluster: mutual TLS with the cluster's own certificate authority.

A certificate names its owner in CN, with a number that no other certificate has, and what the owner may
be, the role, in OU. Whoever holds one that the
cluster's CA signed is a member; there is no other list. A "reader" is a mount that changes nothing.
Addresses do not count: nodes and mounts come and go with changing ones, so the peer's role is checked
and not its DNS name. Extended key usage keeps a mount from posing as a node: only nodes (and etcd) may
accept connections. Certificates of the role "etcd" are for etcd itself, whose clients do check names,
and carry them.
"""

import contextlib
import datetime
import ipaddress
import os
import re
import secrets
import ssl
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast, get_args

from ..cluster.config_values import ConfigError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

__all__ = [
    "Credentials",
    "CredentialsError",
    "Identity",
    "Role",
    "begin_ca_change",
    "describe_tls_error",
    "expiry_of",
    "finish_ca_change",
    "identity_in",
    "is_final",
    "issue",
    "make_ca",
    "peer_identity",
]

Role = Literal["node", "mount", "reader", "admin", "etcd"]
ROLES: tuple[Role, ...] = get_args(Role)
_LISTENING_ROLES = ("node", "etcd")

CA_DAYS = 3650
CERTIFICATE_DAYS = 825
_FILE_LIMIT_BYTES = 1 << 20
# OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED.
_TIME_CODES = (9, 10)
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST")
# Clocks of different hosts are not equal: what was just issued is valid elsewhere, too.
_CLOCK_SKEW = datetime.timedelta(hours=1)
# With the number of the certificate, at most the 64 characters that a CN may have.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,55}", re.ASCII)
_OWNER_MARK = "#"
_OWNER_BITS = 24
_OWNER = re.compile(r"[0-9a-f]{6}", re.ASCII)


class CredentialsError(ConfigError):
    """Certificates or keys cannot be used; the text names the file and the remedy."""


class Identity(NamedTuple):
    """`owner` is the number of the certificate in etcd, 0 if it has none; `serial` is in hexadecimal."""

    role: Role
    name: str
    owner: int = 0
    serial: str = ""

    @property
    def user(self) -> str:
        """Return the name of this user in etcd: the certificate's CN."""
        return f"{self.name}{_OWNER_MARK}{self.owner:06x}" if self.owner else self.name


class _Peer(Protocol):
    def getpeercert(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Credentials:
    """Files in PEM: the cluster's CA (or several, while it is being replaced, the newest first), and the
    certificate and private key of this process."""

    ca: str
    cert: str
    key: str

    def client_context(self) -> ssl.SSLContext:
        """For connecting to nodes. Raises CredentialsError."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def server_context(self) -> ssl.SSLContext:
        """For accepting connections, of peers with a certificate only. Raises CredentialsError."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def _context(self, protocol: int) -> ssl.SSLContext:
        self.check()
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        context.load_verify_locations(cafile=self.ca)
        context.load_cert_chain(self.cert, self.key)
        return context

    def check(self) -> Identity:
        """Who these credentials are of. Raises CredentialsError when they cannot work: a file that is
        missing or damaged, a key that others can read, a certificate that is expired, of another
        key or of another CA."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        _check_private(self.key)
        try:
            key = load_pem_private_key(_read(self.key), None)
        except (ValueError, TypeError) as error:
            raise CredentialsError(f"{self.key} holds no usable private key: {error}") from error
        cert, ca = _load_certificate(self.cert), None
        for trusted in _load_certificates(self.ca):
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
            _check_time(path, certificate)
        identity = _identity_of(cert)
        if identity is None:
            raise CredentialsError(
                f"{self.cert} names no role of a cluster (OU one of {', '.join(ROLES)}); make one "
                "with: irdmafs cluster cert"
            )
        return identity

    def days_left(self) -> float:
        """Until the certificate or the CA expires, whichever is first."""
        now = datetime.datetime.now(datetime.UTC)
        ends = (_load_certificate(path).not_valid_after_utc for path in (self.cert, self.ca))
        return (min(ends) - now).total_seconds() / 86400


def peer_identity(connection: _Peer) -> Identity | None:
    """Who is at the other end of a TLS connection (ssl.SSLObject, trio.SSLStream, ...) whose handshake
    is complete; None for a certificate without a role."""
    certificate = connection.getpeercert() or {}
    names: dict[str, list[str]] = {}
    for part in certificate.get("subject", ()):
        for key, value in part:
            names.setdefault(key, []).append(value)
    serial = str(certificate.get("serialNumber", "")).lower().lstrip("0")
    return _identity(names.get("organizationalUnitName", []), names.get("commonName", []), serial)


def identity_in(path: str) -> Identity | None:
    """Return the identity in a certificate's file. None: it has no role. Raises CredentialsError."""
    return _identity_of(_load_certificate(path))


def expiry_of(path: str) -> int:
    """When a certificate in a file expires, in seconds since 1970. Raises CredentialsError."""
    return int(_load_certificate(path).not_valid_after_utc.timestamp())


def describe_tls_error(error: ssl.SSLError) -> str:
    """A failed handshake in words that say what to do."""
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        what = error.verify_message
        if error.verify_code in _TIME_CODES:
            return f"the peer's certificate is not valid now ({what}); renew it, or set the clock"
        return f"the peer's certificate is not of this cluster's CA, or not for this use ({what})"
    if reason in ("TLSV1_ALERT_UNKNOWN_CA", "TLSV1_ALERT_DECRYPT_ERROR"):
        return "the peer does not know our CA: its credentials are of another cluster"
    if reason == "SSLV3_ALERT_CERTIFICATE_EXPIRED":
        return "the peer says that our certificate has expired"
    if reason in ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        return "no certificate was shown; set ca, cert and key in [cluster]"
    if reason in _NO_TLS:
        return "the peer speaks no TLS; one of the two sides has no credentials configured"
    # Which of the two depends on what has come when we look.
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return (
            "the peer broke off: it may not trust our certificate, as its CA is another cluster's"
        )
    return reason.replace("_", " ").lower() or str(error)


def is_final(error: ssl.SSLError) -> bool:
    """Whether a handshake that failed so will fail again until somebody changes the credentials of one
    side. That the peer broke off may also mean that it ended."""
    return isinstance(error, ssl.SSLCertVerificationError) or (error.reason or "") in (
        *_NO_TLS,
        "TLSV1_ALERT_UNKNOWN_CA",
        "TLSV1_ALERT_DECRYPT_ERROR",
        "SSLV3_ALERT_CERTIFICATE_EXPIRED",
        "TLSV13_ALERT_CERTIFICATE_REQUIRED",
    )


def make_ca(directory: str, cluster_name: str, days: float = CA_DAYS) -> str:
    """Make the cluster's certificate authority: `ca.pem`, whose path is returned, and `ca.key`, which
    only issuing certificates needs and no node or mount should have.

    Raises CredentialsError, also when one is there already.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = _subject(f"{cluster_name} CA"[:64], "ca", cluster_name)
    builder = _builder(name, name, key, days)
    usage = _key_usage(key_cert_sign=True, crl_sign=True)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier),
            critical=False,
        )
    )
    return _write_pair(directory, "ca", builder, key, key)[0]


def begin_ca_change(directory: str, cluster_name: str) -> None:
    """Make another certificate authority: new certificates are signed by it, and `ca.pem` holds both, so
    that those of either are accepted. Raises CredentialsError."""
    path = os.path.join(directory, "ca.pem")
    old = _load_certificates(path)
    if len(old) > 1:
        raise CredentialsError(f"{path} holds two CAs already: the change before is not finished")
    with tempfile.TemporaryDirectory(prefix=".ca-", dir=directory) as made:
        both = _read(make_ca(made, cluster_name)) + _read(path)
        _write_new(os.path.join(made, "both.pem"), both)
        # Between the two, nothing can be issued, and nobody is refused.
        os.replace(os.path.join(made, "both.pem"), path)
        os.replace(os.path.join(made, "ca.key"), os.path.join(directory, "ca.key"))


def finish_ca_change(directory: str) -> None:
    """Take the older certificate authority out of `ca.pem`: what it signed is accepted no more where this
    file is. Raises CredentialsError."""
    from cryptography.hazmat.primitives.serialization import Encoding

    path = os.path.join(directory, "ca.pem")
    trusted = _load_certificates(path)
    if len(trusted) < 2:
        raise CredentialsError(f"{path} holds one CA only: no change has begun")
    with tempfile.TemporaryDirectory(prefix=".ca-", dir=directory) as made:
        _write_new(os.path.join(made, "ca.pem"), trusted[0].public_bytes(Encoding.PEM))
        os.replace(os.path.join(made, "ca.pem"), path)


def issue(
    directory: str,
    name: str,
    role: Role,
    hosts: Iterable[str] = (),
    days: float = CERTIFICATE_DAYS,
    ca_directory: str | None = None,
) -> Credentials:
    """Make `ROLE-NAME.pem` and `ROLE-NAME.key` in `directory` (`ROLE.pem`, `ROLE.key` if that is the
    name), signed by the CA there or in `ca_directory`. `hosts` are names and addresses that the
    certificate carries (etcd's need them).

    Raises CredentialsError, also when they are there already.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    if not _NAME.fullmatch(name):
        raise CredentialsError(f"{name!r} is not a name: take letters, digits, '.', '_', '-'")
    ca_directory = ca_directory or directory
    ca_path, ca_key_path = (os.path.join(ca_directory, file) for file in ("ca.pem", "ca.key"))
    ca = _load_certificate(ca_path)
    _check_time(ca_path, ca)
    _check_private(ca_key_path)
    try:
        ca_key = cast("EllipticCurvePrivateKey", load_pem_private_key(_read(ca_key_path), None))
    except (ValueError, TypeError) as error:
        raise CredentialsError(f"{ca_key_path} holds no usable private key: {error}") from error
    if ca_key.public_key() != ca.public_key():
        raise CredentialsError(f"{ca_key_path} is not the key of {ca_path}")
    cluster = str(ca.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)[0].value)
    key = ec.generate_private_key(ec.SECP256R1())
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if role in _LISTENING_ROLES:
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
    # etcd knows its clients by CN: a certificate that follows another one of its name is somebody else.
    owner = 0 if role == "etcd" else secrets.randbelow((1 << _OWNER_BITS) - 1) + 1
    user = Identity(role, name, owner).user
    builder = _builder(_subject(user, role, cluster), ca.subject, key, days)
    builder = (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
    )
    alternatives = [_general_name(host) for host in hosts]
    if alternatives:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    file_name = role if name == role else f"{role}-{name}"
    cert_path, key_path = _write_pair(directory, file_name, builder, key, ca_key)
    return Credentials(ca_path, cert_path, key_path)


def _builder(
    subject: "x509.Name", issuer: "x509.Name", key: "EllipticCurvePrivateKey", days: float
) -> "x509.CertificateBuilder":
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _subject(name: str, unit: str, organization: str) -> "x509.Name":
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )


def _key_usage(**used: bool) -> "x509.KeyUsage":
    from cryptography import x509

    names = (
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "key_cert_sign",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    )
    return x509.KeyUsage(**{name: used.get(name, False) for name in names})


def _general_name(host: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise CredentialsError(f"{host!r} is no host name: {error}") from error


def _write_pair(
    directory: str,
    name: str,
    builder: "x509.CertificateBuilder",
    key: "EllipticCurvePrivateKey",
    signer: "EllipticCurvePrivateKey",
) -> tuple[str, str]:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    cert_path, key_path = (os.path.join(directory, f"{name}.{kind}") for kind in ("pem", "key"))
    key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    _write_new(key_path, key_pem)
    try:
        _write_new(cert_path, builder.sign(signer, hashes.SHA256()).public_bytes(Encoding.PEM))
    except BaseException:
        os.unlink(key_path)
        raise
    return cert_path, key_path


def _write_new(path: str, data: bytes) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise CredentialsError(
            f"{path} exists; remove it first if it is really to be replaced"
        ) from None
    except OSError as error:
        raise CredentialsError(f"cannot write {path}: {error.strerror}") from error
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise CredentialsError(f"cannot write {path}: {error.strerror}") from error


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_FILE_LIMIT_BYTES)
    except OSError as error:
        raise CredentialsError(f"cannot read {path}: {error.strerror}") from error


def _load_certificate(path: str) -> "x509.Certificate":
    """The first one."""
    return _load_certificates(path)[0]


def _load_certificates(path: str) -> "list[x509.Certificate]":
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(_read(path))
    except ValueError as error:
        raise CredentialsError(f"{path} holds no usable certificate: {error}") from error


def _check_private(path: str) -> None:
    try:
        status = os.stat(path)
    except OSError as error:
        raise CredentialsError(f"cannot read {path}: {error.strerror}") from error
    # A key of root that a group may read is how secrets are handed to containers and services.
    forbidden = 0o027 if status.st_uid == 0 else 0o077
    if stat.S_IMODE(status.st_mode) & forbidden:
        raise CredentialsError(f"{path} can be read by others; run: chmod 600 {path}")


def _check_time(path: str, certificate: "x509.Certificate") -> None:
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
    return _identity(units, names, f"{certificate.serial_number:x}")


def _identity(units: list[str], names: list[str], serial: str) -> Identity | None:
    if len(units) != 1 or len(names) != 1 or units[0] not in ROLES:
        return None
    name, _, number = names[0].partition(_OWNER_MARK)
    owner = int(number, 16) if _OWNER.fullmatch(number) else 0
    return Identity(units[0], name, owner, serial)
