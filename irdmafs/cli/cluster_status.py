"""Print a cluster for people: its state, and progress bars."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, Self

import click

from ..backend.model.policy import LEVELS
from ..backend.model.values import human_bytes
from .status import human_duration, one_line, print_table, printable

_NODE_COLUMNS = (
    *("node", "state", "address", "where", "weight"),
    *("primary", "in sync", "joining", "used", "free", "scrubbed"),
)
_LINE_PERIOD_S = 5.0


def print_cluster(data: Mapping[str, Any]) -> None:
    """Print the report of `irdmafs cluster status` for people."""
    settings = data["settings"]
    stripe_bytes = settings["stripe_bytes"]
    rows = [
        ("health", data["health"]),
        ("etcd", ", ".join(data["etcd"])),
        ("room in etcd", _etcd_line(data["etcd_room"])),
        ("replicas", str(settings["replicas"])),
        ("stripes of", human_bytes(stripe_bytes) if stripe_bytes else "-"),
        ("lease", human_duration(settings["lease_ttl_s"])),
        ("groups", _groups_line(data["groups"])),
        ("being moved", _moving_line(data["moving"])),
    ]
    print_table(("", ""), rows, title=f"cluster {data['cluster']}")
    print()
    if data["nodes"]:
        print_table(_NODE_COLUMNS, [_node_row(node) for node in data["nodes"]])
    else:
        print("no store nodes")
    if data["mounts"]:
        print()
        keys = ("host", "mountpoint", "pid", "version")
        rows_of_mounts = [[str(mount[key]) for key in keys] for mount in data["mounts"]]
        print_table(("mount on", *keys[1:]), rows_of_mounts)
    lines = [f"WARNING: {warning}" for warning in data["warnings"]]
    lines += [f"! {problem}" for problem in data["problems"]]
    lines += [f"  {note}" for note in data["notes"]]
    if lines:
        print("", *map(one_line, lines), sep="\n")


def _etcd_line(room: Mapping[str, Any]) -> str:
    """Return the room of the fullest member of etcd."""
    members = [one for one in room["members"].values() if "file_bytes" in one]
    if not members:
        return "not known"
    fullest = max(members, key=lambda one: int(one["file_bytes"]))
    text = f"{human_bytes(fullest['file_bytes'])}, {human_bytes(fullest['used_bytes'])} in use"
    if fullest["quota_bytes"]:
        text += f", quota {human_bytes(fullest['quota_bytes'])}"
    alarms = ", ".join(room["alarms"])
    return f"ALARM {alarms}; {text}" if alarms else text


def _groups_line(groups: Mapping[str, Any]) -> str:
    if not groups["total"]:
        return "none yet: the first file makes them"
    bad = [f"{groups[name]:,} {name}" for name in ("degraded", "unavailable") if groups[name]]
    return f"{groups['total']:,}, {', '.join(bad) or 'all in sync'}"


def _moving_line(moving: Mapping[str, Any]) -> str:
    if not moving["replicas"]:
        return "nothing"
    return (
        f"{moving['replicas']:,} replicas of groups, about {human_bytes(moving['bytes_about'])}, "
        f"{human_duration(moving['seconds_about'])}"
    )


def _node_row(node: Mapping[str, Any]) -> tuple[str, ...]:
    labels = node["labels"]
    return (
        node["id"],
        node["state"],
        f"{node['address']}:{node['port']}" if "address" in node else "-",
        "/".join(labels[name] for name in LEVELS if labels.get(name)) or "-",
        f"{node['weight']:g}" if node["weight"] is not None else "-",
        *(str(node[f"groups_{kind}"]) for kind in ("primary", "in_sync", "joining")),
        human_bytes(node.get("bytes")),
        human_bytes(node.get("free_bytes")),
        _scrubbed(node),
    )


def _scrubbed(node: Mapping[str, Any]) -> str:
    """Return when a node last compared everything with its digests, or how far it has come."""
    share, age_s = node.get("scrub_share"), node.get("scrub_age_s")
    if share is not None:
        return f"{share:.0%} done"
    if age_s is None:
        return "never" if "wrong_extents" in node else "-"
    return f"{human_duration(age_s)} ago"


class Progress:
    """A progress bar on a terminal; elsewhere a line now and then."""

    def __init__(self, title: str, unit: str, total: int) -> None:
        self._title = printable(title)
        self._unit = unit
        self._bar: Any = click.progressbar(
            length=total, label=self._title, item_show_func=lambda _: self._counts(),
            show_percent=False,
        )  # fmt: skip
        self._is_shown = sys.stdout.isatty()
        self._next_line_s = 0.0
        self._printed = ""

    def __enter__(self) -> Self:
        if self._is_shown:
            self._bar.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if self._is_shown:
            self._bar.__exit__(kind, *error)
        elif kind is None:
            self._print()

    def update(self, done: int, total: int | None = None) -> None:
        bar = self._bar
        bar.length = bar.length if total is None else total
        bar.finished = False
        bar.make_step(done - bar.pos)
        if self._is_shown:
            bar.render_progress()
        elif time.monotonic() >= self._next_line_s:
            self._next_line_s = time.monotonic() + _LINE_PERIOD_S
            self._print()

    def _counts(self) -> str:
        return f"{self._bar.pos} of {self._bar.length} {self._unit}"

    def _print(self) -> None:
        counts = self._counts()
        if counts != self._printed:
            self._printed = counts
            print(f"{self._title}: {counts}", flush=True)
