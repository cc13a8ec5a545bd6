"""Aborting the connection of a mount whose daemon was killed."""

import ctypes
import logging
import os
import subprocess
from typing import Final

log = logging.getLogger(__name__)

# Systems mount fusectl there, which has a file `abort` for each connection. Containers do not.
_FUSECTL: Final = "/sys/fs/fuse/connections"
_FLAGS: Final = os.O_WRONLY | os.O_CLOEXEC
_SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 430, 431, 432
_FD_CLOEXEC, _CMD_CREATE = 1, 6
# Runs until it gets the signal or its input ends.
_SCRIPT: Final = "trap 'echo 1; exit' USR1; read -r line; echo 1"

_libc = ctypes.CDLL(None)


def abort_after_this_thread(device: str) -> None:
    """Start a process that aborts the connection of a FUSE mount, known by its device ("0:37"), when the
    thread that calls this has ended.

    The kernel aborts the connection itself when /dev/fuse is closed. But a killed daemon keeps /dev/fuse
    open while another thread of it waits for a lock, whose owner may wait for an answer of the daemon.
    """
    try:
        abort = _open_abort(device.partition(":")[2])
        # The daemon keeps the other end.
        until, _ = os.pipe()
        # The kernel sends the signal when the thread ends, even if the process does not.
        command = ("setpriv", "--pdeathsig", "USR1", "--", "sh", "-c", _SCRIPT)
        process = subprocess.Popen(
            command, stdin=until, stdout=abort, cwd="/", start_new_session=True
        )
        process.returncode = 0  # no need to wait for it
        os.close(until)
        os.close(abort)
    except OSError as error:
        log.info("programs may have to wait if this daemon is killed: %s", error)


def _open_abort(connection: str) -> int:
    try:
        return os.open(f"{_FUSECTL}/{connection}/abort", _FLAGS)
    except FileNotFoundError:
        pass
    # Mount fusectl for root, where nobody sees it. A call that fails leads to EBADF.
    context = _libc.syscall(_SYS_FSOPEN, b"fusectl", _FD_CLOEXEC)
    _libc.syscall(_SYS_FSCONFIG, context, _CMD_CREATE, None, None, 0)
    directory = _libc.syscall(_SYS_FSMOUNT, context, _FD_CLOEXEC, 0)
    os.close(context)
    try:
        return os.open(f"{connection}/abort", _FLAGS, dir_fd=directory)
    finally:
        os.close(directory)
