"""Runs the `irdmafs` command. A mount soon finds that nobody uses it, its directories or its locks."""

from irdmafs.backend.cluster import replica
from irdmafs.backend.store.remote import claims, leases, locks
from irdmafs.cli.command import main
from irdmafs.fuse import kernel

if __name__ == "__main__":
    claims._IDLE_S = leases._IDLE_S = locks._IDLE_S = replica._LOOK_S = replica._QUIET_S = 0.2
    kernel._UNUSED_S = 1.2  # type: ignore[misc]
    main(prog_name="irdmafs")
