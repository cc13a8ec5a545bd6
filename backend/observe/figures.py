"""Figures: counts and gauges that a component keeps in a dataclass of its own.

A field made by one of the functions here says everything about a figure: its name, its kind and its
meaning. `irdmafs status` and the metrics walk the dataclasses, so a new figure is written down once, where
it is counted.
"""

import dataclasses
from collections import Counter
from typing import Any


def count(help: str) -> Any:
    """Return a field for a number that only grows."""
    return dataclasses.field(default=0, metadata={"kind": "counter", "help": help})


def counts(help: str, label: str) -> Any:
    """Return a field for numbers that only grow, by `label`."""
    metadata = {"kind": "counter", "help": help, "label": label}
    return dataclasses.field(default_factory=Counter, metadata=metadata)


def gauge(help: str) -> Any:
    """Return a field for a number that changes both ways."""
    return dataclasses.field(default=0, metadata={"kind": "gauge", "help": help})


def gauges(help: str, label: str) -> Any:
    """Return a field for numbers that change both ways, by `label`."""
    metadata = {"kind": "gauge", "help": help, "label": label}
    return dataclasses.field(default_factory=dict, metadata=metadata)


def values_of(*figures: Any) -> dict[str, Any]:
    """Return the figures of these dataclasses by name."""
    return {
        field.name: getattr(one, field.name) for one in figures for field in dataclasses.fields(one)
    }
