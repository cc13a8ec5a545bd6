"""Parse the values of a configuration: sizes, durations, addresses."""

from .sizes import parse_duration, parse_size


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
