"""The result of one check of the doctor."""

from __future__ import annotations

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
