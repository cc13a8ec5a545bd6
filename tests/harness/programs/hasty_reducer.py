"""Runs the `irdmafs` command. A reducer looks often, and soon leaves its parts to others when it fails."""

import sys
from pathlib import Path

# Run by its path: what `harness` is must be found beside this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.training_runs import hurry
from irdmafs.cli.command import main
from irdmafs.train import reducer

if __name__ == "__main__":
    hurry(setattr)
    reducer._FAILS_S = 1.0
    main(prog_name="irdmafs")
