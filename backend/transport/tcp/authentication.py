"""Message authentication on data connections: only messages of the two ends that have the key are accepted.

A key is handed out on the control connection, which TLS protects, and never travels again. The preamble of
a data connection shows a number, which opens one connection only, and from which and the key this
connection's own key is derived. Each end keeps a count of what it sent and of what it received. A message
(the preamble, a header, a reply) is followed by its code, BLAKE2b keyed with that key, over the count and
the message; so one that was forged, changed, repeated, left out or sent out of turn has the wrong code,
and its receiver gives the connection up.

Bytes of extents are authenticated in the same way where a cluster has certificates, but by GMAC (the
authentication of AES-GCM, NIST SP 800-38D), which processors have instructions for: one code follows all
bytes of a request. Its key is derived from the connection's, its nonce is the count.
"""

import hashlib
import hmac
from typing import TYPE_CHECKING

from ..frames import BadMessage

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import AEADEncryptionContext

CODE_BYTES = 16
KEY_BYTES = 32
_COUNT_BYTES = 12  # The length of a nonce of GCM.
# The purposes of derived keys, BLAKE2b's personalization: a connection; messages, or bytes, to one of its
# ends.
_CONNECTION = b"irdmafs data"
_MESSAGES, _BYTES = b"irdmafs to ", b"irdmafs in "
_NODE, _CALLER = b"node", b"call"


class Forged(BadMessage):
    """A code is wrong: a third party sends in the connection."""


class ByteCode:
    """The code of the bytes of one request, in their order. For one thread."""

    def __init__(self, key: bytes, count: int) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES128
        from cryptography.hazmat.primitives.ciphers.modes import GCM

        nonce = count.to_bytes(_COUNT_BYTES, "big")
        self._context: AEADEncryptionContext = Cipher(AES128(key), GCM(nonce)).encryptor()

    def add(self, data: bytes | memoryview) -> None:
        self._context.authenticate_additional_data(data)

    def code(self) -> bytes:
        """Return the code of all that was added. Nothing more can be added."""
        self._context.finalize()
        return self._context.tag


class Authentication:
    """One end of a data connection, the node's if it `listens`. `key` is its own. For one thread."""

    def __init__(self, key: bytes, *, listens: bool) -> None:
        here, there = (_NODE, _CALLER) if listens else (_CALLER, _NODE)
        self._outgoing = _keyed(key, _MESSAGES + there)
        self._incoming = _keyed(key, _MESSAGES + here)
        self._bytes_out = _keyed(key, _BYTES + there).digest()
        self._bytes_in = _keyed(key, _BYTES + here).digest()
        self._sent = self._received = 0

    def sign(self, message: bytes) -> bytes:
        """Return the code of the next message that is sent."""
        self._sent += 1
        return _code(self._outgoing, self._sent, message)

    def check(self, message: bytes, code: bytes) -> None:
        """Raise Forged unless this is the next message that the other end sent."""
        self._received += 1
        if not hmac.compare_digest(_code(self._incoming, self._received, message), code):
            raise Forged("a message on a data connection was not sent by the other end")

    def outgoing_bytes(self) -> ByteCode:
        """Return the code, still empty, for the bytes that follow the last message."""
        return ByteCode(self._bytes_out, self._sent)

    def incoming_bytes(self) -> ByteCode:
        return ByteCode(self._bytes_in, self._received)


def connection_key(key: bytes, number: int) -> bytes:
    """Return the key of the data connection with this number; `key` is the control connection's."""
    told = number.to_bytes(8, "big")
    return hashlib.blake2b(told, key=key, digest_size=KEY_BYTES, person=_CONNECTION).digest()


def _keyed(key: bytes, purpose: bytes) -> "hashlib.blake2b":
    return hashlib.blake2b(key=key, digest_size=CODE_BYTES, person=purpose)


def _code(keyed: "hashlib.blake2b", count: int, message: bytes) -> bytes:
    state = keyed.copy()
    state.update(count.to_bytes(_COUNT_BYTES, "big"))
    state.update(message)
    return state.digest()
