"""Endpoints of etcd: addresses, TLS contexts and sockets."""

import os
import socket
import ssl
from typing import NamedTuple
from urllib.parse import urlsplit

import trio

from ..unwrap import first_error

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
    try:
        stream = await trio.open_tcp_stream(endpoint.host, endpoint.port)
    except OSError as error:
        # One for each address of the name.
        if isinstance(error.__cause__, BaseExceptionGroup):
            raise first_error(error.__cause__) from None
        raise
    # Undo a limit of trio's streams: the kernel may buffer a large request whole.
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 0)
    sock = socket.socket(fileno=stream.socket.detach())
    sock.setblocking(False)
    return sock
