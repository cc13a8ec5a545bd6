"""The doctor: checks of this machine, its RDMA devices, and a cluster's certificates."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail", "info"]


@dataclass(frozen=True, slots=True)
class Check:
    """One finding; `remedy` is empty where there is nothing to do."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""
