"""The process that checks pushes for a mount before they are published. Run by mount/push_checker.py.

It is a separate process, because a check reads the run's own files on that mount, which the daemon has to
serve meanwhile, and because it computes. Anything that a check raises refuses the push.

A check has the rights of the owner of push/: a link of that user leads it nowhere where he could not go
himself. They are those of fsuid(2), as a mount without allow_other admits processes by their other ids.
"""

import contextlib
import ctypes
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
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

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def serve(channel: socket.socket, check: Check, uid: int, gid: int) -> None:
    """Answer requests until the mount ends. `uid` and `gid`: of the owner of push/."""
    if os.geteuid() == 0 and uid:
        # A user namespace may forbid it.
        with contextlib.suppress(PermissionError):
            os.setgroups([])
    while True:
        request, descriptors, _, _ = socket.recv_fds(channel, REQUEST_MAX_BYTES, 1)
        if not request:
            return
        mountpoint, directory, name = map(os.fsdecode, request.split(b"\0"))
        (fd,) = descriptors
        try:
            with _at(mountpoint), _rights_of(uid, gid):
                code, reason = _verdict(check, Path(directory).parent.parent, fd, name)
        except OSError as error:
            # The mount has ended, or nobody can enter it.
            code, reason = error.errno or errno.EIO, str(error)
        finally:
            os.close(fd)
        text = reason.encode(errors="backslashreplace")[:REASON_MAX_BYTES]
        try:
            channel.send(ANSWER.pack(code) + text)
        except BrokenPipeError:
            return


@contextlib.contextmanager
def _at(mountpoint: str) -> Iterator[None]:
    """Go to the root of the mount: its owner may have to pass directories of others on the way there."""
    os.chdir(mountpoint)
    try:
        yield
    finally:
        os.chdir("/")


@contextlib.contextmanager
def _rights_of(uid: int, gid: int) -> Iterator[None]:
    """Have the rights of a user on files, if this process may, and end with the mount's daemon, whatever a
    check waits for."""
    own_uid, own_gid = os.geteuid(), os.getegid()
    _libc.setfsgid(gid)
    _libc.setfsuid(uid)
    # A change of fsuid ends the wish to be signalled.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        yield
    finally:
        _libc.setfsuid(own_uid)
        _libc.setfsgid(own_gid)


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


def main(fd: int, module: str, uid: int, gid: int) -> None:
    """Check with the function `check` of a module what comes over a socket, with the rights of a user.
    Return when the mount ends."""
    check: Check = import_module(module).check
    with socket.socket(fileno=fd) as channel:
        serve(channel, check, uid, gid)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
