"""Endpoints of etcd: addresses, TLS contexts and sockets."""

import os
import socket
import ssl
from typing import NamedTuple

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


def tls_context(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext:
    """Return the TLS context of these certificates. Raises OSError or ValueError that name the file."""
    if (cert is None) != (key is None):
        raise ValueError("a client certificate for etcd needs its key, and a key its certificate")
    for path in (ca, cert, key):
        if path is not None:
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))  # an error that names the file
    try:
        context = ssl.create_default_context(cafile=ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
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
