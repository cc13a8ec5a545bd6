"""pyverbs, rdma-core's own Python bindings, from Debian (44) or from PyPI (59).

No other module imports it, and this one only when a device was found: hosts without RDMA never load it.
"""

import errno
import functools
import importlib
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

_REMEDY = (
    "install Debian's python3-pyverbs and ibverbs-providers (for its own Python 3), "
    "or irdmafs[verbs] from PyPI"
)
# In the order of enum ibv_wc_status, which is part of the kernel's interface.
STATUS_NAMES = (
    "SUCCESS", "LOC_LEN_ERR", "LOC_QP_OP_ERR", "LOC_EEC_OP_ERR", "LOC_PROT_ERR", "WR_FLUSH_ERR",
    "MW_BIND_ERR", "BAD_RESP_ERR", "LOC_ACCESS_ERR", "REM_INV_REQ_ERR", "REM_ACCESS_ERR", "REM_OP_ERR",
    "RETRY_EXC_ERR", "RNR_RETRY_EXC_ERR", "LOC_RDD_VIOL_ERR", "REM_INV_RD_REQ_ERR", "REM_ABORT_ERR",
    "INV_EECN_ERR", "INV_EEC_STATE_ERR", "FATAL_ERR", "RESP_TIMEOUT_ERR", "GENERAL_ERR",
)  # fmt: skip
_MEANINGS = {
    "RETRY_EXC_ERR": "the peer does not answer",
    "REM_ACCESS_ERR": "the peer does not allow it any more",
    "WR_FLUSH_ERR": "the connection was ended",
}


class VerbsMissing(OSError):
    """pyverbs cannot be used; the text is one line that says what to do."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.ENOSYS, f"{why}; {_REMEDY}")


class Library:
    """The part of pyverbs that is used. `enum` returns the value of IBV_NAME in any supported version."""

    def __init__(self) -> None:
        addr = _module("addr")
        cq, device, mr = _module("cq"), _module("device"), _module("mr")
        qp, wr = _module("qp"), _module("wr")
        self.AHAttr, self.GID, self.GlobalRoute = addr.AHAttr, addr.GID, addr.GlobalRoute
        self.CQ, self.CompChannel = cq.CQ, cq.CompChannel
        self.Context = device.Context
        self.MR, self.DmaBufMR = mr.MR, mr.DmaBufMR
        self.MW, self.MWBindInfo = mr.MW, mr.MWBindInfo
        self.PD = _module("pd").PD
        self.QP, self.QPAttr = qp.QP, qp.QPAttr
        self.QPCap, self.QPInitAttr = qp.QPCap, qp.QPInitAttr
        self.RecvWR, self.SendWR, self.SGE = wr.RecvWR, wr.SendWR, wr.SGE
        self.errors = _Errors(_module("pyverbs_error").PyverbsError)
        self._enums = _enums()
        self.enum = functools.cache(self._find)
        self._channels = threading.Lock()

    def _find(self, name: str) -> int:
        full_name = f"IBV_{name}"
        for group in (self._enums, *vars(self._enums).values()):
            if (group is self._enums or isinstance(group, type)) and hasattr(group, full_name):
                return int(getattr(group, full_name))
        raise VerbsMissing(f"this pyverbs does not know {full_name}")

    def open(self, device: str) -> tuple[Any, int]:
        """Return a Context and the non-blocking descriptor of its asynchronous events. Raises OSError."""
        return self._with_descriptor(functools.partial(self.Context, name=device))

    def completion_channel(self, context: Any) -> tuple[Any, int]:
        """Return a CompChannel and its non-blocking descriptor. Raises OSError."""
        return self._with_descriptor(functools.partial(self.CompChannel, context))

    def _with_descriptor(self, make: Callable[[], Any]) -> tuple[Any, int]:
        # Only this class makes such descriptors, and only while it holds this lock.
        with self._channels, self.errors:
            before = _event_descriptors()
            made = make()
            (fd,) = _event_descriptors() - before
        os.set_blocking(fd, False)
        return made, fd

    def close(self, made: Any) -> None:
        """Close an object. Those of a device that is gone went with it. Raises OSError."""
        try:
            with self.errors:
                made.close()
        except OSError as error:
            if error.errno != errno.EIO:
                raise


@functools.cache
def load() -> Library:
    """Return pyverbs, loaded once. Raises VerbsMissing."""
    return Library()


def immediate(number: int) -> int:
    """Return immediate data in network byte order: pyverbs does not convert it."""
    return socket.htonl(number)


def reason_of(status: int) -> str:
    """Return what the status of a work completion means."""
    name = STATUS_NAMES[status] if status < len(STATUS_NAMES) else f"status {status}"
    return f"{name}: {_MEANINGS[name]}" if name in _MEANINGS else name


class _Errors:
    """A context manager that turns pyverbs' exceptions into OSErrors."""

    def __init__(self, kind: type[Exception]) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, *more: object) -> None:
        if isinstance(error, self._kind):
            code = getattr(error, "error_code", 0) or errno.EIO
            raise OSError(code, str(error).rstrip(". ")) from None


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"pyverbs.{name}")
    except ImportError as error:
        raise VerbsMissing(f"pyverbs cannot be imported ({error})") from None


def _enums() -> Any:
    try:
        return importlib.import_module("pyverbs.libibverbs_enums")
    except ImportError:
        return _module("enums")


def _event_descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[infinibandevent]":
                found.add(int(name))
        except OSError:
            pass
    return found
