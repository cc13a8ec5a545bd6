"""Print the reports of `irdmafs status`, `versions` and `doctor` for people.

A key that the daemon does not report shows as "-": the two may be of different releases.
"""

from __future__ import annotations

import json
import shlex
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import click

from ..backend.model.values import human_bytes
from ..mount.mounting import STATUS_XATTR, Mount, MountState, ask_mount, mount_state
from ..mount.stores import LeftoverStore, cluster_of, default_store_path

# The colours of words that tell how something is, on a terminal.
_COLOURS = {
    **dict.fromkeys(("ok", "up", "valid", "current"), "green"),
    **dict.fromkeys(("warn", "degraded", "draining", "expired", "denied", "working"), "yellow"),
    **dict.fromkeys(("fail", "unavailable", "down", "revoked", "stale", "hung"), "red"),
    "info": "cyan",
}


# The rows of a mount: labels, and figures of its report in the form that `shown` takes.
_MOUNT_ROWS = {
    "session": "{session_name}",
    "reason": "{session_reason}",
    "daemon": "process {pid}, irdmafs {version}",
    "up": "{uptime_s:time}",
    "memory of daemon": "{daemon_rss_bytes:bytes}",
    "store": "{store}",
    "{space}": "{store_free_bytes:bytes} free of {store_total_bytes:bytes}",
    "files": "{files:count}",
    "directories": "{directories:count}",
    "inodes": "{inodes:count}",
    "versions kept": "{versions_kept:count}",
    "bytes published": "{bytes_published:bytes}",
    "bytes in working copies": "{bytes_working:bytes}",
    "nodes": "{nodes:count}",
    "open handles": "{open_handles:count} (file limit {open_files_limit:count})",
}
_CLUSTER_ROWS = {
    "cluster": "{name} ({nodes_up:count} of {nodes_known:count} nodes up)",
    "names": "{names}",
    "lease in etcd": "{lease}",
    "node on this host": "{node_here}",
    "cache": "{cache_bytes:bytes} of {cache_limit_bytes:bytes}; {cache_hits:count} opens found it there, "
    "{cache_misses:count} fetched",
    "fetched": "{fetched_bytes:bytes}",
    "read into buffers": "{lent_bytes:bytes}; {lent_buffers:count} are lent",
    "found to be as published": "{checked_bytes:bytes}",
    "RDMA": "{rdma_use}",
    "published": "{published_bytes:bytes}",
    "directories followed": "{followed_directories:count}",
    "directories claimed": "{claimed_directories:count}",
}


@dataclass(frozen=True, slots=True)
class MountReport:
    """A mount and its daemon's report; `status` is empty unless `state` is "ok"."""

    mount: Mount
    state: MountState
    status: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"mountpoint": self.mount.mountpoint, "state": self.state, **self.status}


class _Parts(TypedDict, total=False):
    """The parts of a report that are no figures. A foreign filesystem of the same name has others."""

    warnings: list[str]
    quotas: list[dict[str, Any]]
    requests: dict[str, Any]
    errors: dict[str, Any]
    cluster: dict[str, Any] | None


def parsed(text: bytes) -> dict[str, Any]:
    """Return what a mount tells. Raises ValueError."""
    import msgspec

    try:
        # Not by msgspec, which refuses surrogates: they stand for bytes of a path that are no UTF-8.
        found: dict[str, Any] = json.loads(text)
        json.dumps(found, allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    msgspec.convert(found, _Parts)
    return found


def report(mount: Mount) -> MountReport:
    """Ask a mount for its state. Never waits for long."""
    try:
        return MountReport(mount, "ok", parsed(ask_mount(mount.mountpoint, STATUS_XATTR)))
    except TimeoutError:
        return MountReport(mount, "hung", {})
    except PermissionError:  # of a mount that keeps others out; it answers statfs(2) all the same
        return MountReport(mount, "denied", {})
    except (OSError, ValueError):
        try:
            return MountReport(mount, mount_state(mount.mountpoint), {})
        except OSError:
            return MountReport(mount, "hung", {})  # it answers, but it is not a mount of irdmafs


def printable(text: str) -> str:
    """Return a text that can be printed: bytes that are no UTF-8 and control characters become "?"."""
    text = text.encode(errors="surrogateescape").decode(errors="replace")
    return "".join(one if one.isprintable() or one in "\n\t" else "?" for one in text)


def one_line(text: str) -> str:
    """Return a text that others chose as one line, so that it cannot pass for several."""
    return printable(text).replace("\n", "\\n")


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


class _Figures(string.Formatter):
    """Fills in figures of a report: {name:bytes}, {name:count}, {name:time} or {name}; "-" for none."""

    _forms: Mapping[str, Callable[[object], str]] = {
        "": lambda value: "-" if value is None or value == "" else str(value),
        "bytes": human_bytes,
        "count": _count,
        "time": human_duration,
    }

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs.get(str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        return self._forms[format_spec](value)


def shown(form: str, report: Mapping[str, Any]) -> str:
    """Return a form such as "{bytes:bytes} of {limit}" with figures of a report."""
    return _Figures().vformat(form, (), report)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """Print rows of text on stdout, with words for states in colour on a terminal. Columns of numbers are
    right-aligned. Without column names there is no head line."""
    table = [[one_line(cell) for cell in row] for row in rows]
    if title:
        click.secho(printable(title), bold=True)
    head = [list(columns)] if any(columns) else []
    lines = [*head, *table]
    down = list(zip(*lines, strict=True))
    widths = [max(map(len, cells)) for cells in down]
    right = [all(one == "-" or one[:1].isdigit() for one in cells[len(head) :]) for cells in down]
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
        cells = ("{files:count}", "{bytes_published:bytes}", "{pid}", "{uptime_s:time}")
        rows = []
        for entry in reports:
            figures = (shown(cell, entry.status) for cell in cells)
            session = _session(entry.status)
            rows.append((entry.mount.mountpoint, entry.state, session, *figures))
        columns = ("mountpoint", "state", "session", "files", "published", "pid", "up")
        print_table(columns, rows)
    for entry in reports:
        for line in _advice(entry):
            print(one_line(line))
    if leftovers:
        print()
        print_table(
            ("store", "used", "mountpoint"),
            [(left.path, human_bytes(left.bytes), left.mountpoint or "-") for left in leftovers],
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
        how = shlex.join([path] if cluster is None else [path, "--cluster", cluster])
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
            print(one_line(line))
        return
    cluster = data.get("cluster") or {}
    space = "space in the cluster" if cluster else "store space"
    rows = _rows(_MOUNT_ROWS, {**data, "session_name": _session(data), "space": space})
    if cluster:
        lease = "valid" if cluster.get("session_valid") else "waiting for etcd"
        names = "all are read" if cluster.get("all_names") else "of directories that were used"
        words = {"lease": lease, "names": names, "rdma_use": _rdma(cluster)}
        rows += _rows(_CLUSTER_ROWS, {**cluster, **words})
    print_table(("", ""), rows, title=entry.mount.mountpoint)
    if quotas := data.get("quotas"):
        print()
        cells = ("{path}", "{bytes:bytes}", "{limit_bytes:bytes}", "{inodes:count}",
                 "{limit_inodes:count}")  # fmt: skip
        columns = ("quota of", "bytes", "limit", "inodes", "limit")
        print_table(columns, [[shown(cell, quota) for cell in cells] for quota in quotas])
    for title in ("requests", "errors"):
        counts = data.get(title) or {}
        if counts:
            ordered = sorted(counts.items(), key=lambda item: (-int(item[1]), str(item[0])))
            print()
            print_table((title, "count"), [(str(kind), _count(count)) for kind, count in ordered])
    warnings = data.get("warnings") or ()
    if warnings:
        print()
    for warning in warnings:
        print(one_line(f"warning: {warning}"))


def _rows(forms: Mapping[str, str], figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(shown(label, figures), shown(form, figures)) for label, form in forms.items()]


def _rdma(cluster: Mapping[str, Any]) -> str:
    if cluster.get("rdma") != "on":
        return f"not used: {cluster.get('rdma', '-')}"
    rails = ", ".join(cluster.get("rdma_rails") or ()) or "no port yet"
    return f"{human_bytes(cluster.get('rdma_bytes'))} moved by {rails}"


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
