"""Runs the `irdmafs` command. A node looks every second for what it may free and how much room it has, and
soon says that etcd does not answer."""

from irdmafs.backend.etcd import engine
from irdmafs.backend.node import catalog, daemon
from irdmafs.cli.command import main

if __name__ == "__main__":
    engine._OPEN_S = catalog._TIDY_S = daemon._SPACE_PERIOD_S = 1.0
    main(prog_name="irdmafs")
