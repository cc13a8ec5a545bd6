"""Runs the `irdmafs` command, which loses the answer of etcd about one version after the signal: it is
published, and who publishes it cannot know."""

import errno
import sys
from pathlib import Path

# Run by its path: what `harness` is must be found beside this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.after_publish import after_publish
from harness.at_signal import told_once
from irdmafs.cli.command import main


def lose_answers() -> None:
    """Lose the answer about the next version that is published after the signal."""
    loses = told_once()

    async def lose() -> None:
        if loses():
            raise OSError(errno.ETIMEDOUT, "the answer was lost")

    after_publish(lose)


if __name__ == "__main__":
    lose_answers()
    main(prog_name="irdmafs")
