"""What the measures gave, the bars that follow from it, and the tables that show both."""

from __future__ import annotations

import os
import platform
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from .files import MIB
from .machine import meminfo
from .posix_measures import Measure
from .tables import Rates, table, three_digits
from .workspace import Scale


class Cost(NamedTuple):
    """What one run of a measure cost the daemon: requests by kind, processor time in seconds, and
    its resident bytes afterwards."""

    requests: Counter[str]
    cpu_seconds: float
    rss_bytes: int


class Verdict(NamedTuple):
    """A bar in words, the number that counts, None if there is none, and whether that reaches it."""

    text: str
    value: float | None
    reached: bool


class Results:
    """Rates by target and row, costs by (target, measure), and what did not work."""

    def __init__(self, targets: list[str], measures: Sequence[Measure]) -> None:
        self.targets = targets
        self.measures = measures
        self.base = next((name for name in ("tmpfs", "shm") if name in targets), None)
        self.rows = [row for measure in measures for row in measure.rows]
        shown = [replace(row, title=f"{row.title}  [dim]{row.key}[/dim]") for row in self.rows]
        self.rates = Rates(shown, "kernel", self.base, targets, three_digits)
        self.costs: dict[tuple[str, str], list[Cost]] = defaultdict(list)
        self.notes: list[str] = []
        self.failures: list[str] = []

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def judge(self) -> list[Verdict]:
        """Every bar of the kernel session whose row was asked for."""
        value, ratio = self.rates.value, self.rates.ratio
        asked = {row.key for row in self.rows}
        verdicts = []

        def bar(
            row: str, text: str, number: float | None, reached: Callable[[float], bool]
        ) -> None:
            if row in asked:
                verdicts.append(Verdict(text, number, number is not None and reached(number)))

        for row, least in (("write", 0.90), ("read", 0.95), ("mmap", 0.95)):
            found = ratio("kernel", row, "tmpfs")
            bar(row, f"{row} >= {least} of tmpfs", found, least.__le__)
        bar("write", "write faster than shm", ratio("kernel", "write", "shm"), (1.0).__lt__)
        bar("open", "open, read, close p50 <= 40 us", value("kernel", "open"), (40.0).__ge__)
        for row, rate in (("small-write", 5000.0), ("small-cold", 10000.0)):
            bar(row, f"{row} >= {rate:g} files/s", value("kernel", row), rate.__le__)
        return verdicts

    def show(self, console: Console) -> None:
        """Print the table of values, one of costs for each irdmafs mount, and the notes."""
        self.rates.show(console)
        for target in self.targets:
            if any(name == target for name, _ in self.costs):
                self._show_costs(target, console)
        for note in self.notes:
            console.print(Text(note))
        for failure in self.failures:
            console.print(Text(f"FAILED  {failure}", style="bold red"))

    def _show_costs(self, target: str, console: Console) -> None:
        title = f"{target}: what each measure asked of the daemon (mean of the rounds)"
        shown = table(title, "measure", "CPU s", "RSS MiB", "requests", numbers=True)
        shown.columns[3].justify, shown.columns[3].no_wrap = "left", False
        for measure in self.measures:
            if not (costs := self.costs.get((target, measure.name))):
                continue
            total = sum((cost.requests for cost in costs), Counter[str]())
            requests = [f"{kind} {n / len(costs):.4g}" for kind, n in total.most_common()]
            shown.add_row(
                measure.name,
                f"{fmean(cost.cpu_seconds for cost in costs):.3f}",
                f"{costs[-1].rss_bytes / MIB:.1f}",
                ", ".join(requests) or "none",
            )
        console.print(shown)

    def show_bars(self, console: Console) -> bool:
        """Print what the kernel session has to reach, and whether it did. True if it missed one."""
        judged = self.judge()
        for text, number, reached in judged:
            if number is None:
                console.print(f"not measured  {text}")
            else:
                verdict = "reached" if reached else "[bold red]MISSED[/] "
                console.print(f"{verdict}  {text}: {number:,.2f}")
        return not all(verdict.reached for verdict in judged)

    def as_json(self, scale: Scale, rounds: int) -> dict[str, Any]:
        """Everything, every round of it, for a file."""
        return {
            "machine": {
                "kernel": platform.release(),
                "cpus": len(os.sched_getaffinity(0)),
                "memory_bytes": meminfo()["MemTotal"],
                "python": platform.python_version(),
            },
            "scale": asdict(scale),
            "rounds": rounds,
            **self.rates.as_json(),
            "costs": {
                f"{target}/{measure}": [cost._asdict() for cost in costs]
                for (target, measure), costs in self.costs.items()
            },
            "bars": [verdict._asdict() for verdict in self.judge()],
            "notes": self.notes,
            "failures": self.failures,
        }
