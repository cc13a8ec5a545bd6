"""How many requests came, which of them failed, and the errno that each of these is answered with."""

import errno
import logging

from .wire import Malformed, Opcode

log = logging.getLogger(__name__)

# The kernel takes no other answer with an error, and the call would never end.
_CODE_MAX = 511
# Errors of calls that a log should explain.
_LOGGED = (errno.EIO, errno.ENOSPC, errno.EMFILE)


class Counts:
    """Requests by opcode, and those that were answered with an error, by its name."""

    def __init__(self) -> None:
        self.by_opcode = [0] * 64
        self.errors: dict[str, int] = {}

    @property
    def requests(self) -> dict[str, int]:
        """Requests so far, by kind."""
        return {opcode.name: self.by_opcode[opcode] for opcode in Opcode if self.by_opcode[opcode]}

    def failed(self, request: str, error: Exception) -> int:
        """Count a request of this kind that failed, and return the errno to answer. Log the error if it is
        none that a filesystem answers with."""
        code = (isinstance(error, OSError) and error.errno) or 0
        if 0 < code <= _CODE_MAX:
            if code in _LOGGED:
                log.error("%s: %s", request, error)
        elif isinstance(error, KeyError):
            log.error("%s: the kernel asked for what is not open", request, exc_info=error)
            code = errno.EBADF
        elif isinstance(error, (Malformed, OverflowError)):
            if isinstance(error, Malformed):
                log.error("from the kernel: %s", error)
            code = errno.EINVAL
        else:
            log.exception("%s failed", request, exc_info=error)
            code = errno.EIO
        name = errno.errorcode.get(code, str(code))
        self.errors[name] = self.errors.get(name, 0) + 1
        return code
