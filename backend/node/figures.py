"""Figures of a store node, by the component that counts them."""

# Functions that return dataclasses.field are called in the class bodies below.
# ruff: noqa: RUF009

from dataclasses import dataclass

from ..observe.figures import count, gauge, gauges


@dataclass(slots=True)
class FileFigures:
    """The files of extents."""

    created_files: int = count("Files made for extents")
    reused_files: int = count("Files of superseded extents that were used for new ones")
    store_bytes: int = gauge("Bytes of extents kept")
    store_free_bytes: int = gauge("Bytes free in the store directory")
    extents: int = gauge("Extents kept")


@dataclass(slots=True)
class CatalogFigures:
    """Extents that were freed, or may be."""

    freed_extents: int = count("Extents removed: superseded, deleted or never published")
    pending_extents: int = gauge("Extents kept that are not published yet")
    named_contents: int = gauge("Contents that an inode names, here or not")
    quarantined_extents: int = gauge("Extents kept for a while though nothing names them")
    quarantined_bytes: int = gauge("Bytes of them")


@dataclass(slots=True)
class ResyncFigures:
    """Filling the groups that a node joins."""

    resync_bytes: int = count("Bytes copied to fill groups that this node joined")
    resync_groups_left: int = gauge("Groups still to be filled")
    resync_bytes_left: int = gauge("Bytes still to be copied to fill them")
    resync_bytes_per_s: int = gauge("Bytes copied in each of the last seconds")
    lost_extents: int = count("Extents that were found on no node")
    damaged_groups: int = gauge(
        "Groups that lack something and of which this node alone is in sync"
    )


@dataclass(slots=True)
class ScrubFigures:
    """Comparing what is kept with what was published."""

    scrubbed_bytes: int = count("Bytes kept here that were read again and compared")
    scrub_finished_seconds: float = gauge(
        "When all extents had last been read again, in seconds since 1970; 0: never"
    )
    wrong_found: int = count("Extents found not to be what was published any more")
    wrong_mended: int = count("Of them, replaced by a right copy")
    wrong_extents: int = gauge("Extents here that are not what was published")
    broken_extents: int = gauge("Of them, those that no node has right")


@dataclass(slots=True)
class NodeFigures:
    """The node's part in its cluster."""

    groups: dict[str, int] = gauges("Placement groups, by this node's state in them", "state")
    lease_valid_seconds: float = gauge("How long this node may still serve without etcd")


@dataclass(slots=True)
class EtcdFigures:
    """The room of the member of etcd that this node uses."""

    etcd_file_bytes: int = gauge("Size of etcd's file, which its quota limits")
    etcd_used_bytes: int = gauge("Bytes of etcd's file in use")
    etcd_quota_bytes: int = gauge("etcd's quota; 0: not known")
    etcd_grown_bytes: int = gauge("Growth of what etcd has in use, in etcd_grown_seconds")
    etcd_grown_seconds: float = gauge("Time in which the growth was seen, an hour at most")
    etcd_alarms: dict[str, int] = gauges("1 for an alarm of etcd that is raised", "alarm")
