"""What guests say, passed on until each has an exit status."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Sequence

from .guest import NO_STATUS, TIMED_OUT, Guest

_READ_BYTES = 1 << 16
# How long the other guest may go on when one has failed: to notice, and to say so.
_GRACE_S = 10.0


class Relay:
    """Copies the output of guests to `out` and `err`. Of several guests each line names its guest."""

    def __init__(self, guests: Sequence[Guest], out: int, err: int) -> None:
        self._guests = guests
        self._targets = {"stdout": out, "stderr": err}
        # The begin of a line whose end has not come yet.
        self._lines: dict[int, bytes] = {}

    def run(self, timeout_s: float | None) -> int:
        """The first exit status that is not 0; TIMED_OUT; NO_STATUS if a guest ended without one.

        Raises BrokenPipeError when nobody reads.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        status = 0
        with contextlib.ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            for guest in self._guests:
                for name, pipe in guest.pipes.items():
                    selector.register(pipe, selectors.EVENT_READ, (guest, name))
                process = os.pidfd_open(guest.pid)
                stack.callback(os.close, process)
                selector.register(process, selectors.EVENT_READ, (guest, None))
            while selector.get_map():
                left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                events = selector.select(left_s)
                if not events:
                    return status or TIMED_OUT
                for key, _ in events:
                    guest, name = key.data
                    if name is None:
                        # What its kernel started lives on, and holds the pipes.
                        guest.kill()
                        selector.unregister(key.fd)
                    elif not self._read(key.fd, guest, name):
                        selector.unregister(key.fd)
                    if status == 0 and guest.status:
                        status = guest.status
                        grace = time.monotonic() + _GRACE_S
                        deadline = grace if deadline is None else min(deadline, grace)
        return status

    def _read(self, pipe: int, guest: Guest, name: str) -> bool:
        """Take what there is. False at the end."""
        data = os.read(pipe, _READ_BYTES)
        if name == "kernel":
            guest.kernel_log.extend(data.splitlines())
        elif name != "status":
            self._pass_on(pipe, guest, name, data)
        elif data:
            # All that the command said is in the other pipes by now.
            guest.status = int(data)
            guest.kill()
        elif guest.status is None:
            guest.status = NO_STATUS
        return bool(data)

    def _pass_on(self, pipe: int, guest: Guest, name: str, data: bytes) -> None:
        target = self._targets[name]
        if len(self._guests) == 1:
            _write(target, data)
            return
        *lines, rest = (self._lines.pop(pipe, b"") + data).split(b"\n")
        if data:
            self._lines[pipe] = rest
        elif rest:
            lines.append(rest)
        _write(target, b"".join(b"[%d] %s\n" % (guest.node, line) for line in lines))


def _write(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]
