"""Tables of what was measured: medians over rounds, ratios to a base, and whether a bar is reached."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def table(title: str, *columns: str, numbers: bool = False, **options: Any) -> Table:
    """An empty table. `numbers`: all columns but the first are of numbers."""
    made = Table(
        title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, **options
    )
    for number, column in enumerate(columns):
        made.add_column(
            Text(column), no_wrap=True, justify="right" if numbers and number else "left"
        )
    return made


four_digits = "{:,.4g}".format


def three_digits(value: float) -> str:
    """Such as 17.5k."""
    for unit in ("", "k", "M"):
        if value < 1000 or unit == "M":
            break
        value /= 1000
    return f"{value:.3g}{unit}" if value < 100 else f"{value:.0f}{unit}"


def spread(values: Sequence[float], number: Callable[[float], str] = four_digits) -> str:
    """The median, and the lowest to the highest if there are several."""
    text = f"[bold]{number(median(values))}[/]"
    if len(values) < 2:
        return text
    return f"{text} [dim]({number(min(values))}-{number(max(values))})[/]"


@dataclass(frozen=True, slots=True)
class Row:
    """A measured quantity. `bar`: the least ratio of ours to the base, where more is better.

    `others`: the least ratios of ours to other columns.
    """

    key: str
    title: str
    unit: str
    bar: float | None = None
    others: Mapping[str, float] = field(default_factory=dict)


class Rates:
    """Values by column and row, one for each round; ratios are taken within a round.

    `base` is the column that others are compared with, `ours` the one that has to reach the bars.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        ours: str,
        base: str | None,
        columns: Sequence[str] = (),
        number: Callable[[float], str] = four_digits,
    ) -> None:
        self.rows = rows
        self.ours = ours
        self.base = base
        self._columns = columns
        self._number = number
        self._values: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)

    def add(self, column: str, row: str, round_: int, value: float) -> None:
        self._values[column, row][round_] = value

    def values(self, column: str, row: str) -> list[float]:
        return list(self._values[column, row].values())

    def value(self, column: str, row: str) -> float | None:
        """The median over the rounds, None where there is no value."""
        values = self.values(column, row)
        return median(values) if values else None

    def ratio(self, column: str, row: str, base: str | None = None) -> float | None:
        """The median of value / base's value of the same round."""
        of, to = self._values[column, row], self._values[base or self.base or "", row]
        ratios = [of[i] / to[i] for i in of if to.get(i)]
        return median(ratios) if ratios else None

    def missed(self) -> list[Row]:
        """The rows in which a bar was not reached, or nothing was measured."""
        return [
            row
            for row in self.rows
            if any(ratio is None or ratio < bar for _, bar, ratio in self._bars(row))
        ]

    def _bars(self, row: Row) -> list[tuple[str, float, float | None]]:
        """The columns that ours has a bar to, the bar and the ratio."""
        bars = [] if row.bar is None else [(self.base or "", row.bar)]
        return [
            (column, bar, self.ratio(self.ours, row.key, column))
            for column, bar in (*bars, *row.others.items())
        ]

    def show(self, console: Console) -> None:
        columns = self._columns or list(
            dict.fromkeys(column for column, row in self._values if self.values(column, row))
        )
        caption = "median (lowest to highest of all rounds)"
        if self.base:
            caption += f"; x: median ratio to {self.base}"
        has_bars = any(self._bars(row) for row in self.rows)
        heads = ["measure", "unit", *columns, *(["bar"] if has_bars else [])]
        shown = table("", *heads, caption=caption, caption_justify="left")
        for row in self.rows:
            cells = [self._cell(column, row.key) for column in columns]
            bars = [self._verdict(row)] if has_bars else []
            shown.add_row(row.title, row.unit, *cells, *bars)
        console.print(shown)

    def _verdict(self, row: Row) -> str:
        verdicts = []
        for column, bar, ratio in self._bars(row):
            if ratio is None:
                verdict = "not measured"
            else:
                verdict = "reached" if ratio >= bar else "[bold red]missed[/]"
                if column != self.base:
                    verdict += f" (x{ratio:.2f} of {column})"
            verdicts.append(f"x{bar:g} {verdict}")
        return ", ".join(verdicts)

    def _cell(self, column: str, row: str) -> str:
        values = self.values(column, row)
        if not values:
            return "-"
        text, ratio = spread(values, self._number), self.ratio(column, row)
        return text if ratio is None or column == self.base else f"{text}  x{ratio:.2f}"

    def as_json(self) -> dict[str, Any]:
        """Return every number."""
        found = {
            f"{column}/{row}": {"rounds": list(rounds.values()), "ratio": self.ratio(column, row)}
            for (column, row), rounds in list(self._values.items())
            if rounds
        }
        return {"base": self.base, "values": found}


def save(figures: dict[str, Any], path: Path | None) -> None:
    """Write figures into a file, if there is to be one."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")
