"""Print the reports of `irdmafs status`, `versions` and `doctor` for people.

A key that the daemon does not report shows as "-": the two may be of different releases.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import click

from ..backend.model.sizes import human_bytes
from ..mount.mounting import STATUS_XATTR, VERSIONS_XATTR, Mount, MountState, ask_mount, mount_state
from ..mount.stores import LeftoverStore, cluster_of, default_store_path

_ASK_TIMEOUT_S = 5.0

# The colours of words that tell how something is, on a terminal.
_COLOURS = {
    **dict.fromkeys(("ok", "up", "valid", "current"), "green"),
    **dict.fromkeys(("warn", "degraded", "draining", "expired", "denied", "working"), "yellow"),
    **dict.fromkeys(("fail", "unavailable", "down", "revoked", "stale", "hung"), "red"),
    "info": "cyan",
}


@dataclass(frozen=True, slots=True)
class MountReport:
    """A mount and its daemon's report; `status` is empty unless `state` is "ok"."""

    mount: Mount
    state: MountState
    status: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"mountpoint": self.mount.mountpoint, "state": self.state, **self.status}


def read_status(mountpoint: str, timeout_s: float = _ASK_TIMEOUT_S) -> dict[str, Any]:
    """Return the report of a mount's daemon. Raises OSError, TimeoutError among them."""
    return _as_dict(ask_mount(mountpoint, STATUS_XATTR, timeout_s))


def read_versions(path: str, timeout_s: float = _ASK_TIMEOUT_S) -> dict[str, Any]:
    """Return the versions kept of a file on a mount. Raises OSError, TimeoutError among them."""
    return _as_dict(ask_mount(path, VERSIONS_XATTR, timeout_s))


def _as_dict(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return _sane(value) if isinstance(value, dict) else {}


_SCALARS = (str, int, float, bool, type(None))


def _sane(found: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a report that a daemon of irdmafs can have sent. Others come from a foreign
    filesystem of the same name, and are dropped."""
    kept: dict[str, Any] = {}
    for name, value in found.items():
        if isinstance(value, _SCALARS):
            kept[name] = value
        elif isinstance(value, list):
            kept[name] = [one if isinstance(one, _SCALARS) else _sane(one) for one in value
                          if isinstance(one, (*_SCALARS, dict))]  # fmt: skip
        elif isinstance(value, dict):
            kept[name] = _sane(value)
    for name in ("warnings",):
        if not isinstance(kept.get(name, []), list):
            del kept[name]
    quotas = kept.get("quotas", [])
    if not isinstance(quotas, list) or not all(isinstance(one, dict) for one in quotas):
        del kept["quotas"]
    for name in ("requests", "errors", "cluster"):
        if not isinstance(kept.get(name, {}), dict):
            del kept[name]
    return kept


def report(mount: Mount) -> MountReport:
    """Ask a mount for its state. Never waits for long."""
    try:
        found = read_status(mount.mountpoint)
        warnings = [*found.get("warnings", ()), *_cluster_warnings(found.get("cluster") or {})]
        return MountReport(mount, "ok", {**found, "warnings": warnings})
    except TimeoutError:
        return MountReport(mount, "hung", {})
    except (OSError, ValueError):
        try:
            return MountReport(mount, mount_state(mount.mountpoint), {})
        except OSError:
            return MountReport(mount, "hung", {})  # it answers, but it is not a mount of irdmafs


def _cluster_warnings(cluster: Mapping[str, Any]) -> list[str]:
    """Return what a mount of a cluster waits for, and where to look."""
    if not cluster:
        return []
    warnings = []
    if not cluster.get("session_valid", True):
        etcd = ", ".join(map(str, cluster.get("etcd") or ()))
        warnings.append(
            f"etcd at {etcd} does not answer: calls wait for it, and fail after a while"
        )
    if cluster.get("nodes_up", 1) == 0:
        warnings.append(
            "no store node is up: nothing can be published, and only what is cached here can be read "
            "(irdmafs cluster status)"
        )
    if wrong := cluster.get("wrong_fetches", 0):
        warnings.append(
            f"{wrong} fetches brought other bytes than were published, and were dropped: the log says from "
            "which store nodes"
        )
    return warnings


def printable(text: str) -> str:
    """Return a text that can be printed: bytes that are no UTF-8 and control characters become "?"."""
    text = text.encode(errors="surrogateescape").decode(errors="replace")
    return "".join(one if one.isprintable() or one in "\n\t" else "?" for one in text)


def human_duration(seconds: object) -> str:
    """Return a duration in two units at most: "45 s", "2 h 5 min", "3 d 4 h"."""
    if not isinstance(seconds, int | float):
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    units = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    while len(units) > 1 and units[0][0] == 0:
        units.pop(0)
    return " ".join(f"{count} {unit}" for count, unit in units[:2] if count or unit == "s")


def _count(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return "-" if value is None else ("yes" if value else "no")
    return f"{value:,}" if isinstance(value, int) else printable(str(value))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """Print rows of text on stdout, with words for states in colour on a terminal. Columns of numbers are
    right-aligned. Without column names there is no head line."""
    table = [[printable(cell) for cell in row] for row in rows]
    if title:
        click.secho(printable(title), bold=True)
    head = [list(columns)] if any(columns) else []
    lines = [*head, *table]
    down = list(zip(*lines, strict=True))
    widths = [max(map(len, cells)) for cells in down]
    right = [
        all(cell == "-" or cell[:1].isdigit() for cell in cells[len(head) :]) for cells in down
    ]
    for line in lines:
        cells = [
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(line, widths, right, strict=True)
        ]
        cells[-1] = cells[-1].rstrip()
        colours = (_COLOURS.get(cell) for cell in line)
        click.echo("  ".join(map(_coloured, cells, colours)).rstrip())


def _coloured(text: str, colour: str | None) -> str:
    return click.style(text, fg=colour) if colour else text


def print_overview(reports: Sequence[MountReport], leftovers: Sequence[LeftoverStore]) -> None:
    """Print one line for each mount, and for each store that no mount uses."""
    if not reports:
        print("no irdmafs mounts")
    else:
        columns = ("mountpoint", "state", "session", "files", "published", "pid", "up")
        rows = []
        for entry in reports:
            data = entry.status
            rows.append(
                (
                    entry.mount.mountpoint,
                    entry.state,
                    _session(data),
                    _count(data.get("files")),
                    human_bytes(data.get("bytes_published")),
                    str(data.get("pid", "-")),
                    human_duration(data.get("uptime_s")),
                )
            )
        print_table(columns, rows)
    for entry in reports:
        for line in _advice(entry):
            print(printable(line))
    if leftovers:
        rows_left = [
            (left.path, human_bytes(left.bytes_used), left.mountpoint or "-") for left in leftovers
        ]
        print()
        print_table(
            ("store", "used", "mountpoint"),
            rows_left,
            title="stores without a mount (mount there again to use them, "
            "or irdmafs umount --discard DIR)",
        )


def _session(data: Mapping[str, Any]) -> str:
    if "session" not in data:
        return "-"
    return f"{data['session']}{', passthrough' if data.get('passthrough') else ''}"


def _advice(entry: MountReport) -> list[str]:
    path = entry.mount.mountpoint
    if entry.state == "stale":
        store = default_store_path(path)
        cluster = cluster_of(store) if store is not None else None
        how = f"{path} --cluster {cluster}" if cluster is not None else path
        return [f"{path} is stale: its daemon is gone. Heal it with: irdmafs mount {how}"]
    if entry.state == "hung":
        return [f"{path} does not answer. Detach it with: irdmafs umount --lazy {path}"]
    if entry.state == "denied":
        return [f"{path} belongs to another user, who did not mount it with -o allow_other"]
    return [f"{path}: warning: {warning}" for warning in entry.status.get("warnings") or ()]


def print_mount(entry: MountReport) -> None:
    """Print everything that one mount reports."""
    data = entry.status
    if entry.state != "ok":
        for line in _advice(entry):
            print(printable(line))
        return
    opened, limit = data.get("open_files_limit"), data.get("open_handles")
    rows = [
        ("session", _session(data)),
        ("reason", str(data.get("session_reason") or "-")),
        ("daemon", f"process {data.get('pid', '-')}, irdmafs {data.get('version', '-')}"),
        ("up", human_duration(data.get("uptime_s"))),
        ("memory of daemon", human_bytes(data.get("daemon_rss_bytes"))),
        ("store", str(data.get("store", "-"))),
        (
            "space in the cluster" if "cluster" in data else "store space",
            f"{human_bytes(data.get('store_free_bytes'))} free of "
            f"{human_bytes(data.get('store_total_bytes'))}",
        ),
        ("files", _count(data.get("files"))),
        ("directories", _count(data.get("directories"))),
        ("inodes", _count(data.get("inodes"))),
        ("versions kept", _count(data.get("versions_kept"))),
        ("bytes published", human_bytes(data.get("bytes_published"))),
        ("bytes in working copies", human_bytes(data.get("bytes_working"))),
        ("nodes", _count(data.get("nodes"))),
        ("open handles", f"{_count(limit)} (file limit {_count(opened)})"),
    ]
    rows += _cluster_rows(data.get("cluster") or {})
    print_table(("", ""), rows, title=entry.mount.mountpoint)
    _print_quotas(data.get("quotas") or ())
    for title in ("requests", "errors"):
        counts = data.get(title) or {}
        if counts:
            ordered = sorted(counts.items(), key=lambda item: (-int(item[1]), str(item[0])))
            print()
            print_table(
                (title, "count"),
                [(str(kind), _count(count)) for kind, count in ordered],
            )
    warnings = data.get("warnings") or ()
    if warnings:
        print()
    for warning in warnings:
        print(printable(f"warning: {warning}"))


def _print_quotas(quotas: Sequence[Mapping[str, Any]]) -> None:
    if not quotas:
        return
    rows = [
        (
            str(quota.get("path", "-")),
            human_bytes(quota.get("bytes")),
            human_bytes(quota.get("limit_bytes")),
            _count(quota.get("inodes")),
            _count(quota.get("limit_inodes")),
        )
        for quota in quotas
    ]
    print()
    columns = ("quota of", "bytes", "limit", "inodes", "limit")
    print_table(columns, rows)


def _cluster_rows(cluster: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows that only a mount of a cluster has."""
    if not cluster:
        return []
    up, known = cluster.get("nodes_up"), cluster.get("nodes_known")
    opens = f"{_count(cluster.get('cache_hits'))} opens found it there"
    return [
        ("cluster", f"{cluster.get('name', '-')} ({_count(up)} of {_count(known)} nodes up)"),
        ("lease in etcd", "valid" if cluster.get("session_valid") else "waiting for etcd"),
        ("node on this host", str(cluster.get("node_here") or "-")),
        (
            "cache",
            f"{human_bytes(cluster.get('cache_bytes'))} of "
            f"{human_bytes(cluster.get('cache_limit_bytes'))}; {opens}, "
            f"{_count(cluster.get('cache_misses'))} fetched",
        ),
        ("fetched", human_bytes(cluster.get("fetched_bytes"))),
        (
            "read into buffers",
            f"{human_bytes(cluster.get('lent_bytes'))}; {_count(cluster.get('lent_buffers'))} are lent",
        ),
        ("found to be as published", human_bytes(cluster.get("checked_bytes"))),
        ("RDMA", _rdma(cluster)),
        ("published", human_bytes(cluster.get("published_bytes"))),
        ("directories followed", _count(cluster.get("followed_directories"))),
        ("directories claimed", _count(cluster.get("claimed_directories"))),
    ]


def _rdma(cluster: Mapping[str, Any]) -> str:
    if cluster.get("rdma") != "on":
        return f"not used: {cluster.get('rdma', '-')}"
    rails = ", ".join(cluster.get("rdma_rails") or ()) or "no port yet"
    return f"{human_bytes(cluster.get('rdma_bytes'))} moved by {rails}"


def print_versions(path: str, data: Mapping[str, Any]) -> None:
    """Print the versions kept of one file, the newest first."""
    rows = []
    for entry in data.get("versions") or ():
        mtime_ns = entry.get("mtime_ns")
        when = "-"
        if isinstance(mtime_ns, int):
            when = datetime.fromtimestamp(mtime_ns / 1e9).isoformat(" ", "milliseconds")
        openers = ", ".join(map(str, entry.get("openers") or ())) or "-"
        rows.append(
            (
                str(entry.get("version", "-")),
                str(entry.get("state", "-")),
                human_bytes(entry.get("size")),
                when,
                openers,
            )
        )
    print_table(
        ("version", "state", "size", "modified", "open in processes"),
        rows,
        title=f"{path} (inode {data.get('ino', '-')})",
    )


def print_checks(rows: Iterable[tuple[str, str, str, str]]) -> None:
    """Print the doctor's findings: (name, verdict, found, remedy)."""
    rows = list(rows)
    width = max((len(name) for name, *_ in rows), default=0)
    for name, verdict, found, remedy in rows:
        shown = _coloured(verdict.ljust(4), _COLOURS.get(verdict))
        click.echo(f"{printable(name).ljust(width)}  {shown}  {printable(found)}")
        if remedy:
            # Remedies are sentences, so each has a line of its own.
            click.echo(printable(f"{' ' * width}        -> {remedy}"))
