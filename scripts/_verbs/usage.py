"""Processor time, of one process and of the kernel's own threads."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_KTHREADD = 2


class Usage(NamedTuple):
    """Seconds. `kernel` is what no process is charged for: kernel threads and soft interrupts."""

    client: float
    node: float
    kernel: float

    def since(self, before: Usage) -> Usage:
        return Usage(*(now - then for now, then in zip(self, before, strict=True)))


def measure(client: int, node: int) -> Usage:
    """Until now, of two processes by their numbers."""
    return Usage(_of_process(client), _of_process(node), _of_kernel())


def _of_process(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _of_kernel() -> float:
    total = 0.0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == _KTHREADD:
                    total += (int(fields[11]) + int(fields[12])) / _TICKS
    return total + int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[7]) / _TICKS
