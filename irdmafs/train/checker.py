"""The process that checks pushes for a mount before they are published. Run by mount/push_checker.py.

It is a separate process, because a check reads the run's own files on that mount, which the daemon has to
serve meanwhile, and because it computes. Anything that a check raises refuses the push.
"""

import errno
import logging
import os
import socket
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from ..mount.push_messages import ANSWER, REASON_MAX_BYTES, REQUEST_MAX_BYTES
from .errors import TrainError

__all__ = ["Check", "main", "serve"]

log = logging.getLogger(__name__)

# check(directory, fd, name): `directory` is the one that is trained in, `name` the path of the push from
# its .train/push, of one or two components, and `fd` is open on its content, for reading. Raises OSError
# with the reason, or TrainError.
Check = Callable[[Path, int, str], None]


def serve(channel: socket.socket, check: Check) -> None:
    """Answer requests until the mount ends."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(channel, REQUEST_MAX_BYTES, 1)
        if not request:
            return
        mountpoint, directory, name = map(os.fsdecode, request.split(b"\0"))
        (fd,) = descriptors
        try:
            code, reason = _verdict(check, Path(mountpoint, directory).parent.parent, fd, name)
        finally:
            os.close(fd)
        text = reason.encode(errors="backslashreplace")[:REASON_MAX_BYTES]
        try:
            channel.send(ANSWER.pack(code) + text)
        except BrokenPipeError:
            return


def _verdict(check: Check, directory: Path, fd: int, name: str) -> tuple[int, str]:
    try:
        check(directory, fd, name)
    except OSError as error:
        reason = error.strerror or str(error)
        where = f" ({error.filename})" if error.filename is not None else ""
        return error.errno or errno.EIO, reason + where
    except TrainError as error:
        return errno.EINVAL, str(error)
    except Exception as error:
        log.exception("checking %s in %s failed", name, directory)
        return errno.EIO, f"the check failed: {type(error).__name__}: {error}"
    return 0, ""


def main(fd: int, module: str) -> None:
    """Check with the function `check` of a module what comes over a socket. Return when the mount ends."""
    check: Check = import_module(module).check
    with socket.socket(fileno=fd) as channel:
        serve(channel, check)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
