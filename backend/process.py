"""Settings of a daemon's own process."""

import gc
import logging
import os
import resource
import socket
from contextlib import suppress

log = logging.getLogger(__name__)

# Each file that is written or sent is a descriptor.
_WANTED_OPEN_FILES = 1 << 20
_TELL_TIMEOUT_S = 1.0
# Names the socket on which a service manager waits for a process that it started.
MANAGER_VARIABLE = "NOTIFY_SOCKET"


def calm_the_collector() -> None:
    """Exclude everything that is in memory now from garbage collection, and collect less often.

    Requests leave no cycles behind; searching for them every 700 objects costs a tenth of a create.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)


def raise_limits() -> None:
    """Raise the limits of open files, of the length of files and of processor time as far as this process
    may: those of a shell are meant for the programs that it runs."""
    with open("/proc/sys/fs/nr_open", "rb") as file:
        files = min(int(file.read()), _WANTED_OPEN_FILES)
    wanted = {
        resource.RLIMIT_NOFILE: max(files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        resource.RLIMIT_FSIZE: resource.RLIM_INFINITY,
        resource.RLIMIT_CPU: resource.RLIM_INFINITY,
    }
    for kind, most in wanted.items():
        for limit in (resource.getrlimit(kind)[1], most):
            with suppress(OSError, ValueError):  # raising the hard limit needs CAP_SYS_RESOURCE
                resource.setrlimit(kind, (limit, limit))


def own_status(field: str) -> str:
    """Return a field of this process's proc_pid_status(5); "" if the kernel has none of this name."""
    with open("/proc/self/status") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name == field:
                return value.strip()
    return ""


def has_capability(capability: int, among: str = "CapEff") -> bool:
    """Return whether a capability (a number of capabilities(7)) is among those of this process that a field
    of its status lists."""
    return bool(int(own_status(among) or "0", 16) >> capability & 1)


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal: then SIGHUP means that it is gone."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def tell_manager(*words: str, status: str = "") -> None:
    """Tell the service manager that started this process, and waits for that (sd_notify(3)), words such as
    READY=1 and STOPPING=1, and a line for people."""
    address = os.environ.get(MANAGER_VARIABLE, "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):
        address = f"\0{address[1:]}"  # a name in no directory
    if status:
        words = (*words, f"STATUS={' '.join(status.split())}")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.settimeout(_TELL_TIMEOUT_S)
            manager.sendto("\n".join(words).encode(errors="replace"), address)
    except OSError as error:
        log.warning("the service manager is not told %s: %s", ", ".join(words), error)
