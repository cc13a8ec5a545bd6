"""The key by which a mount proves to store nodes that a session is its own."""

import hashlib
import secrets

__all__ = ["make_session_key", "session_digest"]

_KEY_BYTES = 32


def make_session_key() -> bytes:
    """Return a new key."""
    return secrets.token_bytes(_KEY_BYTES)


def session_digest(key: bytes) -> bytes:
    """Return the digest of a session's key for the session's record. A reader of the record cannot
    show the key."""
    return hashlib.sha256(key).digest()
