"""The `irdmafs` command.

Commands other than `mount` start without trio, pyfuse3 and numpy. Errors are one line on stderr
and exit code 1; wrong usage is exit code 2.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
from collections.abc import Iterator
from dataclasses import asdict, astuple, fields, replace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from .. import __version__
from ..backend.model.values import ConfigError, human_bytes
from ..mount import background, mounting, stores
from ..mount.users import holders_of, users_of
from ..mount_options import MountConfig, MountError, MountFlags, parse_mount_options
from . import status
from .cluster import file_option, json_option, load, mount_of, print_json, rdma_wanted, say, size_of
from .flags import flag_name, flags_of, overrides, section_flags
from .install import install, uninstall
from .members import cluster
from .nodes import admit, drain, prefetch, rebalance, remove, scrub
from .serve import serve
from .train import train
from .versions import clone, diff, hold, publish, rollback, versions, watch

if TYPE_CHECKING:
    from ..backend.cluster.config import ClusterConfig

_DAEMON_EXIT_TIMEOUT_S = 60.0
# A daemon that has nothing to store ends sooner.
_DAEMON_SOON_S = 2.0
# Each mount that does not answer takes some seconds.
_ASKED_AT_ONCE = 64


class _Failure(click.ClickException):
    def show(self, file: Any = None) -> None:
        say(self.message, err=True)


class _Group(click.Group):
    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        with _failures_are_lines():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _failures_are_lines():
            return super().invoke(ctx)


@contextlib.contextmanager
def _failures_are_lines() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise _Failure(str(error)) from error
    except (KeyboardInterrupt, BaseExceptionGroup) as error:
        if isinstance(error, BaseExceptionGroup) and not error.subgroup(KeyboardInterrupt):
            raise
        raise click.exceptions.Exit(128 + signal.SIGINT) from None
    except OSError as error:
        name, why = error.filename, mounting.reason(error)
        # The reader of the output closed it, as `head` does; or there is no room for it.
        if name is None and error.errno in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            if error.errno != errno.EPIPE:
                say(f"cannot print: {why}", err=True)
            raise click.exceptions.Exit(1) from None
        if name is None and error.errno == errno.ENOENT:  # as getcwd(3) fails
            why = "the current directory was removed; change to another directory"
        raise _Failure(f"{name}: {why}" if name else why) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="irdmafs", message="%(prog)s %(version)s")
def main() -> None:
    """A parameter filesystem: mount a directory, and the files in it are published versions."""


@main.command()
@click.argument("directory", metavar="DIR")
@click.option("--store", metavar="STORE", help="Keep contents in this directory "
              " [default: a private tmpfs, found again by the mountpoint's name]")  # fmt: skip
@click.option("--size", metavar="SIZE", help="Limit of that tmpfs: 512M, 8G, 50%  [default: 80%]")
@click.option("-o", "options", metavar="OPT[,OPT...]", multiple=True, help="Mount options: ro, "
              "allow_other, uid=, gid=, umask=, noexec, locks= and others (docs/options.md).")  # fmt: skip
@flags_of(MountFlags)
@click.option("-v", "--verbose", is_flag=True, help="Log every request (--log-level debug).")
@click.option("--cluster", "cluster_file", metavar="FILE", help="Mount the cluster that this file "
              "describes (irdmafs cluster init writes one).")  # fmt: skip
@section_flags("mount", "With --cluster: ")
def mount(
    directory: str,
    store: str | None,
    size: str | None,
    options: tuple[str, ...],
    verbose: bool,
    cluster_file: str | None,
    **flags: Any,
) -> None:
    """Mount a filesystem on DIR and return once it answers."""
    own = {field.name: flags.pop(field.name) for field in fields(MountFlags)}
    if not own["foreground"]:
        click.get_current_context().with_resource(background.ended_as_by_ctrl_c())
    if own["log_file"] is not None:
        own["log_file"] = os.path.abspath(own["log_file"])
    mount_options = parse_mount_options(options)
    cluster = _load_cluster(cluster_file, overrides(flags))
    if cluster is not None:
        own["log_file"] = own["log_file"] or cluster.log.file
        source = click.get_current_context().get_parameter_source("log_level")
        if source is ParameterSource.DEFAULT:
            own["log_level"] = cluster.log.level
    if verbose:
        own["log_level"] = "debug"
    if cluster is not None and cluster.cluster.mount_role == "reader":
        mount_options = replace(mount_options, read_only=True)
        # A reader cannot record locks in etcd, yet programs lock files that they only read.
        if not any(option.startswith("locks=") for text in options for option in text.split(",")):
            mount_options = replace(mount_options, locks="local")
    size_bytes = None if size is None else size_of("--size", size)
    mounting.refuse_what_users_may_not(mount_options)
    mountpoint = mounting.prepare_mountpoint(directory, mount_options.nonempty)
    log = own["log_file"]
    if log and os.path.commonpath([os.path.realpath(log), mountpoint]) == mountpoint:
        raise MountError(f"the log {log} is below the mountpoint: the mount would wait for itself")
    if store is None:
        chosen = stores.default_store(mountpoint, size_bytes)
    else:
        chosen = stores.explicit_store(store, mountpoint, size_bytes)
    own |= {"size": size_bytes, "cluster": cluster}
    config = MountConfig(mountpoint=mountpoint, store=chosen.path, options=mount_options, **own)
    answered = False

    def ready(text: str) -> None:
        nonlocal answered
        answered = True
        name, *reasons = text.split("\n")
        say(f"{directory} mounted ({name} session; store {chosen.path})")
        for reason in reasons:
            say(reason)

    try:
        _claim(chosen.path, mountpoint, cluster)
        for warning in chosen.warnings:
            say(f"warning: {warning}", err=True)
        if config.foreground:
            background.run_here(config, ready)
        else:
            ready(background.start(config))
    except background.DaemonFailedError:
        raise
    except (ConfigError, KeyboardInterrupt):
        if chosen.created and not answered:
            stores.discard_store(chosen.path)
        raise


def _claim(store: str, mountpoint: str, cluster: ClusterConfig | None) -> None:
    """Claim a store for a mount of this kind. Raises MountError where that would destroy its contents, and
    for a cache larger than its directory: it would never evict, and opens would fail."""
    stores.claim(store, mountpoint, None if cluster is None else cluster.path or "FILE")
    if cluster is None:
        return
    below = os.statvfs(store)
    room, wanted = below.f_blocks * below.f_frsize, cluster.mount.cache_size
    if wanted is not None and wanted > room:
        raise MountError(
            f"a cache of {human_bytes(wanted)} does not fit into {store}, which has "
            f"{human_bytes(room)}: give a smaller --cache-size, or a larger --size"
        )


def _load_cluster(path: str | None, flags: dict[str, dict[str, Any]]) -> ClusterConfig | None:
    if path is None:
        for section, keys in flags.items():
            for key, value in keys.items():
                if value is not None:
                    raise click.UsageError(f"{flag_name(section, key)} needs --cluster FILE")
        return None
    return load(path, flags)


@main.command()
@click.argument("directory", metavar="[DIR]", required=False)
@click.option("-l", "--lazy", is_flag=True, help="Detach now; it ends when nobody uses it.")
@click.option("--discard", is_flag=True, help="Also throw away the store and all that is in it.")
@click.option("--store", "given", metavar="STORE", help="With --discard: the store to throw away, if "
              "its mount is gone and was made with --store. DIR can then be left out.")  # fmt: skip
def umount(directory: str | None, lazy: bool, discard: bool, given: str | None) -> None:
    """Unmount DIR and wait until its daemon has stored everything and ended.

    If that does not answer, DIR is unmounted, but the exit code is 1.
    """
    if lazy and discard:
        raise click.UsageError("--discard cannot be used with --lazy: the store may be in use")
    if given is not None and not discard:
        raise click.UsageError("--store says what to throw away: it needs --discard")
    if directory is None:
        if given is None:
            raise click.UsageError("say which DIR to unmount")
        stores.discard_given_store(given)
        return
    mountpoint = mounting.resolve(directory)
    found = mounting.mounted_at(mountpoint)
    if found is None:
        _discard_unmounted(directory, mountpoint, discard, given)
        return
    if found.fstype != mounting.FSTYPE:
        raise MountError(f"{directory} is a {found.fstype} mount, not one of irdmafs")
    _refuse_of_another(found)
    report = status.report(found)
    is_trusted = found.user in (None, 0, os.geteuid())
    # A daemon of another user is not trusted to name the store.
    told = report.status if is_trusted else {}
    _unmount(found, told.get("pid"), lazy or report.state == "stale")
    if report.state == "hung" and not lazy:
        raise MountError(
            f"{directory} is unmounted, but its daemon did not answer: it may still run, and have "
            "something to store, which it does when it goes on and not if it is killed"
        )
    if not is_trusted:
        if discard:
            raise MountError(
                f"{directory} is unmounted; it was a mount of user {found.user}, and so is its store: "
                "nothing is discarded"
            )
        return
    store = given or told.get("store", stores.default_store_path(mountpoint))
    if store is not None:
        stores.empty_cache(store)
    if discard:
        if store is None:
            raise MountError(
                f"{directory} is unmounted, but its store is not known; discard it with: "
                "irdmafs umount --discard --store STORE"
            )
        stores.discard_given_store(store)


def _discard_unmounted(directory: str, mountpoint: str, discard: bool, given: str | None) -> None:
    store = given or stores.default_store_path(mountpoint)
    if not discard:
        hint = f"; its store is kept in {store}" if store is not None else ""
        raise MountError(f"{directory} is not mounted{hint}")
    if store is None:
        raise MountError(
            f"{directory} is not mounted, and has no store of its own; one that was given with --store is "
            "discarded with: irdmafs umount --discard --store STORE"
        )
    (stores.discard_store if given is None else stores.discard_given_store)(store)


def _refuse_of_another(mount: mounting.Mount) -> None:
    """Raise MountError for the mount of another user: only that user and root may unmount it."""
    if mount.user is None or mounting.can_mount() or mount.user == os.geteuid():
        return
    raise MountError(
        f"{mount.mountpoint} was mounted by {mounting.user_name(mount.user)}: only that user and root can "
        "unmount it"
    )


def _unmount(mount: mounting.Mount, pid: int | None, lazy: bool) -> None:
    mountpoint = mount.mountpoint
    # Open the pidfd first: once the daemon is gone, its pid may be another process's.
    daemon = None if pid is None or lazy else _open_daemon(pid)
    try:
        mounting.unmount(mountpoint, lazy)
        if daemon is not None:
            _wait_for_end(mount, pid, daemon)
    except mounting.MountBusyError:
        raise MountError(f"{mountpoint} is busy{_describe_users(mountpoint)}") from None
    finally:
        if daemon is not None:
            os.close(daemon)


def _wait_for_end(mount: mounting.Mount, pid: int | None, daemon: int) -> None:
    poll = select.poll()
    poll.register(daemon, select.POLLIN)
    if poll.poll(_DAEMON_SOON_S * 1000):
        return
    where = f"{mount.mountpoint} is unmounted"
    if others := holders_of(mount.device):
        raise MountError(
            f"{where} here, but not in another mount namespace (process {others[0]} is in it), for "
            f"which its daemon goes on; unmount it there, or end the daemon with: kill {pid}"
        )
    if not poll.poll(_DAEMON_EXIT_TIMEOUT_S * 1000):
        raise MountError(
            f"{where}, but process {pid} has not ended after {_DAEMON_EXIT_TIMEOUT_S:g} s; see its log"
        )


def _open_daemon(pid: int) -> int | None:
    # A daemon in another PID namespace reports a pid that is another process here.
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return None
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        if b"irdmafs" in file.read():
            return descriptor
    os.close(descriptor)
    return None


def _describe_users(mountpoint: str) -> str:
    for mount in mounting.mounts():
        if mount.mountpoint != mountpoint and mounting.is_under(mount.mountpoint, mountpoint):
            return f"; {mount.mountpoint} is mounted below it: unmount that first"
    found = users_of(mountpoint)
    users = [f"{user.pid} ({user.command}: {user.how} {user.path})" for user in found[:5]]
    if len(found) > 5:
        users.append("and others")
    if not users and os.geteuid() == 0:
        return "; a program waits in it for an answer, or holds it elsewhere; detach it with --lazy"
    if not users:
        return "; see who uses it as root, or detach it with --lazy"
    return f", used by {status.one_line(', '.join(users))}; end them or detach it with --lazy"


@main.command("status")
@click.argument("directory", metavar="[DIR]", required=False)
@json_option
@click.pass_context
def status_command(ctx: click.Context, directory: str | None, as_json: bool) -> None:
    """Show one mount, or all of them and the stores that no mount uses."""
    if directory is not None:
        found = mount_of(directory)
        entry = status.report(found)
        print_json(entry.to_json()) if as_json else status.print_mount(entry)
        ctx.exit(0 if entry.state == "ok" else 1)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        reports = list(pool.map(status.report, mounting.irdmafs_mounts()))
    leftovers = stores.leftover_stores(entry.mount.mountpoint for entry in reports)
    if as_json:
        mounts = [entry.to_json() for entry in reports]
        print_json({"mounts": mounts, "leftover_stores": [asdict(left) for left in leftovers]})
    else:
        status.print_overview(reports, leftovers)
    ctx.exit(1 if any(entry.state in ("stale", "hung") for entry in reports) else 0)


@main.command()
@file_option
@section_flags("doctor")
@json_option
@click.pass_context
def doctor(ctx: click.Context, /, config_path: str | None, as_json: bool, **flags: Any) -> None:
    """Report what this machine can do for irdmafs, and how to improve it.

    With a cluster's file, also check whether its RDMA settings work on the route to its etcd, and whether
    certificates and etcd keep strangers out.
    """
    from ..backend.cluster.config import find_config
    from ..doctor.machine import examine
    from ..doctor.trust import check_trust

    found = examine(*rdma_wanted(config_path, overrides(flags)))
    if find_config(config_path) is not None:
        found = replace(found, checks=(*found.checks, *check_trust(load(config_path))))
    if as_json:
        print_json(found.to_json())
    else:
        status.print_checks(map(astuple, found.checks))
        print(found.summary())
    ctx.exit(0 if found.sessions else 1)


for _command in (admit, drain, remove, scrub):
    cluster.add_command(_command)
for _command in (clone, cluster, diff, hold, install, prefetch, publish, rebalance, rollback, serve,
                 train, uninstall, versions, watch):  # fmt: skip
    main.add_command(_command)
