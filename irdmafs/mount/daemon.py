"""One mounted filesystem from start to end: store, session, signals."""

import logging
import os
import platform
import resource
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any, Protocol

import trio

from .._version import __version__
from ..backend.cluster.config_values import ConfigError
from ..backend.kv import Damaged
from ..backend.process import calm_the_collector, has_terminal, raise_open_files_limit
from ..backend.store.api import Store
from ..backend.store.embedded import embedded_store
from ..backend.store.storedir import StoreInUse
from ..callers.processes import Processes
from ..coherence.alone import Alone
from ..coherence.beliefs import Beliefs
from ..coherence.cache import Cache
from ..coherence.isolation import Isolation
from ..coherence.kernel_cache import KernelCache
from ..coherence.protocol import Coherence
from ..coherence.shared import Shared
from ..fuse.backings import Backings
from ..fuse.connection import Connection, ProtocolError
from ..fuse.kernel import KernelSession
from ..fuse.notices import Notices
from ..fuse.session import Session
from ..fuse.submounts import Submounts
from ..fuse.wakeups import FastWakeups
from ..posix import quotas
from ..posix.atimes import Atimes
from ..posix.operations import Operations
from . import mounting
from .config import MountConfig, MountError
from .store_events import MountEvents, Parts

log = logging.getLogger(__name__)

_STACKED = ("overlay", "ecryptfs")
_LOW_SPACE_SHARE = 0.05
_CHECK_NODES_S = 1.0
_CHECKED_NODES_MAX = 16


async def serve(config: MountConfig, ready: Callable[[str], None]) -> None:
    """Mount, and serve until the filesystem is unmounted or a signal says so.

    `ready` is called once the mount answers, with the session's name and, on lines of their own, why
    it is not the faster one and what else is wrong. Raises MountError with one line for whoever mounts.
    """
    raise_open_files_limit()
    try:
        events = MountEvents()
        async with _opened_store(config, events) as (store, cluster):
            calm_the_collector()
            await _Daemon(config, store, events, cluster).run(ready)
    except StoreInUse as error:
        raise MountError(f"{config.store}: {error.strerror}") from error
    except (ConfigError, Damaged) as error:
        raise MountError(str(error)) from error
    except OSError as error:
        # What a cluster refuses says by itself where it comes from.
        where = error.filename or (config.store if config.cluster is None else "")
        reason = error.strerror or str(error)
        raise MountError(f"{where}: {reason}" if where else reason) from error


class _Cluster(Protocol):
    """What a mount of a cluster may be asked beside its store."""

    def warnings(self) -> list[str]:
        """Return a line for each thing that is wrong."""
        ...

    def renew(self) -> None:
        """Read certificates and keys again now."""
        ...


@asynccontextmanager
async def _opened_store(
    config: MountConfig, events: MountEvents
) -> AsyncIterator[tuple[Store, _Cluster | None]]:
    if config.cluster is None:
        async with embedded_store(config.store, events) as node:
            yield node, None
        return
    # Here only: an embedded mount starts without all of it.
    from ..backend.store.remote.store import remote_store

    async with remote_store(
        config.cluster,
        config.store,
        config.mountpoint,
        __version__,
        events,
        timeout_s=config.cluster.mount.timeout,
    ) as remote:
        with trio.move_on_after(_CHECK_NODES_S):
            await remote.peers.check(islice(remote.members.nodes, _CHECKED_NODES_MAX))
        yield remote, remote


class _Daemon:
    def __init__(
        self,
        config: MountConfig,
        store: Store,
        events: MountEvents,
        cluster: _Cluster | None,
    ) -> None:
        self._config = config
        self._store = store
        self._events = events
        self._cluster = cluster
        self._processes = Processes(config.mountpoint)
        self._started = time.monotonic()
        self._reason = ""
        self._mounted: tuple[int, str] | None = None
        self._session: Session
        self._operations: Operations

    async def run(self, ready: Callable[[str], None]) -> None:
        config = self._config
        await self._mount()
        found = mounting.find_mount(config.mountpoint)
        self._mounted = (found.mount_id, found.device) if found is not None else None
        log.info(
            "mounted %s: %s session, store %s", config.mountpoint, self._session.name, config.store
        )
        try:
            async with trio.open_nursery() as nursery, self._metrics():
                nursery.start_soon(self._stop_on_signal)
                nursery.start_soon(self._announce, ready)
                await self._session.run()
                await self._operations.ended()
                nursery.cancel_scope.cancel()
        finally:
            self._unmount()
            self._session.close()
            self._processes.close()
            log.info("unmounted %s", config.mountpoint)

    # -- mounting --------------------------------------------------------------------------------

    async def _mount(self) -> None:
        wanted = self._config.session
        if wanted in ("auto", "kernel"):
            try:
                self._session = await self._mount_kernel()
                return
            except (ProtocolError, OSError, MountError) as error:
                text = getattr(error, "strerror", None) or str(error)
                if wanted == "kernel":
                    raise MountError(f"no kernel session: {text}") from error
                self._reason = f"no passthrough: {text}"
                log.warning("taking the pyfuse3 session; %s", self._reason)
        self._session = self._mount_portable()

    async def _mount_kernel(self) -> KernelSession:
        if not mounting.can_mount():
            raise MountError("passthrough needs CAP_SYS_ADMIN (root)")
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        try:
            wakeups = FastWakeups(self._config.fast_wakeups)
        except OSError as error:
            os.close(fd)
            raise MountError(f"no fast wake-ups: {error.filename}: {error.strerror}") from error
        options = self._config.options
        acls = options.default_permissions and options.acl
        try:
            mounting.mount_fuse(fd, self._config.mountpoint, options)
            try:
                connection = Connection(fd, self._stack_depth(), acls=acls)
                found = mounting.find_mount(self._config.mountpoint)
                submounts = Submounts(found.device if found is not None else "")
            except BaseException:
                mounting.unmount(self._config.mountpoint, lazy=True)
                raise
        except BaseException:
            wakeups.close()
            os.close(fd)
            raise
        atimes = Atimes(options, self._store.extents)
        backings = Backings(connection, self._store.extents, atimes)
        notices = Notices(connection, backings, submounts)
        operations = self._assemble(notices, atimes, passthrough=True, acls=acls)
        return KernelSession(connection, operations, backings, notices, wakeups)

    def _stack_depth(self) -> int:
        """1 lets others stack (overlayfs) on this mount; a store on overlayfs itself takes 2."""
        below = mounting.containing_mount(self._config.store)
        return 2 if below is not None and below.fstype in _STACKED else 1

    def _lock_warnings(self) -> list[str]:
        """Return warnings about locks in the pyfuse3 session, where the kernel keeps them by itself."""
        if self._store.shared and self._config.options.locks == "cluster":
            return [
                "locks hold on this host only, not in the cluster (-o locks=local says so, too)"
            ]
        return []

    def _mount_portable(self) -> Session:
        # Here only: a kernel session needs no pyfuse3.
        from ..fuse.portable import PortableSession

        if self._config.options.locks == "refuse":
            raise MountError("-o locks=refuse takes the kernel session; see `irdmafs doctor`")
        session = PortableSession()
        atimes = Atimes(self._config.options, self._store.extents)
        operations = self._assemble(session, atimes, passthrough=False, acls=False)
        options = mounting.libfuse_options(self._config.options)
        try:
            session.mount(operations, self._config.mountpoint, options)
        except RuntimeError as error:
            raise MountError(
                f"cannot mount on {self._config.mountpoint}: libfuse refused ({error}); its log may say "
                "more, and `irdmafs doctor` what this machine lacks"
            ) from error
        return session

    def _assemble(
        self, kernel: KernelCache, atimes: Atimes, *, passthrough: bool, acls: bool
    ) -> Operations:
        store, options = self._store, self._config.options
        isolation = Isolation(store.namespace, default=options.isolation)
        cache = Cache(store, kernel, self._processes, isolation, passthrough=passthrough)
        beliefs = Beliefs(store.namespace, cache.nodes, kernel)
        coherence: Coherence
        if store.freshness is not None:
            coherence = Shared(store, store.freshness, cache, beliefs)
        else:
            coherence = Alone(store.namespace, cache)
        operations = Operations(store, cache, coherence, options, atimes, self.status, acls=acls)
        self._operations = operations
        self._events.begin(Parts(cache, beliefs, operations.locking, kernel))
        return operations

    async def _announce(self, ready: Callable[[str], None]) -> None:
        """Say ready when the mount answers a stat that really comes through the kernel."""
        await trio.to_thread.run_sync(os.stat, self._config.mountpoint, abandon_on_cancel=True)
        lines = self._warnings()
        if not isinstance(self._session, KernelSession):
            lines = [*lines, *self._lock_warnings()]
        warnings = [f"warning: {line}" for line in lines]
        ready("\n".join(filter(None, (self._session.name, self._reason, *warnings))))

    @asynccontextmanager
    async def _metrics(self) -> AsyncIterator[None]:
        cluster = self._config.cluster
        if cluster is None or cluster.mount.metrics_port is None:
            yield
            return
        from ..backend.observe.metrics import Collector, MountCounters, serve_metrics

        def figures() -> list[Any]:
            requests, errors = Counter(self._session.requests), Counter(self._session.errors)
            opened = self._operations.count()["open_handles"]
            return [MountCounters(requests, errors, opened), *self._store.figures()]

        labels = {"mountpoint": self._config.mountpoint}
        collector = Collector("mount", figures, labels, trio.lowlevel.current_trio_token())
        section = cluster.mount
        assert section.metrics_port is not None
        server = serve_metrics(collector, section.metrics_address, section.metrics_port)
        log.info("metrics are served on %s port %d", section.metrics_address, server.port)
        try:
            yield
        finally:
            # Its thread may be waiting for this one to look figures up.
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(server.close)

    # -- ending ----------------------------------------------------------------------------------

    async def _stop_on_signal(self) -> None:
        """Unmount when a signal says so. SIGHUP has a mount of a cluster that has no terminal read its
        certificates again."""
        cluster = None if has_terminal() else self._cluster
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
            async for number in signals:
                if number == signal.SIGHUP and cluster is not None:
                    cluster.renew()
                    continue
                log.info("%s: unmounting", signal.Signals(number).name)
                self._session.stop()

    def _unmount(self) -> None:
        """Leave no stale mountpoint, whoever began the end."""
        found = mounting.mounted_at(self._config.mountpoint)
        if found is None or (found.mount_id, found.device) != self._mounted:
            return  # unmounted already; what may be mounted there by now is somebody else's
        try:
            mounting.unmount(self._config.mountpoint, lazy=True)
        except MountError as error:
            log.error("%s", error)

    # -- status ----------------------------------------------------------------------------------

    def _warnings(self) -> list[str]:
        return self._cluster.warnings() if self._cluster is not None else []

    def status(self) -> dict[str, Any]:
        below = self._store.statvfs()
        free, total = below.f_bavail * below.f_frsize, below.f_blocks * below.f_frsize
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        warnings = [*([self._reason] if self._reason else []), *self._warnings()]
        if free < total * _LOW_SPACE_SHARE:
            warnings.append(f"the store is nearly full: {free >> 20} MiB of {total >> 20} MiB free")
        if not isinstance(self._session, KernelSession):
            warnings.append("locks are kept by version: two versions of a file lock separately")
            warnings += self._lock_warnings()
        return {
            "version": __version__,
            "pid": os.getpid(),
            "mountpoint": self._config.mountpoint,
            "store": self._config.store,
            "session": self._session.name,
            "session_reason": self._reason,
            "passthrough": isinstance(self._session, KernelSession),
            "fast_wakeups": isinstance(self._session, KernelSession)
            and self._session.wakeups.enabled,
            "kernel": platform.release(),
            "uptime_s": round(time.monotonic() - self._started, 3),
            **self._operations.count(),
            "quotas": quotas.report(self._store.namespace),
            **self._store.status(),
            "store_free_bytes": free,
            "store_total_bytes": total,
            "daemon_rss_bytes": _resident_bytes(),
            "open_files_limit": soft,
            "requests": self._session.requests,
            "errors": self._session.errors,
            "warnings": warnings,
        }


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
