"""A cluster's state for people and programs: a verdict, the reasons for it, and everything as JSON."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from ..etcd.admin import Room, remedy
from ..etcd.leases import LEASE_BITS
from ..kv import WentBack
from ..kv.faults import Fault, summary
from ..model.placement import policy_of, replicas_of
from ..model.policy import policy_of_rule
from ..model.records import GROUP_BUCKET_BITS, MountRecord
from ..model.values import counted
from .history import described
from .overview import Cluster, NodeReport

Health = Literal["ok", "degraded", "unavailable"]
HEALTHS: tuple[Health, ...] = ("ok", "degraded", "unavailable")

_FULL_SHARE = 0.05
_FILES_SHOWN = 5


def health(found: Cluster) -> tuple[Health, list[str]]:
    """Return the verdict, and a line for each thing that is wrong."""
    problems = [*_problems(found)]
    worst: Health = max((how for how, _ in problems), key=HEALTHS.index, default="ok")
    return worst, [line for _, line in problems]


def _problems(found: Cluster) -> Iterator[tuple[Health, str]]:
    live = found.live
    if found.went_back:
        yield "unavailable", str(WentBack(described(found.went_back)).strerror)
    yield from _faults_of_etcd(found)
    if not live:
        yield "unavailable", "no store node is up; start one with: irdmafs serve STORE"
    elif all(found.state_of(node) != "up" for node in live):
        yield "degraded", "every store node is draining: nothing can be moved"
    else:
        for line in _nodes_to_add(found):
            yield "degraded", line
    for line in filter(None, (_node_problem(found, node) for node in found.nodes())):
        yield "degraded", line
    if lost := found.unavailable():
        groups = counted(lost, "group")
        yield "unavailable", f"{groups} without a live replica in sync: files there must wait"
    for lack, n in sorted(found.missing().items()):
        yield "degraded", f"{counted(n, 'group')} without {lack} of the replicas"
    yield from _damaged_files(found)
    count, some = found.faults()
    if count:
        yield (
            "degraded",
            summary(count, [_described(found, fault) for fault in some[:_FILES_SHOWN]]),
        )


def _faults_of_etcd(found: Cluster) -> Iterator[tuple[Health, str]]:
    """Yield the faults of etcd's members, each once: alarms are those of all."""
    told: dict[str, Health] = {}
    for room in found.etcd_room.values():
        if isinstance(room, Room) and (fault := remedy(room)):
            told[fault] = "unavailable" if room.alarms else "degraded"
    for fault, how in told.items():
        yield how, fault


def _damaged_files(found: Cluster) -> Iterator[tuple[Health, str]]:
    damaged = found.damaged()
    hopeless = [ino for ino, may_be_mended in damaged.items() if not may_be_mended]
    waiting = [ino for ino, may_be_mended in damaged.items() if may_be_mended]
    if hopeless:
        yield (
            "unavailable",
            f"{counted(len(hopeless), 'file')} of which no node has what was published: "
            f"{_named(found, hopeless)}; publish them again, start the node that has a sound copy, "
            "or read what there is with: irdmafs mount --no-verify",
        )
    if waiting:
        yield (
            "degraded",
            f"{counted(len(waiting), 'file')} with fewer sound replicas than they should have: "
            f"{_named(found, waiting)}; a right copy is being fetched as soon as a node can give it",
        )


def _described(found: Cluster, fault: Fault) -> str:
    """Describe a damaged record and, if it is known, who wrote it."""
    members = found.members
    record = members.sessions.get(fault.session or members.session_of(fault.lease) or 0)
    writer = ""
    if record is not None:
        writer = f", written by {record.host}:{record.mountpoint}"
    elif fault.lease:
        writer = f", written with the certificate #{fault.lease >> LEASE_BITS:06x}"
    elif fault.session:
        writer = f", written in session {fault.session}"
    path = f" ({found.paths[fault.ino]})" if fault.ino in found.paths else ""
    return f"{fault.what}{path}{writer}: {fault.why}"


def _named(found: Cluster, inos: Sequence[int]) -> str:
    names = [found.paths.get(ino, f"inode {ino}") for ino in inos[:_FILES_SHOWN]]
    more = len(inos) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _nodes_to_add(found: Cluster) -> Iterator[str]:
    """Yield a line for each case in which more replicas are wanted than nodes may keep one."""
    settings = found.members.known_settings
    usual = settings.replicas if settings else 0
    wanted = {0: usual}  # by policy
    for pool in found.pools_in_use():
        group = pool << GROUP_BUCKET_BITS
        policy = policy_of(group)
        wanted[policy] = max(wanted.get(policy, 0), replicas_of(group))
    candidates = found.members.candidates()
    for policy, replicas in sorted(wanted.items()):
        rule = found.members.policies.get(policy, "")
        admits = policy_of_rule(rule).admits
        fitting = sum(admits(candidate) for candidate in candidates if candidate.weight > 0)
        if fitting >= replicas:
            continue
        fit = f" within the placement {rule!r}" if rule else ""
        line = f"{counted(fitting, 'node')}{fit} cannot keep {replicas} replicas"
        line += f"; add {replicas - fitting}"
        if replicas > usual:
            line += (
                ", or make the files anew that were created where user.irdmafs.replicas was "
                f"{replicas}"
            )
        yield line


def _node_problem(found: Cluster, node: int) -> str:
    """Return the fault of a node, and the remedy; "" for none."""
    at, alone = found.members.nodes.get(node), len(found.only_copies(node))
    name = f"node {node:016x}"
    if at is not None:
        if refused := found.reports.get(node, NodeReport()).get("credential_problems"):
            return f"{name} goes on with its former credentials: {'; '.join(refused)}"
        if at.free_bytes >= _FULL_SHARE * at.total_bytes:
            return ""
        return (
            f"{name} is nearly full, {at.free_bytes >> 20} MiB of {at.total_bytes >> 20} MiB "
            "free; add nodes or remove files"
        )
    kept = f"{name} is down, and with it the only copy of {counted(alone, 'group')}"
    if node not in found.members.records:
        if not alone:
            return ""  # its groups are about to be moved off it
        return (
            f"{kept}; it was removed: give up what only it has with: irdmafs cluster remove "
            f"{node:016x} --force, or have it back: irdmafs cluster admit {node:016x}"
        )
    if alone:
        return f"{kept}; start it again"
    return f"{name} is down; start it again, or: irdmafs cluster remove {node:016x}"


def _unfit_rules(found: Cluster) -> list[str]:
    """Return the placement rules that no node obeys. Rules stay for ever, so this is no fault."""
    candidates = found.members.candidates()
    return [
        f"no node that is up fits the placement {rule!r}: below directories that have it "
        "nothing can be written"
        for rule in found.members.policies.values()
        if candidates and not any(map(policy_of_rule(rule).admits, candidates))
    ]


def _quarantined(found: Cluster) -> list[str]:
    """Describe, for each node, the extents that it keeps although no inode names them."""
    return [
        f"node {node:016x} keeps {counted(extents, 'extent')} ({size >> 20} MiB) in quarantine that "
        "nothing names: they go in time, or when room is wanted"
        for node, report in sorted(found.reports.items())
        if (extents := report.get("quarantined_extents", 0))
        and (size := report.get("quarantined_bytes"))
    ]


def report_of(found: Cluster) -> dict[str, Any]:
    """Return everything that was read, as JSON."""
    verdict, problems = health(found)
    settings = found.members.known_settings
    return {
        "health": verdict,
        "problems": problems,
        "notes": [*found.notes, *_unfit_rules(found), *_quarantined(found)],
        "settings": None if settings is None else msgspec.structs.asdict(settings),
        "nodes": [_node_json(found, node) for node in found.nodes()],
        "groups": {
            "total": len(found.groups),
            "unavailable": found.unavailable(),
            "degraded": found.missing().total(),
            "missing_replicas": {str(lack): n for lack, n in found.missing().items()},
        },
        "moving": found.moving(),
        "etcd_room": _etcd_json(found),
        "damaged_files": [
            {"ino": ino, "path": found.paths.get(ino), "may_be_mended": may_be_mended}
            for ino, may_be_mended in found.damaged().items()
        ],
        "mounts": [
            {"session": session, **_told_of(record)}
            for session, record in sorted(found.members.sessions.items())
        ],
    }


def _node_json(found: Cluster, node: int) -> dict[str, Any]:
    record, at = found.members.records.get(node), found.members.nodes.get(node)
    # The node's own report comes first, so that what etcd knows replaces it.
    result: dict[str, Any] = {
        **found.reports.get(node, NodeReport()),
        "id": f"{node:016x}",
        "state": found.state_of(node),
        "weight": record.weight if record else None,
        "labels": record.labels if record else {},
        "groups_primary": found.primary[node],
        "groups_in_sync": found.in_sync[node],
        "groups_joining": found.joining[node],
    }
    if at is not None:
        result |= {
            "address": f"[{at.address}]" if ":" in at.address else at.address,
            "port": at.control_port,
            "host": at.host,
            "store": at.store,
            "total_bytes": at.total_bytes,
            "free_bytes": at.free_bytes,
            "version": at.version,
        }
    return result


def _etcd_json(found: Cluster) -> dict[str, Any]:
    """Return the room of each member of etcd."""
    alarms: set[str] = set()
    members: dict[str, dict[str, Any]] = {}
    for address, room in found.etcd_room.items():
        if isinstance(room, Room):
            alarms.update(room.alarms)
            members[address] = room._asdict()
        else:
            members[address] = {"error": room.strerror or str(room)}
    return {"alarms": sorted(alarms), "members": members}


def _told_of(record: MountRecord) -> dict[str, Any]:
    return {
        key: value for key, value in msgspec.structs.asdict(record).items() if key != "key_digest"
    }
