"""The report of a mount: its status, its warnings, and its figures for metrics."""

import os
import platform
import resource
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from .._version import __version__
from ..backend.store.api import Store
from ..fuse.counts import Counts
from ..fuse.wakeups import FastWakeups
from ..mount_options import MountConfig
from ..posix import quotas

if TYPE_CHECKING:
    from ..backend.store.remote.store import RemoteStore

_LOW_SPACE_SHARE = 0.05


class SessionKind(NamedTuple):
    """Which session serves a mount. `reason`: why it is not the kernel session; `wakeups`: of the kernel
    session, None: it is another one."""

    name: str
    reason: str
    wakeups: FastWakeups | None


class Status:
    """The answers to questions about one mount."""

    def __init__(
        self,
        config: MountConfig,
        store: Store,
        cluster: "RemoteStore | None",
        kind: SessionKind,
        counts: Counts,
        census: Callable[[], dict[str, int]],
    ) -> None:
        self._config = config
        self._store = store
        self._cluster = cluster
        self._kind = kind
        self._counts = counts
        self._census = census
        self._started = time.monotonic()

    def first_words(self) -> str:
        """Return the session's name and, on lines of their own, why it is not the faster one and what else
        is wrong."""
        lines = self._cluster_warnings() + self._lock_warnings()
        warnings = [f"warning: {line}" for line in lines]
        return "\n".join(filter(None, (self._kind.name, self._kind.reason, *warnings)))

    def report(self) -> dict[str, Any]:
        """Return the attribute user.irdmafs.status."""
        below = self._store.statvfs()
        free, total = below.f_bavail * below.f_frsize, below.f_blocks * below.f_frsize
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        kind = self._kind
        warnings = [*([kind.reason] if kind.reason else []), *self._cluster_warnings()]
        if free < total * _LOW_SPACE_SHARE:
            warnings.append(f"the store is nearly full: {free >> 20} MiB of {total >> 20} MiB free")
        if kind.wakeups is None:
            warnings.append("locks are kept by version: two versions of a file lock separately")
            warnings += self._lock_warnings()
        return {
            "version": __version__,
            "pid": os.getpid(),
            "mountpoint": self._config.mountpoint,
            "store": self._config.store,
            "session": kind.name,
            "session_reason": kind.reason,
            "passthrough": kind.wakeups is not None,
            "fast_wakeups": kind.wakeups is not None and kind.wakeups.enabled,
            "kernel": platform.release(),
            "uptime_s": round(time.monotonic() - self._started, 3),
            **self._census(),
            "quotas": quotas.report(self._store.namespace),
            **self._store.status(),
            "store_free_bytes": free,
            "store_total_bytes": total,
            "daemon_rss_bytes": _resident_bytes(),
            "open_files_limit": soft,
            "requests": self._counts.requests,
            "errors": self._counts.errors,
            "warnings": warnings,
        }

    def figures(self) -> list[Any]:
        """Return dataclasses of figures (observe/figures.py)."""
        # Here only: a mount without metrics starts without them.
        from ..backend.observe.metrics import MountCounters

        requests, errors = Counter(self._counts.requests), Counter(self._counts.errors)
        opened = self._census()["open_handles"]
        return [MountCounters(requests, errors, opened), *self._store.figures()]

    def _cluster_warnings(self) -> list[str]:
        return self._cluster.warnings() if self._cluster is not None else []

    def _lock_warnings(self) -> list[str]:
        """Return warnings about locks in the pyfuse3 session, where the kernel keeps them by itself."""
        in_cluster = self._store.locks is not None and self._config.options.locks == "cluster"
        if self._kind.wakeups is None and in_cluster:
            return [
                "locks hold on this host only, not in the cluster (-o locks=local says so, too)"
            ]
        return []


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
