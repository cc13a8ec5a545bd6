"""Values as people write them: sizes ("64M", "50%"), durations ("5m"), addresses."""

import contextlib
import os
import re
from itertools import accumulate

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(%|(?:([KMGT])(?:iB)?|B)?)", re.IGNORECASE | re.ASCII)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d)?", re.ASCII)
_UNIT_SECONDS = {None: 1, "ms": 1e-3, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
# By the kind of control group in /proc/self/cgroup: of version 2, and of version 1.
_LIMITS_OF_GROUPS = {
    "": "/sys/fs/cgroup{}/memory.max",
    "memory": "/sys/fs/cgroup/memory{}/memory.limit_in_bytes",
}


def parse_size(text: str) -> int:
    """Return the bytes meant by "4096", "64M", "8GiB" (powers of 1024) or "50%" (of the machine's memory).

    Raises ValueError, whose text is a sentence, for any other text, and for a size of 0.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write it like 512M, 8G, 8GiB or 50%")
    number, unit, prefix = match.groups()
    if unit == "%":
        if float(number) > 100:
            raise ValueError(f"{text!r} is more memory than this machine has")
        size = int(memory_limit() * float(number) / 100)
    else:
        unit_bytes = 1024.0 ** (" KMGT".index(prefix.upper()) if prefix else 0)
        size = int(min(float(number) * unit_bytes, 1 << 63))
    if size <= 0:
        raise ValueError(f"{text!r} is not a size: it must be more than nothing")
    if size >= 1 << 63:
        raise ValueError(f"{text!r} is larger than any file system can be")
    return size


def parse_duration(text: str) -> float:
    """Return the seconds meant by "90", "90s", "5m", "1.5h" or "2d"; raise ValueError for other text."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write it like 90s, 5m, 2h or 1d")
    return float(match[1]) * _UNIT_SECONDS[match[2]]


def human_bytes(count: object) -> str:
    """Return a number of bytes for people: 1536 -> "1.5 KiB"; anything but a number -> "-"."""
    if not isinstance(count, int | float):
        return "-"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        text = f"{size:.{0 if unit == 'B' or size >= 99.95 else 1}f}"
        # A size that is rounded up to 1024 is 1.0 of the next unit.
        if float(text) < 1024:
            break
        size /= 1024
    return f"{text} {unit}"


def counted(count: int, noun: str) -> str:
    """Return text like "1 node", "2 nodes"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def meminfo(name: str) -> int:
    """Return a figure of proc_meminfo(5) in bytes, 0 where there is none."""
    with open("/proc/meminfo") as lines:
        found = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
        return int(next(found, 0)) << 10


def filesystem_of(device: int) -> bytes:
    """Return the type of the filesystem whose files have this st_dev, b"" if it is mounted nowhere here."""
    number = b"%d:%d" % (os.major(device), os.minor(device))
    with open("/proc/self/mountinfo", "rb") as mounts:
        found = (line.partition(b" - ") for line in mounts)
        types = (tail.split()[0] for mount, _, tail in found if mount.split()[2] == number)
        return next(types, b"")


def memory_limit() -> int:
    """Return the memory in bytes that this process can use: the machine's, or that of the smallest of the
    control groups (cgroups(7)) around it."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    groups: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError), open("/proc/self/cgroup") as lines:
        groups = {kind: path for _, kind, path in (line.strip().split(":", 2) for line in lines)}
    for kind, file in _LIMITS_OF_GROUPS.items():
        for group in accumulate(groups.get(kind, "").split("/"), "{}/{}".format):
            with contextlib.suppress(OSError, ValueError), open(file.format(group)) as limit:
                total = min(total, int(limit.read()))
    return total


class ConfigError(Exception):
    """The configuration cannot be used; the text is one line that says what to do."""


class Size(int):
    """Bytes; in the file a number or text such as "64M" or "50%" (of the machine's memory)."""

    def __str__(self) -> str:
        for shift, unit in ((30, "G"), (20, "M"), (10, "K")):
            if self and not self % (1 << shift):
                return f"{self >> shift}{unit}"
        return str(int(self))


class Seconds(float):
    """Seconds; in the file a number or text such as "90s", "5m"."""

    def __str__(self) -> str:
        days = self / 86400
        return f"{days:g}d" if days >= 1 else f"{float(self):g}s"


def split_host_port(text: str, default_port: int) -> tuple[str, int]:
    """Return host and port of "HOST", "HOST:PORT", "[IPV6]:PORT" or "IPV6". Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")) or text.endswith("]"):
        host, port = text, str(default_port)
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or any(character in bare for character in " /[]@,"):
        raise ValueError(f"{text!r} is not HOST:PORT")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError(f"{text!r} is not HOST:PORT: {port!r} is no port")
    return bare, int(port)


def from_text(kind: type, value: object) -> object:
    """Return the Size or Seconds that a value in the file stands for. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"expected a {'size' if kind is Size else 'duration'}, got {value!r}")
    if kind is Size:
        if isinstance(value, float):
            raise ValueError(f"expected a size, got {value!r}")
        return Size(parse_size(str(value)))
    return Seconds(parse_duration(str(value)))
