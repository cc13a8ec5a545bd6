"""Runs the `irdmafs` command, which takes in the answer of etcd about one version only when it is told: the
first signal announces that, the second one ends it. Meanwhile the replica has the version already."""

import sys
from pathlib import Path

import trio

# Run by its path: what `harness` is must be found beside this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.after_publish import after_publish
from harness.at_signal import told_once
from irdmafs.cli.command import main

# How often the second signal is looked for.
_LOOK_S = 0.01


def delay_answers() -> None:
    """Delay the answer about the next version that is published after the signal."""
    told = told_once()

    async def wait() -> None:
        if told():
            while not told():
                await trio.sleep(_LOOK_S)

    after_publish(wait)


if __name__ == "__main__":
    delay_answers()
    main(prog_name="irdmafs")
