"""The messages between a mount and the process that checks its pushes (train/checker.py).

A request: the paths of the mountpoint, of the directory from there, and of the push from there, with zeros
between them, and the descriptor of the content. An answer: an error code (0: none), then the reason.
"""

import struct
from typing import Final

__all__ = ["ANSWER", "REASON_MAX_BYTES", "REQUEST_MAX_BYTES"]

REQUEST_MAX_BYTES: Final = 16384
ANSWER: Final = struct.Struct("<i")
REASON_MAX_BYTES: Final = 1024
