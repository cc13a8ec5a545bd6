"""Whether a file is open anywhere else on this host."""

import errno
import fcntl
import signal

# There for this kernel, but not for this file, filesystem or user.
_LEASE_UNSUPPORTED = (errno.EINVAL, errno.EACCES, errno.EPERM, errno.EOPNOTSUPP)


def is_only_opener(fd: int) -> bool:
    """Whether nothing but this descriptor and its duplicates has the file open, or mapped. True where the
    kernel does not tell: it is a second look, not the only one.

    A write lease is granted exactly then; it is given back at once.
    """
    # Whoever opens the file meanwhile has a signal sent to us: by default SIGIO, which kills.
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        return error.errno in _LEASE_UNSUPPORTED
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True
