"""Figures of a mount of a cluster, by the component that counts them."""

from collections import Counter
from dataclasses import dataclass

from ...observe.figures import count, counts, gauge


@dataclass(slots=True)
class OpenFigures:
    """Opens."""

    cache_hits: int = count("Opens of a version that was in the cache")
    cache_misses: int = count("Opens of a version that had to be fetched")


@dataclass(slots=True)
class PublishFigures:
    """Publishes."""

    publishes: int = count("Versions published")
    published_bytes: int = count("Bytes of published versions sent to store nodes")


@dataclass(slots=True)
class FetchFigures:
    """Contents that came to this host."""

    fetched_files: int = count("Versions fetched from store nodes")
    fetched_bytes: int = count("Bytes fetched from store nodes")
    checked_bytes: int = count("Bytes of them that were found to be what was published")
    lent_files: int = count("Versions read into memory that programs lent, past the cache")
    lent_bytes: int = count("Bytes read into memory that programs lent, past the cache")
    wrong_fetches: int = count("Fetches that were dropped: not the bytes that were published")
    borrowed: int = count("Versions opened where the store node of this host keeps them")


@dataclass(slots=True)
class CacheFigures:
    """The cache, as it is now."""

    cache_bytes: int = gauge("Bytes of versions in the cache")
    cache_limit_bytes: int = gauge("Bytes that the cache may hold")
    cache_evictions: int = count("Versions removed from the cache to make room")


@dataclass(slots=True)
class ClusterFigures:
    """Figures that are looked up in their components when somebody asks."""

    applied_revision: int = gauge("Revision of etcd that the replica is at")
    barriers: int = count("Times that etcd was asked whether the replica is up to date")
    rests: int = count("Times that changes were let pass, as nobody used the mount")
    transactions: int = count("Transactions of etcd")
    followed_directories: int = gauge("Directories that are read without asking etcd")
    claimed_directories: int = gauge("Directories in which files are made without asking etcd")
    exclusive_directories: int = gauge(
        "Directories in which changes are answered before etcd has them"
    )
    deferred_changes: int = count("Changes that were answered before etcd had them")
    lease_transactions: int = count("Transactions of etcd about directories that are followed")
    acknowledgements: int = count("Times that etcd was told how far this mount is")
    locked: int = gauge("Files that this host has locks on for the cluster")
    lock_transactions: int = count("Transactions of etcd about locks")
    session_valid_seconds: float = gauge("How long this mount's session lasts without etcd")
    lent_buffers: int = gauge("Buffers that programs lend")
    prefetched_bytes: int = count("Bytes fetched before anybody opened the file")
    round_trips: int = count("Round trips to store nodes that a caller waited for")
    message_bytes: int = count("Bytes of small files that came or went inside messages")
    rdma_bytes: int = count("Bytes moved by RDMA")
    rdma_fallbacks: int = count("Transfers that began by RDMA and were moved over TCP")
    rdma_reroutes: int = count("Transfers that went on over another queue pair")
    rdma_rails: Counter[str] = counts("Bytes moved by RDMA, by rail", "rail")
