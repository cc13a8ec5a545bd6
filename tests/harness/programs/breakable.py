"""The `irdmafs` command with queue pairs that break, as if by hardware, when it is sent SIGUSR2, and are
soon tried again. A node keeps spare files for good: in a guest on a busy machine, a minute is a few steps
of a training."""

import signal
import weakref
from pathlib import Path
from typing import Any

from irdmafs.backend.node import catalog
from irdmafs.backend.transport.verbs import way
from irdmafs.backend.transport.verbs.queue import QueuePair
from irdmafs.cli.command import main

SIGNAL = signal.SIGUSR2


def break_pair(pair: QueuePair) -> None:
    """The software is told by what completes with an error, and by nothing else."""
    library = pair._library
    attributes = library.QPAttr(qp_state=library.enum("QPS_ERR"))
    pair._pair.modify(attributes, library.enum("QP_STATE"))


def is_ready(pid: int) -> bool:
    """Return whether the process has a handler of the signal."""
    caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
    return bool(int(caught, 16) >> (SIGNAL - 1) & 1)


def make_breakable() -> None:
    """Every other of the queue pairs in use, from now on."""
    pairs: weakref.WeakSet[QueuePair] = weakref.WeakSet()
    connect = QueuePair.connect

    def connecting(self: QueuePair, *arguments: Any) -> None:
        connect(self, *arguments)
        pairs.add(self)

    def break_some(*_: object) -> None:
        for pair in [pair for pair in pairs if not pair.failure][::2]:
            break_pair(pair)

    QueuePair.connect = connecting  # type: ignore[assignment, method-assign]
    signal.signal(SIGNAL, break_some)


if __name__ == "__main__":
    way.RETRY_S = 0.5
    setattr(catalog, "SPARE_S", float("inf"))  # noqa: B010
    make_breakable()
    main(prog_name="irdmafs")
