"""The cluster's certificate authority: make it, replace it, and issue certificates.

Extended key usage keeps a mount from posing as a node: only nodes (and etcd) may accept connections.
Certificates of the role "etcd" are for etcd itself, whose clients do check names, and carry them. etcd
refuses a reader's certificate (see security).
"""

import contextlib
import datetime
import fcntl
import ipaddress
import os
import re
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import cast

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..unwrap import if_it_fails
from .security import (
    OWNER_BITS,
    READER_OID,
    Credentials,
    CredentialsError,
    Identity,
    Role,
    check_time,
    load_certificate,
    load_certificates,
    load_key,
    subvolume_extension,
)

# The list of revoked certificates beside ca.pem, for etcd (--client-crl-file).
REVOKED_FILE = "revoked.crl"

_LISTENING_ROLES = ("node", "etcd")
CA_DAYS = 3650
CERTIFICATE_DAYS = 825
# Clocks of hosts differ: a certificate that was just issued must be valid on all of them.
_CLOCK_SKEW = datetime.timedelta(hours=1)
# A name has, with the number of the certificate, at most the 64 characters that a CN may have.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,55}", re.ASCII)


def make_ca(directory: str, cluster_name: str) -> str:
    """Make the cluster's certificate authority: `ca.pem`, whose path is returned, and `ca.key`, which
    only issuing certificates needs and no node or mount should have.

    Raises CredentialsError, also when one is there already.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = _subject(f"{cluster_name} CA"[:64], "ca", cluster_name)
    builder = _builder(name, name, key, key, CA_DAYS, is_ca=True)
    return _write_pair(directory, "ca", builder, key, key)[0]


@contextlib.contextmanager
def alone_in(directory: str) -> Iterator[int]:
    """Keep other commands from changing the files in a directory, and yield its descriptor. Raises
    CredentialsError if one is changing them now."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CredentialsError(f"cannot open {directory}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CredentialsError(f"another command changes {directory}; wait for it") from None
        except OSError:
            pass  # NFS locks no directories
        yield descriptor
    finally:
        os.close(descriptor)


def begin_ca_change(directory: str, cluster_name: str) -> None:
    """Make another certificate authority, which signs new certificates. `ca.pem` holds both, so
    certificates of either count. A change that was cut off is begun again. Raises CredentialsError."""
    path, key_path = (os.path.join(directory, file) for file in ("ca.pem", "ca.key"))
    with alone_in(directory) as descriptor:
        trusted = load_certificates(path)
        if len(trusted) > 1:
            if load_key(key_path).public_key() == trusted[0].public_key():
                text = f"{path} holds two CAs already: the change before is not finished"
                raise CredentialsError(text)
            del trusted[0]  # its key was lost before it signed anything
        with tempfile.TemporaryDirectory(prefix=".ca-", dir=directory) as made:
            both = [load_certificate(make_ca(made, cluster_name)), *trusted]
            # Between the two steps no certificate can be issued, and none is refused.
            _replace(path, b"".join(each.public_bytes(Encoding.PEM) for each in both))
            os.fsync(descriptor)
            os.replace(os.path.join(made, "ca.key"), key_path)


def finish_ca_change(directory: str) -> None:
    """Remove the older certificate authority from `ca.pem`: its certificates are not accepted any more
    where this file is. Raises CredentialsError, also if the change was cut off when it began."""
    path = os.path.join(directory, "ca.pem")
    with alone_in(directory):
        trusted = load_certificates(path)
        if len(trusted) < 2:
            raise CredentialsError(f"{path} holds one CA only: no change has begun")
        if os.path.exists(os.path.join(directory, "ca.key")):
            _authority(directory)  # raises an error unless the newer one can sign
        _replace(path, trusted[0].public_bytes(Encoding.PEM))


def issue(
    directory: str,
    name: str,
    role: Role,
    hosts: Iterable[str] = (),
    days: float = CERTIFICATE_DAYS,
    ca_directory: str | None = None,
    owner: int = 0,
    subvolume: int = 0,
) -> Credentials:
    """Make `ROLE-NAME.pem` and `ROLE-NAME.key` in `directory` (`ROLE.pem`, `ROLE.key` if that is the
    name), signed by the CA there or in `ca_directory`. `hosts` are names and addresses that the
    certificate carries (etcd's need them). `owner` is its number in etcd, if it follows another one of the
    same user; 0: it is another user. `subvolume`: what a mount is kept to.

    Raises CredentialsError, also when they are there already.
    """
    if not _NAME.fullmatch(name):
        raise CredentialsError(f"{name!r} is not a name: take letters, digits, '.', '_', '-'")
    ca_directory = ca_directory or directory
    ca, ca_key = _authority(ca_directory)
    cluster = str(ca.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)[0].value)
    key = ec.generate_private_key(ec.SECP256R1())
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if role in _LISTENING_ROLES:
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
    # etcd knows its clients by CN: a certificate that follows another one of its name is somebody else.
    if role != "etcd":
        owner = owner or secrets.randbelow((1 << OWNER_BITS) - 1) + 1
    user = Identity(role, name, owner).user
    builder = _builder(_subject(user, role, cluster), ca.subject, key, ca_key, days)
    builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    if role == "reader":
        mark = x509.UnrecognizedExtension(x509.ObjectIdentifier(READER_OID), b"\x05\x00")
        builder = builder.add_extension(mark, critical=True)
    if subvolume:
        builder = builder.add_extension(subvolume_extension(subvolume), critical=False)
    alternatives = [_general_name(host) for host in hosts]
    if alternatives:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    file_name = role if name == role else f"{role}-{name}"
    cert_path, key_path = _write_pair(directory, file_name, builder, key, ca_key)
    return Credentials(os.path.join(ca_directory, "ca.pem"), cert_path, key_path)


def list_revoked(directory: str, serials: Iterable[int]) -> str:
    """Write the list of revoked certificates, by their serial numbers, which etcd reads at each handshake,
    and return its path. Raises CredentialsError, also where the CA's key is not there."""
    ca, ca_key = _authority(directory)
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(ca.subject)
        .last_update(now - _CLOCK_SKEW)
        .next_update(now + datetime.timedelta(days=CA_DAYS))
    )
    for serial in serials:
        revoked = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now)
        builder = builder.add_revoked_certificate(revoked.build())
    # Newer versions of etcd read no PEM here.
    data = builder.sign(ca_key, hashes.SHA256()).public_bytes(Encoding.DER)
    path = os.path.join(directory, REVOKED_FILE)
    _replace(path, data, mode=0o644)
    return path


def _authority(directory: str) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return the CA's certificate and key. Raises CredentialsError."""
    ca_path, ca_key_path = (os.path.join(directory, file) for file in ("ca.pem", "ca.key"))
    ca = load_certificate(ca_path)
    check_time(ca_path, ca)
    ca_key = cast(ec.EllipticCurvePrivateKey, load_key(ca_key_path))
    if ca_key.public_key() != ca.public_key():
        raise CredentialsError(
            f"{ca_key_path} is not the key of {ca_path}; if irdmafs cluster rotate-ca was cut off, "
            "give it again"
        )
    return ca, ca_key


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    days: float,
    *,
    is_ca: bool = False,
) -> x509.CertificateBuilder:
    """Return the builder of a certificate of `key`: of a CA, which signs certificates and lists of revoked
    ones, or of a process, which signs handshakes; nothing else."""
    now = datetime.datetime.now(datetime.UTC)
    # In this order: signatures, four others, certificates and lists, two others.
    usage = x509.KeyUsage(not is_ca, False, False, False, False, is_ca, is_ca, False, False)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    issued_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(is_ca, 0 if is_ca else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(issued_by, critical=False)
    )


def _subject(name: str, unit: str, organization: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )


def _general_name(host: str) -> x509.GeneralName:
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise CredentialsError(f"{host!r} is no host name: {error}") from error


def _write_pair(
    directory: str,
    name: str,
    builder: x509.CertificateBuilder,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
) -> tuple[str, str]:
    cert_path, key_path = (os.path.join(directory, f"{name}.{kind}") for kind in ("pem", "key"))
    key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    _write_new(key_path, key_pem)
    with if_it_fails(lambda: os.unlink(key_path)):
        _write_new(cert_path, builder.sign(signer, hashes.SHA256()).public_bytes(Encoding.PEM))
    return cert_path, key_path


def _replace(path: str, data: bytes, mode: int = 0o600) -> None:
    """Write a file anew, whole. Raises CredentialsError."""
    directory, name = os.path.split(path)
    # A directory for the draft could be left behind: an interrupt may come while it is being made.
    draft = os.path.join(directory, f".new-{os.getpid()}-{name}")
    try:
        with if_it_fails(partial(Path(draft).unlink, missing_ok=True)):
            _write_new(draft, data)
            os.chmod(draft, mode)
            os.replace(draft, path)
    except OSError as error:
        raise CredentialsError(f"cannot write {path}: {error.strerror}") from error


def _write_new(path: str, data: bytes) -> None:
    remove = partial(Path(path).unlink, missing_ok=True)
    try:
        with open(path, "xb", opener=partial(os.open, mode=0o600)) as file, if_it_fails(remove):
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise CredentialsError(
            f"{path} exists; remove it first if it is really to be replaced"
        ) from None
    except OSError as error:
        raise CredentialsError(f"cannot write {path}: {error.strerror}") from error
