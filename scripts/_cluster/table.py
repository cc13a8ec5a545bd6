"""Tables of measured rates: medians over rounds, ratios to a base, and whether a bar is reached."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """A rate, more is better. `bar`: the least ratio of ours to the base."""

    key: str
    title: str
    unit: str
    bar: float | None = None


class Rates:
    """Values by column and row, one for each round; ratios are taken within a round."""

    def __init__(self, rows: Sequence[Row], ours: str, base: str) -> None:
        self.rows = rows
        self.ours = ours
        self.base = base
        self._values: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
        self.notes: list[str] = []

    def add(self, column: str, row: str, round_: int, value: float) -> None:
        self._values[column, row][round_] = value

    def values(self, column: str, row: str) -> list[float]:
        return list(self._values[column, row].values())

    def ratio(self, column: str, row: str) -> float | None:
        """The median of value / base's value of the same round."""
        of, to = self._values[column, row], self._values[self.base, row]
        ratios = [of[i] / to[i] for i in of if to.get(i)]
        return median(ratios) if ratios else None

    def missed(self) -> list[Row]:
        """The rows in which the bar was not reached, or nothing was measured."""
        found = []
        for row in self.rows:
            ratio = self.ratio(self.ours, row.key)
            if row.bar is not None and (ratio is None or ratio < row.bar):
                found.append(row)
        return found

    def show(self, console: Console) -> None:
        columns = list(dict.fromkeys(column for column, _ in self._values))
        caption = f"median (lowest to highest); x: median ratio to {self.base}"
        table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left", pad_edge=False)
        table.add_column("measure", no_wrap=True)
        table.add_column("unit", no_wrap=True)
        for column in columns:
            table.add_column(column, no_wrap=True)
        table.add_column("bar", no_wrap=True)
        missed = self.missed()
        for row in self.rows:
            bar = ""
            if row.bar is not None:
                verdict = "[bold red]missed[/]" if row in missed else "reached"
                if not self.values(self.ours, row.key) or not self.values(self.base, row.key):
                    verdict = "not measured"
                bar = f"x{row.bar:g} {verdict}"
            cells = (self._cell(column, row.key) for column in columns)
            table.add_row(row.title, row.unit, *cells, bar)
        console.print(table)
        for note in self.notes:
            console.print(f"note: {note}")

    def _cell(self, column: str, row: str) -> str:
        values = self.values(column, row)
        if not values:
            return "-"
        text = f"[bold]{median(values):,.4g}[/]"
        if len(values) > 1:
            text += f" [dim]({min(values):,.4g}-{max(values):,.4g})[/]"
        ratio = self.ratio(column, row)
        return text if ratio is None or column == self.base else f"{text} x{ratio:.2f}"

    def save(self, path: Path) -> None:
        """Every number, as JSON."""
        found = {
            f"{column}/{row}": {"rounds": list(rounds.values()), "ratio": self.ratio(column, row)}
            for (column, row), rounds in self._values.items()
        }
        path.write_text(json.dumps({"base": self.base, "values": found}, indent=1) + "\n")
