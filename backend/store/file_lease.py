"""A test whether a file is open anywhere else on this host."""

import errno
import fcntl
import signal

# The errors of a kernel that has leases, but not for this file, filesystem or user.
_LEASE_UNSUPPORTED = (errno.EINVAL, errno.EACCES, errno.EPERM, errno.EOPNOTSUPP)


def is_only_opener(fd: int, *, if_unknown: bool = True) -> bool:
    """Return whether only this descriptor and its duplicates have the file open or mapped; `if_unknown` if
    the kernel does not tell: True is for callers that use this as a second check only.

    The kernel grants a write lease in exactly that case; the lease is given back at once.
    """
    # Opening the file while the lease is held sends a signal: by default SIGIO, which would end this
    # process.
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        return if_unknown and error.errno in _LEASE_UNSUPPORTED
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True
