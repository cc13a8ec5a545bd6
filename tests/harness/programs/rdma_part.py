"""Runs the `irdmafs` command. Rails that were lost are soon tried again. A node keeps spare files for good:
in a guest on a busy machine, a minute is a few steps of a training."""

from irdmafs.backend.node import catalog
from irdmafs.backend.transport.verbs import lanes
from irdmafs.cli.command import main

if __name__ == "__main__":
    lanes.RETRY_S = 0.5
    setattr(catalog, "SPARE_S", float("inf"))  # noqa: B010
    main(prog_name="irdmafs")
