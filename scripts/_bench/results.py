"""What was measured, the ratios and bars that follow from it, and the tables that show them."""

from __future__ import annotations

import os
import platform
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .measures import Measure, Row
from .places import meminfo
from .workspace import Scale


@dataclass(frozen=True, slots=True)
class Cost:
    """What one run of a measure cost the daemon: requests by kind, processor time in seconds, and
    its resident bytes afterwards."""

    requests: Counter[str]
    cpu_seconds: float
    rss_bytes: int


@dataclass(slots=True)
class Results:
    """Values by (target, row) and round, costs by (target, measure), and what did not work."""

    targets: list[str]
    measures: Sequence[Measure]
    values: dict[tuple[str, str], dict[int, float]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    costs: dict[tuple[str, str], list[Cost]] = field(default_factory=lambda: defaultdict(list))
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def base(self) -> str | None:
        """The target that the others are compared with."""
        return next((name for name in ("tmpfs", "shm") if name in self.targets), None)

    def rows(self) -> list[Row]:
        return [row for measure in self.measures for row in measure.rows]

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def value(self, target: str, row: str) -> float | None:
        """The median over the rounds, None where there is no value."""
        rounds = self.values.get((target, row))
        return median(rounds.values()) if rounds else None

    def ratio(self, target: str, row: str, base: str | None = None) -> float | None:
        """The median of value / base's value of the same round. ``base`` is ``self.base`` unless
        given."""
        of = self.values.get((target, row), {})
        to = self.values.get((base or self.base or "", row), {})
        ratios = [of[number] / to[number] for number in of if to.get(number)]
        return median(ratios) if ratios else None

    def mean_requests(self, target: str, measure: str) -> dict[str, float]:
        """Requests by kind, those of all rounds divided by the rounds."""
        costs = self.costs.get((target, measure), [])
        total: Counter[str] = Counter()
        for cost in costs:
            total += cost.requests
        return {kind: count / len(costs) for kind, count in total.most_common()}


@dataclass(frozen=True, slots=True)
class Bar:
    """What the kernel session has to reach in ``row``: ``read`` gives the number, None if there
    is none."""

    row: str
    text: str
    read: Callable[[Results], float | None]
    reached: Callable[[float], bool]


def _compared(row: str, least: float, with_: str = "tmpfs") -> Bar:
    return Bar(
        row,
        f"{row} >= {least} of {with_}",
        lambda results: results.ratio("kernel", row, with_),
        lambda ratio: ratio >= least,
    )


def _at_least(row: str, rate: float) -> Bar:
    return Bar(
        row,
        f"{row} >= {rate:g} files/s",
        lambda results: results.value("kernel", row),
        lambda value: value >= rate,
    )


BARS: tuple[Bar, ...] = (
    _compared("write", 0.90),
    _compared("read", 0.95),
    _compared("mmap", 0.95),
    Bar(
        "write",
        "write faster than shm",
        lambda results: results.ratio("kernel", "write", "shm"),
        lambda ratio: ratio > 1,
    ),
    Bar(
        "open",
        "open, read, close p50 <= 40 us",
        lambda results: results.value("kernel", "open"),
        lambda value: value <= 40,
    ),
    _at_least("small-write", 5000),
    _at_least("small-cold", 10000),
)


def judge(results: Results) -> list[tuple[str, float | None, bool]]:
    """(text, number, reached) of every bar whose row was asked for."""
    asked = {row.key for row in results.rows()}
    judged = []
    for bar in BARS:
        if bar.row in asked:
            number = bar.read(results)
            judged.append((bar.text, number, number is not None and bar.reached(number)))
    return judged


def show(results: Results, console: Console) -> None:
    """Print the table of values, one of costs for each irdmafs mount, and the notes."""
    console.print(_value_table(results))
    for target in results.targets:
        if any(name == target for name, _ in results.costs):
            console.print(_cost_table(results, target))
    for note in results.notes:
        console.print(Text(note))
    for failure in results.failures:
        console.print(Text(f"FAILED  {failure}", style="bold red"))


def _value_table(results: Results) -> Table:
    caption = "median (lowest to highest of all rounds)"
    if results.base:
        caption += f"  x ratio to {results.base}: median of the ratios of each round"
    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left", pad_edge=False)
    table.add_column("measure", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    for target in results.targets:
        table.add_column(Text(target), justify="left", no_wrap=True)
    for row in results.rows():
        cells = [_cell(results, target, row.key) for target in results.targets]
        table.add_row(f"{row.title}  [dim]{row.key}[/dim]", row.unit, *cells)
    return table


def _cell(results: Results, target: str, row: str) -> str:
    rounds = results.values.get((target, row))
    if not rounds:
        return "-"
    values = rounds.values()
    text = f"[bold]{_number(median(values))}[/bold]"
    if len(values) > 1:
        text += f" [dim]({_number(min(values))}-{_number(max(values))})[/dim]"
    ratio = results.ratio(target, row)
    return f"{text}  x{ratio:.2f}" if ratio is not None and target != results.base else text


def _number(value: float) -> str:
    for unit in ("", "k", "M"):
        if value < 1000 or unit == "M":
            break
        value /= 1000
    return f"{value:.3g}{unit}" if value < 100 else f"{value:.0f}{unit}"


def _cost_table(results: Results, target: str) -> Table:
    table = Table(
        title=f"{target}: what each measure asked of the daemon (mean of the rounds)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("measure", no_wrap=True)
    table.add_column("CPU s", justify="right")
    table.add_column("RSS MiB", justify="right")
    table.add_column("requests", overflow="fold")
    for measure in results.measures:
        costs = results.costs.get((target, measure.name))
        if not costs:
            continue
        requests = results.mean_requests(target, measure.name)
        table.add_row(
            measure.name,
            f"{fmean(cost.cpu_seconds for cost in costs):.3f}",
            f"{costs[-1].rss_bytes / (1 << 20):.1f}",
            ", ".join(f"{kind} {count:.4g}" for kind, count in requests.items()) or "none",
        )
    return table


def as_json(results: Results, scale: Scale, rounds: int) -> dict[str, Any]:
    """Everything, every round of it, for a file."""
    return {
        "machine": {
            "kernel": platform.release(),
            "cpus": len(os.sched_getaffinity(0)),
            "memory_bytes": meminfo()["MemTotal"],
            "python": platform.python_version(),
        },
        "size_bytes": scale.size,
        "small_files": scale.small_files,
        "names": scale.names,
        "iterations": scale.iterations,
        "rounds": rounds,
        "base": results.base,
        "values": {
            row.key: {
                target: {
                    "unit": row.unit,
                    "median": results.value(target, row.key),
                    "rounds": list(results.values[target, row.key].values()),
                    "ratio": results.ratio(target, row.key),
                }
                for target in results.targets
                if results.values.get((target, row.key))
            }
            for row in results.rows()
        },
        "costs": {
            target: {
                measure.name: [
                    {
                        "requests": dict(cost.requests),
                        "cpu_seconds": cost.cpu_seconds,
                        "rss_bytes": cost.rss_bytes,
                    }
                    for cost in results.costs[target, measure.name]
                ]
                for measure in results.measures
                if results.costs.get((target, measure.name))
            }
            for target in results.targets
        },
        "bars": [
            {"text": text, "value": number, "reached": reached}
            for text, number, reached in judge(results)
        ],
        "notes": results.notes,
        "failures": results.failures,
    }
