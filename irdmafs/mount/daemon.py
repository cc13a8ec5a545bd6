"""One mounted filesystem from start to end: store, session, signals; and its report."""

import logging
import os
import platform
import resource
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, nullcontext
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import trio

from .._version import __version__
from ..backend.kv import Damaged
from ..backend.process import calm_the_collector, has_terminal, raise_limits, tell_manager
from ..backend.store.api import Store
from ..backend.store.embedded import embedded_store
from ..backend.unwrap import if_it_fails
from ..callers.processes import Processes
from ..coherence.beliefs import Beliefs
from ..coherence.cache import Cache
from ..coherence.kernel_cache import KernelCache
from ..coherence.protocol import Coherence
from ..coherence.shared import Shared
from ..fuse.connection import Connection, ProtocolError
from ..fuse.counts import Counts
from ..fuse.kernel import KernelSession
from ..fuse.notices import Notices, Submounts
from ..fuse.tasks import Tasks
from ..fuse.wakeups import FastWakeups
from ..mount_options import MountConfig, MountError
from ..posix import quotas
from ..posix.atimes import Atimes
from ..posix.filesystem import Filesystem
from ..posix.locking import Locking
from ..posix.metadata import Superblock
from . import mounting

if TYPE_CHECKING:
    from ..backend.store.remote.store import RemoteStore
    from ..fuse.portable import PortableSession

log = logging.getLogger(__name__)

Session: TypeAlias = "KernelSession | PortableSession"

_STACKED = ("overlay", "ecryptfs")
_STORE_READS_S = 3.0
_CHECK_NODES_S = 1.0
_CHECKED_NODES_MAX = 16
_LOW_SPACE_SHARE = 0.05


async def serve(config: MountConfig, ready: Callable[[str], None]) -> None:
    """Mount, and serve until the filesystem is unmounted or a signal arrives.

    `ready` is called once the mount answers, with the session's name and, on further lines, why it is not
    the kernel session and other warnings. Raises MountError with one line for the user.
    """
    raise_limits()
    try:
        async with _opened_store(config) as (store, cluster):
            calm_the_collector()
            with closing(Processes(config.mountpoint)) as processes:
                daemon = _Daemon(config, store, cluster, processes)
                await daemon.run(ready)
                await daemon.store_reads()
    except Damaged as error:
        raise MountError(str(error)) from error
    except OSError as error:
        # Errors of a cluster name their source themselves.
        where = error.filename or (config.store if config.cluster is None else "")
        reason = error.strerror or str(error)
        raise MountError(f"{where}: {reason}" if where else reason) from error


@asynccontextmanager
async def _opened_store(config: MountConfig) -> AsyncIterator[tuple[Store, "RemoteStore | None"]]:
    if config.cluster is None:
        async with embedded_store(config.store) as node:
            yield node, None
        return
    # Imported here, so that a mount of one host starts without the cluster's modules.
    from ..backend.store.remote.store import remote_store

    async with remote_store(
        config.cluster,
        config.store,
        config.mountpoint,
        __version__,
        timeout_s=config.cluster.mount.timeout,
        defers=not (config.options.sync or config.options.dirsync),
    ) as remote:
        with trio.move_on_after(_CHECK_NODES_S):
            await remote.peers.check(islice(remote.members.nodes, _CHECKED_NODES_MAX))
        yield remote, remote


class _Daemon:
    """Mounts, makes the parts of a mount, each from the parts that it needs, and runs it until it ends."""

    def __init__(
        self, config: MountConfig, store: Store, cluster: "RemoteStore | None", processes: Processes
    ) -> None:
        """Raises MountError."""
        self._config = config
        self._store = store
        self._cluster = cluster
        self._processes = processes
        self._atimes = Atimes(config.options, store.extents)
        self._tasks = Tasks()
        self._counts = Counts()
        self._started = time.monotonic()
        # Why it is not the kernel session; what wakes processors for that session.
        self._reason = ""
        self._wakeups: FastWakeups | None = None
        self._session = self._mount()
        found = mounting.mounted_at(config.mountpoint)
        self._mounted = (found.mount_id, found.device) if found is not None else None
        if found is not None:
            try:
                mounting.abort_after_this_thread(found)
            except OSError as error:
                log.info("if this daemon is killed, programs may have to wait: %s", error)

    def _mount(self) -> Session:
        """Mount with the requested session, or with the best one that works. Raises MountError."""
        wanted = self._config.session
        if wanted in ("auto", "kernel"):
            try:
                return self._with_kernel_session()
            except (ProtocolError, OSError, MountError) as error:
                text = getattr(error, "strerror", None) or str(error)
                if wanted == "kernel":
                    raise MountError(f"no kernel session: {text}") from error
                self._reason = f"no passthrough: {text}"
                log.warning("taking the pyfuse3 session; %s", self._reason)
        return self._with_portable_session()

    async def store_reads(self) -> None:
        """Store, after the unmount, when files were last read, if there is room and etcd answers."""
        try:
            with trio.move_on_after(_STORE_READS_S):
                await self._atimes.store(self._store.namespace)
        except OSError as error:
            log.warning("the times of the last reads could not be stored: %s", error)

    def _with_kernel_session(self) -> Session:
        if not mounting.can_mount():
            raise MountError("passthrough needs CAP_SYS_ADMIN (root)")
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        wakeups = FastWakeups()
        mountpoint, options = self._config.mountpoint, self._config.options
        with if_it_fails(partial(os.close, fd)), if_it_fails(wakeups.close):
            mounting.mount_fuse(fd, mountpoint, options)
            with if_it_fails(partial(mounting.unmount, mountpoint, lazy=True)):
                connection = Connection(fd, self._stack_depth(), acls=options.acl)
                found = mounting.mounted_at(mountpoint)
                submounts = Submounts(found.device if found is not None else "")
        notices = Notices(connection, self._store.extents, self._atimes, submounts, self._tasks)
        self._wakeups = wakeups
        filesystem = self._filesystem(notices, acls=options.acl)
        return KernelSession(connection, filesystem, notices, self._tasks, self._counts, wakeups)

    def _stack_depth(self) -> int:
        """Return 1, so that others can stack (overlayfs) on this mount; 2 for a store on overlayfs, and in
        a cluster: what a stacked filesystem has found is ESTALE for good once the kernel forgets names."""
        below = mounting.containing_mount(self._config.store)
        return 2 if self._config.cluster or (below and below.fstype in _STACKED) else 1

    def _with_portable_session(self) -> Session:
        # Imported here: a kernel session needs no pyfuse3.
        from ..fuse.portable import PortableNotices, PortableSession

        mountpoint, options = self._config.mountpoint, self._config.options
        if options.locks == "refuse":
            raise MountError("-o locks=refuse takes the kernel session; see `irdmafs doctor`")
        self._wakeups = None
        filesystem = self._filesystem(PortableNotices(self._tasks), acls=False)
        words = mounting.libfuse_options(options)
        try:
            return PortableSession(filesystem, self._tasks, self._counts, mountpoint, words)
        except RuntimeError as error:
            raise MountError(
                f"cannot mount on {mountpoint}: {error}; `irdmafs doctor` says what is missing here, and "
                "how to get it"
            ) from error

    def _filesystem(self, kernel: KernelCache, *, acls: bool) -> Filesystem:
        """Make the parts that both kinds of session need."""
        store, options = self._store, self._config.options
        isolates, passthrough = options.isolation, self._wakeups is not None
        cache = Cache(store, kernel, self._processes, isolates=isolates, passthrough=passthrough)
        locking = Locking(options.locks, store, cache.publisher, kernel)
        coherence: Coherence
        if store.freshness is not None:
            beliefs = Beliefs(store.namespace, cache.nodes, kernel)
            store.freshness.listeners.append(beliefs)
            coherence = Shared(store, store.freshness, cache, beliefs)
        else:
            coherence = Coherence(store.namespace, cache)
        self._drafts = cache.drafts
        store.before_looks(cache.drafts.store)
        block = Superblock(cache, coherence, self._atimes, options)
        filesystem = Filesystem(block, locking, self._report, acls=acls)
        self._census = filesystem.census
        return filesystem

    async def run(self, ready: Callable[[str], None]) -> None:
        config = self._config
        log.info(
            "mounted %s: %s session, store %s", config.mountpoint, self._session.name, config.store
        )
        try:
            async with trio.open_nursery() as nursery, self._metrics():
                nursery.start_soon(self._stop_on_signal)
                nursery.start_soon(self._announce, ready)
                nursery.start_soon(self._drafts.run)
                await self._session.run()
                tell_manager("STOPPING=1", status="unmounted; what was written is being stored")
                try:
                    await self._drafts.store()
                except OSError as error:
                    log.error("files of drafts are lost: %s", error)
                nursery.cancel_scope.cancel()
        finally:
            self._unmount()
            self._session.close()
            log.info("unmounted %s", config.mountpoint)

    async def _announce(self, ready: Callable[[str], None]) -> None:
        """Call `ready` when the mount answers a stat that comes through the kernel."""
        await trio.to_thread.run_sync(os.stat, self._config.mountpoint, abandon_on_cancel=True)
        why = [self._reason, *(f"warning: {line}" for line in self._warnings())]
        words = [self._session.name, *filter(None, why)]
        tell_manager("READY=1", status="; ".join((f"{words[0]} session", *words[1:])))
        ready("\n".join(words))

    def _metrics(self) -> AbstractAsyncContextManager[int]:
        if self._config.cluster is None:
            return nullcontext(0)
        from ..backend.observe.metrics import serve_metrics

        section = self._config.cluster.mount
        labels = {"mountpoint": self._config.mountpoint}
        address, port = section.metrics_address, section.metrics_port
        return serve_metrics("mount", self._figures, labels, address, port)

    async def _stop_on_signal(self) -> None:
        """Unmount on SIGINT, SIGTERM or SIGHUP. In a cluster's mount without a terminal, SIGHUP reads the
        certificates again instead."""
        cluster = None if has_terminal() else self._cluster
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
            async for number in signals:
                if number == signal.SIGHUP and cluster is not None:
                    cluster.renew()
                    continue
                log.info("%s: unmounting", signal.Signals(number).name)
                self._session.stop()

    def _unmount(self) -> None:
        """Leave no stale mountpoint, whatever ended the session."""
        found = mounting.mounted_at(self._config.mountpoint)
        if found is None or (found.mount_id, found.device) != self._mounted:
            return  # unmounted already; another filesystem may be mounted there by now
        try:
            mounting.unmount(self._config.mountpoint, lazy=True)
        except MountError as error:
            log.error("%s", error)

    # -- its report --------------------------------------------------------------------------------

    def _report(self) -> dict[str, Any]:
        """Return the attribute user.irdmafs.status."""
        below = self._store.statvfs()
        free, total = below.f_bavail * below.f_frsize, below.f_blocks * below.f_frsize
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        warnings = [*filter(None, [self._reason]), *self._warnings()]
        if free < total * _LOW_SPACE_SHARE:
            warnings.append(f"the store is nearly full: {free >> 20} MiB of {total >> 20} MiB free")
        if self._wakeups is None:
            warnings.append("locks are kept by version: two versions of a file lock separately")
        return {
            "version": __version__,
            "pid": os.getpid(),
            "mountpoint": self._config.mountpoint,
            "store": self._config.store,
            "session": self._session.name,
            "session_reason": self._reason,
            "passthrough": self._wakeups is not None,
            "fast_wakeups": self._wakeups is not None and self._wakeups.enabled,
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

    def _figures(self) -> list[Any]:
        """Return dataclasses of figures (observe/figures.py)."""
        # Here only: a mount without metrics starts without them.
        from ..backend.observe.metrics import MountCounters

        requests, errors = Counter(self._counts.requests), Counter(self._counts.errors)
        opened = self._census()["open_handles"]
        return [MountCounters(requests, errors, opened), *self._store.figures()]

    def _warnings(self) -> list[str]:
        """Return the cluster's warnings, and those about options that the pyfuse3 session does not obey, as
        the kernel keeps its locks and answers its polls by itself."""
        found = [] if self._cluster is None else self._cluster.warnings()
        options, is_portable = self._config.options, self._wakeups is None
        if is_portable and options.poll:
            found.append("-o poll has no effect: with pyfuse3 no file tells that it is outdated")
        if is_portable and self._store.locks is not None and options.locks == "cluster":
            found.append(
                "locks hold on this host only, not in the cluster (-o locks=local says so too)"
            )
        return found


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
