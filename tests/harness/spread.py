"""How tests are spread over the workers of pytest-xdist: in the order of the rooms, a module at a time.

A unit of work is what one worker runs in one go: the tests of a module on one kind of mount, so that the
mount is made once; of modules with long tests each test by itself. Workers take units in the order in which
tests run without workers, so that the first failure is still about the deepest.
"""

import re

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from harness.guest_tests import WORKER

# Modules with long tests that share nothing.
DIVIDED = frozenset(
    {
        "tests/cluster/test_membership.py",
        "tests/cluster/test_protocols.py",
        "tests/faults/test_random_faults.py",
        "tests/train/test_random_kills.py",
    }
)
# The tests that wait for guests. They come last, and to the worker that started the guests.
GUESTS = "tests/verbs/test_guest.py::test_promises_of_verbs_hold_in_a_guest"
# Tests that have processes import torch: one unit of all kinds of mounts, so that it is imported once.
_TORCH = "tests/posix/test_programs.py::test_torch_"
_SESSION = re.compile(r"\[(kernel|pyfuse3|cluster)[-\]]")


def unit(nodeid: str) -> str:
    for together in (GUESTS, _TORCH):
        if nodeid.startswith(together):
            return together
    module = nodeid.partition("::")[0]
    if module in DIVIDED:
        return nodeid
    session = _SESSION.search(nodeid)
    return f"{module}[{session[1]}]" if session else module


class Spread(LoadScopeScheduling):
    """Hands units to workers, one after the other."""

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        # Otherwise the modules with the most tests would come first.
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)

    def _reschedule(self, node: WorkerController) -> None:
        if list(self.workqueue) == [GUESTS] and node.gateway.id != WORKER:
            node.shutdown()
        else:
            super()._reschedule(node)
