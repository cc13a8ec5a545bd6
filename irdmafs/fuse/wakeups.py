"""Fast wake-ups while requests are coming.

A process that waits for our answer leaves its processor idle. A virtual processor that halts when it
is idle is woken through the hypervisor, which takes 15-35 us: more than the whole answer (*measured*:
two processes on two cores wake each other in 35 us each way when they halt, in 3.5 us when they poll).
The kernel offers a remedy: as long as /dev/cpu_dma_latency is held open with the value 0, idle
processors poll (Documentation/power/pm_qos_interface.rst). We hold it while requests come and for
a few milliseconds after the last one, and the kernel lets go of it when we die.
"""

import logging
import os
import struct

log = logging.getLogger(__name__)

DEVICE = "/dev/cpu_dma_latency"
_POLL = struct.pack("<i", 0)
_NO_DEMAND = struct.pack("<i", 2_000_000_000)  # PM_QOS_CPU_LATENCY_DEFAULT_VALUE


def halts_at_once() -> bool:
    """Return whether this is a virtual machine whose idle processors halt without polling first."""
    governor = _read("/sys/devices/system/cpu/cpuidle/current_governor")
    poll_ns = _read("/sys/module/haltpoll/parameters/guest_halt_poll_ns")
    return governor == "haltpoll" and poll_ns == "0"


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


class FastWakeups:
    """A demand on the kernel, from hold() to let_go(); `enabled` where halts_at_once()."""

    def __init__(self) -> None:
        self.enabled = self.held = False
        self._fd = -1
        if not halts_at_once():
            return
        try:
            self._fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
            os.write(self._fd, _NO_DEMAND)
            self.enabled = True
        except OSError as error:
            log.info("wake-ups stay slow: %s: %s", DEVICE, error.strerror)

    def hold(self) -> None:
        os.write(self._fd, _POLL)
        self.held = True

    def let_go(self) -> None:
        if self.held:
            os.write(self._fd, _NO_DEMAND)
            self.held = False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self.enabled, self.held = -1, False, False
