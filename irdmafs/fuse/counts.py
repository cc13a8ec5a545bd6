"""How many requests came, and how many of them failed."""

import errno

from .wire import Opcode


class Counts:
    """Requests by opcode, and those that were answered with an error, by its name."""

    def __init__(self) -> None:
        self.by_opcode = [0] * 64
        self.errors: dict[str, int] = {}

    @property
    def requests(self) -> dict[str, int]:
        """Requests so far, by kind."""
        return {opcode.name: self.by_opcode[opcode] for opcode in Opcode if self.by_opcode[opcode]}

    def failed(self, code: int) -> None:
        """Count a request that was answered with this errno."""
        name = errno.errorcode.get(code, str(code))
        self.errors[name] = self.errors.get(name, 0) + 1
