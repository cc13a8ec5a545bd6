"""Endpoints of etcd: addresses, TLS contexts and sockets."""

import contextlib
import errno
import os
import socket
import ssl
from typing import NamedTuple
from urllib.parse import urlsplit

import trio

DEFAULT_PORT = 2379


class Endpoint(NamedTuple):
    host: str
    port: int
    secure: bool

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_endpoint(text: str, secure: bool) -> Endpoint:
    """Return the endpoint that "host:port", or a URL with http or https, names. Raises ValueError."""
    url = urlsplit(text if "//" in text else f"//{text}")
    port = url.port or DEFAULT_PORT
    if url.scheme not in ("", "http", "https") or not url.hostname or url.path not in ("", "/"):
        raise ValueError(f"{text!r} is not an address of etcd, like 10.0.0.1:{DEFAULT_PORT}")
    if url.scheme == "http" and secure:
        raise ValueError(f"{text!r} says http, but a certificate for TLS is given")
    return Endpoint(url.hostname, port, secure or url.scheme == "https")


def tls_context(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext:
    """Return the TLS context of these certificates. Raises OSError or ValueError that name the file."""
    if (cert is None) != (key is None):
        raise ValueError("a client certificate for etcd needs its key, and a key its certificate")
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    for path in (ca, cert, key):
        if path is not None:
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))  # an error that names the file
    try:
        if ca is not None:
            context = ssl.create_default_context(cafile=ca)
            context.set_alpn_protocols(["h2"])
        if cert is not None:
            context.load_cert_chain(cert, key)
    except ssl.SSLError as error:
        raise ValueError(
            f"{ca}, {cert} or {key} is not what it should be: PEM files of etcd's CA, of a client"
            f" certificate and of its key ({error.reason or error})"
        ) from error
    return context


async def connect(endpoint: Endpoint) -> socket.socket:
    """Return a connected, non-blocking socket. Raises OSError."""
    addresses = await trio.socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    failed: OSError | None = None
    for family, kind, protocol, _, address in addresses:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(BlockingIOError):
                sock.connect(address)
            await trio.lowlevel.wait_writable(sock)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if not code:
                return sock
            failed = OSError(code, os.strerror(code))
        except OSError as error:
            failed = error
        except BaseException:
            sock.close()
            raise
        sock.close()
    raise failed or OSError(errno.EHOSTUNREACH, "the name has no address")
